from __future__ import annotations

import pytest

from skyrl.config.rules.methods import loss_facts
from skyrl.config.rules.sampler_support import check_score_centering, check_support_replay
from skyrl.errors import ConfigError
from tests.config.rules.build import build

SAMPLING = "generator.sampling_params"
SUPPORT = "generator.inference_engine.enable_return_sample_support_set"
REPLAY = ["trainer.algorithm.enable_sample_support_replay=true", f"{SUPPORT}=true", f"{SAMPLING}.top_k=20"]
CENTERED = ["trainer.algorithm.score_centering.enabled=true", "trainer.algorithm.policy_loss_type=rollout_is"]


def replay(*tokens: str) -> None:
    config = build(*REPLAY, *tokens)
    check_support_replay(config.trainer.algorithm, config.generator)


def center(*tokens: str) -> None:
    config = build(*CENTERED, *tokens)
    check_score_centering(config.trainer.algorithm, loss_facts(config.trainer.algorithm), config.generator)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (f"{SUPPORT}=false", rf"enable_sample_support_replay=true .*set {SUPPORT}=true"),  # S1
        (f"{SAMPLING}.top_k=-1", r"top_k=-1: .*from 2 to .*sample_support_max_top_k=1024"),  # S2
        (f"{SAMPLING}.top_k=1", r"top_k=1: .*from 2"),
        (f"{SAMPLING}.top_k=1025", r"top_k=1025: .*1024"),
        (f"{SAMPLING}.temperature=0.0", r"sampling_params\.temperature=0\.0: .*above 0"),
        ("trainer.algorithm.temperature=0.7", r"algorithm\.temperature=0\.7 must equal .*temperature=1\.0"),  # S3
        (f"{SAMPLING}.repetition_penalty=1.1", r"sampling_params\.repetition_penalty=1\.1 .*remove"),  # S4
        (f"{SAMPLING}.additional_kwargs.repetition_penalty=1.1", r"additional_kwargs\.repetition_penalty=1\.1"),
        (f"{SAMPLING}.additional_kwargs.presence_penalty=0.5", r"presence_penalty=0\.5 .*remove"),
        (f"{SAMPLING}.additional_kwargs.frequency_penalty=0.5", r"frequency_penalty=0\.5 .*remove"),
        (f"{SAMPLING}.additional_kwargs.logit_bias={{a:1}}", r"logit_bias=.*remove"),
        ("generator.batched=true", r"enable_sample_support_replay=true .*generator\.batched=true"),  # S5
        ("generator.chat_template.name_or_path=qwen", r"chat_template\.name_or_path=qwen"),
        ("generator.merge_stepwise_output=true", r"merge_stepwise_output=true"),
    ],
)
def test_replay_follows_only_what_the_sampler_can_return(token: str, message: str):
    with pytest.raises(ConfigError, match=message):
        replay(token)


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [f"{SAMPLING}.top_p=0.9", f"{SAMPLING}.min_p=0.01"],
        [f"{SAMPLING}.top_k=2000", "trainer.algorithm.sample_support_max_top_k=2000"],
        [f"{SAMPLING}.temperature=0.7"],
        [f"{SAMPLING}.additional_kwargs.presence_penalty=0", f"{SAMPLING}.additional_kwargs.logit_bias={{}}"],
    ],
)
def test_replay_works_with_bounded_sampling(tokens: list[str]):
    replay(*tokens)


def test_candidates_that_nobody_reads_cause_a_warning(caplog):
    config = build(f"{SUPPORT}=true")
    check_support_replay(config.trainer.algorithm, config.generator)
    assert f"{SUPPORT}=true, but nothing reads the candidates" in caplog.text


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("trainer.algorithm.policy_loss_type=regular", r"policy_loss_type=rollout_is or reinforce, not regular"),
        ("trainer.algorithm.score_centering.top_k=0", r"score_centering\.top_k=0: must be at least 1"),
        ("trainer.algorithm.score_centering.tail=cut", r"tail=cut: must be one of proportional, drop, renormalize"),
        ("trainer.algorithm.off_policy_correction.tis_ratio_type=token", r"enabled=true .*tis_ratio_type=token"),
    ],
)
def test_centering_names_what_it_needs(token: str, message: str):
    center()
    center("trainer.algorithm.policy_loss_type=reinforce")
    with pytest.raises(ConfigError, match=message):
        center(token)


def test_centering_needs_the_samplers_log_probs():
    config = build(*CENTERED)
    config.generator.sampling_params.logprobs = None
    with pytest.raises(ConfigError, match=r"score_centering\.enabled=true needs .*logprobs=1, not null"):
        check_score_centering(config.trainer.algorithm, loss_facts(config.trainer.algorithm), config.generator)


@pytest.mark.parametrize("token", ["top_k=20", "top_p=0.9", "min_p=0.1"])
def test_the_head_of_truncated_sampling_is_that_of_the_filtered_distribution(token: str):
    raw = "generator.inference_engine.engine_init_kwargs.logprobs_mode=raw_logprobs"
    center(raw)
    center(f"{SAMPLING}.{token}")
    with pytest.raises(ConfigError, match=r"logprobs_mode=raw_logprobs: .*processed_logprobs; remove"):
        center(f"{SAMPLING}.{token}", raw)


def test_centering_switches_on_what_the_engine_must_return():
    engine = build(*CENTERED, "trainer.algorithm.score_centering.top_k=50").generator.inference_engine
    assert engine.enable_return_sample_support_set and engine.enable_return_sample_support_logprobs
    assert engine.engine_init_kwargs == {"max_logprobs": 50}
    narrow = build(*CENTERED).generator.inference_engine
    assert narrow.engine_init_kwargs == {}
    off = build().generator.inference_engine
    assert not off.enable_return_sample_support_set and off.engine_init_kwargs == {}


def test_a_bound_of_the_engine_that_is_wide_enough_stays():
    wide = "generator.inference_engine.engine_init_kwargs.max_logprobs=100"
    tokens = [*CENTERED, "trainer.algorithm.score_centering.top_k=50", wide]
    assert build(*tokens).generator.inference_engine.engine_init_kwargs == {"max_logprobs": 100}
