"""What every test shares: the environment of a CPU host, the rules for markers, and small models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before ray, torch or transformers are imported anywhere.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

pytest_plugins = ["tests.fakes.vllm_server"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests without CUDA; leave recipes out unless the ``-m`` expression names them."""
    if "recipe" not in config.option.markexpr:
        recipes = [item for item in items if item.get_closest_marker("recipe")]
        if recipes:
            config.hook.pytest_deselected(items=recipes)
            items[:] = [item for item in items if not item.get_closest_marker("recipe")]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_tiny_model`` without the directory: equal arguments give the same directory for the whole session."""
    from tests.fakes.tiny_models import make_tiny_model

    made: dict[tuple[object, ...], Path] = {}

    def make(arch: str = "qwen3", **options: object) -> Path:
        key = (arch, *sorted(options.items()))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(f"tiny-{arch}"), arch, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model: Callable[..., Path]) -> Path:
    """Directory of a random 4-layer Qwen3 in fp32 with a character tokenizer. Read only."""
    return make_model("qwen3")
