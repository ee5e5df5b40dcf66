"""How losses are called, built in or a user's."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from skyrl.algorithms.loss_reduction import LOSS_REDUCTIONS, compute_loss_weights
from skyrl.algorithms.mean import Mean
from skyrl.algorithms.off_policy import apply_off_policy_correction
from skyrl.algorithms.policy_losses import PolicyLossRegistry, compute_policy_loss, register_policy_loss
from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl.errors import ConfigError

CONFIG = AlgorithmConfig()
LOG_PROBS = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
OLD = torch.tensor([[-1.3, -2.1], [-0.4, -2.0]])
ADVANTAGES = torch.tensor([[1.0, -1.0], [2.0, float("nan")]])
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def call(name_or_fn, **changes):
    arguments = {
        "log_probs": LOG_PROBS, "old_log_probs": OLD, "advantages": ADVANTAGES, "config": CONFIG,
        "loss_mask": MASK, "rollout_logprobs": OLD, "loss_weights": None,
    }  # fmt: skip
    return compute_policy_loss(name_or_fn, **(arguments | changes))


def plain_ppo(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    """Upstream's form: no weights, advantages scaled before, a masked sum."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    return (-torch.minimum(ratio * advantages, clipped * advantages) * loss_mask).sum(), {"mine": 0.25}


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_a_custom_loss_without_weights_equals_the_built_in_one(reduction):
    weights = compute_loss_weights(MASK, reduction, uids=["a", "b"], max_seq_len=7, micro_batch_size=1)
    custom, metrics = call(plain_ppo, loss_weights=weights)
    built_in, _ = call("regular", loss_weights=weights)
    assert custom.item() == pytest.approx(built_in.item(), rel=1e-6)
    assert metrics["mine"].item() == 0.25


def test_a_custom_loss_may_take_weights_and_unscaled_advantages():
    weights = torch.full((2, 2), 0.1)

    def loss(log_probs, old_log_probs, advantages, config, loss_mask, *, loss_weights):
        assert advantages is ADVANTAGES
        assert loss_weights is weights
        return log_probs.sum(), {}

    call(loss, loss_weights=weights)


def test_a_loss_that_lacks_rollout_logprobs_or_returns_a_bare_scalar_is_fine():
    loss, metrics = call(
        lambda log_probs, old_log_probs, advantages, config, loss_mask=None: (log_probs * loss_mask).sum()
    )
    assert loss.item() == -3.5
    assert metrics == {}


def test_the_first_three_arguments_may_have_any_name():
    loss, _ = call(lambda logp, old_logp, adv: (logp - old_logp).sum())
    assert loss.item() == pytest.approx((LOG_PROBS - OLD).sum().item())


def test_a_loss_with_open_keywords_gets_the_known_ones():
    def loss(log_probs, old_log_probs, advantages, **kwargs):
        assert kwargs.keys() == {"config", "loss_mask", "rollout_logprobs"}
        return log_probs.sum()

    call(loss)


def test_metrics_carry_no_gradient():
    log_probs = LOG_PROBS.clone().requires_grad_()
    _, metrics = call(lambda logp, *_: (logp.sum(), {"mean": logp.mean(), "one": 1}), log_probs=log_probs)
    assert not metrics["mean"].requires_grad
    assert metrics["one"].item() == 1.0


def test_old_log_probs_may_be_missing_for_a_loss_that_does_not_read_them():
    register_policy_loss("no_old", needs_old_logprobs=False)(lambda logp, old_logp, adv: logp.sum())
    try:
        call("no_old", old_log_probs=None)
    finally:
        PolicyLossRegistry.unregister("no_old")
    with pytest.raises(ValueError, match="'regular' needs old_log_probs"):
        call("regular", old_log_probs=None)


def test_missing_rollout_log_probs_are_named():
    register_policy_loss("anchored", needs_rollout_logprobs=True)(lambda logp, old_logp, adv: logp.sum())
    try:
        with pytest.raises(ValueError, match=r"generator\.sampling_params\.logprobs"):
            call("anchored", rollout_logprobs=None)
    finally:
        PolicyLossRegistry.unregister("anchored")


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match="Did you mean 'regular'"):
        call("regulr")


@pytest.mark.parametrize("name", ["old_log_probs", "advantages", "loss_mask", "rollout_logprobs", "loss_weights"])
def test_a_wrong_shape_names_the_tensor_and_both_shapes(name):
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 3\) but log_probs has shape \(2, 2\)"):
        call("regular", **{name: torch.zeros(2, 3)})


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(ValueError, match=r"returned shape \(2,\); sum it"):
        call(lambda logp, *_: logp.sum(dim=1))


CORRECTED = AlgorithmConfig(
    off_policy_correction=OffPolicyCorrectionConfig(
        tis_ratio_type="token",
        token_tis_ratio_clip_high=2.0,
        token_mask_is_threshold_low=0.5,
        token_mask_is_threshold_high=9.0,
    )
)
SAMPLER = OLD - torch.tensor([[4.0, 1.5], [0.4, 1.0]]).log()  # ratios of the old policy to the sampler


def test_a_correction_becomes_factors_of_the_weights():
    """Ratios 4 (capped at 2), 1.5 and .4 (dropped)."""
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    received = []

    def loss(log_probs, old_log_probs, advantages, config, loss_mask, *, loss_weights):
        received.append(loss_weights)
        return log_probs.sum()

    _, metrics = call(loss, config=CORRECTED, rollout_logprobs=SAMPLER, loss_weights=weights)
    call(loss, config=CORRECTED, rollout_logprobs=SAMPLER)
    assert received[0].tolist() == [pytest.approx([0.2, 0.3]), [0.0, 0.0]]
    assert received[1].tolist() == [pytest.approx([2.0, 1.5]), [0.0, 0.0]]
    assert metrics["token_mask_ratio"].item() == pytest.approx(1 / 3)
    assert metrics["is_ratio_max"].item() == pytest.approx(4.0)


def test_a_loss_without_weights_corrects_by_itself_and_equals_the_built_in_one():
    weights = torch.tensor([[0.1, 0.1], [0.3, 0.3]])

    def upstreams(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
        ratio = (log_probs - old_log_probs).exp()
        clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
        loss, mask, metrics = apply_off_policy_correction(
            -torch.minimum(ratio * advantages, clipped * advantages),
            old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction,
        )  # fmt: skip
        return (loss * mask).sum(), metrics

    given = {"config": CORRECTED, "rollout_logprobs": SAMPLER, "loss_weights": weights}
    custom, own_metrics = call(upstreams, **given)
    built_in, metrics = call("regular", **given)
    assert custom.item() == pytest.approx(built_in.item(), rel=1e-6)
    assert isinstance(own_metrics["token_mask_ratio"], Mean)
    assert own_metrics["token_mask_ratio"].item() == metrics["token_mask_ratio"].item()


def test_a_loss_without_weights_is_not_corrected_from_outside():
    advantages = torch.ones(2, 2)
    corrected, metrics = call(plain_ppo, config=CORRECTED, rollout_logprobs=SAMPLER, advantages=advantages)
    plain, _ = call(plain_ppo, advantages=advantages)
    assert corrected.item() == plain.item()
    assert list(metrics) == ["mine"]


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("rollout_logprobs", r"needs rollout_logprobs; set generator\.sampling_params\.logprobs"),
        ("old_log_probs", "skipped"),
    ],
)
def test_a_correction_names_the_log_probs_that_it_lacks(missing, text):
    def loss(log_probs, old_log_probs, advantages, *, loss_weights):
        return log_probs.sum()

    with pytest.raises(ValueError, match=text):
        call(loss, config=CORRECTED, **{missing: None})


def test_extras_reach_only_losses_that_name_them():
    support, batch = torch.zeros(2, 2, 3), {"loss_mask": MASK}

    def named(log_probs, old_log_probs, advantages, *, support, topk, batch):
        return log_probs.sum(), {"width": support.shape[-1], "columns": len(batch), "head": topk is None}

    _, metrics = call(named, support=support, batch=batch)
    assert {name: value.item() for name, value in metrics.items()} == {"width": 3.0, "columns": 1.0, "head": 1.0}

    def with_kwargs(log_probs, old_log_probs, advantages, **kwargs):
        assert not kwargs.keys() & {"support", "topk", "batch", "loss_weights"}
        return log_probs.sum()

    call(with_kwargs, support=support, batch=batch)


def test_masked_nan_in_every_input_reaches_neither_loss_nor_gradient():
    hidden = MASK == 0
    given = {
        name: tensor.masked_fill(hidden, float("nan"))
        for name, tensor in {"old_log_probs": OLD, "advantages": ADVANTAGES, "rollout_logprobs": SAMPLER}.items()
    }
    log_probs = LOG_PROBS.masked_fill(hidden, float("-inf")).requires_grad_()
    weights = torch.full((2, 2), 0.25)
    loss, metrics = call("regular", log_probs=log_probs, config=CORRECTED, loss_weights=weights, **given)
    loss.backward()
    clean, _ = call("regular", config=CORRECTED, loss_weights=weights, rollout_logprobs=SAMPLER)
    assert loss.item() == clean.item()
    assert log_probs.grad.isfinite().all()
    assert log_probs.grad[hidden].tolist() == [0.0]
    assert all(torch.tensor(value.item()).isfinite() for value in metrics.values())


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "returned nothing"),
        (1.5, "returned a float"),
        ({"loss": LOG_PROBS.sum()}, "returned a dict"),
        ((LOG_PROBS.sum(), {}, 1), r"returned 3 values \(Tensor, dict, int\)"),
        (({}, LOG_PROBS.sum()), r"returned 2 values \(dict, Tensor\)"),
        ((LOG_PROBS.sum(), None), r"returned 2 values \(Tensor, NoneType\)"),
        ((LOG_PROBS.sum(), {"mine": None}), "metric 'mine' is None, not a number"),
        ((LOG_PROBS.sum(), {"mine": "high"}), "metric 'mine' is 'high', not a number"),
        ((LOG_PROBS.sum(), {"mine": LOG_PROBS}), r"metric 'mine' has shape \(2, 2\); reduce it"),
    ],
)
def test_what_a_custom_loss_returns_wrongly_is_named(result, text):
    with pytest.raises(ValueError, match=text):
        call(lambda log_probs, old_log_probs, advantages: result)


def test_a_list_of_two_and_numbers_of_any_kind_are_fine():
    loss, metrics = call(lambda logp, *_: [logp.sum(), {"one": np.float64(0.5), "two": torch.tensor([2]), "yes": True}])
    assert loss.item() == -6.5
    assert {name: value.item() for name, value in metrics.items()} == {"one": 0.5, "two": 2.0, "yes": 1.0}


def test_a_loss_without_gradient_is_refused_where_one_is_wanted():
    def detached(log_probs, old_log_probs, advantages):
        return log_probs.detach().sum()

    wanted = LOG_PROBS.clone().requires_grad_()
    with pytest.raises(ValueError, match="without gradient; compute it from log_probs"):
        call(detached, log_probs=wanted)
    with torch.no_grad():
        assert call(detached, log_probs=wanted)[0].item() == -6.5


def test_an_object_that_has_no_hash_can_be_a_loss():
    @dataclass
    class Scaled:
        factor: float

        def __call__(self, log_probs, old_log_probs, advantages, config):
            return self.factor * log_probs.sum()

    assert call(Scaled(2.0))[0].item() == -13.0
