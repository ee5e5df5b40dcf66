"""Upstream's path to the algorithms. Home: `skyrl.algorithms`."""

from skyrl.algorithms.advantages import (
    AdvantageEstimatorRegistry,
    compute_advantages_and_returns,
    register_advantage_estimator,
)
from skyrl.algorithms.critic_loss import critic_loss
from skyrl.algorithms.kl import AdaptiveKLController, FixedKLController, compute_approx_kl, get_kl_controller
from skyrl.algorithms.loss_reduction import apply_loss_reduction_to_advantages_minibatch, compute_loss_weights
from skyrl.algorithms.masked import masked_mean, masked_var, masked_whiten
from skyrl.algorithms.masked import weighted_sum as reduce_loss
from skyrl.algorithms.off_policy import apply_off_policy_correction
from skyrl.algorithms.policy_losses import PolicyLossRegistry, compute_policy_loss, register_policy_loss
from skyrl.algorithms.registries import repopulate_all_registries, sync_registries

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimatorRegistry",
    "FixedKLController",
    "PolicyLossRegistry",
    "apply_loss_reduction_to_advantages_minibatch",
    "apply_off_policy_correction",
    "compute_advantages_and_returns",
    "compute_approx_kl",
    "compute_loss_weights",
    "compute_policy_loss",
    "critic_loss",
    "get_kl_controller",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "reduce_loss",
    "register_advantage_estimator",
    "register_policy_loss",
    "repopulate_all_registries",
    "sync_registries",
]
