"""Which checkpoints exist, where the next one goes, and what the controller stores in it.

::

    {ckpt_path}/latest_ckpt_global_step.txt     the step that ``resume_mode=latest`` takes; written last of all
    {ckpt_path}/global_step_N/policy, critic    written by the workers
    {ckpt_path}/global_step_N/data.pt           state of the data loader
    {ckpt_path}/global_step_N/trainer_state.pt  `TrainerState`
    {ckpt_path}/global_step_N/COMPLETE          empty; without it nobody resumes from here

Local directories are written under a hidden name and renamed when all of it is on disk. A bucket has no rename, so
there ``COMPLETE`` is what tells. All nodes must see ``ckpt_path``; one run at a time writes to it.
"""

from __future__ import annotations

import importlib.metadata
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import torch

from skyrl.config.trainer import TrainerConfig
from skyrl.errors import CheckpointError, ConfigError, MissingCheckpointError
from skyrl.utils import storage
from skyrl.utils.disk import disk_full, free_bytes, tree_bytes
from skyrl.utils.plain import plain

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
LATEST = "latest_ckpt_global_step.txt"
TRAINER_STATE = "trainer_state.pt"
DATA_STATE = "data.pt"
PREFIX = "global_step_"

_FORMAT = 1
_STEP_NAME = re.compile(rf"^{PREFIX}(\d+)$")
_LEFTOVER_NAME = re.compile(rf"^\.({PREFIX}\d+)\.(tmp|old)$")

WATCHED_KEYS = (
    "data.train_data",
    "trainer.seed",
    "trainer.strategy",
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.critic_mini_batch_size",
    "trainer.update_epochs_per_batch",
    "trainer.policy.model.path",
    "trainer.policy.model.lora.rank",
    "trainer.ref.model.path",
    "trainer.critic.model.path",
    "trainer.algorithm.advantage_estimator",
    "trainer.algorithm.policy_loss_type",
    "generator.n_samples_per_prompt",
)
"""Keys whose change between save and resume makes it another experiment."""


class ResumeMode(StrEnum):
    """Values of ``trainer.resume_mode``; None means ``none``."""

    NONE = "none"
    LATEST = "latest"
    FROM_PATH = "from_path"

    @classmethod
    def _missing_(cls, value: object) -> ResumeMode | None:
        if value is None:
            return cls.NONE
        return cls.__members__.get(str(value).strip().upper())


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint to go on from, e.g. ``ResumePoint(path="/ckpts/global_step_20", step=20)``."""

    path: str
    """Its directory."""
    step: int
    """The last finished step."""
    complete: bool = True
    """Whether it has the completion marker; upstream's checkpoints have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What the controller needs besides the roles' weights and the data loader to go on where it stopped."""

    global_step: int
    """The last finished step."""
    epoch: int = 0
    """Pass over the data that the step's last batch came from, from 0."""
    batches_drawn: int | None = None
    """Batches of the data loader that were used up to that step; None means one for each step."""
    weight_version: int = 0
    """Weight syncs that the engines had received."""
    kl_coef: float | None = None
    """Value of the KL controller; None without KL in the reward."""
    rng: dict[str, Any] | None = None
    """Generators of the driver (`skyrl.utils.seeds.rng_state`); None in upstream's checkpoints."""
    run_dir: str | None = None
    """Folder of the run's metrics, which a resumed run appends to."""
    config: dict[str, Any] = field(default_factory=dict)
    """The whole config in plain types."""
    extra: dict[str, Any] = field(default_factory=dict)
    """State of a subclassed trainer, in plain types and tensors."""
    library_version: str = field(default_factory=lambda: importlib.metadata.version("skyrl"))
    """Version of this library that wrote it."""


class CheckpointManager:
    """Checkpoints below one directory or bucket prefix.

    Args:
        ckpt_path: ``trainer.ckpt_path``.
        ckpt_interval: ``trainer.ckpt_interval`` in steps; 0 or less means that none is due.
        max_to_keep: ``trainer.max_ckpts_to_keep``; 0 or less keeps all.
    """

    def __init__(self, ckpt_path: str, *, ckpt_interval: int = -1, max_to_keep: int = -1) -> None:
        self.root = storage.join(ckpt_path)
        self.ckpt_interval = ckpt_interval
        self.max_to_keep = max_to_keep

    @classmethod
    def from_config(cls, cfg: TrainerConfig) -> CheckpointManager:
        """Manager of a run's ``trainer`` settings."""
        return cls(cfg.ckpt_path, ckpt_interval=cfg.ckpt_interval, max_to_keep=cfg.max_ckpts_to_keep)

    def path_of(self, step: int) -> str:
        """Final directory of a step's checkpoint."""
        return storage.join(self.root, f"{PREFIX}{step}")

    @contextmanager
    def saving(self, step: int) -> Iterator[str]:
        """Yield the directory into which roles and controller write the checkpoint of ``step``.

        When the block ends, the directory gets its marker and its final name, and the latest marker names it. When it
        raises, or the process dies, ``resume_mode=latest`` still finds the previous checkpoint.

        Raises:
            CheckpointError: Writing failed (disk full, no permission). What was written is gone again. Other
                exceptions of the block pass unchanged.
        """
        path = self.path_of(step)
        with self._explained(step, path, OSError):
            # The inner one looks at the disk while what was written still fills it.
            with self._directory(path) as work, self._explained(step, work, Exception):
                yield work
                storage.write_atomic(storage.join(work, COMPLETE), b"")
            storage.write_atomic(storage.join(self.root, LATEST), str(step))
        logger.info("Saved checkpoint %s", path)

    def cleanup(self) -> list[int]:
        """Delete the oldest checkpoints beyond ``max_to_keep``, never the latest; return the deleted steps."""
        return cleanup_old_checkpoints(self.root, self.max_to_keep, newest=self.latest_step())

    def steps(self) -> list[int]:
        """Steps that have a directory, in numeric order, complete or not."""
        return _steps(self.root)

    def latest_step(self) -> int | None:
        """The step that the latest marker names, or None without marker.

        Raises:
            CheckpointError: The marker holds no number.
        """
        marker = storage.join(self.root, LATEST)
        if not storage.exists(marker):
            return None
        text = storage.read_bytes(marker).decode(errors="replace").strip()
        if not text.isdigit():
            raise CheckpointError(f"{marker} must hold a step number, not {text!r}; {self._choices()}")
        return int(text)

    def find_resume(self, mode: ResumeMode | str | None, resume_path: str | None = None) -> ResumePoint | None:
        """Decide where to go on, after clearing what killed saves left; None means from step 0.

        Args:
            mode: ``trainer.resume_mode``.
            resume_path: ``trainer.resume_path``, read with ``from_path`` only.

        Raises:
            ConfigError: Unknown mode; ``from_path`` without a path ending in ``global_step_N``; with ``latest``, a
                directory of a later run lies here too.
            MissingCheckpointError: ``from_path`` names no directory.
            CheckpointError: The latest marker names a checkpoint that is missing or not complete.
        """
        try:
            chosen = ResumeMode(mode)  # type: ignore[arg-type]  # None is `none`
        except ValueError:
            names = ", ".join(ResumeMode)
            raise ConfigError(f"trainer.resume_mode={mode!r} must be null or one of {names}") from None
        self.recover()
        if chosen is ResumeMode.NONE:
            return None
        return self._latest() if chosen is ResumeMode.LATEST else _from_path(resume_path)

    def recover(self) -> None:
        """Delete the hidden directories of saves that were killed, or put back what they had moved away."""
        if storage.is_cloud_path(self.root) or not storage.isdir(self.root):
            return
        for name in storage.list_dir(self.root):
            if match := _LEFTOVER_NAME.match(name):
                logger.warning("Clearing %s, left by a save that did not finish", storage.join(self.root, name))
                storage.recover_directory(storage.join(self.root, match[1]))
            elif name.startswith(f".{LATEST}."):
                storage.remove(storage.join(self.root, name))

    def save_state(
        self, directory: str, state: TrainerState, dataloader_state: Mapping[str, Any] | None = None
    ) -> None:
        """Write ``data.pt`` and ``trainer_state.pt`` into the directory that `saving` handed out.

        A data loader state that is not plain data and tensors is left out with a warning.
        """
        if dataloader_state is not None:
            content = _dump(dict(dataloader_state))
            try:
                _load(content)
            except Exception as error:  # noqa: BLE001 - torch raises many types; the run can do without this file
                logger.warning("The data loader's state cannot be stored, a resumed run restarts its data: %s", error)
            else:
                storage.write_atomic(storage.join(directory, DATA_STATE), content)
        content = _dump({"format": _FORMAT, **{name.name: getattr(state, name.name) for name in fields(state)}})
        storage.write_atomic(storage.join(directory, TRAINER_STATE), content)

    def load_state(self, point: ResumePoint) -> TrainerState:
        """Read the controller's state; the step in the directory's name wins over the one inside.

        Raises:
            CheckpointError: The file is missing or damaged, or the checkpoint was never finished.
        """
        stored = _read(storage.join(point.path, TRAINER_STATE))
        if not isinstance(stored, dict) or "global_step" not in stored:
            raise CheckpointError(f"{point.path}/{TRAINER_STATE} holds no trainer state; {_other_checkpoint()}")
        if not point.complete and "format" in stored:
            raise CheckpointError(f"{point.path} has no {COMPLETE}: its save was interrupted; {_other_checkpoint()}")
        if stored["global_step"] != point.step:
            logger.warning("%s says step %s inside; taking %d", point.path, stored["global_step"], point.step)
        known = {name.name for name in fields(TrainerState)}
        values = {key: value for key, value in stored.items() if key in known}
        values.setdefault("library_version", "unknown")
        return TrainerState(**{**values, "global_step": point.step})

    def load_dataloader_state(self, point: ResumePoint) -> dict[str, Any] | None:
        """Read the data loader's state, or warn and return None: the epoch's data then starts again."""
        path = storage.join(point.path, DATA_STATE)
        try:
            if not storage.exists(path):
                raise CheckpointError(f"{path} is missing")
            return dict(_read(path))
        except (CheckpointError, TypeError, ValueError) as error:
            logger.warning("The data starts again at the beginning of its epoch: %s", error)
            return None

    def _latest(self) -> ResumePoint | None:
        step = self.latest_step()
        if step is None:
            if found := self.steps():
                logger.warning("%s holds steps %s but no %s: starting at step 0", self.root, found, LATEST)
            return None
        beyond = [other for other in self.steps() if self.ckpt_interval > 0 and other > step + self.ckpt_interval]
        if beyond:
            raise ConfigError(
                f"trainer.ckpt_path={self.root} mixes runs: the latest checkpoint is step {step}, but steps {beyond} "
                f"lie more than trainer.ckpt_interval={self.ckpt_interval} beyond it; move them away, "
                "or use trainer.resume_mode=from_path with trainer.resume_path"
            )
        path = self.path_of(step)
        if not storage.exists(storage.join(path, COMPLETE)):
            raise CheckpointError(
                f"{LATEST} names step {step}, but {path} is missing or has no {COMPLETE}; {self._choices()}"
            )
        return ResumePoint(path=path, step=step)

    def _choices(self) -> str:
        complete = [step for step in self.steps() if storage.exists(storage.join(self.path_of(step), COMPLETE))]
        known = f"complete here are steps {complete}" if complete else "no checkpoint here is complete"
        return (
            f"{known}; choose one with trainer.resume_mode=from_path and trainer.resume_path, "
            "or start over with trainer.resume_mode=none"
        )

    @contextmanager
    def _directory(self, path: str) -> Iterator[str]:
        if not storage.is_cloud_path(path):
            with storage.atomic_directory(path) as work:
                yield work
            return
        discard_checkpoint(path)
        try:
            yield path
        except BaseException:
            with suppress(Exception):
                discard_checkpoint(path)
            raise

    @contextmanager
    def _explained(self, step: int, work: str, kinds: type[Exception]) -> Iterator[None]:
        """Turn failed writes into a `CheckpointError` that says what to do; other exceptions pass."""
        try:
            yield
        except kinds as error:
            target, cloud = self.path_of(step), storage.is_cloud_path(self.root)
            if not cloud and disk_full(error, self.root):
                free, written = free_bytes(self.root) / 2**20, tree_bytes(work) / 2**20
                raise CheckpointError(
                    f"the disk is full: checkpoint {target} could not be written ({free:.1f} MiB free after "
                    f"{written:.1f} MiB of it), and what was written is deleted again. Free some space, keep fewer "
                    f"with trainer.max_ckpts_to_keep={self.max_to_keep}, or move trainer.ckpt_path={self.root}; "
                    f"then {self._go_on()}"
                ) from error
            # Without errno it is a deadline or a lost connection, not a write.
            if isinstance(error, OSError) and error.errno is not None:
                raise CheckpointError(
                    f"checkpoint {target} could not be written: {error}. Check that trainer.ckpt_path={self.root} can "
                    f"be written to, or choose another; then {self._go_on()}"
                ) from error
            raise

    def _go_on(self) -> str:
        try:
            step = self.latest_step()
        except (CheckpointError, OSError):
            step = None
        if step is None:
            return "start again (no earlier checkpoint is here)"
        return f"go on from step {step} with trainer.resume_mode=latest"


def cleanup_old_checkpoints(ckpt_path: str, max_to_keep: int, newest: int | None = None) -> list[int]:
    """Delete all but the last ``max_to_keep`` checkpoints, by step number; return the deleted steps.

    Args:
        ckpt_path: directory of the ``global_step_N``.
        max_to_keep: 0 or less keeps all.
        newest: the checkpoint just written. Directories beyond it belong to another run: neither counted nor deleted.
    """
    if max_to_keep <= 0:
        return []
    own = [step for step in _steps(ckpt_path) if newest is None or step <= newest]
    doomed = own[:-max_to_keep]
    for step in doomed:
        discard_checkpoint(storage.join(ckpt_path, f"{PREFIX}{step}"))
    if doomed:
        logger.info("Deleted old checkpoints of steps %s", doomed)
    return doomed


def discard_checkpoint(path: str) -> None:
    """Delete a checkpoint so that one half deleted is never taken for a whole one."""
    if storage.is_cloud_path(path):
        storage.remove(storage.join(path, COMPLETE))
        storage.remove(path)
        return
    doomed = storage.temporary_sibling(path)
    storage.remove(doomed)
    with suppress(FileNotFoundError):
        os.rename(storage.join(path), doomed)
    storage.remove(doomed)


def config_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Watched keys that both configs have with different values: key -> (saved, current)."""
    found = {}
    for key in WATCHED_KEYS:
        old, new = _lookup(saved, key), _lookup(current, key)
        if _ABSENT not in (old, new) and plain(old) != plain(new):
            found[key] = (old, new)
    return found


def warn_config_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Log one warning that lists every watched key that changed since the checkpoint was written."""
    changed = config_differences(saved, current)
    if changed:
        lines = "".join(f"\n  {key}: {old!r} -> {new!r}" for key, (old, new) in changed.items())
        logger.warning("The config differs from the checkpoint's in keys that change the experiment:%s", lines)


_ABSENT = "<absent>"


def _lookup(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _steps(root: str) -> list[int]:
    if not storage.isdir(root):
        return []
    return sorted(int(match[1]) for name in storage.list_dir(root) if (match := _STEP_NAME.match(name)))


def _from_path(resume_path: str | None) -> ResumePoint:
    if not resume_path:
        raise ConfigError("trainer.resume_mode=from_path needs trainer.resume_path=.../global_step_N")
    path = resume_path.rstrip("/")
    match = _STEP_NAME.match(path.rpartition("/")[2])
    if match is None:
        raise ConfigError(f"trainer.resume_path={resume_path} must end in {PREFIX}N, the directory of one checkpoint")
    if not storage.isdir(path):
        raise MissingCheckpointError(
            f"trainer.resume_path={resume_path} does not exist; give the {PREFIX}N folder of a checkpoint"
        )
    complete = storage.exists(storage.join(path, COMPLETE))
    if not complete:
        logger.warning("%s has no %s; reading it as a checkpoint of upstream", path, COMPLETE)
    return ResumePoint(path=path, step=int(match[1]), complete=complete)


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _read(path: str) -> Any:
    try:
        return _load(storage.read_bytes(path))
    except Exception as error:  # torch raises many types for a damaged file
        raise CheckpointError(f"{path} cannot be read ({error}); {_other_checkpoint()}") from error


def _other_checkpoint() -> str:
    return "choose another checkpoint with trainer.resume_mode=from_path and trainer.resume_path"
