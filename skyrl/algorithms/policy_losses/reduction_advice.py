"""A warning for losses whose derivation asks for one weight a sequence."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def advise_sequence_mean(loss_name: str, reduction: str) -> None:
    """Warn, once a process, unless the loss reduction is `sequence_mean`, as in the loss's paper."""
    if reduction != "sequence_mean":
        logger.warning(
            "trainer.algorithm.policy_loss_type=%s is made for trainer.algorithm.loss_reduction=sequence_mean, not %s",
            loss_name,
            reduction,
        )
