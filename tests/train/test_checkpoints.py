"""A checkpoint is whole or absent; resume finds the right one, whatever killed the save before."""

import errno
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap

import fsspec
import pytest
import torch

from skyrl.config.trainer import TrainerConfig
from skyrl.errors import CheckpointError, ConfigError, DeadlineError
from skyrl.train import checkpoints
from skyrl.train.checkpoints import (
    CheckpointManager,
    ResumeMode,
    ResumePoint,
    TrainerState,
    cleanup_old_checkpoints,
    config_differences,
)
from skyrl.utils import storage
from skyrl.utils.seeds import rng_state


def save(manager, step, weights="w", **state):
    with manager.saving(step) as work:
        with storage.open_file(storage.join(work, "weights"), "wb") as file:
            file.write(weights.encode())
        manager.save_state(work, TrainerState(global_step=step, **state))


def directory(root, step, complete=True):
    path = root / f"global_step_{step}"
    path.mkdir(parents=True)
    if complete:
        (path / "COMPLETE").touch()
    return path


def mark_latest(root, step):
    (root / "latest_ckpt_global_step.txt").write_text(str(step))


@pytest.fixture
def manager(tmp_path):
    return CheckpointManager(str(tmp_path), ckpt_interval=5)


def test_a_saved_step_is_found_by_latest(manager, tmp_path):
    save(manager, 5)
    save(manager, 10)
    assert manager.find_resume("latest") == ResumePoint(path=str(tmp_path / "global_step_10"), step=10)
    assert sorted(os.listdir(tmp_path)) == ["global_step_10", "global_step_5", "latest_ckpt_global_step.txt"]
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "10"


def test_inside_the_block_nothing_is_visible_yet(manager, tmp_path):
    with manager.saving(5) as work:
        assert manager.steps() == [] and manager.latest_step() is None
        assert os.path.basename(work).startswith(".")
    assert manager.steps() == [5]


def test_the_completion_marker_is_in_place_before_the_latest_marker(manager, tmp_path, monkeypatch):
    order = []
    original = storage.write_atomic

    def record(path, data):
        order.append((os.path.basename(path), (tmp_path / "global_step_5").exists()))
        original(path, data)

    monkeypatch.setattr(storage, "write_atomic", record)
    with manager.saving(5) as work:
        manager.save_state(work, TrainerState(global_step=5), {"position": 3})
    assert order == [
        ("data.pt", False),
        ("trainer_state.pt", False),
        ("COMPLETE", False),
        ("latest_ckpt_global_step.txt", True),
    ]


def test_saving_a_step_again_replaces_it(manager, tmp_path):
    save(manager, 5, "old")
    save(manager, 5, "new")
    assert (tmp_path / "global_step_5/weights").read_text() == "new"


def test_an_exception_in_the_block_passes_and_leaves_the_older_checkpoint(manager, tmp_path):
    save(manager, 5)
    with pytest.raises(ZeroDivisionError), manager.saving(10) as work:
        open(os.path.join(work, "half"), "w").close()
        raise ZeroDivisionError
    assert manager.find_resume("latest").step == 5
    assert sorted(os.listdir(tmp_path)) == ["global_step_5", "latest_ckpt_global_step.txt"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_save_leaves_nothing(manager, tmp_path, interruption):
    with pytest.raises(interruption), manager.saving(5):
        raise interruption
    assert os.listdir(tmp_path) == []


def test_a_deadline_passes_unchanged_although_it_is_an_os_error(manager):
    with pytest.raises(DeadlineError), manager.saving(5):
        raise DeadlineError("controller", "policy save", 10, "trainer.worker_timeout_s")


def test_the_manager_reads_its_keys_from_the_trainer_settings(tmp_path):
    cfg = TrainerConfig(ckpt_path=str(tmp_path), ckpt_interval=3, max_ckpts_to_keep=2)
    manager = CheckpointManager.from_config(cfg)
    assert (manager.root, manager.ckpt_interval, manager.max_to_keep) == (str(tmp_path), 3, 2)


# --- disk full --------------------------------------------------------------------------------------------------------


def test_a_full_device_gives_one_clear_error_and_keeps_the_older_checkpoint(manager, tmp_path):
    save(manager, 5)
    with pytest.raises(CheckpointError) as caught, manager.saving(10) as work:
        os.symlink("/dev/full", os.path.join(work, "weights"))
        with open(os.path.join(work, "weights"), "wb", buffering=0) as file:
            file.write(b"x")
    text = str(caught.value)
    assert "disk is full" in text and str(tmp_path / "global_step_10") in text
    assert "trainer.max_ckpts_to_keep" in text and "trainer.ckpt_path" in text
    assert "step 5 with trainer.resume_mode=latest" in text
    assert sorted(os.listdir(tmp_path)) == ["global_step_5", "latest_ckpt_global_step.txt"]
    assert manager.find_resume("latest").step == 5


def test_a_worker_that_met_the_full_disk_is_explained_the_same_way(manager):
    with pytest.raises(CheckpointError, match="disk is full"), manager.saving(5):
        raise RuntimeError("ray task failed: OSError: [Errno 28] No space left on device: '/ckpts/x'")


def test_a_disk_that_fills_at_fsync_is_explained_too(manager, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="disk is full"), manager.saving(5):
        monkeypatch.setattr(os, "fsync", full)
    assert os.listdir(tmp_path) == []


def test_another_write_error_names_path_and_key(manager, tmp_path):
    with pytest.raises(CheckpointError, match=r"global_step_5.*Read-only.*trainer\.ckpt_path"), manager.saving(5):
        raise OSError(errno.EROFS, "Read-only file system")


TINY_DISK = """
    import os, sys, torch
    from skyrl.errors import CheckpointError
    from skyrl.train.checkpoints import CheckpointManager, TrainerState
    manager = CheckpointManager(sys.argv[1])
    def save(step, mib):
        with manager.saving(step) as work:
            torch.save(torch.zeros(mib << 18), os.path.join(work, "weights.pt"))
            manager.save_state(work, TrainerState(global_step=step))
    save(1, 2)
    try:
        save(2, 8)
    except CheckpointError as error:
        assert "disk is full" in str(error), error
    else:
        raise SystemExit("no error")
    assert sorted(os.listdir(sys.argv[1])) == ["global_step_1", "latest_ckpt_global_step.txt"], os.listdir(sys.argv[1])
    assert manager.find_resume("latest").step == 1
    save(3, 1)  # the space is free again
    print("held")
"""


def test_a_real_full_file_system_under_torch_save(tmp_path):
    enter = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=6m none "$0" && shift 0 && exec "$@"', str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    command = [*enter, sys.executable, "-c", textwrap.dedent(TINY_DISK), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "held"


# --- killed in the middle ---------------------------------------------------------------------------------------------

KILLED = """
    import os, signal, sys
    from skyrl.train.checkpoints import CheckpointManager, TrainerState
    from skyrl.utils import storage
    root, moment = sys.argv[1:]
    manager = CheckpointManager(root, ckpt_interval=5)
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    def save(step, weights):
        with manager.saving(step) as work:
            open(os.path.join(work, "weights"), "w").write(weights)
            manager.save_state(work, TrainerState(global_step=step))
            if moment == "state written" and weights == "new":
                die()
    save(5, "old")
    rename, count = os.rename, 0
    def counted(source, target):
        global count
        count += 1
        if moment == f"rename {count}":
            die()
        rename(source, target)
    os.rename = counted
    if moment == "latest marker":
        write = storage.write_atomic
        storage.write_atomic = lambda path, data: die() if path.endswith(".txt") else write(path, data)
    save(5 if moment.startswith("rename") else 10, "new")
"""


@pytest.mark.parametrize("moment", ["state written", "rename 1", "rename 2", "latest marker"])
def test_kill_nine_in_a_save_leaves_the_older_checkpoint_for_resume(tmp_path, moment):
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), moment], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    manager = CheckpointManager(str(tmp_path), ckpt_interval=5)
    point = manager.find_resume("latest")
    assert point.step == 5
    assert (tmp_path / "global_step_5/weights").read_text() == "old"
    assert manager.load_state(point).global_step == 5
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_killed_marker_write_is_cleared(manager, tmp_path):
    save(manager, 5)
    (tmp_path / ".latest_ckpt_global_step.txt.0a1b.tmp").write_text("1")
    manager.recover()
    assert sorted(os.listdir(tmp_path)) == ["global_step_5", "latest_ckpt_global_step.txt"]


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "none", "NONE", ResumeMode.NONE])
def test_without_resume_a_run_starts_at_zero(manager, mode):
    save(manager, 5)
    assert manager.find_resume(mode) is None


def test_latest_without_any_checkpoint_starts_at_zero(tmp_path):
    assert CheckpointManager(str(tmp_path / "absent")).find_resume("latest") is None


def test_directories_without_marker_start_at_zero_with_a_warning(manager, tmp_path, caplog):
    directory(tmp_path, 5)
    assert manager.find_resume("latest") is None
    assert "starting at step 0" in caplog.text


def test_directories_up_to_one_interval_beyond_the_marker_are_a_partial_save(manager, tmp_path):
    for step in (5, 10, 15):
        directory(tmp_path, step)
    mark_latest(tmp_path, 10)
    assert manager.find_resume("latest").step == 10


def test_a_directory_further_beyond_means_mixed_runs(manager, tmp_path):
    for step in (10, 16):
        directory(tmp_path, step)
    mark_latest(tmp_path, 10)
    with pytest.raises(ValueError, match=r"mixes runs.*\[16\]"):
        manager.find_resume("latest")


@pytest.mark.parametrize("present", [False, True])
def test_a_marker_without_complete_checkpoint_lists_the_choices(manager, tmp_path, present):
    directory(tmp_path, 5)
    if present:
        directory(tmp_path, 10, complete=False)
    mark_latest(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"step 10.*complete here are steps \[5\].*from_path"):
        manager.find_resume("latest")


def test_a_damaged_marker_is_named(manager, tmp_path):
    mark_latest(tmp_path, "ten")
    with pytest.raises(CheckpointError, match="'ten'"):
        manager.find_resume("latest")


def test_from_path_takes_the_step_from_the_name(manager, tmp_path):
    path = directory(tmp_path, 7)
    assert manager.find_resume("from_path", f"{path}/") == ResumePoint(path=str(path), step=7)


@pytest.mark.parametrize("path", [None, ""])
def test_from_path_needs_a_path(manager, path):
    with pytest.raises(ConfigError, match=r"trainer\.resume_path"):
        manager.find_resume("from_path", path)


def test_from_path_needs_the_directory_of_one_step(manager, tmp_path):
    (tmp_path / "step_7").mkdir()
    with pytest.raises(ValueError, match="global_step_N"):
        manager.find_resume("from_path", str(tmp_path / "step_7"))


def test_from_path_names_a_missing_directory(manager, tmp_path):
    with pytest.raises(FileNotFoundError, match="global_step_9") as error:
        manager.find_resume("from_path", str(tmp_path / "global_step_9"))
    assert isinstance(pickle.loads(pickle.dumps(error.value)), CheckpointError)  # it crosses from Ray's task


def test_an_unknown_mode_lists_the_known_ones(manager):
    with pytest.raises(ConfigError, match="none, latest, from_path"):
        manager.find_resume("newest")


def test_a_checkpoint_of_upstream_is_read_from_its_path_with_a_warning(manager, tmp_path, caplog):
    path = directory(tmp_path, 3, complete=False)
    torch.save({"global_step": 3, "config": {"trainer": {"seed": 1}}}, path / "trainer_state.pt")
    point = manager.find_resume("from_path", str(path))
    assert not point.complete and "COMPLETE" in caplog.text
    state = manager.load_state(point)
    assert (state.global_step, state.rng, state.library_version) == (3, None, "unknown")
    assert state.config == {"trainer": {"seed": 1}}


def test_our_own_checkpoint_without_marker_is_refused_even_by_path(manager, tmp_path):
    save(manager, 5)
    (tmp_path / "global_step_5/COMPLETE").unlink()
    point = manager.find_resume("from_path", str(tmp_path / "global_step_5"))
    with pytest.raises(CheckpointError, match="interrupted"):
        manager.load_state(point)


# --- state ------------------------------------------------------------------------------------------------------------


def test_the_whole_state_comes_back(manager):
    state = TrainerState(
        global_step=5,
        epoch=2,
        weight_version=6,
        kl_coef=0.02,
        rng=rng_state(),
        run_dir="/runs/a-2",
        config={"trainer": {"seed": 1, "tags": None, "lr": 1e-6}, "data": {"train_data": ["a.parquet"]}},
        extra={"ema": torch.tensor([1.0, 2.0])},
    )
    with manager.saving(5) as work:
        manager.save_state(work, state, {"sampler": {"generator": torch.arange(3)}, "yielded": 8})
    point = manager.find_resume("latest")
    loaded = manager.load_state(point)
    assert torch.equal(loaded.extra["ema"], state.extra["ema"])
    assert torch.equal(loaded.rng["torch"], state.rng["torch"])
    for name in ("global_step", "epoch", "weight_version", "kl_coef", "run_dir", "config", "library_version"):
        assert getattr(loaded, name) == getattr(state, name)
    data = manager.load_dataloader_state(point)
    assert data["yielded"] == 8 and torch.equal(data["sampler"]["generator"], torch.arange(3))


def test_the_step_in_the_name_wins_over_the_one_inside(manager, tmp_path, caplog):
    save(manager, 5)
    os.rename(tmp_path / "global_step_5", tmp_path / "global_step_6")
    point = manager.find_resume("from_path", str(tmp_path / "global_step_6"))
    assert manager.load_state(point).global_step == 6
    assert "says step 5 inside" in caplog.text


class NotPlain:
    pass


def test_a_data_loader_state_with_objects_is_left_out_with_a_warning(manager, caplog):
    with manager.saving(5) as work:
        manager.save_state(work, TrainerState(global_step=5), {"dataset": NotPlain()})
    assert "cannot be stored" in caplog.text
    point = manager.find_resume("latest")
    assert manager.load_dataloader_state(point) is None
    assert "data starts again" in caplog.text


def test_a_file_with_code_in_it_is_not_executed(manager, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    save(manager, 5)
    torch.save({"global_step": 5, "x": Bomb()}, tmp_path / "global_step_5/trainer_state.pt")
    with pytest.raises(CheckpointError, match=r"trainer_state\.pt cannot be read"):
        manager.load_state(manager.find_resume("latest"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_state_file_is_a_checkpoint_error(manager, tmp_path, content):
    save(manager, 5)
    path = tmp_path / "global_step_5/trainer_state.pt"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match="trainer_state"):
        manager.load_state(manager.find_resume("latest"))


def test_config_differences_list_only_watched_keys_that_both_have():
    old = {"trainer": {"seed": 1, "train_batch_size": 8, "run_name": "a"}, "data": {"train_data": ["x"]}}
    new = {"trainer": {"seed": 2, "train_batch_size": 8, "run_name": "b"}, "data": {}}
    assert config_differences(old, new) == {"trainer.seed": (1, 2)}


def test_changed_keys_are_warned_about_once(caplog):
    with caplog.at_level(logging.WARNING):
        checkpoints.warn_config_differences({"trainer": {"seed": 1}}, {"trainer": {"seed": 2}})
        checkpoints.warn_config_differences({"trainer": {"seed": 1}}, {"trainer": {"seed": 1}})
    (record,) = caplog.records
    assert "trainer.seed: 1 -> 2" in record.getMessage()


def test_every_watched_key_exists_in_the_config():
    from skyrl.config.root import SkyRLTrainConfig

    for key in checkpoints.WATCHED_KEYS:
        node = SkyRLTrainConfig()
        for part in key.split("."):
            node = getattr(node, part)


# --- cleanup ----------------------------------------------------------------------------------------------------------


def test_keeping_two_of_three_removes_the_oldest(tmp_path):
    for step in (5, 10, 15):
        directory(tmp_path, step)
    assert cleanup_old_checkpoints(str(tmp_path), 2) == [5]
    assert sorted(os.listdir(tmp_path)) == ["global_step_10", "global_step_15"]


def test_steps_are_compared_as_numbers(tmp_path):
    for step in (9, 10):
        directory(tmp_path, step)
    assert cleanup_old_checkpoints(str(tmp_path), 1) == [9]


@pytest.mark.parametrize("keep", [-1, 0])
def test_no_limit_keeps_all(tmp_path, keep):
    directory(tmp_path, 5)
    assert cleanup_old_checkpoints(str(tmp_path), keep) == []


def test_the_checkpoint_just_written_survives_older_runs_with_higher_steps(tmp_path):
    directory(tmp_path, 20)
    manager = CheckpointManager(str(tmp_path), max_to_keep=1)
    for step in (3, 6):
        save(manager, step)
    assert manager.cleanup() == [3]
    assert manager.steps() == [6, 20]


def test_cleanup_leaves_other_files_alone(tmp_path):
    for step in (1, 2):
        directory(tmp_path, step)
    (tmp_path / "global_step_1_backup").mkdir()
    (tmp_path / "notes.txt").touch()
    cleanup_old_checkpoints(str(tmp_path), 1)
    assert sorted(os.listdir(tmp_path)) == ["global_step_1_backup", "global_step_2", "notes.txt"]


# --- buckets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setitem(storage._CLOUD_EXTRAS, "memory", "none")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield CheckpointManager("memory://bucket/ckpts", ckpt_interval=5, max_to_keep=1)
    memory.store.clear()


def test_a_bucket_is_written_in_place_with_the_marker_last(bucket):
    with bucket.saving(5) as work:
        assert work == "memory://bucket/ckpts/global_step_5"
        with storage.local_work_dir(f"{work}/policy") as local, open(os.path.join(local, "w"), "w") as file:
            file.write("x")
        bucket.save_state(work, TrainerState(global_step=5))
        assert not storage.exists(f"{work}/COMPLETE")
    save(bucket, 10)
    assert bucket.cleanup() == [5]
    point = bucket.find_resume("latest")
    assert point.path == "memory://bucket/ckpts/global_step_10"
    assert bucket.load_state(point).global_step == 10
    assert bucket.find_resume("from_path", point.path) == point


def test_a_failed_save_to_a_bucket_removes_what_was_uploaded(bucket):
    save(bucket, 5)
    with pytest.raises(ZeroDivisionError), bucket.saving(10) as work:
        bucket.save_state(work, TrainerState(global_step=10))
        raise ZeroDivisionError
    assert bucket.steps() == [5]
    assert bucket.find_resume("latest").step == 5


def test_from_path_names_a_missing_bucket_path(bucket):
    with pytest.raises(CheckpointError, match=r"resume_path=memory://.*global_step_9 does not exist"):
        bucket.find_resume("from_path", "memory://bucket/ckpts/global_step_9")
