from __future__ import annotations

import re
from importlib import resources
from math import inf
from pathlib import Path

import pytest

from skyrl.config.base import get_config_as_dict
from skyrl.config.presets import join_presets, preset_names, share_of
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.train.validate import validate_cfg

ROOT = Path(__file__).parents[2]
METHODS = [name for name in preset_names() if name != "quickstart"]
TEACHER = "trainer.ref.model.path=a/teacher"

NO_KL = {"use_kl_loss": False, "use_kl_in_reward": False}
KL_IN_REWARD = {"use_kl_loss": False, "use_kl_in_reward": True}
ALGORITHM = {
    "dapo": {
        "policy_loss_type": "dual_clip",
        "clip_ratio_c": 10.0,
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "loss_reduction": "token_mean",
        "dynamic_sampling.type": "filter",
        "overlong_buffer_len": 205,  # a fifth of 1024
        "overlong_buffer_penalty_factor": 1.0,
        **NO_KL,
    },
    "gspo": {
        "policy_loss_type": "gspo",
        "loss_reduction": "sequence_mean",
        "eps_clip_low": 3e-4,
        "eps_clip_high": 4e-4,
    },
    "sapo": {"policy_loss_type": "sapo", "loss_reduction": "sequence_mean", "sapo.tau_pos": 1.0, "sapo.tau_neg": 1.05},
    "cispo": {
        "policy_loss_type": "cispo",
        "cispo.cispo_eps_clip_low": 1.0,
        "cispo.cispo_eps_clip_high": 4.0,
        **NO_KL,
    },
    "dppo": {"policy_loss_type": "dppo", "dppo.dppo_type": "binary_tv", "dppo.delta_low": 0.2, "dppo.delta_high": 0.2},
    "clip_cov": {
        "policy_loss_type": "clip_cov",
        "clip_cov.clip_ratio": 2e-4,
        "clip_cov.clip_cov_lb": 1.0,
        "clip_cov.clip_cov_ub": 5.0,
    },
    "kl_cov": {"policy_loss_type": "kl_cov", "kl_cov.kl_cov_frac": 0.2, "kl_cov.ppo_kl_coef": 1.0},
    "drgrpo": {
        "advantage_estimator": "grpo",
        "grpo_norm_by_std": False,
        "loss_reduction": "seq_mean_token_sum_norm",
        "max_seq_len": 1024,
        **NO_KL,
    },
    "rloo": {"advantage_estimator": "rloo", **KL_IN_REWARD},
    "reinforce_pp": {"advantage_estimator": "reinforce++", "kl_estimator_type": "k2", **KL_IN_REWARD},
    "ppo": {
        "advantage_estimator": "gae",
        "gamma": 1.0,
        "lambd": 1.0,
        "policy_loss_type": "regular",
        "value_clip": 0.2,
        "use_kl_loss": True,
    },
    "opo": {"advantage_estimator": "opo", "policy_loss_type": "reinforce", "use_entropy_loss": False, **NO_KL},
    "gpg": {"advantage_estimator": "gpg", "policy_loss_type": "reinforce", **NO_KL},
    "remax": {"advantage_estimator": "remax", **KL_IN_REWARD},
    "maxrl": {"advantage_estimator": "maxrl", **NO_KL},
    "liteppo": {"advantage_estimator": "liteppo", "loss_reduction": "token_mean"},
    "tis": {
        "off_policy_correction.tis_ratio_type": "token",
        "off_policy_correction.token_tis_ratio_clip_high": 2.0,
    },
    "icepop": {
        "off_policy_correction.token_mask_is_threshold_low": 0.5,
        "off_policy_correction.token_mask_is_threshold_high": 5.0,
        "off_policy_correction.tis_ratio_type": "token",
        "off_policy_correction.token_tis_ratio_clip_high": 5.0,
    },
    "decoupled_ppo": {
        "policy_loss_type": "regular",
        "off_policy_correction.tis_ratio_type": "token",
        "off_policy_correction.token_tis_ratio_clip_high": inf,
    },
    "on_policy_distillation": {
        "on_policy_distillation": True,
        "advantage_estimator": "no_op",
        "policy_loss_type": "importance_sampling",
        **KL_IN_REWARD,
    },
}
"""What each method sets under `trainer.algorithm`, from its paper and from upstream's recipe."""


def compose(*tokens: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(tokens)


def flat(config: SkyRLTrainConfig) -> dict[str, object]:
    found, todo = {}, list(get_config_as_dict(config).items())
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict) and value:
            todo += [(f"{key}.{name}", part) for name, part in value.items()]
        else:
            found[key] = value
    return found


def test_every_method_has_an_entry_above():
    assert set(ALGORITHM) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_preset_sets_the_keys_of_its_method_and_passes(name: str):
    before, config = flat(compose()), compose(f"+recipe={name}", TEACHER)
    validate_cfg(config)
    after = flat(config)
    for key, value in ALGORITHM[name].items():
        assert after[f"trainer.algorithm.{key}"] == value, key
    expected = {f"trainer.algorithm.{key}" for key in ALGORITHM[name]}
    elsewhere = {
        "trainer.policy_mini_batch_size",  # OPO takes one step per batch
        *("trainer.critic.model.path", "trainer.ref.model.path"),
    }
    assert {key for key in after if after[key] != before.get(key)} <= expected | elsewhere


@pytest.mark.parametrize("name", METHODS)
def test_a_preset_fits_on_top_of_the_quickstart(name: str):
    validate_cfg(compose(f"+recipe=[quickstart,{name}]", TEACHER))


@pytest.mark.parametrize("name", METHODS)
def test_a_preset_names_its_paper_and_appears_in_the_documentation(name: str):
    text = (resources.files("skyrl.config") / "recipe" / f"{name}.yaml").read_text()
    first, second = text.splitlines()[:2]
    head = re.match(r"(?:#.*\n)+", text)
    assert first == "# @package _global_" and second.startswith("# ")
    assert head is not None and re.search(r"arXiv:\d{4}\.\d{5}|https://", head.group())
    assert f"| `{name}` |" in (ROOT / "docs" / "getting-started" / "configuration.md").read_text()


def test_the_critic_of_ppo_starts_from_the_policys_model():
    config = compose("+recipe=ppo", "trainer.policy.model.path=a/b")
    assert config.trainer.critic.model.path == "a/b"
    assert config.trainer.critic.optimizer_config.lr == 5e-6
    assert compose("+recipe=ppo", "trainer.policy_mini_batch_size=64").trainer.critic_mini_batch_size == 64


def test_opo_takes_one_optimizer_step_per_batch():
    trainer = compose("+recipe=opo", "trainer.train_batch_size=64").trainer
    assert (trainer.policy_mini_batch_size, trainer.update_epochs_per_batch) == (64, 1)


def test_lengths_follow_the_length_limit():
    length = "generator.sampling_params.max_generate_length"
    assert compose("+recipe=dapo", f"{length}=20480").trainer.algorithm.overlong_buffer_len == 4096  # as in the paper
    assert compose("+recipe=dapo", f"{length}=2").trainer.algorithm.overlong_buffer_len == 1
    assert compose("+recipe=drgrpo", f"{length}=300").trainer.algorithm.max_seq_len == 300


@pytest.mark.parametrize(("share", "whole", "tokens"), [(0.2, 10, 2), (0.2, 1024, 205), (0.2, 1, 1), (1, 7, 7)])
def test_a_share_is_rounded_and_at_least_one(share: float, whole: int, tokens: int):
    assert share_of(share, whole) == tokens


def test_several_presets_compose_and_later_ones_win():
    both = compose("+recipe=[quickstart,dapo]")
    assert both.trainer.train_batch_size == 8 and both.trainer.algorithm.dynamic_sampling.type == "filter"
    assert compose("+recipe=[dapo,gspo]").trainer.algorithm.policy_loss_type == "gspo"
    assert compose("+recipe=[gspo,dapo]").trainer.algorithm.policy_loss_type == "dual_clip"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_command_line_wins_over_all_presets(place: int):
    tokens = ["+recipe=quickstart", "+recipe=[gspo,dapo]"]
    tokens.insert(place, "trainer.algorithm.policy_loss_type=regular")
    algorithm = compose(*tokens).trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.dynamic_sampling.type) == ("regular", "filter")


def test_a_script_with_a_preset_takes_another_one():
    assert compose("+recipe=quickstart", "trainer.seed=1", "+recipe=dapo") == compose(
        "+recipe=[quickstart,dapo]", "trainer.seed=1"
    )


@pytest.mark.parametrize(
    ("tokens", "joined"),
    [
        (["+recipe=a", "x=1", "+recipe=b"], ["+recipe=[a,b]", "x=1"]),
        (["+recipe=[a,b]", "+recipe=[c]"], ["+recipe=[a,b,c]"]),
        (["+recipe=a", "+recipe=b", "+recipe=a"], ["+recipe=[b,a]"]),
        (["+recipe=a", "x=1"], ["+recipe=a", "x=1"]),
        (["+recipe=a", "+recipe=b,c"], ["+recipe=a", "+recipe=b,c"]),
        (["+recipes=a", "+recipe=b", "+recipe=c"], ["+recipes=a", "+recipe=[b,c]"]),
        ([], []),
    ],
)
def test_presets_named_apart_become_one_list(tokens: list[str], joined: list[str]):
    assert join_presets(tokens) == joined
    assert join_presets(joined) == joined


@pytest.mark.parametrize("value", ["dapoo", "[quickstart,dapoo]"])
def test_an_unknown_preset_lists_the_others_and_suggests_one(value: str):
    with pytest.raises(ConfigError, match=r"\+recipe=dapoo: .*cispo, .*gspo, .*did you mean dapo"):
        compose(f"+recipe={value}")


@pytest.mark.parametrize(
    ("token", "way_out"),
    [
        ("recipe=dapo", "+recipe=dapo"),
        ("++recipe=dapo", "+recipe=dapo"),
        ("+recipe=dapo,gspo", "+recipe=[dapo,gspo]"),
        ("recipe=dapo,gspo", "+recipe=[dapo,gspo]"),
        ("~recipe", "+recipe=NAME"),
    ],
)
def test_a_preset_that_is_written_in_another_way_gets_one_line_with_the_way_out(token: str, way_out: str):
    with pytest.raises(ConfigError) as raised:
        SkyRLTrainConfig.from_cli_overrides([token])
    assert str(raised.value) == f"{token}: presets are added by name; write '{way_out}'"


def test_presets_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"policy_loss_type=dppo .*tis_ratio_type=token would do so twice"):
        validate_cfg(compose("+recipe=[dppo,tis]"))
