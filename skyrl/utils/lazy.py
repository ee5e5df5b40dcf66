"""Names that a module offers and loads when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's ``__getattr__``, which finds each name in its home.

    Example:
        ``__getattr__ = lazy_names(__name__, {"Timer": "skyrl.utils.timing"})``

    Args:
        module: the module that offers the names.
        homes: name -> module that defines it.
    """

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)

    return find
