"""Checkpoints and exports of all roles."""

import pytest

from skyrl.train.checkpoints import COMPLETE, CheckpointManager, TrainerState
from skyrl.train.stages.persist import PersistStage
from tests.fakes.trainer import make_cfg
from tests.fakes.worker_dispatch import FakeWorkerDispatch

ROLES = ["policy", "critic"]


def make_stage(folder, **fields):
    cfg = make_cfg(folder, trainer__max_ckpts_to_keep=1).trainer
    dispatch = FakeWorkerDispatch({"policy": 1, "critic": 1}, **fields)
    manager = CheckpointManager.from_config(cfg)
    return PersistStage(dispatch, manager, cfg, None, ROLES), dispatch, manager


def test_what_was_saved_is_loaded_role_by_role(tmp_path):
    stage, dispatch, manager = make_stage(tmp_path)
    path = stage.save(TrainerState(global_step=4, epoch=1, kl_coef=0.25), {"position": 7})
    assert path == str(tmp_path / "ckpt" / "global_step_4")
    assert (tmp_path / "ckpt" / "global_step_4" / COMPLETE).exists()
    state, loader = stage.load(manager.find_resume("latest"))
    assert (state.global_step, state.epoch, state.kl_coef, loader) == (4, 1, 0.25, {"position": 7})
    assert dispatch.loaded == ROLES


def test_old_checkpoints_go_once_the_new_one_is_complete(tmp_path):
    stage, _, manager = make_stage(tmp_path)
    stage.save(TrainerState(global_step=1), None)
    stage.save(TrainerState(global_step=2), None)
    assert manager.steps() == [2]


def test_a_role_that_fails_leaves_the_previous_checkpoint(tmp_path):
    stage, dispatch, manager = make_stage(tmp_path)
    stage.save(TrainerState(global_step=1), None)
    dispatch.fails_at = "save_checkpoint"
    with pytest.raises(RuntimeError, match="save_checkpoint failed"):
        stage.save(TrainerState(global_step=2), None)
    assert (manager.steps(), manager.latest_step()) == ([1], 1)


def test_exports_lie_beside_each_other_under_their_step(tmp_path):
    stage, dispatch, _ = make_stage(tmp_path)
    parent = tmp_path / "export" / "global_step_3"
    assert stage.export(3) == str(parent)
    assert dispatch.calls == [("save_hf_model", (role, str(parent / role))) for role in ROLES]


def test_a_reference_that_follows_the_policy_is_stored_but_not_exported(tmp_path):
    _, dispatch, manager = make_stage(tmp_path)
    moving = PersistStage(dispatch, manager, make_cfg(tmp_path).trainer, None, ROLES, moving_ref=True)
    moving.save(TrainerState(global_step=1), None)
    moving.load(manager.find_resume("latest"))
    assert dispatch.loaded == [*ROLES, "ref"]
    assert sorted(path.name for path in (tmp_path / "ckpt" / "global_step_1").iterdir() if path.is_dir()) == [
        "critic",
        "policy",
        "ref",
    ]
