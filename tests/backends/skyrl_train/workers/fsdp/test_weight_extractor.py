from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyrl.backends.skyrl_train.workers.fsdp.load import load_config, load_model
from skyrl.backends.skyrl_train.workers.fsdp.weight_extractor import FSDPWeightExtractor


@pytest.mark.parametrize(("arch", "tie"), [("qwen3", True), ("llama", False), ("qwen3_moe", True)])
def test_names_shapes_and_values_are_those_of_the_checkpoint(
    make_model: Callable[..., Path], arch: str, tie: bool
) -> None:
    from transformers import AutoModelForCausalLM

    path = make_model(arch, layers=2, tie=tie)
    stored = load_file(path / "model.safetensors")
    config = load_config(str(path))
    model = load_model(AutoModelForCausalLM, str(path), config, torch.float32, with_weights=True)
    extractor = FSDPWeightExtractor(model)
    metadata = extractor.get_weight_metadata(torch.bfloat16)
    assert sorted(metadata["names"]) == sorted(stored)
    assert set(metadata["dtype_names"]) == {"bfloat16"}
    assert dict(zip(metadata["names"], metadata["shapes"], strict=True)) == {
        n: list(t.shape) for n, t in stored.items()
    }
    extracted: dict[str, torch.Tensor] = {}
    for chunk in extractor.extract_weights(torch.bfloat16):
        extracted |= dict(zip(chunk.names, chunk.tensors, strict=True))
    assert list(extracted) == metadata["names"]
    assert all(torch.equal(value, stored[name]) for name, value in extracted.items())
    some = metadata["names"][::-3]
    named = dict(extractor.extract_named(some, torch.bfloat16))
    assert list(named) == some
    assert all(torch.equal(value, stored[name].bfloat16()) for name, value in named.items())
    with pytest.raises(KeyError, match="no_such"):
        next(extractor.extract_named(["no_such"], torch.bfloat16))


def test_a_model_without_weights_has_the_same_metadata(make_model: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    path = make_model("qwen3_moe", layers=2, tie=True)
    config = load_config(str(path))
    real, shapes_only = (
        FSDPWeightExtractor(load_model(AutoModelForCausalLM, str(path), config, torch.float32, with_weights=weights))
        for weights in (True, False)
    )
    assert real.get_weight_metadata(torch.float32) == shapes_only.get_weight_metadata(torch.float32)


def test_the_actors_module_loads_no_engine() -> None:
    """A training process must be ready in seconds: it imports neither vLLM nor a web server."""
    code = (
        "import sys, skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker;"
        "print([name for name in ('vllm', 'fastapi', 'datasets', 'pandas', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
