from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.rules.paths import check_data_files, check_model_paths, check_output_folders
from skyrl.errors import ConfigError, DatasetError, ModelLoadError


def test_a_missing_local_data_file_is_named(tmp_path: Path):
    data = SkyRLTrainConfig().data
    there = tmp_path / "there.parquet"
    there.touch()
    data.train_data, data.val_data = [str(there), "org/dataset:train", "s3://bucket/x.parquet"], []
    check_data_files(data)
    data.val_data = [str(tmp_path / "gone.jsonl")]
    check_data_files(data, evaluate=False)
    with pytest.raises(DatasetError, match=r"data\.val_data: .*gone\.jsonl does not exist"):
        check_data_files(data)


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "~/no-such-model", "a/b/c"])
def test_a_missing_model_folder_is_named(path: str):
    trainer = SkyRLTrainConfig().trainer
    trainer.policy.model.path = path
    with pytest.raises(ModelLoadError, match=r"trainer\.policy\.model\.path=.* does not exist"):
        check_model_paths(trainer)


def test_hub_names_pass_and_a_folder_needs_a_model(tmp_path: Path):
    trainer = SkyRLTrainConfig().trainer
    check_model_paths(trainer)
    trainer.policy.model.path = str(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        check_model_paths(trainer)
    (tmp_path / "config.json").touch()
    check_model_paths(trainer)


def test_the_critics_path_counts_too():
    trainer = SkyRLTrainConfig().trainer
    trainer.critic.model.path = "/no/such/critic"
    with pytest.raises(ModelLoadError, match=r"trainer\.critic\.model\.path"):
        check_model_paths(trainer)


def test_output_folders_must_be_folders(tmp_path: Path):
    trainer = SkyRLTrainConfig().trainer
    trainer.ckpt_path, trainer.export_path, trainer.log_path = (str(tmp_path / name) for name in ("c/d", "e", "l"))
    check_output_folders(trainer)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    trainer.ckpt_path = str(tmp_path / "file" / "ckpts")
    with pytest.raises(ConfigError, match=r"trainer\.ckpt_path.*is a file"):
        check_output_folders(trainer)
    trainer.ckpt_interval = -1
    check_output_folders(trainer)
    trainer.ckpt_interval, trainer.ckpt_path = 1, "s3://bucket/ckpts"
    check_output_folders(trainer)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_folders_must_be_writable(tmp_path: Path):
    tmp_path.chmod(0o500)
    trainer = SkyRLTrainConfig().trainer
    trainer.export_path = str(tmp_path / "e")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_output_folders(trainer)


def test_a_checkpoint_to_resume_from_must_exist(tmp_path: Path):
    trainer = SkyRLTrainConfig().trainer
    trainer.ckpt_path = trainer.export_path = trainer.log_path = str(tmp_path)
    trainer.resume_mode, trainer.resume_path = "from_path", str(tmp_path / "global_step_3")
    with pytest.raises(ConfigError, match=r"trainer\.resume_path=.* does not exist"):
        check_output_folders(trainer)


def test_an_unknown_scheme_is_refused_with_the_known_ones():
    cfg = SkyRLTrainConfig()
    cfg.trainer.ckpt_path = "hdfs://runs/1"
    with pytest.raises(ConfigError, match=r"trainer\.ckpt_path=hdfs://runs/1: unknown scheme.*s3://, gs://"):
        check_output_folders(cfg.trainer)
    cfg.trainer.ckpt_path = "S3://runs/1"
    check_output_folders(cfg.trainer)
    cfg.trainer.resume_mode, cfg.trainer.resume_path = "from_path", "ftp://runs/global_step_1"
    with pytest.raises(ConfigError, match=r"trainer\.resume_path=ftp://"):
        check_output_folders(cfg.trainer)
    cfg.data.train_data = ["hf://datasets/x.parquet"]
    with pytest.raises(ConfigError, match=r"data\.train_data=hf://"):
        check_data_files(cfg.data)
