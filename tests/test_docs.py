"""The documentation builds, and what it names exists."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.schema import is_declared, structured_node

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
KEY = re.compile(r"\b(?:trainer|generator|data|environment)(?:\.[a-zA-Z][a-zA-Z0-9_]*)+(?![\w/(*{<])")
# Not keys: modules, and files that share a name with a group.
NO_KEY = re.compile(r"\.(?:py|pt|md|parquet)$|^data\.pt$|^trainer\.(?:train|global_step)$")


@pytest.fixture(scope="module")
def node():
    return structured_node(SkyRLTrainConfig, {})


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_key_that_a_page_or_script_names_is_declared(path, node):
    text = path.read_text().replace("skyrl.train", "").replace("trainer.policy.model.pth=x", "")
    keys = {key for key in KEY.findall(text) if not NO_KEY.search(key)}
    assert [key for key in sorted(keys) if not is_declared(node, key)] == []


def test_presets_set_declared_keys(node):
    for preset in (ROOT / "skyrl" / "config" / "recipe").glob("*.yaml"):
        assert preset.read_text().startswith("# @package _global_\n")
        OmegaConf.merge(node, OmegaConf.load(preset))


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    keys = (tmp_path / "reference" / "config" / "index.html").read_text()
    assert "trainer.policy.optimizer_config.lr" in keys
    assert str(Path.home()) not in keys


def test_the_examples_of_the_algorithm_page_run():
    import torch

    from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig

    page = (ROOT / "docs" / "guides" / "custom_algorithm.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 3
    space: dict = {}
    # Without the decorators: registering would leave the functions in this process's registries.
    for block in blocks:
        exec(re.sub(r"^@register.*$", "", block, flags=re.M), space)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    advantages, returns = space["batch_baseline"](torch.tensor([[0.0, 1.0], [3.0, 0.0]]), mask)
    assert advantages.tolist() == returns.tolist() == [[-1.0, -1.0], [1.0, 0.0]]
    hidden = float("nan")
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, hidden]], requires_grad=True)
    value, metrics = space["plain_reinforce"](log_probs, None, advantages, None, mask, loss_weights=mask / 2)
    assert value.item() == (-1.0 - 2.0 + 3.0) / 2
    assert metrics["weight_max"] == 0.5
    # Twice as likely to the trainer as to the sampler, and the cap is 1.5.
    config = AlgorithmConfig(
        off_policy_correction=OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=1.5)
    )
    old = log_probs.detach()
    value, metrics = space["corrected_ratio"](log_probs, old, advantages, config, mask, old - math.log(2.0))
    assert value.item() == pytest.approx(1.5 * (1.0 + 1.0 - 1.0))
    assert "tis_token_clip_high_ratio" in metrics
    assert torch.autograd.grad(value, log_probs)[0].tolist() == [[1.5, 1.5], [-1.5, 0.0]]


def test_the_page_of_metrics_names_every_number_of_a_sync_and_every_count_of_failures():
    from skyrl.backends.skyrl_train.weight_sync.pipeline import SendReport
    from skyrl.train.generators.skyrl_gym_generator import _failure_metrics

    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    timed = re.findall(r'"(\w+_s)"', (ROOT / "skyrl/backends/skyrl_train/weight_sync/session.py").read_text())
    names = [*(f"weight_sync/{name}" for name in {*vars(SendReport()), *timed}), *_failure_metrics([])]
    names += ["policy/ess_rollout", "policy/grad_skipped", "critic/grad_skipped"]
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
