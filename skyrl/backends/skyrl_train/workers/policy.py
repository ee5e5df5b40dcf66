"""The policy's loss of one micro-batch, and what is measured on the way.

L = Σ w·m·(L_t + kl_coef·KL_t - ent_coef·H_t) with the weights w of the loss reduction: the sum over all
micro-batches of all ranks is the loss, however the mini-batch is cut (algorithms.md 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from skyrl.algorithms.kl import compute_approx_kl
from skyrl.algorithms.masked import hide, masked_max, masked_mean, masked_min, weighted_sum
from skyrl.algorithms.off_policy.correction import WEIGHT
from skyrl.algorithms.policy_losses import PolicyLossRegistry, compute_policy_loss
from skyrl.algorithms.score_centering import SamplerHead
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer
from skyrl.config.algorithm import AlgorithmConfig

GAP = "minibatch_rollout_logprobs_abs_diff"
RATIO = "rollout_ratio"
SAMPLE_SIZES = {"ess_rollout": RATIO, "loss_metrics/ess": f"loss_metrics/{WEIGHT}"}
"""Effective sample sizes, and the weights whose first two moments give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRows:
    """One micro-batch as the loss reads it; tensors are [rows, response]."""

    loss_mask: Float[Tensor, "rows response"]
    """Not 0 = trains; other values than 1 scale."""
    advantages: Float[Tensor, "rows response"]
    """Not scaled by the reduction."""
    response_mask: Tensor
    """1 = after the prompt."""
    loss_weights: Tensor | None
    """The loss reduction; None sums plainly."""
    old_log_probs: Tensor | None
    """Before this update; None when the loss does not read them, or when they are those of the model now."""
    old_is_current: bool
    """The only optimizer step of its rollouts: the old policy is the model now, so its forward pass is saved."""
    ref_log_probs: Tensor | None
    """Of the reference."""
    rollout_logprobs: Tensor | None
    """Of the policy that sampled."""
    support: Tensor | None
    """Candidates that the sampler kept at each token [rows, response, width], -1 pads."""
    batch: TrainingInputBatch
    """All columns, by upstream's names; for losses that ask for them."""

    @classmethod
    def from_batch(cls, batch: TrainingInputBatch) -> PolicyRows:
        """Rename upstream's batch keys."""
        mask = batch["loss_mask"]
        return cls(
            loss_mask=mask,
            advantages=batch["advantages"] if batch.get("advantages") is not None else torch.zeros_like(mask),
            response_mask=batch["response_mask"],
            loss_weights=batch.get("loss_weights"),
            old_log_probs=batch.get("action_log_probs"),
            old_is_current=bool(batch.metadata.get("old_is_current", False)),
            ref_log_probs=batch.get("base_action_log_probs"),
            rollout_logprobs=batch.get("rollout_logprobs"),
            support=batch.get("sample_support"),
            batch=batch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """How one micro-batch enters the gradient."""

    dp_size: int
    """FSDP averages gradients over this many ranks; the loss is multiplied to undo it."""
    row_share: float
    """Rows of the micro-batch over rows of the rank; only `legacy_regularizer_reduction` uses it."""


def policy_loss(
    rows: PolicyRows,
    log_probs: Float[Tensor, "rows response"],
    entropy: Float[Tensor, "rows response"],
    loss_name: str,
    algorithm: AlgorithmConfig,
    scale: LossScale,
    metrics: MetricBuffer,
    head: SamplerHead | None = None,
) -> Float[Tensor, ""]:
    """Value to call backward on; adds the micro-batch's metrics.

    Args:
        rows: The micro-batch.
        log_probs: Of the model now, in nats (has grad).
        entropy: Of the model now, in nats.
        loss_name: Registered policy loss.
        algorithm: The config that this loss sees.
        scale: See `LossScale`.
        metrics: Gets this micro-batch's numbers.
        head: The sampler's head, for score centering.
    """
    loss, loss_metrics = compute_policy_loss(
        loss_name,
        log_probs=log_probs,
        old_log_probs=old_log_probs(rows, log_probs),
        advantages=rows.advantages,
        config=algorithm,
        loss_mask=rows.loss_mask,
        rollout_logprobs=rows.rollout_logprobs,
        loss_weights=rows.loss_weights,
        support=rows.support,
        topk=head,
        batch=rows.batch,
    )
    regularizer, undo_mean = log_probs.new_zeros(()), 1.0
    if PolicyLossRegistry.traits(loss_name).regularized:
        regularizer, undo_mean = _regularizer(rows, log_probs, entropy, algorithm, scale, metrics)
    metrics.add_sum("policy_loss", loss)
    metrics.add_sum("final_loss", loss + regularizer)
    weight = (rows.loss_mask != 0).sum()
    for name, value in loss_metrics.items():
        metrics.add_named(f"loss_metrics/{name}", value, weight)
    with torch.no_grad():
        add_diagnostics(rows, log_probs.detach(), entropy.detach(), metrics)
    return loss * scale.dp_size + regularizer * undo_mean


def old_log_probs(rows: PolicyRows, log_probs: Tensor) -> Tensor | None:
    """Log-probs before this update, in nats [rows, response]."""
    return log_probs.detach() if rows.old_is_current else rows.old_log_probs


def _regularizer(
    rows: PolicyRows,
    log_probs: Tensor,
    entropy: Tensor,
    algorithm: AlgorithmConfig,
    scale: LossScale,
    metrics: MetricBuffer,
) -> tuple[Tensor, float]:
    """KL and entropy terms, and the factor that undoes the mean over ranks."""
    zero = log_probs.new_zeros(())
    if not (algorithm.use_kl_loss or algorithm.use_entropy_loss):
        return zero, 1.0
    kl = zero
    if algorithm.use_kl_loss:
        if rows.ref_log_probs is None:
            raise ValueError("trainer.algorithm.use_kl_loss=true needs base_action_log_probs in the batch")
        trained = (rows.loss_mask != 0).to(log_probs.dtype)
        kl = compute_approx_kl(log_probs, rows.ref_log_probs, trained, algorithm.kl_estimator_type)
        metrics.add_mean("policy_kl", kl.sum(), trained.sum())
    entropy_coef = algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0
    kl_coef = algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0
    if algorithm.legacy_regularizer_reduction:
        kl_mean = masked_mean(kl, rows.loss_mask, dim=-1).mean() if algorithm.use_kl_loss else zero
        mean = kl_coef * kl_mean - entropy_coef * masked_mean(entropy, rows.loss_mask)
        return mean * scale.row_share, 1.0
    terms = kl_coef * kl - (entropy_coef * entropy if entropy_coef else 0.0)
    return weighted_sum(terms, rows.loss_mask, rows.loss_weights), float(scale.dp_size)


def add_diagnostics(rows: PolicyRows, log_probs: Tensor, entropy: Tensor, metrics: MetricBuffer) -> None:
    """Entropy, lengths, and how far the policy is from the old one and from the sampler."""
    trained = rows.loss_mask != 0
    count = trained.sum()
    metrics.add_mean("policy_entropy", hide(entropy, trained).sum(), count)
    real_rows = trained.any(dim=-1)
    lengths = rows.response_mask.sum(dim=-1)
    metrics.add_mean("response_length", (lengths * real_rows).sum(), real_rows.sum())
    old = old_log_probs(rows, log_probs)
    if old is not None:
        log_ratio = hide(log_probs - old, trained).clamp(-20.0, 20.0)
        ratio = log_ratio.exp()
        metrics.add_mean("ratio_mean", hide(ratio, trained).sum(), count)
        metrics.add_mean("approx_kl_old", hide(ratio - 1.0 - log_ratio, trained).sum(), count)
    if rows.rollout_logprobs is not None:
        gap = hide(log_probs - rows.rollout_logprobs, trained)
        rho = hide(gap.clamp(-20.0, 20.0).exp(), trained)
        metrics.add_mean(f"{RATIO}_mean", rho.sum(), count)
        metrics.add_mean(f"{RATIO}_sq_mean", rho.square().sum(), count)
        gap = gap.abs()
        metrics.add_mean(f"{GAP}_mean", gap.sum(), count)
        metrics.add_mean(f"{GAP}_sq_mean", gap.square().sum(), count)
        metrics.add_max(f"{GAP}_max", masked_max(gap, trained))
        metrics.add_min(f"{GAP}_min", masked_min(gap, trained))


def finish_policy_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Add effective sample sizes as a share, (Σw)² / (N·Σw²), from the moments over all ranks."""
    done = dict(metrics)
    for name, weight in SAMPLE_SIZES.items():
        if f"{weight}_sq_mean" in metrics:
            square = metrics[f"{weight}_sq_mean"]
            done[name] = metrics[f"{weight}_mean"] ** 2 / square if square else 0.0
    return done
