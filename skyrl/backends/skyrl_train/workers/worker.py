"""Upstream's path to the workers' base class and to actor groups; homes: `workers.base`, `workers.actor_group`."""

from skyrl.backends.skyrl_train.workers.actor_group import PPORayActorGroup
from skyrl.backends.skyrl_train.workers.base import DistributedTorchRayActor, Worker

__all__ = ["DistributedTorchRayActor", "PPORayActorGroup", "Worker"]
