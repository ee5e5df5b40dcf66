"""A full disk is recognised through wrapped errors and texts from other processes."""

import errno

import pytest

from skyrl.utils import disk


def chained(inner):
    try:
        try:
            raise inner
        except Exception as error:
            raise RuntimeError("save failed") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_errno_counts_wherever_it_is_in_the_chain(number, tmp_path):
    assert disk.disk_full(OSError(number, "x"), str(tmp_path))
    assert disk.disk_full(chained(OSError(number, "x")), str(tmp_path))


def test_the_text_of_another_process_counts(tmp_path):
    assert disk.disk_full(RuntimeError("rank 1: [Errno 28] No space left on device"), str(tmp_path))


def test_other_errors_do_not_count_while_there_is_space(tmp_path):
    assert not disk.disk_full(OSError(errno.EACCES, "Permission denied"), str(tmp_path))
    assert not disk.disk_full(RuntimeError("PytorchStreamWriter failed writing file data/0"), str(tmp_path))


def test_a_torch_write_error_counts_when_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda _: 4096)
    assert disk.disk_full(RuntimeError("PytorchStreamWriter failed writing file data/0"), str(tmp_path))
    assert not disk.disk_full(RuntimeError("CUDA error"), str(tmp_path))


def test_free_space_of_a_path_that_does_not_exist_yet_is_its_disk_s(tmp_path):
    assert disk.free_bytes(str(tmp_path / "a/b")) > 0


def test_tree_bytes_sum_over_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"45")
    assert disk.tree_bytes(str(tmp_path)) == 5
    assert disk.tree_bytes(str(tmp_path / "absent")) == 0
