"""Upstream's path to metric reduction and micro-batches; homes: `workers.metrics`, `workers.micro_batches`."""

from skyrl.backends.skyrl_train.workers.metrics import reduce_metrics
from skyrl.backends.skyrl_train.workers.micro_batches import get_microbatch_iterator

__all__ = ["get_microbatch_iterator", "reduce_metrics"]
