"""Whether a write failed because the disk is full, and how much is left."""

from __future__ import annotations

import errno
import os
import shutil

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = ("no space left on device", "disk quota exceeded")
# Words in which torch's and the C++ library's writers put it, seen on a full tmpfs.
_WRITE_TEXTS = ("write", "writing", "iostream error", "unexpected pos")
_NOTHING_LEFT_BYTES = 16 << 20


def disk_full(error: BaseException, path: str) -> bool:
    """Whether ``error``, or what caused it, is a write that found no space.

    Torch's file writers and errors from other processes carry no errno: their texts are read, and when one speaks of
    writing while the disk has less than 16 MiB left, that counts too.

    Args:
        error: what the write raised.
        path: local path on the disk in question; it need not exist.
    """
    seen: BaseException | None = error
    writing = False
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, OSError) and seen.errno in _FULL_ERRNOS:
            return True
        if any(part in text for part in _FULL_TEXTS):
            return True
        writing = writing or any(part in text for part in _WRITE_TEXTS)
        seen = seen.__cause__ or seen.__context__
    return writing and free_bytes(path) < _NOTHING_LEFT_BYTES


def free_bytes(path: str) -> int:
    """Bytes that an ordinary user may still write on the disk of ``path``, which need not exist."""
    probe = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(probe):
        probe = os.path.dirname(probe)
    return shutil.disk_usage(probe).free


def tree_bytes(path: str) -> int:
    """Bytes in the files below a local directory; 0 if it is absent."""
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, files in os.walk(path) for name in files)
