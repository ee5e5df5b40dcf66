"""KL penalty in the rewards, then advantages and returns. Pure: each returns another batch."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl.algorithms.advantages import compute_advantages_and_returns, normalize_advantages
from skyrl.algorithms.distillation import distillation_rewards
from skyrl.algorithms.kl import compute_approx_kl
from skyrl.algorithms.masked import hide, masked_mean
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.config.algorithm import AlgorithmConfig

Metrics = dict[str, float]


def apply_kl_penalty(
    batch: TrainingInputBatch, coef: float, estimator: str, *, distil: bool = False
) -> tuple[TrainingInputBatch, Metrics]:
    """Subtract max(0, coef)·KL from the reward of each trained token, or let the reference alone reward.

    Args:
        batch: With `rewards`, `action_log_probs` and `base_action_log_probs`.
        coef: The KL controller's value.
        estimator: `trainer.algorithm.kl_estimator_type`.
        distil: `trainer.algorithm.on_policy_distillation`: the reference is a teacher, and reference minus old
            log-prob takes the place of each token's reward. The environment's rewards are only measured then.

    Returns:
        The batch with new `rewards` and the column `kl` (nats per token), and the metrics `loss/avg_kl` (mean
        over valid rows of the mean over trained tokens), `loss/avg_kl_max` (mean over valid rows of the
        largest |KL|) and `loss/kl_loss_coef`.
    """
    kl = compute_approx_kl(batch["action_log_probs"], batch["base_action_log_probs"], batch["loss_mask"], estimator)
    penalised = batch.copy()
    penalised["kl"] = kl
    penalised["rewards"] = (
        distillation_rewards(batch["action_log_probs"], batch["base_action_log_probs"], batch["loss_mask"])
        if distil
        else batch["rewards"] - max(0.0, coef) * kl
    )
    valid = _valid_rows(batch)
    return penalised, {
        "loss/avg_kl": masked_mean(masked_mean(kl, batch["loss_mask"], dim=-1), valid).item(),
        "loss/avg_kl_max": masked_mean(kl.abs().amax(dim=-1), valid).item(),
        "loss/kl_loss_coef": float(coef),
    }


def add_advantages(batch: TrainingInputBatch, algorithm: AlgorithmConfig) -> tuple[TrainingInputBatch, Metrics]:
    """Add the columns `advantages` and `returns` with the configured estimator.

    Args:
        batch: With `rewards`, `response_mask`, `loss_mask`, metadata `uids`, and `values`, `baseline_scores`
            or `reward_components` (named by the metadata `reward_names`) where the estimator needs them. Rows
            whose `valid_rows` is False get zeros and count in no metric.
        algorithm: `trainer.algorithm`.

    Returns:
        The batch, and the metrics `loss/avg_final_rewards` (mean row reward, KL penalty included),
        `loss/avg_raw_advantages` and `loss/avg_raw_advantages_abs` (means over response tokens, before
        `advantage_batch_normalize`), and `reward/component/<name>` (mean of each named part of the rewards).
    """
    valid_rows, components = _valid_rows(batch), _reward_components(batch)
    advantages, returns = compute_advantages_and_returns(
        token_level_rewards=batch["rewards"],
        response_mask=batch["response_mask"],
        index=batch.metadata["uids"],
        adv_estimator=algorithm.advantage_estimator,
        config=algorithm,
        values=batch.get("values"),
        grpo_norm_by_std=algorithm.grpo_norm_by_std,
        gamma=algorithm.gamma,
        lambd=algorithm.lambd,
        loss_mask=batch["loss_mask"],
        valid_rows=valid_rows,
        baseline_scores=batch.get("baseline_scores"),
        reward_components=components,
    )
    advantages, returns = (hide(tensor, valid_rows.unsqueeze(1)) for tensor in (advantages, returns))
    shown = batch["response_mask"].bool() & valid_rows.unsqueeze(1)
    metrics = {
        "loss/avg_final_rewards": masked_mean(
            hide(batch["rewards"], batch["response_mask"]).sum(dim=-1), valid_rows
        ).item(),
        "loss/avg_raw_advantages": masked_mean(advantages, shown).item(),
        "loss/avg_raw_advantages_abs": masked_mean(advantages.abs(), shown).item(),
    }
    for name, component in (components or {}).items():
        metrics[f"reward/component/{name}"] = masked_mean(component, valid_rows).item()
    if algorithm.advantage_batch_normalize:
        advantages = normalize_advantages(advantages, batch["loss_mask"])
    estimated = batch.copy()
    estimated["advantages"] = advantages
    estimated["returns"] = returns
    return estimated, metrics


def _reward_components(batch: TrainingInputBatch) -> dict[str, Tensor] | None:
    columns = batch.get("reward_components")
    if columns is None:
        return None
    names: list[str] = batch.metadata["reward_names"]
    return dict(zip(names, columns.unbind(dim=1), strict=True))


def _valid_rows(batch: TrainingInputBatch) -> Tensor:
    valid = batch.get("valid_rows")
    return torch.ones(len(batch), dtype=torch.bool) if valid is None else valid
