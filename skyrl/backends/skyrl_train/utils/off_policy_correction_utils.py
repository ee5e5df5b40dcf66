"""Upstream's path to the off-policy corrections. Home: `skyrl.algorithms.off_policy`."""

from skyrl.algorithms.off_policy import (
    apply_off_policy_correction,
    compute_off_policy_correction,
    compute_outlier_token_mask,
    compute_sequence_mask,
    compute_tis_ratio,
    compute_token_mask,
)
from skyrl.algorithms.off_policy import is_active as off_policy_correction_enabled

__all__ = [
    "apply_off_policy_correction",
    "compute_off_policy_correction",
    "compute_outlier_token_mask",
    "compute_sequence_mask",
    "compute_tis_ratio",
    "compute_token_mask",
    "off_policy_correction_enabled",
]
