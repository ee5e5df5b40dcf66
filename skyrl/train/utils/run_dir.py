"""The local folder of one run: metrics.jsonl, config.yaml, trajectories/, plots/."""

from __future__ import annotations

import logging
import os

from skyrl.utils import storage

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
CONFIG = "config.yaml"


def prepare_run_dir(path: str, *, resumed: bool, recorded: str | None = None) -> str:
    """Choose and make the folder of a run; return its path.

    A resumed run goes on in the folder that its checkpoint recorded. A fresh run that finds ``path`` used takes
    ``<path>-2``, ``-3``, ...; a folder that exists but is empty is free.

    Args:
        path: ``trainer.run_dir``.
        resumed: whether a checkpoint was loaded.
        recorded: the folder that its `TrainerState` names; None if it names none.
    """
    base = os.path.expanduser(path).rstrip("/")
    if resumed:
        chosen = recorded if recorded and os.path.isdir(recorded) else base
        os.makedirs(chosen, exist_ok=True)
        return chosen
    number = 1
    while True:
        chosen = base if number == 1 else f"{base}-{number}"
        if _claim(chosen):
            if number > 1:
                logger.info("%s holds another run; this one writes to %s", base, chosen)
            return chosen
        number += 1


def write_config(run_dir: str, text: str) -> str:
    """Write ``config.yaml``; an earlier one that differs is kept as ``config-1.yaml``, ``-2``, ... Return its path."""
    path = os.path.join(run_dir, CONFIG)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            earlier = file.read()
        if earlier == text:
            return path
        number = 1
        while os.path.exists(kept := os.path.join(run_dir, f"config-{number}.yaml")):
            number += 1
        os.rename(path, kept)
    storage.write_atomic(path, text)
    return path


def _claim(path: str) -> bool:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        os.mkdir(path)
    except FileExistsError:
        return os.path.isdir(path) and not os.listdir(path)
    return True
