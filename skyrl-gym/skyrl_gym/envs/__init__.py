"""Bundled environments; importing this package registers them."""

from __future__ import annotations

from skyrl_gym.envs.registration import deregister, register, registry

__all__ = ["deregister", "register"]

if "gsm8k" not in registry:  # a reload of this module finds the table filled
    register(id="gsm8k", entry_point="skyrl_gym.envs.gsm8k.env:GSM8kEnv")
