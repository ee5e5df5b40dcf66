"""Files on local disk and in buckets, by one set of functions; local writes are atomic.

A path is a plain string. ``s3://``, ``gs://``, ``gcs://``, ``az://`` and ``abfs://`` go through fsspec, everything else
is a local path (``~`` is expanded). Locally a file or directory appears under its name only when it is whole and on
disk: temporary name, fsync, rename. A bucket shows an object once its upload is done, but has no rename for
directories: who reads one must look for a marker that was written last.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

logger = logging.getLogger(__name__)

# Scheme -> the extra whose package serves it.
_CLOUD_EXTRAS = {"s3": "aws", "gs": "gcp", "gcs": "gcp", "az": "azure", "abfs": "azure", "abfss": "azure"}
CLOUD_SCHEMES = tuple(_CLOUD_EXTRAS)
"""Schemes of bucket paths, without ``://``."""
_EXPIRED_TOKEN_CODES = ("ExpiredToken", "RequestExpired", "InvalidToken")


def is_cloud_path(path: str) -> bool:
    """Whether the path names a bucket."""
    scheme, separator, _ = str(path).partition("://")
    return bool(separator) and scheme.lower() in _CLOUD_EXTRAS


def join(path: str, *names: str) -> str:
    """Path below ``path``; keeps a bucket's ``scheme://``."""
    if not is_cloud_path(path):
        return os.path.join(_local(path), *names)
    return "/".join([str(path).rstrip("/"), *(name.strip("/") for name in names)])


def open_file(path: str, mode: str = "rb") -> IO[Any]:
    """Open a file. Writing in place is not atomic: see `write_atomic`.

    Raises:
        FileNotFoundError: There is no such file to read.
        ImportError: The scheme's package is missing; names the extra to install.
    """
    if not is_cloud_path(path):
        return open(_local(path), mode)
    handle: IO[Any] = _call(path, lambda fs: fs.open(path, mode))
    return handle


def makedirs(path: str) -> None:
    """Make a local directory and its parents; buckets have none to make."""
    if not is_cloud_path(path):
        os.makedirs(_local(path), exist_ok=True)


def exists(path: str) -> bool:
    """Whether a file, directory or object prefix exists."""
    if not is_cloud_path(path):
        return os.path.exists(_local(path))
    return bool(_call(path, lambda fs: fs.exists(path)))


def isdir(path: str) -> bool:
    """Whether the path is a directory, or a prefix that objects share."""
    if not is_cloud_path(path):
        return os.path.isdir(_local(path))
    return bool(_call(path, lambda fs: fs.isdir(path)))


def list_dir(path: str) -> list[str]:
    """Sorted names (not paths) of the entries of a directory.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    if not is_cloud_path(path):
        return sorted(os.listdir(_local(path)))
    entries: list[str] = _call(path, lambda fs: fs.ls(path, detail=False, refresh=True))
    own = path.partition("://")[2].strip("/")
    names = {entry.rstrip("/").rpartition("/")[2] for entry in entries if entry.strip("/") != own}
    return sorted(names)


def remove(path: str) -> None:
    """Delete a file or a directory with all it holds; what is absent already is fine."""
    if is_cloud_path(path):
        with suppress(FileNotFoundError):
            _call(path, lambda fs: fs.rm(path, recursive=True))
        return
    local = _local(path)
    if os.path.isdir(local) and not os.path.islink(local):
        shutil.rmtree(local)
    else:
        with suppress(FileNotFoundError):
            os.remove(local)


def write_atomic(path: str, data: bytes | str) -> None:
    """Write a small file so that a reader sees the old content or the new one, whatever happens meanwhile.

    Raises:
        OSError: Nothing was changed (disk full, no permission); no temporary file stays behind.
    """
    content = data.encode() if isinstance(data, str) else data
    if is_cloud_path(path):
        _call(path, lambda fs: fs.pipe_file(path, content))
        return
    local = _local(path)
    parent = os.path.dirname(local) or "."
    os.makedirs(parent, exist_ok=True)
    temporary = os.path.join(parent, f".{os.path.basename(local)}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, local)
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(temporary)
        raise
    _fsync_path(parent)


def read_bytes(path: str) -> bytes:
    """Whole content of a file."""
    with open_file(path, "rb") as file:
        content: bytes = file.read()
    return content


def temporary_sibling(path: str) -> str:
    """Hidden local name next to ``path``, under which `publish_directory` expects the new content."""
    parent, name = os.path.split(_local(path).rstrip("/"))
    return os.path.join(parent, f".{name}.tmp")


def replaced_sibling(path: str) -> str:
    """Hidden local name that an older ``path`` has during the two renames of `publish_directory`."""
    parent, name = os.path.split(_local(path).rstrip("/"))
    return os.path.join(parent, f".{name}.old")


def publish_directory(temporary: str, path: str) -> None:
    """Bring a finished local directory under its name: fsync all it holds, rename, fsync the parent.

    An older directory of that name is moved to `replaced_sibling` first and deleted last; `recover_directory` undoes
    that if the process dies between the renames.
    """
    target, old = _local(path).rstrip("/"), replaced_sibling(path)
    _fsync_tree(temporary)
    if os.path.exists(target):
        remove(old)
        os.rename(target, old)
    os.rename(temporary, target)
    _fsync_path(os.path.dirname(target) or ".")
    remove(old)


def recover_directory(path: str) -> None:
    """Clear what a killed write of ``path`` left behind, and put back an older version that it had moved away."""
    target, old = _local(path).rstrip("/"), replaced_sibling(path)
    remove(temporary_sibling(path))
    if os.path.isdir(old) and not os.path.exists(target):
        os.rename(old, target)
    remove(old)


@contextmanager
def atomic_directory(path: str) -> Iterator[str]:
    """Yield an empty local directory whose content becomes ``path`` when the block ends without an exception.

    Otherwise nothing appears and nothing stays. For a bucket the content is uploaded at the end.
    """
    if is_cloud_path(path):
        with local_work_dir(path) as work:
            yield work
        return
    recover_directory(path)
    temporary = temporary_sibling(path)
    os.makedirs(temporary)
    try:
        yield temporary
        publish_directory(temporary, path)
    except BaseException:
        with suppress(OSError):
            recover_directory(path)
        raise


@contextmanager
def local_work_dir(path: str) -> Iterator[str]:
    """Yield a local directory to write into; for a bucket it is uploaded at the end, unless the block raised.

    A local path is yielded itself (made if absent), so files are added to what is there.
    """
    if not is_cloud_path(path):
        makedirs(path)
        yield _local(path)
        return
    with tempfile.TemporaryDirectory(prefix="skyrl-upload-") as work:
        yield work
        upload_directory(work, path)


@contextmanager
def local_read_dir(path: str) -> Iterator[str]:
    """Yield a local directory with the content of ``path``; a bucket's is downloaded and deleted afterwards.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    if not is_cloud_path(path):
        local = _local(path)
        if not os.path.isdir(local):
            raise FileNotFoundError(f"no directory {local}")
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="skyrl-download-") as work:
        download_directory(path, work)
        yield work


@contextmanager
def local_read_files(path: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a local directory that holds the named files of ``path``; of a bucket only those are downloaded.

    Args:
        path: directory or bucket prefix.
        names: paths relative to it.

    Raises:
        FileNotFoundError: One of them is missing.
    """
    wanted = list(names)
    if not is_cloud_path(path):
        local = _local(path)
        for name in wanted:
            if not os.path.exists(os.path.join(local, name)):
                raise FileNotFoundError(f"no file {os.path.join(local, name)}")
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="skyrl-download-") as work:
        for name in wanted:
            download_file(join(path, name), os.path.join(work, name))
        yield work


def download_file(path: str, local_path: str) -> None:
    """Copy one file of a bucket (or of the disk) to a local path, atomically."""
    local = _local(local_path)
    os.makedirs(os.path.dirname(local) or ".", exist_ok=True)
    temporary = temporary_sibling(local)
    try:
        if is_cloud_path(path):
            _call(path, lambda fs: fs.get_file(path, temporary))
        else:
            shutil.copyfile(_local(path), temporary)
        os.replace(temporary, local)
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)


def upload_directory(local_dir: str, path: str) -> None:
    """Copy the files below a local directory to a bucket prefix.

    Raises:
        ValueError: ``path`` is no bucket.
    """
    _require_cloud(path)
    source = _local(local_dir)
    for folder, _, files in sorted(os.walk(source)):
        for name in sorted(files):
            local = os.path.join(folder, name)
            _upload_file(local, join(path, os.path.relpath(local, source)))


def _upload_file(local_path: str, path: str) -> None:
    _call(path, lambda fs: fs.put_file(local_path, path))


def download_directory(path: str, local_dir: str) -> None:
    """Copy all files below a bucket prefix to a local directory.

    Raises:
        ValueError: ``path`` is no bucket.
        FileNotFoundError: Nothing is stored under that prefix.
    """
    _require_cloud(path)
    found: list[str] = _call(path, lambda fs: fs.find(path))
    if not found:
        raise FileNotFoundError(f"nothing is stored under {path}")
    prefix = path.partition("://")[2].strip("/")
    scheme = path.partition("://")[0]
    for entry in found:
        relative = entry.strip("/")[len(prefix) :].strip("/")
        download_file(f"{scheme}://{entry.lstrip('/')}", os.path.join(_local(local_dir), relative))


def _local(path: str) -> str:
    return os.path.expanduser(str(path))


def _require_cloud(path: str) -> None:
    if not is_cloud_path(path):
        schemes = ", ".join(f"{scheme}://" for scheme in _CLOUD_EXTRAS)
        raise ValueError(f"{path!r} is no bucket path; it must start with one of {schemes}")


def _filesystem(path: str) -> Any:
    import fsspec

    scheme = path.partition("://")[0].lower()
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        extra = _CLOUD_EXTRAS[scheme]
        raise ImportError(
            f"{scheme}:// paths need a package that is not installed: pip install 'skyrl[{extra}]' "
            f"(or uv sync --extra {extra})"
        ) from error


def _call(path: str, action: Callable[[Any], Any]) -> Any:
    """Run an action on the path's file system; once more with new credentials if the token has expired."""
    filesystem = _filesystem(path)
    try:
        return action(filesystem)
    except Exception as error:
        if not _token_expired(error):
            raise
        logger.warning("The access token of %s has expired; reading the credentials again", path)
        filesystem.clear_instance_cache()
        return action(_filesystem(path))


def _token_expired(error: BaseException) -> bool:
    chain: BaseException | None = error
    while chain is not None:
        if any(code in f"{type(chain).__name__} {chain}" for code in _EXPIRED_TOKEN_CODES):
            return True
        chain = chain.__cause__
    return False


def _fsync_path(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_tree(path: str) -> None:
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            full = os.path.join(folder, name)
            if not os.path.islink(full):
                _fsync_path(full)
        _fsync_path(folder)
