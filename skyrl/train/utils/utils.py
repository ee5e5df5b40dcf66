"""Facade: names that upstream's users import from here, each loaded from its home when it is used."""

from skyrl.utils.lazy import lazy_names

HOMES = {
    "ResolvedPlacementGroup": "skyrl.backends.skyrl_train.placement",
    "Timer": "skyrl.utils.timing",
    "get_ray_pg_ready_with_timeout": "skyrl.backends.skyrl_train.placement",
    "initialize_ray": "skyrl.backends.skyrl_train.cluster",
    "prepare_runtime_environment": "skyrl.backends.skyrl_train.cluster",
    "validate_cfg": "skyrl.train.validate",
    "validate_generator_cfg": "skyrl.train.validate",
}

__all__ = list(HOMES)
__getattr__ = lazy_names(__name__, HOMES)
