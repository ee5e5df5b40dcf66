"""Facade: helpers of the trainer under upstream's path, each loaded from its home when it is used."""

from skyrl.utils.lazy import lazy_names

_HOMES = {
    "ResumeMode": "skyrl.train.checkpoints",
    "build_dataloader": "skyrl.train.dataset.dataloader",
    "calculate_per_dataset_metrics": "skyrl.train.evaluate",
    "cleanup_old_checkpoints": "skyrl.train.checkpoints",
    "concatenate_generator_outputs": "skyrl.train.generators.utils",
    "dump_per_dataset_eval_results": "skyrl.train.evaluate",
    "handle_dynamic_sampling": "skyrl.train.stages.sampling",
    "validate_generator_output": "skyrl.train.generators.utils",
    "zero_variance_filter": "skyrl.algorithms.group_filters",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
