"""Local writes are all or nothing; bucket paths go through fsspec (here its in-memory file system)."""

import errno
import os
import stat

import fsspec
import pytest

from skyrl.utils import storage


@pytest.fixture
def bucket(monkeypatch):
    """A ``memory://`` bucket that is empty before and after."""
    monkeypatch.setitem(storage._CLOUD_EXTRAS, "memory", "none")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"
    memory.store.clear()


def put(path, content):
    with storage.open_file(path, "wb") as file:
        file.write(content)


@pytest.mark.parametrize("path", ["s3://b/x", "gs://b/x", "gcs://b", "az://c/x", "abfs://c/x"])
def test_bucket_schemes_are_cloud_paths(path):
    assert storage.is_cloud_path(path)


@pytest.mark.parametrize("path", ["/tmp/s3", "s3:/b/x", "relative/gs", "http://host/x", "~/x", "s3"])
def test_everything_else_is_local(path):
    assert not storage.is_cloud_path(path)


def test_join_keeps_the_double_slash_of_a_bucket():
    assert storage.join("s3://bucket/a/", "b", "c.txt") == "s3://bucket/a/b/c.txt"
    assert storage.join("/tmp/a", "b") == "/tmp/a/b"


def test_a_home_path_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    storage.makedirs("~/ckpts")
    storage.write_atomic("~/ckpts/latest.txt", "3")
    assert (tmp_path / "ckpts/latest.txt").read_text() == "3"


def test_makedirs_makes_no_local_directory_for_a_bucket(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    storage.makedirs("s3://bucket/x")
    assert os.listdir(tmp_path) == []


def test_a_missing_package_names_the_extra():
    pytest.importorskip("fsspec")
    if _installed("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(ImportError, match=r"skyrl\[aws\]"):
        storage.exists("s3://bucket/x")


def _installed(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_remove_deletes_trees_and_ignores_what_is_absent(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/f").write_text("x")
    storage.remove(str(tmp_path / "a"))
    storage.remove(str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_list_dir_gives_sorted_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
    assert storage.list_dir(str(tmp_path)) == ["a", "b", "c"]
    with pytest.raises(FileNotFoundError):
        storage.list_dir(str(tmp_path / "absent"))


def test_an_atomic_write_replaces_the_file_and_follows_the_umask(tmp_path):
    target = tmp_path / "deep/latest.txt"
    old = os.umask(0o027)
    try:
        storage.write_atomic(str(target), "1")
        storage.write_atomic(str(target), b"2")
    finally:
        os.umask(old)
    assert target.read_text() == "2"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(target.parent) == ["latest.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "latest.txt"
    storage.write_atomic(str(target), "old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        storage.write_atomic(str(target), "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["latest.txt"]


def test_a_directory_appears_only_when_the_block_has_ended(tmp_path):
    target = tmp_path / "model"
    with storage.atomic_directory(str(target)) as work:
        assert os.path.dirname(work) == str(tmp_path) and os.path.basename(work).startswith(".")
        with open(os.path.join(work, "weights"), "w") as file:
            file.write("w")
        assert not target.exists()
    assert (target / "weights").read_text() == "w"
    assert os.listdir(tmp_path) == ["model"]


def test_a_block_that_raises_keeps_the_older_directory(tmp_path):
    target = tmp_path / "model"
    with storage.atomic_directory(str(target)) as work, open(os.path.join(work, "v"), "w") as file:
        file.write("1")
    with pytest.raises(RuntimeError), storage.atomic_directory(str(target)) as work:
        with open(os.path.join(work, "v"), "w") as file:
            file.write("2")
        raise RuntimeError("boom")
    assert (target / "v").read_text() == "1"
    assert os.listdir(tmp_path) == ["model"]


def test_publishing_over_an_older_directory_replaces_all_of_it(tmp_path):
    target = tmp_path / "model"
    for name in ("first", "second"):
        with storage.atomic_directory(str(target)) as work, open(os.path.join(work, name), "w"):
            pass
    assert os.listdir(target) == ["second"]
    assert os.listdir(tmp_path) == ["model"]


def test_recovery_after_death_between_the_renames_restores_the_older_directory(tmp_path):
    target = tmp_path / "model"
    os.makedirs(storage.replaced_sibling(str(target)))
    os.makedirs(storage.temporary_sibling(str(target)))
    (tmp_path / ".model.old/v").write_text("1")
    storage.recover_directory(str(target))
    assert (target / "v").read_text() == "1"
    assert os.listdir(tmp_path) == ["model"]


def test_recovery_after_death_past_the_renames_keeps_the_newer_directory(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "v").write_text("2")
    os.makedirs(storage.replaced_sibling(str(target)))
    storage.recover_directory(str(target))
    assert (target / "v").read_text() == "2"
    assert os.listdir(tmp_path) == ["model"]


def test_a_local_work_dir_is_the_directory_itself(tmp_path):
    with storage.local_work_dir(str(tmp_path / "new")) as work:
        assert work == str(tmp_path / "new") and os.path.isdir(work)


def test_a_local_read_dir_must_exist(tmp_path):
    with storage.local_read_dir(str(tmp_path)) as work:
        assert work == str(tmp_path)
    with pytest.raises(FileNotFoundError), storage.local_read_dir(str(tmp_path / "absent")):
        pass


def test_local_read_files_name_the_missing_one(tmp_path):
    (tmp_path / "a").write_text("x")
    with storage.local_read_files(str(tmp_path), ["a"]) as work:
        assert work == str(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"), storage.local_read_files(str(tmp_path), ["a", "absent"]):
        pass


@pytest.mark.parametrize("copy", [storage.upload_directory, lambda a, b: storage.download_directory(b, a)])
def test_directory_transfers_refuse_a_local_path(tmp_path, copy):
    with pytest.raises(ValueError, match="s3://"):
        copy(str(tmp_path), "/tmp/not-a-bucket")


def test_a_bucket_work_dir_uploads_the_tree_at_the_end(bucket):
    with storage.local_work_dir(bucket) as work:
        os.makedirs(os.path.join(work, "policy/dcp"))
        with open(os.path.join(work, "policy/dcp/0"), "w") as file:
            file.write("shard")
        assert not storage.exists(bucket)
    assert not os.path.exists(work)
    assert storage.read_bytes(f"{bucket}/policy/dcp/0") == b"shard"
    assert storage.list_dir(bucket) == ["policy"]
    assert storage.isdir(f"{bucket}/policy")


def test_a_bucket_work_dir_uploads_nothing_after_an_exception(bucket):
    with pytest.raises(RuntimeError), storage.local_work_dir(bucket) as work:
        with open(os.path.join(work, "half"), "w") as file:
            file.write("x")
        raise RuntimeError("boom")
    assert not storage.exists(bucket)


def test_a_bucket_directory_comes_back_whole(bucket, tmp_path):
    put(f"{bucket}/a/b.bin", b"\x00\x01")
    put(f"{bucket}/c.txt", b"c")
    storage.download_directory(bucket, str(tmp_path / "got"))
    assert (tmp_path / "got/a/b.bin").read_bytes() == b"\x00\x01"
    with storage.local_read_dir(bucket) as work:
        assert sorted(os.listdir(work)) == ["a", "c.txt"]
    assert not os.path.exists(work)
    with pytest.raises(FileNotFoundError):
        storage.download_directory(f"{bucket}/absent", str(tmp_path / "none"))


def test_only_the_named_files_of_a_bucket_are_downloaded(bucket):
    put(f"{bucket}/x", b"x")
    put(f"{bucket}/deep/y", b"y")
    with storage.local_read_files(bucket, ["deep/y"]) as work:
        assert os.listdir(work) == ["deep"]
        assert os.listdir(os.path.join(work, "deep")) == ["y"]


def test_bucket_files_are_written_listed_and_removed(bucket):
    storage.write_atomic(f"{bucket}/latest.txt", "7")
    assert storage.read_bytes(f"{bucket}/latest.txt") == b"7"
    storage.remove(bucket)
    storage.remove(bucket)
    assert not storage.exists(f"{bucket}/latest.txt")


def test_an_expired_token_is_renewed_once(bucket, monkeypatch):
    calls, cleared = [], []
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "clear_instance_cache", classmethod(lambda cls: cleared.append(1)))

    def exists(path, **_):
        calls.append(path)
        if len(calls) == 1:
            raise PermissionError("ExpiredToken: the provided token has expired")
        return True

    monkeypatch.setattr(memory, "exists", exists)
    assert storage.exists(f"{bucket}/x")
    assert len(calls) == 2 and cleared == [1]


def test_other_bucket_errors_propagate_at_once(bucket, monkeypatch):
    memory = fsspec.filesystem("memory")
    calls = []

    def exists(path, **_):
        calls.append(path)
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(memory, "exists", exists)
    with pytest.raises(PermissionError, match="AccessDenied"):
        storage.exists(f"{bucket}/x")
    assert len(calls) == 1
