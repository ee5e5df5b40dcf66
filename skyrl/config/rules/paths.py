"""Checks of files and folders that a run will need, made before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

from skyrl.config.data import DataConfig
from skyrl.config.rules.batches import uses_critic, uses_ref
from skyrl.config.trainer import TrainerConfig
from skyrl.errors import ConfigError, DatasetError, ModelLoadError
from skyrl.utils.storage import CLOUD_SCHEMES, is_cloud_path

_DATA_SUFFIXES = (".parquet", ".json", ".jsonl")
_LOCAL_STARTS = ("/", "./", "../", "~")


def check_data_files(data: DataConfig, *, train: bool = True, evaluate: bool = True) -> None:
    """Check local data files and the schemes of others; buckets and hub names are left alone.

    Raises:
        DatasetError: a local file does not exist.
        ConfigError: a path has an unknown scheme.
    """
    used = [("data.train_data", data.train_data)] if train else []
    if evaluate:
        used.append(("data.val_data", data.val_data or []))
    for key, paths in used:
        for path in paths:
            _require_known_scheme(key, path)
            is_local = path.endswith(_DATA_SUFFIXES) or path.startswith(_LOCAL_STARTS)
            if is_local and not is_cloud_path(path) and not Path(path).expanduser().exists():
                raise DatasetError(f"{key}: {path} does not exist; run the recipe's data script or correct the path")


def check_model_paths(trainer: TrainerConfig) -> None:
    """Raise ModelLoadError for a model path that names a local folder which is missing or holds no model."""
    paths = {"trainer.policy.model.path": trainer.policy.model.path}
    if uses_ref(trainer):
        paths["trainer.ref.model.path"] = trainer.ref.model.path
    if uses_critic(trainer):
        paths["trainer.critic.model.path"] = trainer.critic.model.path
    for key, path in paths.items():
        if path is not None:
            _check_model_path(key, path)


def _check_model_path(key: str, path: str) -> None:
    """A hub name has at most one slash and does not start like a path; everything else is a folder."""
    folder = Path(path).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{key}={path} holds no model: there is no config.json in it")
    elif path.startswith(_LOCAL_STARTS) or path.count("/") > 1:
        raise ModelLoadError(
            f"{key}={path} does not exist; give the folder of a checkpoint or a hub name (owner/model)"
        )


def check_output_folders(trainer: TrainerConfig) -> None:
    """Raise ConfigError for a local folder that the run cannot create or write."""
    used = {"trainer.export_path": trainer.export_path, "trainer.log_path": trainer.log_path}
    if trainer.run_dir is not None:
        used["trainer.run_dir"] = trainer.run_dir
    if trainer.ckpt_interval > 0:
        used["trainer.ckpt_path"] = trainer.ckpt_path
    for key, path in used.items():
        _require_known_scheme(key, path)
        if is_cloud_path(path):
            continue
        existing = next(parent for parent in [Path(path).absolute(), *Path(path).absolute().parents] if parent.exists())
        if not existing.is_dir():
            raise ConfigError(f"{key}={path}: {existing} is a file, not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"{key}={path}: {existing} cannot be written; choose another folder")
    if trainer.resume_mode == "from_path" and trainer.resume_path:
        _check_resume_path(trainer.resume_path)


def _check_resume_path(path: str) -> None:
    _require_known_scheme("trainer.resume_path", path)
    if not is_cloud_path(path) and not Path(path).is_dir():
        raise ConfigError(f"trainer.resume_path={path} does not exist; give the folder of a checkpoint")


def _require_known_scheme(key: str, path: str) -> None:
    """A path such as ``hdfs://a`` would name a local folder otherwise."""
    if "://" in path and not is_cloud_path(path):
        known = ", ".join(f"{scheme}://" for scheme in CLOUD_SCHEMES)
        raise ConfigError(f"{key}={path}: unknown scheme; must be a local path or start with one of {known}")
