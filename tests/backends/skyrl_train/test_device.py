from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from skyrl.backends.skyrl_train import device

PACKAGE = Path(device.__file__).parents[2]


def test_only_the_device_module_asks_for_cuda() -> None:
    """Weight transfer moves CUDA memory by its nature, engine processes belong to vLLM, the monitor reads GPUs."""
    asked = re.compile(r"torch\.cuda\b")
    own = {PACKAGE / "backends/skyrl_train/device.py"}
    searched = [PACKAGE / "backends/skyrl_train" / part for part in ("workers", "distributed", "utils")]
    files = [file for folder in searched for file in folder.rglob("*.py")]
    files += list((PACKAGE / "backends/skyrl_train").glob("*.py")) + list((PACKAGE / "algorithms").rglob("*.py"))
    guilty = [str(file) for file in files if file not in own and asked.search(file.read_text())]
    assert guilty == []
    assert asked.search((PACKAGE / "backends/skyrl_train/device.py").read_text())


def test_random_state_comes_back() -> None:
    device.seed_all(3)
    state = device.rng_state()
    first = torch.rand(4)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_local_rank_is_physical_only_when_ray_leaves_visibility(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in device.NOSET_VISIBLE_DEVICES:
        monkeypatch.delenv(name, raising=False)
    assert device.physical_gpu_ids([5]) == 0
    monkeypatch.setenv(device.NOSET_VISIBLE_DEVICES[0], "1")
    assert device.physical_gpu_ids([5]) == 5
    assert device.physical_gpu_ids([]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes hosts without a GPU")
def test_without_a_gpu_everything_is_cpu_and_gloo() -> None:
    assert (device.mesh_device_type(), device.dist_backend(), str(device.device())) == ("cpu", "gloo", "cpu")
    assert device.mem_info() == {"allocated": 0, "reserved": 0, "free": 0, "total": 0}
    device.empty_cache()
    device.synchronize()
    device.set_expandable_segments(True)
    device.bind_to_gpu_numa_node()
    assert not device.host_offload_useful()
