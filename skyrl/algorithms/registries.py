"""Both registries at once: what travels to workers, and upstream's names for keeping them complete."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry
from skyrl.algorithms.policy_losses import PolicyLossRegistry
from skyrl.utils.registry import Registry

_REGISTRIES: dict[str, Registry] = {  # type: ignore[type-arg]
    "advantage_estimator": AdvantageEstimatorRegistry,
    "policy_loss": PolicyLossRegistry,
}


def export_user_functions() -> dict[str, dict[str, bytes]]:
    """Pickle every function that users registered in this process, for `import_user_functions` in another.

    Raises:
        ConfigError: A function holds something that cannot be pickled.
    """
    return {kind: registry.export_user_entries() for kind, registry in _REGISTRIES.items()}


def import_user_functions(exported: Mapping[str, dict[str, bytes]]) -> None:
    """Take over what `export_user_functions` of another process of this run returned."""
    for kind, entries in exported.items():
        _REGISTRIES[kind].import_user_entries(entries)


def repopulate_all_registries() -> None:
    """Bring back the built-in functions that are missing."""
    for registry in _REGISTRIES.values():
        registry.repopulate_registry()


def sync_registries() -> None:
    """Complete the local registries. Upstream's name: there is no actor to ask here."""
    repopulate_all_registries()
