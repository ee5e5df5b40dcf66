"""Upstream's helper paths offer the promised names and stay light to import."""

import importlib
import subprocess
import sys

import pytest

from skyrl.train import utils
from skyrl.train.utils import trainer_utils


@pytest.mark.parametrize("path", ["skyrl.train.utils", "skyrl.train.utils.utils"])
def test_both_paths_offer_the_same_names(path):
    module = importlib.import_module(path)
    promised = {
        "Timer",
        "initialize_ray",
        "validate_cfg",
        "validate_generator_cfg",
        "get_ray_pg_ready_with_timeout",
        "prepare_runtime_environment",
        "ResolvedPlacementGroup",
    }
    assert set(module.__all__) == promised
    for name in promised:
        assert getattr(module, name).__name__ == name


def test_a_name_imported_through_the_facade_is_the_one_of_its_home():
    from skyrl.train.checkpoints import ResumeMode

    assert trainer_utils.ResumeMode is ResumeMode


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = utils.nothing


def test_importing_the_facades_loads_nothing_heavy():
    code = (
        "import sys, skyrl.train.utils, skyrl.train.utils.utils, skyrl.train.utils.trainer_utils, "
        "skyrl.train.utils.callbacks; "
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'matplotlib', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
