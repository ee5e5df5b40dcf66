"""Upstream's path to masked statistics. Home: `skyrl.algorithms.masked`."""

from skyrl.algorithms.masked import masked_mean, masked_var, masked_whiten

__all__ = ["masked_mean", "masked_var", "masked_whiten"]
