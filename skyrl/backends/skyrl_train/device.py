"""The training device: the one module that knows whether torch runs on CUDA or on the CPU.

Everything else asks here (a test greps for direct ``torch.cuda`` uses), so one code path serves a laptop and a
GPU host. What has no meaning on a CPU (offload, allocator settings, memory snapshots) does nothing there.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch

_CPU = "cpu"
_CUDA = "cuda"
# Ray sets these when it leaves device visibility to the process; LOCAL_RANK is then the physical id.
NOSET_VISIBLE_DEVICES = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES")


@cache
def mesh_device_type() -> str:
    """``cuda`` where a GPU is visible, else ``cpu``: the device type of meshes and of parameters."""
    return _CUDA if torch.cuda.is_available() else _CPU


def on_cuda() -> bool:
    """Whether parameters live on a GPU."""
    return mesh_device_type() == _CUDA


def device() -> torch.device:
    """The device of this process."""
    return torch.device(_CUDA, torch.cuda.current_device()) if on_cuda() else torch.device(_CPU)


def set_device(local_rank: int) -> None:
    """Choose this process's GPU."""
    if on_cuda():
        torch.cuda.set_device(local_rank)


def dist_backend() -> str:
    """Backend string for ``init_process_group``: gloo always carries CPU tensors."""
    return "cpu:gloo,cuda:nccl" if on_cuda() else "gloo"


def autocast(dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True) -> AbstractContextManager[Any]:
    """Mixed precision on this device."""
    return torch.autocast(mesh_device_type(), dtype=dtype, enabled=enabled)


def empty_cache() -> None:
    """Give cached memory back to the device."""
    if on_cuda():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the device's queued work."""
    if on_cuda():
        torch.cuda.synchronize()


def mem_info() -> dict[str, int]:
    """Bytes ``allocated``, ``reserved``, ``free`` and ``total`` on the GPU; zeros on a CPU."""
    if not on_cuda():
        return {"allocated": 0, "reserved": 0, "free": 0, "total": 0}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "free": free,
        "total": total,
    }


def seed_all(seed: int) -> None:
    """Seed torch's generators on the CPU and on every GPU."""
    torch.manual_seed(seed)


def rng_state() -> dict[str, torch.Tensor]:
    """States of torch's generators: ``cpu``, and ``cuda`` where there is a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if on_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `rng_state`; a state of a device that is absent is ignored."""
    torch.set_rng_state(state["cpu"])
    if on_cuda() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def host_offload_useful() -> bool:
    """Whether moving tensors to host memory frees anything."""
    return on_cuda()


def set_cpu_threads(threads: int | None) -> None:
    """Bound torch's intra-op threads of a CPU process; None leaves them. Ignored on a GPU."""
    if threads is not None and not on_cuda():
        torch.set_num_threads(max(1, threads))


def set_expandable_segments(enabled: bool) -> None:
    """Switch the CUDA allocator to expandable segments or back (they cannot be exported through CUDA IPC)."""
    if on_cuda():
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enabled}")


def start_memory_history() -> None:
    """Begin recording allocations for `save_memory_snapshot`."""
    if on_cuda():
        torch.cuda.memory._record_memory_history(max_entries=100_000)


def save_memory_snapshot(path: str) -> None:
    """Write the recorded allocations for torch's memory viewer."""
    if on_cuda():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.cuda.memory._dump_snapshot(path)


def physical_gpu_ids(ray_gpu_ids: list[int]) -> int:
    """LOCAL_RANK of a process: 0 when Ray narrowed the visible GPUs to its own, else the physical id it was given."""
    if ray_gpu_ids and any(os.environ.get(name) for name in NOSET_VISIBLE_DEVICES):
        return int(ray_gpu_ids[0])
    return 0


def peer_access_possible(num_gpus: int) -> bool:
    """Whether the first ``num_gpus`` local GPUs can read each other's memory.

    Asked in a child process: a CUDA context in the driver would hold memory for the whole run.
    """
    if num_gpus <= 1:
        return True
    code = (
        "import sys, torch; n = min(int(sys.argv[1]), torch.cuda.device_count());"
        "sys.exit(any(a != b and not torch.cuda.can_device_access_peer(a, b) for a in range(n) for b in range(n)))"
    )
    return subprocess.run([sys.executable, "-c", code, str(num_gpus)], check=False, timeout=120).returncode == 0


def bind_to_gpu_numa_node() -> None:
    """Run this process on the CPUs, and allocate on the memory, of its GPU's NUMA node.

    Skipped silently without a GPU, without libnuma, or when the node is unknown or has no CPUs: the process then
    stays where the system put it.
    """
    if not on_cuda() or ctypes.util.find_library("numa") is None:
        return
    numa = ctypes.CDLL(ctypes.util.find_library("numa"))
    if numa.numa_available() < 0:
        return
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    with contextlib.suppress(OSError, ValueError):
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        cpus = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip() if node >= 0 else ""
        if cpus and numa.numa_run_on_node(node) == 0:
            numa.numa_set_preferred(node)
