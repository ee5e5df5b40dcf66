"""Correction for the gap between the policy that sampled and the policy that trains (algorithms.md 6)."""

from skyrl.algorithms.off_policy.correction import (
    Correction,
    apply_off_policy_correction,
    compute_correction,
    compute_off_policy_correction,
)
from skyrl.algorithms.off_policy.outlier_mask import compute_outlier_token_mask
from skyrl.algorithms.off_policy.sequence_mask import compute_sequence_mask
from skyrl.algorithms.off_policy.tis import compute_tis_ratio
from skyrl.algorithms.off_policy.token_mask import compute_token_mask
from skyrl.config.derive import corrects_off_policy as is_active

__all__ = [
    "Correction",
    "apply_off_policy_correction",
    "compute_correction",
    "compute_off_policy_correction",
    "compute_outlier_token_mask",
    "compute_sequence_mask",
    "compute_tis_ratio",
    "compute_token_mask",
    "is_active",
]
