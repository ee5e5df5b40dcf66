"""Policy losses by name (`trainer.algorithm.policy_loss_type`); importing this registers the built-ins."""

from skyrl.algorithms.policy_losses import (
    cispo,
    clip_cov,
    cross_entropy,
    dppo,
    dual_clip,
    gspo,
    importance_sampling,
    kl_cov,
    regular,
    reinforce,
    rollout_is,
    sapo,
)
from skyrl.algorithms.policy_losses.call import compute_policy_loss
from skyrl.algorithms.policy_losses.registry import (
    LossTraits,
    PolicyLossRegistry,
    reads_old_log_probs,
    register_policy_loss,
)

__all__ = [
    "LossTraits",
    "PolicyLossRegistry",
    "cispo",
    "clip_cov",
    "compute_policy_loss",
    "cross_entropy",
    "dppo",
    "dual_clip",
    "gspo",
    "importance_sampling",
    "kl_cov",
    "reads_old_log_probs",
    "register_policy_loss",
    "regular",
    "reinforce",
    "rollout_is",
    "sapo",
]
