"""Text environments and tools for reinforcement learning on language models."""

from __future__ import annotations

from importlib.metadata import version

from skyrl_gym import envs, error, tools
from skyrl_gym.core import Env
from skyrl_gym.envs.registration import make, pprint_registry, register, registry, spec

__version__ = version("skyrl-gym")

__all__ = ["Env", "envs", "error", "make", "pprint_registry", "register", "registry", "spec", "tools"]
