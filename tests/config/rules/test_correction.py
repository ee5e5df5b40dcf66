from __future__ import annotations

import pytest

from skyrl.config.rules.correction import check_correction
from skyrl.config.rules.methods import loss_facts
from skyrl.errors import ConfigError
from tests.config.rules.build import build

FOUR_KINDS = [
    "tis_ratio_type=token",
    "sequence_mask_metric=geometric",
    "outlier_token_is_threshold_high=100.0",
    "token_mask_is_threshold_low=0.5",
]
BY_ROLLOUT = {"rollout_is": [], "dppo": [], "cispo": ["cispo.cispo_anchor=rollout"]}


def check(loss: str, *tokens: str, logprobs: int | None = 1) -> None:
    tokens = (f"policy_loss_type={loss}", *tokens)
    config = build(*(f"trainer.algorithm.{token}" for token in tokens))
    check_correction(config.trainer.algorithm, loss_facts(config.trainer.algorithm), logprobs=logprobs)


def corrected(token: str) -> list[str]:
    tokens = [f"off_policy_correction.{token}"]
    return [*tokens, "off_policy_correction.token_mask_is_threshold_high=5.0"] if "token_mask" in token else tokens


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("kind", FOUR_KINDS)
def test_no_kind_of_correction_works_with_losses_that_choose_tokens(loss: str, kind: str):
    check(loss)
    check("regular", *corrected(kind))
    with pytest.raises(ConfigError, match=rf"policy_loss_type={loss} does not work with .*{kind}.*null"):
        check(loss, *corrected(kind))


@pytest.mark.parametrize("loss", BY_ROLLOUT)
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_importance_sampling_is_not_counted_twice(loss: str, kind: str):
    with pytest.raises(ConfigError, match=rf"policy_loss_type={loss}.*tis_ratio_type={kind} would do so twice"):
        check(loss, *BY_ROLLOUT[loss], *corrected(f"tis_ratio_type={kind}"))


@pytest.mark.parametrize("loss", BY_ROLLOUT)
@pytest.mark.parametrize("kind", FOUR_KINDS[1:])
def test_masks_work_with_losses_that_are_anchored_to_the_rollout(loss: str, kind: str):
    check(loss, *BY_ROLLOUT[loss], *corrected(kind))


def test_cispo_anchored_to_old_log_probs_takes_importance_sampling():
    check("cispo", *corrected("tis_ratio_type=token"))


@pytest.mark.parametrize("kind", FOUR_KINDS)
def test_a_correction_needs_the_samplers_log_probs(kind: str):
    with pytest.raises(ConfigError, match=rf"{kind} needs the sampler's log-probs, but .*logprobs=null; set .*=1"):
        check("regular", *corrected(kind), logprobs=None)
    check("regular", *corrected(kind), logprobs=0)


@pytest.mark.parametrize("loss", ["rollout_is", "cispo"])
def test_a_loss_anchored_to_the_rollout_needs_the_samplers_log_probs(loss: str):
    with pytest.raises(ConfigError, match=rf"policy_loss_type={loss} needs the sampler's log-probs"):
        check(loss, *BY_ROLLOUT[loss], logprobs=None)


def test_other_losses_do_without():
    check("regular", logprobs=None)
