"""Shard a model with FSDP2: mesh, precision, which modules form a group, and weights from rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl.backends.skyrl_train import device
from skyrl.config.roles import FSDPConfig, MixedPrecisionConfig
from skyrl.errors import ConfigError

logger = logging.getLogger(__name__)

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
Place = tuple[nn.Module, str]


def parse_dtype(key: str, name: str) -> torch.dtype:
    """Dtype by its short or long name.

    Raises:
        ConfigError: Names the key.
    """
    if name not in _DTYPES:
        raise ConfigError(f"{key}={name!r} is unknown; use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def create_mesh(world_size: int, fsdp_size: int) -> DeviceMesh:
    """One axis ``fsdp``, or ``(ddp, fsdp)`` when fewer than all ranks share a copy. Collective.

    Raises:
        ConfigError: The world size is no multiple of ``fsdp_size``.
    """
    kind = device.mesh_device_type()
    if fsdp_size <= 0 or fsdp_size >= world_size:
        return init_device_mesh(kind, (world_size,), mesh_dim_names=("fsdp",))
    if world_size % fsdp_size:
        raise ConfigError(f"fsdp_config.fsdp_size={fsdp_size} must divide the role's {world_size} ranks")
    return init_device_mesh(kind, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


def mixed_precision_policy(config: MixedPrecisionConfig | None, *, bf16: bool) -> MixedPrecisionPolicy:
    """Compute and reduce dtypes; without bf16 everything stays fp32."""
    if not bf16:
        return MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    config = config or MixedPrecisionConfig()
    return MixedPrecisionPolicy(
        param_dtype=parse_dtype("fsdp_config.mixed_precision.param_dtype", config.param_dtype),
        reduce_dtype=parse_dtype("fsdp_config.mixed_precision.reduce_dtype", config.reduce_dtype),
    )


def modules_to_wrap(model: nn.Module, config: FSDPConfig) -> list[nn.Module]:
    """Modules that get a parameter group of their own: transformer layers, and the embedding when it is not tied.

    Args:
        model: A transformers model, or a module around one whose ``no_split_modules`` lists layer classes.
        config: ``wrap_policy`` may name the classes.

    Raises:
        ConfigError: The model has no such layer.
    """
    listed = (config.wrap_policy or {}).get("transformer_layer_cls_to_wrap") or _no_split_classes(model)
    names = {listed} if isinstance(listed, str) else set(listed)
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"fsdp_config.wrap_policy: the model has no module of class {sorted(names) or '(none listed)'}; set "
            "transformer_layer_cls_to_wrap to the class name of its decoder layer"
        )
    owners = _places_by_parameter(model)
    embeddings = [
        module for module in model.modules() if isinstance(module, nn.Embedding) and len(owners[id(module.weight)]) == 1
    ]
    return layers + embeddings


def _no_split_classes(model: nn.Module) -> set[str]:
    found: set[str] = set()
    for module in model.modules():
        found |= set(vars(type(module)).get("_no_split_modules") or ())
        for base in type(module).__mro__[1:]:
            found |= set(vars(base).get("_no_split_modules") or ())
    return found


def shard_model(root: nn.Module, mesh: DeviceMesh, config: FSDPConfig, *, bf16: bool) -> FSDPModule:
    """Turn ``root`` into an FSDP2 module in place; its parameters become DTensors, on the meta device if they were.

    The root group is gathered once per step: it is not freed between its forward and backward pass.
    """
    reshard = config.reshard_after_forward
    offload = CPUOffloadPolicy() if config.cpu_offload and device.host_offload_useful() else OffloadPolicy()
    policy = mixed_precision_policy(config.mixed_precision, bf16=bf16)
    for module in modules_to_wrap(root, config):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    assert isinstance(root, FSDPModule)
    return root


def shard_with_weights(root: nn.Module, mesh: DeviceMesh, config: FSDPConfig, *, bf16: bool) -> None:
    """Shard a model whose weights rank 0 holds, and give every rank its part. Collective.

    On the other ranks ``root`` may be on the meta device: no rank but 0 ever holds the whole model, and it holds it in
    the dtype of the checkpoint's file or the dtype it was loaded in.
    """
    ties = [places for places in _places_by_parameter(root).values() if len(places) > 1]
    full = _tensors(root) if dist.get_rank() == 0 else {}
    _move(root, ties, lambda: root.to("meta"))
    shard_model(root, mesh, config, bf16=bf16)
    home = "cpu" if config.cpu_offload else device.device()
    _move(root, ties, lambda: root.to_empty(device=home))
    _fill(root, full)


def _tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {name: parameter.data for name, parameter in root.named_parameters()}
    return named | dict(root.named_buffers())


def _fill(root: nn.Module, full: dict[str, torch.Tensor]) -> None:
    """Copy rank 0's tensors into the shards of all ranks, one at a time."""
    targets = _tensors(root)
    dtypes: list[dict[str, torch.dtype]] = [{name: tensor.dtype for name, tensor in full.items()}]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(dtypes, src=0)
    for name, target in targets.items():
        source = full.pop(name, None)
        where = device.device()
        value = torch.empty(target.shape, dtype=dtypes[0][name], device=where) if source is None else source.to(where)
        if dist.get_world_size() > 1:
            dist.broadcast(value.contiguous() if source is not None else value, src=0)
        copy_into(target, value)


@torch.no_grad()
def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter or buffer; a sharded one takes its own part."""
    if isinstance(target, DTensor):
        mesh_device = target.to_local().device
        shard = distribute_tensor(value.to(device.device()), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local().to(mesh_device))
        return
    target.copy_(value)


def _places_by_parameter(root: nn.Module) -> dict[int, list[Place]]:
    """Every parameter's places; a tied one has several."""
    places: dict[int, list[Place]] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def _move(root: nn.Module, ties: Iterable[list[Place]], move: Callable[[], object]) -> None:
    """Move a model between devices; modules that shared a parameter share it again afterwards."""
    move()
    for (owner, name), *others in ties:
        for module, attribute in others:
            module._parameters[attribute] = owner._parameters[name]


@torch.no_grad()
def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on the training device. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor.detach().to(device.device()).full_tensor()  # type: ignore[attr-defined]
