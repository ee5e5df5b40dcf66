from __future__ import annotations

import re

import pytest

from skyrl.config.rules.estimator import check_distillation, check_estimator
from skyrl.config.rules.methods import ESTIMATORS
from skyrl.errors import ConfigError
from tests.config.rules.build import build

DISTIL = [
    "trainer.algorithm.advantage_estimator=no_op",
    "trainer.algorithm.on_policy_distillation=true",
    "trainer.algorithm.use_kl_in_reward=true",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.ref.model.path=a/teacher",
]


def check(name: str, *tokens: str, has_critic: bool = False) -> None:
    config = build(f"trainer.algorithm.advantage_estimator={name}", *tokens)
    check_estimator(config.trainer.algorithm, ESTIMATORS[name], config.generator, has_critic=has_critic)


def distil(*tokens: str) -> None:
    config = build(*DISTIL, *tokens)
    check_distillation(config.trainer, ESTIMATORS[config.trainer.algorithm.advantage_estimator])


@pytest.mark.parametrize("name", ["rloo", "opo", "gpg", "liteppo", "turn_level", "gdpo"])
def test_an_estimator_that_compares_rollouts_of_a_prompt_needs_two(name: str):
    check(name, "generator.n_samples_per_prompt=2")
    with pytest.raises(ConfigError, match=rf"advantage_estimator={name} .*n_samples_per_prompt=1 .*2 or more"):
        check(name, "generator.n_samples_per_prompt=1")


@pytest.mark.parametrize("name", ["grpo", "maxrl"])
def test_an_estimator_that_falls_back_to_the_bare_reward_warns(name: str, caplog):
    check(name, "generator.n_samples_per_prompt=2")
    assert caplog.text == ""
    check(name, "generator.n_samples_per_prompt=1")
    assert f"advantage_estimator={name}" in caplog.text and "bare reward" in caplog.text


@pytest.mark.parametrize("name", ["reinforce++", "remax", "no_op"])
def test_an_estimator_without_groups_takes_one_rollout_of_a_prompt(name: str, caplog):
    check(name, "generator.n_samples_per_prompt=1")
    assert caplog.text == ""


@pytest.mark.parametrize(("k", "samples", "good"), [(2, 2, True), (4, 4, True), (1, 4, False), (5, 4, False)])
def test_pass_at_k_chooses_from_the_group(k: int, samples: int, good: bool):
    tokens = [f"trainer.algorithm.pass_at_k={k}", f"generator.n_samples_per_prompt={samples}"]
    check("grpo", *tokens)
    if good:
        check("pass_at_k", *tokens)
        return
    with pytest.raises(ConfigError, match=rf"pass_at_k={k}: .*2 and generator\.n_samples_per_prompt={samples}; lower"):
        check("pass_at_k", *tokens)


@pytest.mark.parametrize("name", ["pass_at_k", "gdpo"])
def test_an_estimator_that_does_not_sum_rewards_takes_no_kl_in_them(name: str):
    with pytest.raises(ConfigError, match=rf"advantage_estimator={name} cannot take .*use_kl_in_reward=true.*set"):
        check(name, "trainer.algorithm.use_kl_in_reward=true")
    check("grpo", "trainer.algorithm.use_kl_in_reward=true")


def test_the_punishment_of_long_responses_does_not_reach_parts_of_the_reward():
    long = "trainer.algorithm.overlong_buffer_len=100"
    with pytest.raises(ConfigError, match=r"advantage_estimator=gdpo .*overlong_buffer_len=100 does not change"):
        check("gdpo", long)
    check("pass_at_k", long)


@pytest.mark.parametrize("setting", ["dynamic_sampling.type=filter", "zero_variance_filter=true"])
@pytest.mark.parametrize("name", ["gdpo", "remax", "turn_level"])
def test_a_filter_by_sums_of_rewards_that_drops_what_could_be_learnt_is_pointed_out(name: str, setting: str, caplog):
    check("grpo", f"trainer.algorithm.{setting}")
    check(name)
    assert caplog.text == ""
    check(name, f"trainer.algorithm.{setting}")
    assert f"advantage_estimator={name} may learn" in caplog.text and f"algorithm.{setting} drops" in caplog.text


def test_gae_needs_a_critic():
    check("gae", has_critic=True)
    with pytest.raises(ConfigError, match=r"advantage_estimator=gae needs a critic, but .*critic\.model\.path=null"):
        check("gae")


@pytest.mark.parametrize("name", ["gae", "reinforce++", "turn_level", "no_op"])
def test_an_estimator_of_tokens_does_not_take_rows_of_turns(name: str):
    with pytest.raises(
        ConfigError, match=rf"advantage_estimator={re.escape(name)} .*step_wise_trajectories=true; use grpo"
    ):
        check(name, "generator.step_wise_trajectories=true", has_critic=True)
    check("grpo", "generator.step_wise_trajectories=true")


@pytest.mark.parametrize(("key", "value"), [("temperature", "0.0"), ("top_k", "1")])
def test_a_greedy_baseline_needs_rollouts_that_are_not_greedy(key: str, value: str):
    with pytest.raises(ConfigError, match=rf"advantage_estimator=remax .*sampling_params\.{key}={value} "):
        check("remax", f"generator.sampling_params.{key}={value}", "trainer.algorithm.temperature=1.0")
    check("remax")


def test_a_greedy_baseline_does_not_take_rows_of_turns():
    with pytest.raises(ConfigError, match=r"advantage_estimator=remax .*step_wise_trajectories=true"):
        check("remax", "generator.step_wise_trajectories=true")


def test_distillation_needs_the_teacher_in_the_reward(caplog):
    distil()
    assert caplog.text == ""
    with pytest.raises(ConfigError, match=r"on_policy_distillation=true .*needs .*use_kl_in_reward=true.*recipe"):
        distil("trainer.algorithm.use_kl_in_reward=false")


def test_the_teacher_stays():
    with pytest.raises(ConfigError, match=r"on_policy_distillation=true .*update_ref_every_epoch=true"):
        distil("trainer.update_ref_every_epoch=true")


@pytest.mark.parametrize(
    "token", ["dynamic_sampling.type=filter", "zero_variance_filter=true", "overlong_buffer_len=9"]
)
def test_what_works_by_the_environments_rewards_does_not_go_with_a_teacher(token: str):
    name = token.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"on_policy_distillation=true .*algorithm\.{token} works; set .*{name}="):
        distil(f"trainer.algorithm.{token}")


def test_a_teacher_that_is_the_student_is_pointed_out(caplog):
    distil("trainer.policy.model.path=a/student", "trainer.ref.model.path=a/student")
    assert "trainer.ref.model.path=a/student is the policy's own model" in caplog.text


def test_an_estimator_that_sums_the_teachers_rewards_is_pointed_out(caplog):
    distil("trainer.algorithm.advantage_estimator=grpo")
    assert "advantage_estimator=grpo sums the rewards of a row; no_op keeps them apart" in caplog.text
