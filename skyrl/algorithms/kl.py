"""KL divergence to the reference policy: estimators per token, and controllers of its coefficient.

Schulman, "Approximating KL divergence" (2020), names the estimators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from skyrl.algorithms.masked import hide
from skyrl.algorithms.signatures import require_shape
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.config.rules.choices import require_choice
from skyrl.errors import ConfigError


def _k3(diff: Tensor) -> Tensor:
    inverse = (-diff).clamp(min=-20.0, max=20.0)
    return (inverse.exp() - inverse - 1.0).clamp(min=-10.0, max=10.0)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda diff: diff,
    "abs": torch.abs,
    "k2": lambda diff: diff.square() / 2,
    "k3": _k3,
}

KL_ESTIMATORS = tuple(_ESTIMATORS)
"""Values of `trainer.algorithm.kl_estimator_type`."""


def compute_approx_kl(
    log_probs: Float[Tensor, "batch response"],
    log_probs_base: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"] | None = None,
    kl_estimator_type: str = "k3",
) -> Float[Tensor, "batch response"]:
    """Estimate KL(policy ‖ reference) in nats at each sampled token, from d = log_probs - log_probs_base.

    k1: d; abs: |d|; k2: d²/2; k3: e^c - c - 1 with c = clip(-d, ±20), clipped to ±10.
    As a loss only k2 has (nearly) the gradient of the reverse KL; k1 and k3 estimate its value, and their
    gradients are others.

    Returns:
        The estimate times the mask; exactly 0 where the mask is 0, whatever stands there.

    Raises:
        ConfigError: The estimator has no such name.
        ValueError: A tensor has another shape than `log_probs`.
    """
    require_choice("trainer.algorithm.kl_estimator_type", kl_estimator_type, KL_ESTIMATORS)
    require_shape("log_probs_base", log_probs_base, "log_probs", log_probs)
    if loss_mask is not None:
        require_shape("loss_mask", loss_mask, "log_probs", log_probs)
    kl = _ESTIMATORS[kl_estimator_type](hide(log_probs - log_probs_base, loss_mask))
    return kl if loss_mask is None else kl * loss_mask


class KLController(Protocol):
    """Sets the coefficient of a KL penalty in the reward."""

    value: float

    def update(self, current: float, n_steps: int) -> None:
        """Take in the mean KL of a batch of `n_steps` rows."""

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""


class FixedKLController:
    """The coefficient never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the configured coefficient: a fixed one belongs to the config, not to the checkpoint."""


class AdaptiveKLController:
    """Steer the coefficient so that the KL stays near a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        if horizon <= 0:
            raise ConfigError(f"trainer.algorithm.kl_ctrl.horizon={horizon} must be positive, such as 10000")
        if target <= 0:
            raise ConfigError(f"trainer.algorithm.kl_ctrl.kl_target={target} must be positive, such as 0.1")
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Multiply the coefficient by 1 + e·n/horizon with e = clip(KL/target - 1, ±0.2).

        Args:
            current: Mean KL of the batch in nats.
            n_steps: Rows in the batch.

        Raises:
            ValueError: The KL is NaN, or the batch is so large beside the horizon that the coefficient would fall to
                0 or below, where it can never rise again.
        """
        if math.isnan(current):
            raise ValueError("the mean KL of the batch is NaN; no coefficient follows from it")
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        factor = 1.0 + error * n_steps / self.horizon
        if factor <= 0.0:
            raise ConfigError(
                f"trainer.algorithm.kl_ctrl.horizon={self.horizon} is too small for {n_steps} rows in a step: the "
                f"coefficient would be multiplied by {factor:g}; set it to at least the rows of a step, such as 10000"
            )
        self.value *= factor

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on with the saved coefficient."""
        self.value = state["value"]


def get_kl_controller(algorithm_cfg: AlgorithmConfig) -> KLController:
    """Make the controller that `trainer.algorithm.kl_ctrl` asks for, starting at `kl_loss_coef`.

    Raises:
        ConfigError: The type is neither `fixed` nor `adaptive`, or horizon or target is not positive.
    """
    control = algorithm_cfg.kl_ctrl
    require_choice("trainer.algorithm.kl_ctrl.type", control.type, ("fixed", "adaptive"))
    if control.type == "fixed":
        return FixedKLController(algorithm_cfg.kl_loss_coef)
    return AdaptiveKLController(algorithm_cfg.kl_loss_coef, control.kl_target, control.horizon)
