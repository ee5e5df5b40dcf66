"""Tools that environments can offer."""

from __future__ import annotations

from skyrl_gym.tools.core import ToolGroup, tool

__all__ = ["ToolGroup", "tool"]
