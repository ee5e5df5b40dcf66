"""Facade: the names of `skyrl.train.utils.utils`, under upstream's shorter path."""

from skyrl.train.utils.utils import HOMES
from skyrl.utils.lazy import lazy_names

__all__ = list(HOMES)
__getattr__ = lazy_names(__name__, HOMES)
