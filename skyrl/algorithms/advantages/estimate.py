"""Run the chosen estimator on a batch: pass it what it takes, keep failed rollouts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skyrl.algorithms.advantages.checks import refuse_non_finite, require_batch_shapes
from skyrl.algorithms.advantages.outcome import shown_tokens
from skyrl.algorithms.advantages.registry import AdvantageEstimator, AdvantageEstimatorRegistry
from skyrl.algorithms.masked import masked_moments, standardize
from skyrl.algorithms.signatures import accepted_keywords, named_keywords, require_shape
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError


def compute_advantages_and_returns(  # noqa: PLR0913 - upstream's public signature, and what estimators may ask for
    token_level_rewards: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    index: Sequence[str] | np.ndarray,
    adv_estimator: str,
    config: AlgorithmConfig,
    values: Float[Tensor, "batch response"] | None = None,
    grpo_norm_by_std: bool = True,
    gamma: float = 1.0,
    lambd: float = 1.0,
    *,
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    valid_rows: Bool[Tensor, " batch"] | None = None,
    baseline_scores: Float[Tensor, " batch"] | None = None,
    reward_components: Mapping[str, Float[Tensor, " batch"]] | None = None,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Compute the advantage and the return of every response token, without gradient.

    Args:
        token_level_rewards: Right-aligned, like every other tensor here.
        response_mask: 1 = after the prompt.
        index: The uid of each row; rows of one uid are a group.
        adv_estimator: A registered name.
        config: `trainer.algorithm`, for estimators that ask for it.
        values: The critic's, for estimators that need them.
        grpo_norm_by_std: Divide by the group's standard deviation.
        gamma: Discount per token.
        lambd: GAE's λ.
        loss_mask: 1 = trains; only for estimators that name it, as are the next three.
        valid_rows: False marks a failed rollout, which is no sample: an estimator that does not name this
            argument is called without those rows, and they get zeros.
        baseline_scores: Score of a baseline rollout of each row's prompt; NaN where that rollout failed.
        reward_components: Row scores by reward name.

    Returns:
        Two tensors shaped like the rewards, which may be one and the same.

    Raises:
        ConfigError: The name is unknown, or the estimator needs values or a baseline and there are none.
        ValueError: A tensor does not fit the rewards, or something that is neither masked nor marked as failed is
            not finite: a reward, a value, or a result without such a cause. Or a user's function returned something
            else than two tensors.
    """
    function = _estimator(adv_estimator, has_values=values is not None, has_baseline=baseline_scores is not None)
    components = {f"reward_components[{name!r}]": part for name, part in (reward_components or {}).items()}
    require_batch_shapes(
        token_level_rewards,
        index,
        tokens={"response_mask": response_mask, "values": values, "loss_mask": loss_mask},
        rows={"valid_rows": valid_rows, "baseline_scores": baseline_scores, **components},
    )
    if not token_level_rewards.is_floating_point():  # advantages take the rewards' type, and would be rounded
        token_level_rewards = token_level_rewards.float()
    if not token_level_rewards.numel():
        return torch.zeros_like(token_level_rewards), torch.zeros_like(token_level_rewards)
    valid_rows = None if valid_rows is None else valid_rows.bool()
    offers: dict[str, Any] = {
        "token_level_rewards": token_level_rewards,
        "response_mask": response_mask,
        "index": index,
        "values": values,
        "grpo_norm_by_std": grpo_norm_by_std,
        "gamma": gamma,
        "lambd": lambd,
        "config": config,
    }
    extras: dict[str, Any] = {
        "loss_mask": loss_mask,
        "valid_rows": valid_rows,
        "baseline_scores": baseline_scores,
        "reward_components": reward_components,
    }
    with torch.no_grad():
        advantages, returns = _call(adv_estimator, function, offers, extras, valid_rows)
        if not _are_finite(advantages, returns, one_for_all=_gives_one_for_all(adv_estimator)):
            shown = shown_tokens(response_mask, valid_rows)
            for name, tensor in {"token_level_rewards": token_level_rewards, "values": values}.items():
                if tensor is not None:
                    refuse_non_finite(name, tensor, shown)
            refuse_non_finite(f"advantages of {adv_estimator!r}", advantages, shown)
            refuse_non_finite(f"returns of {adv_estimator!r}", returns, shown)
    return advantages, returns


def _estimator(name: str, *, has_values: bool, has_baseline: bool) -> AdvantageEstimator:
    function, traits = AdvantageEstimatorRegistry.get(name), AdvantageEstimatorRegistry.traits(name)
    if not has_values and traits.needs_values:
        raise ConfigError(
            f"trainer.algorithm.advantage_estimator={name} needs a critic's values; set "
            "trainer.critic.model.path, or choose an estimator without a critic such as grpo"
        )
    if not has_baseline and traits.needs_baseline:
        raise ConfigError(
            f"trainer.algorithm.advantage_estimator={name} needs baseline_scores, the score of a greedy rollout of "
            "each prompt; the trainer samples it, other callers must pass it, or choose an estimator without one "
            "such as rloo"
        )
    return function


def _call(
    name: str, function: AdvantageEstimator, offers: dict[str, Any], extras: dict[str, Any], valid_rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    named = named_keywords(function)
    chosen = {name: offers[name] for name in accepted_keywords(function, offers)}
    chosen |= {name: value for name, value in extras.items() if name in named}
    rewards: Tensor = offers["token_level_rewards"]
    if valid_rows is None or "valid_rows" in named or bool(valid_rows.all()):
        return _checked(name, function, chosen, rewards)
    kept = valid_rows.nonzero().squeeze(-1)
    results = torch.zeros_like(rewards), torch.zeros_like(rewards)
    if len(kept):
        arguments = {keyword: _take(value, kept) for keyword, value in chosen.items()}
        parts = _checked(name, function, arguments, rewards[kept])
        for whole, part in zip(results, parts, strict=True):
            whole[kept] = part.to(whole.dtype)
    return results


def _checked(name: str, function: AdvantageEstimator, chosen: dict[str, Any], rewards: Tensor) -> tuple[Tensor, Tensor]:
    result = function(**chosen)

    if not isinstance(result, tuple | list) or [isinstance(part, Tensor) for part in result] != [True, True]:
        parts = result if isinstance(result, tuple | list) else [result]
        raise ValueError(
            f"advantage estimator {name!r} returned ({', '.join(type(part).__name__ for part in parts)}); it must "
            "return two tensors, advantages and returns, shaped like token_level_rewards"
        )
    advantages, returns = (part if part.is_floating_point() else part.to(rewards.dtype) for part in result)
    require_shape("advantages", advantages, "token_level_rewards", rewards)
    require_shape("returns", returns, "token_level_rewards", rewards)
    return advantages, returns


def _gives_one_for_all(name: str) -> bool:
    """Whether all tokens of a row surely have one advantage."""
    return AdvantageEstimatorRegistry.is_built_in(name) and AdvantageEstimatorRegistry.traits(name).outcome


def _are_finite(advantages: Tensor, returns: Tensor, *, one_for_all: bool) -> bool:
    """Look at the sums: one NaN or infinity spoils them, and they cost little.

    Of rows with one advantage it looks at the last column: right-aligned rows have their last token there.
    """
    results = [advantages] if returns is advantages else [advantages, returns]
    return all(bool((result[:, -1] if one_for_all else result).sum().isfinite()) for result in results)


def _take(value: Any, rows: Tensor) -> Any:
    """Keep some rows of whatever has one entry a row."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, Mapping):
        return {name: _take(part, rows) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return value[rows.cpu().numpy()]
    if isinstance(value, list | tuple):
        return [value[row] for row in rows.tolist()]
    return value


def normalize_advantages(
    advantages: Float[Tensor, "batch response"], loss_mask: Shaped[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """Whiten advantages over the trained tokens of the whole batch (`trainer.algorithm.advantage_batch_normalize`).

    (A - mean)·rsqrt(max(1e-8, Σ m·(A - mean)² / Σ m)), with the mean over trained tokens; zeros elsewhere.
    """
    count, mean, squares = masked_moments(advantages, loss_mask)
    return standardize(advantages, loss_mask, mean, torch.rsqrt((squares / max(1, count)).clamp(min=1e-8)))
