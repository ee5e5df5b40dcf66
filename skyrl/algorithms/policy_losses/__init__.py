"""Policy losses by name (`trainer.algorithm.policy_loss_type`); importing this registers the built-ins."""

from skyrl.algorithms.policy_losses import regular, reinforce, rollout_is
from skyrl.algorithms.policy_losses.call import compute_policy_loss
from skyrl.algorithms.policy_losses.registry import (
    LossTraits,
    PolicyLossRegistry,
    reads_old_log_probs,
    reads_rollout_logprobs,
    register_policy_loss,
)

__all__ = [
    "LossTraits",
    "PolicyLossRegistry",
    "compute_policy_loss",
    "reads_old_log_probs",
    "reads_rollout_logprobs",
    "register_policy_loss",
    "regular",
    "reinforce",
    "rollout_is",
]
