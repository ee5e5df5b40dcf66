"""Capture of exact tokens from agent traffic. The package holds its name and version; the capture is not built yet."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("skycap")
