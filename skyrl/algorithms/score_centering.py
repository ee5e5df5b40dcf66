"""Score centering: subtract the score that the sampler expects at each prefix (arXiv:2609.20807).

When data come from a sampler q that is not the policy π, E_q[c·∇ℓ] is not zero: the average reward drags the policy
along it. The centred loss subtracts that expectation over the sampler's head K_t (and the sampled token):

    L_t = -A_t·(c_a·ℓ(a) - Σ_{v in K_t} κ_v·ℓ(v)),   κ_v = q_v·c_v - α_t·π_v  (no gradient)

c is the calibration of the base loss. α handles the mass q_T outside K_t (`trainer.algorithm.score_centering.tail`):

| tail | |
|---|---|
| `proportional` | α = q_T/π_T: Σ κ·∇ℓ is then E_K[c·∇ℓ] + q_T·∇log π_T, exact when q is proportional to π there |
| `drop` | α = 0 |
| `renormalize` | q becomes q/Σ_K q, and α = 0 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide
from skyrl.algorithms.mean import Mean, MetricValue
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError

LEAST_TAIL = 1e-6
"""The trainer's mass outside the head counts as at least this, a sampler's below it as none (it is rounding)."""
_KEY = "trainer.algorithm.score_centering"

Calibration = Callable[[Tensor, Tensor], Tensor]
"""The factor c of a base loss, from the log-probs of the trainer and of the sampler; it carries no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerHead:
    """The likeliest tokens of the sampler at each position of a micro-batch, and what the trainer says of them."""

    ids: Int[Tensor, "batch response head"]
    """Token ids, distinct, -1 pads; a position without a head is all -1."""
    sampler_log_probs: Float[Tensor, "batch response head"]
    """Of the sampler, in nats; -inf pads."""
    log_probs: Float[Tensor, "batch response head"]
    """Of the model now, with the normaliser of the sampled token's log-prob (has grad); -inf pads."""
    sampled_ids: Int[Tensor, "batch response"]
    """The sampled tokens."""


class _Members(NamedTuple):
    """K_t: the head and, in the last column, the sampled token where the head lacks it."""

    shown: Bool[Tensor, "batch response members"]
    log_probs: Float[Tensor, "batch response members"]
    """Of the trainer, with gradient; 0 where not shown."""
    sampler_log_probs: Float[Tensor, "batch response members"]
    """0 where not shown."""


def expected_score(
    head: SamplerHead,
    log_probs: Float[Tensor, "batch response"],
    rollout_logprobs: Float[Tensor, "batch response"] | None,
    advantages: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None,
    config: AlgorithmConfig,
    calibration: Calibration,
) -> tuple[Float[Tensor, "batch response"], dict[str, MetricValue]]:
    """Compute Σ_v κ_v·ℓ(v), which a loss subtracts from c_a·ℓ(a).

    A trained token without a head gets 0 and is counted.

    Args:
        head: The sampler's head.
        log_probs: Of the sampled tokens now, in nats (has grad).
        rollout_logprobs: Of the sampled tokens, by the sampler.
        advantages: For the metric of the term's size.
        loss_mask: 1 = trains; None trains every token.
        config: `trainer.algorithm`.
        calibration: c of the base loss.

    Returns:
        The sum, zero where nothing is centred, and the metrics `score_centering_*`.

    Raises:
        ConfigError: Truncated importance sampling is on: its factor would weigh the expectation, too.
        ValueError: `rollout_logprobs` is missing.
    """
    if config.off_policy_correction.tis_ratio_type is not None:
        raise ConfigError(
            f"{_KEY}.enabled does not work with trainer.algorithm.off_policy_correction.tis_ratio_type="
            f"{config.off_policy_correction.tis_ratio_type}, which weighs sampled tokens only; use its masks, or the "
            "loss rollout_is"
        )
    if rollout_logprobs is None:
        raise ValueError(f"{_KEY}.enabled needs rollout_logprobs; set generator.sampling_params.logprobs=1")
    trained = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask != 0
    present = (head.ids >= 0).any(dim=-1) & trained
    in_head = (head.ids == head.sampled_ids.unsqueeze(-1)).any(dim=-1)
    members = _members(head, log_probs, rollout_logprobs, present, in_head)
    with torch.no_grad():
        kappa, metrics = _coefficients(members, present, config, calibration)
    score = (kappa * members.log_probs).sum(dim=-1)
    return score, metrics | {
        "score_centering_sampled_in_head_frac": Mean.over(in_head, present),
        "score_centering_term_abs_mean": Mean.over((hide(advantages, present) * score).abs(), present),
        "score_centering_missing_ratio": Mean.over(~present, trained),
    }


def _members(
    head: SamplerHead, log_probs: Tensor, rollout_logprobs: Tensor, present: Tensor, in_head: Tensor
) -> _Members:
    head_shown = (head.ids >= 0) & present.unsqueeze(-1) & (head.log_probs > -torch.inf)
    shown = torch.cat([head_shown, (present & ~in_head).unsqueeze(-1)], dim=-1)
    now = torch.cat([head.log_probs.to(log_probs.dtype), log_probs.unsqueeze(-1)], dim=-1)
    sampler = torch.cat([head.sampler_log_probs.to(now.dtype), rollout_logprobs.unsqueeze(-1).to(now.dtype)], dim=-1)
    return _Members(shown, hide(now, shown), hide(sampler, shown))


def _coefficients(
    members: _Members, present: Tensor, config: AlgorithmConfig, calibration: Calibration
) -> tuple[Tensor, dict[str, MetricValue]]:
    """Return κ, zero where not shown, and the masses inside and outside K_t."""
    sampler = hide(members.sampler_log_probs.exp(), members.shown)
    trainer = hide(members.log_probs.exp(), members.shown)
    sampler_mass, trainer_mass = sampler.sum(dim=-1), trainer.sum(dim=-1)
    sampler_tail = 1.0 - sampler_mass
    ratio = torch.where(sampler_tail > LEAST_TAIL, sampler_tail, 0.0) / (1.0 - trainer_mass).clamp(min=LEAST_TAIL)
    kappa = sampler * calibration(members.log_probs, members.sampler_log_probs)
    tail = config.score_centering.tail
    if tail == "proportional":
        kappa = kappa - ratio.unsqueeze(-1) * trainer
    elif tail == "renormalize":
        kappa = kappa / torch.where(sampler_mass > 0, sampler_mass, 1.0).unsqueeze(-1)
    elif tail != "drop":
        raise ConfigError(f"{_KEY}.tail={tail!r} is unknown; use proportional, drop or renormalize")
    return hide(kappa, members.shown), {
        "score_centering_sampler_head_mass": Mean.over(sampler_mass, present),
        "score_centering_trainer_head_mass": Mean.over(trainer_mass, present),
        "score_centering_tail_mass_ratio": Mean.over(ratio, present),
    }
