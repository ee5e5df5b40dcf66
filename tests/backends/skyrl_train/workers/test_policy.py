"""The sum over any cut of a mini-batch is the loss of the whole, in value and gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl.algorithms.loss_reduction import compute_loss_weights
from skyrl.algorithms.policy_losses import PolicyLossRegistry, register_policy_loss
from skyrl.algorithms.score_centering import SamplerHead
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer
from skyrl.backends.skyrl_train.workers.policy import LossScale, PolicyRows, finish_policy_metrics, policy_loss
from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from tests.backends.skyrl_train.workers.batches import ROWS, make_batch


def config(**fields: object) -> AlgorithmConfig:
    return AlgorithmConfig(
        use_kl_loss=True, kl_loss_coef=0.5, use_entropy_loss=True, entropy_loss_coef=0.1, temperature=1.0, **fields
    )


def reduced(batch: TrainingInputBatch, reduction: str) -> TrainingInputBatch:
    uids = [f"prompt{i // 2}" for i in range(len(batch))]
    batch["loss_weights"] = compute_loss_weights(
        batch["loss_mask"], reduction, uids=uids, max_seq_len=16, micro_batch_size=2
    )
    return batch


def run(
    batch: TrainingInputBatch, cuts: list[int], ranks: int, algorithm: AlgorithmConfig
) -> tuple[Tensor, dict[str, float]]:
    """Gradient by the log-probs, averaged over ranks as FSDP does, and the metrics, for one cut into micro-batches."""
    log_probs = (batch["action_log_probs"] + 0.3).requires_grad_()
    entropy = log_probs.square()
    metrics = MetricBuffer()
    edges = sorted({0, *cuts, len(batch)})
    for start, end in itertools.pairwise(edges):
        scale = LossScale(dp_size=ranks, row_share=(end - start) / len(batch))
        rows = PolicyRows.from_batch(batch[start:end])
        policy_loss(rows, log_probs[start:end], entropy[start:end], "regular", algorithm, scale, metrics).backward(
            retain_graph=True
        )
    assert log_probs.grad is not None
    return log_probs.grad / ranks, finish_policy_metrics(metrics.result(lambda values, op: values))


@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(1, ROWS - 1), max_size=4),
    ranks=st.sampled_from([1, 2, 4]),
    reduction=st.sampled_from(["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]),
)
def test_any_cut_has_the_gradient_and_metrics_of_the_whole(cuts: list[int], ranks: int, reduction: str) -> None:
    batch = reduced(make_batch(), reduction)
    whole, whole_metrics = run(batch, [], 1, config())
    grad, metrics = run(batch, cuts, ranks, config())
    torch.testing.assert_close(grad, whole, atol=1e-6, rtol=1e-5)
    assert metrics.keys() == whole_metrics.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(whole_metrics[name], rel=1e-4, abs=1e-6), name


def test_the_loss_is_the_formula() -> None:
    batch = reduced(make_batch(), "token_mean")
    _, metrics = run(batch, [3], 2, config())
    mask = batch["loss_mask"].bool()
    log_probs = batch["action_log_probs"] + 0.3
    ratio = torch.full_like(log_probs, 0.3).exp()
    advantages = batch["advantages"]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[mask].mean()
    back = batch["base_action_log_probs"] - log_probs
    kl = (back.exp() - back - 1)[mask].mean()
    entropy = log_probs.square()[mask].mean()
    assert metrics["policy_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["policy_kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert metrics["policy_entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    assert metrics["final_loss"] == pytest.approx((loss + 0.5 * kl - 0.1 * entropy).item(), rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1.349859, rel=1e-5)  # e^0.3
    assert metrics["approx_kl_old"] == pytest.approx(0.049859, rel=1e-4)  # e^0.3 - 1 - 0.3
    rho = (log_probs - batch["rollout_logprobs"])[mask].exp()
    assert metrics["ess_rollout"] == pytest.approx((rho.sum() ** 2 / (len(rho) * rho.square().sum())).item(), rel=1e-4)


def test_padding_rows_change_nothing() -> None:
    from skyrl.backends.skyrl_train.training_batch import pad_training_input_batch

    batch = reduced(make_batch(), "token_mean")
    whole, whole_metrics = run(batch, [], 1, config())
    padded, metrics = run(pad_training_input_batch(batch, 4), [6, 9], 1, config())
    torch.testing.assert_close(padded[:ROWS], whole)
    assert not padded[ROWS:].any()
    assert metrics == pytest.approx(whole_metrics, rel=1e-4)


def test_what_a_mask_hides_never_leaks() -> None:
    batch = reduced(make_batch(), "token_mean")
    hidden = batch["loss_mask"] == 0
    for key in ("advantages", "base_action_log_probs", "rollout_logprobs"):
        batch[key] = batch[key].masked_fill(hidden, float("nan"))
    grad, metrics = run(batch, [4], 2, config())
    assert torch.isfinite(grad).all()
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())


def test_the_old_regularizer_averages_rows_of_the_micro_batch() -> None:
    batch = reduced(make_batch(), "token_mean")
    _, metrics = run(batch, [], 1, config(legacy_regularizer_reduction=True))
    log_probs, mask = batch["action_log_probs"] + 0.3, batch["loss_mask"]
    back = batch["base_action_log_probs"] - log_probs
    kl = (((back.exp() - back - 1) * mask).sum(-1) / mask.sum(-1)).mean()
    entropy = (log_probs.square() * mask).sum() / mask.sum()
    expected = metrics["policy_loss"] + 0.5 * kl.item() - 0.1 * entropy.item()
    assert metrics["final_loss"] == pytest.approx(expected, rel=1e-4)


def test_cross_entropy_gets_no_regularizer_and_needs_no_reference() -> None:
    batch = reduced(make_batch(), "token_mean")
    batch["base_action_log_probs"] = None
    log_probs = (batch["action_log_probs"] + 0.3).requires_grad_()
    metrics = MetricBuffer()
    rows, scale = PolicyRows.from_batch(batch), LossScale(dp_size=1, row_share=1.0)
    loss = policy_loss(rows, log_probs, log_probs.square(), "cross_entropy", config(), scale, metrics)
    mask = batch["loss_mask"].bool()
    assert loss.item() == pytest.approx(-log_probs[mask].mean().item(), rel=1e-5)
    assert "policy_kl" not in metrics.result(lambda values, op: values)


def test_a_missing_reference_is_named() -> None:
    batch = reduced(make_batch(), "token_mean")
    batch["base_action_log_probs"] = None
    with pytest.raises(ValueError, match="base_action_log_probs"):
        run(batch, [], 1, config())


def test_a_correction_weighs_the_policy_term_and_neither_kl_nor_entropy() -> None:
    """Token weights min(exp(old - sampler), 1.02), by hand; everything is divided by all trained tokens."""
    batch = reduced(make_batch(), "token_mean")
    correction = OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=1.02)
    _, metrics = run(batch, [3], 2, config(off_policy_correction=correction))
    _, plain = run(batch, [3], 2, config())
    mask = batch["loss_mask"].bool()
    ratio, advantages = torch.full_like(batch["advantages"], 0.3).exp(), batch["advantages"]
    token_losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    weights = (batch["action_log_probs"] - batch["rollout_logprobs"]).exp().clamp(max=1.02)
    expected = (token_losses * weights)[mask].mean().item()
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["final_loss"] - metrics["policy_loss"] == pytest.approx(
        plain["final_loss"] - plain["policy_loss"], rel=1e-4
    )
    trained = weights[mask]
    assert metrics["loss_metrics/correction_weight_mean"] == pytest.approx(trained.mean().item(), rel=1e-4)
    assert metrics["loss_metrics/ess"] == pytest.approx(
        (trained.sum() ** 2 / (len(trained) * trained.square().sum())).item(), rel=1e-4
    )
    assert metrics["loss_metrics/kept_token_ratio"] == 1.0


def test_a_mini_batch_whose_tokens_are_all_dropped_has_no_effective_sample() -> None:
    batch = reduced(make_batch(), "token_mean")
    correction = OffPolicyCorrectionConfig(token_mask_is_threshold_low=90.0, token_mask_is_threshold_high=91.0)
    algorithm = AlgorithmConfig(use_kl_loss=False, temperature=1.0, off_policy_correction=correction)
    grad, metrics = run(batch, [4], 1, algorithm)
    assert not grad.any()
    assert (metrics["loss_metrics/ess"], metrics["loss_metrics/kept_token_ratio"], metrics["policy_loss"]) == (0, 0, 0)


def test_a_loss_may_ask_for_the_samplers_support_and_head_and_for_all_columns() -> None:
    batch = reduced(make_batch(), "token_mean")
    batch["sample_support"] = torch.zeros(ROWS, batch["loss_mask"].shape[1], 2, dtype=torch.int32)
    log_probs = torch.zeros_like(batch["loss_mask"])
    ids = torch.zeros(*log_probs.shape, 1, dtype=torch.int32)
    head = SamplerHead(ids=ids, sampler_log_probs=ids.float(), log_probs=ids.float(), sampled_ids=ids[..., 0])
    seen = []

    def curious(log_probs, old_log_probs, advantages, config, *, loss_weights, support, topk, batch):  # type: ignore[no-untyped-def]
        seen.extend([support, topk, batch])
        return log_probs.sum()

    register_policy_loss("curious")(curious)
    try:
        rows, scale = PolicyRows.from_batch(batch), LossScale(dp_size=1, row_share=1.0)
        algorithm = AlgorithmConfig(use_kl_loss=False, temperature=1.0)
        policy_loss(rows, log_probs, log_probs, "curious", algorithm, scale, MetricBuffer(), head=head)
    finally:
        PolicyLossRegistry.unregister("curious")
    assert seen[0] is batch["sample_support"]
    assert seen[1] is head
    assert seen[2] is batch
