"""Persist stage: checkpoints of the whole run, and exports of its models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.config.trainer import TrainerConfig
from skyrl.train.checkpoints import CheckpointManager, ResumePoint, TrainerState
from skyrl.utils import storage

logger = logging.getLogger(__name__)


class PersistStage:
    """Writes and reads what a run needs to go on where it stopped."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        manager: CheckpointManager,
        cfg: TrainerConfig,
        tokenizer: Any,
        roles: list[str],
        *,
        moving_ref: bool = False,
    ) -> None:
        self._dispatch = dispatch
        self._manager = manager
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._roles = roles
        # A reference that follows the policy is state of the run; a fixed one is read from its own path.
        self._stored_roles = [*roles, "ref"] if moving_ref else roles

    def save(self, state: TrainerState, dataloader_state: Mapping[str, Any] | None) -> str:
        """Write the checkpoint of `state.global_step` and delete those beyond `max_ckpts_to_keep`.

        Raises:
            CheckpointError: If it could not be written; the previous checkpoint stays the latest.
        """
        with self._manager.saving(state.global_step) as directory:
            for role in self._stored_roles:
                self._dispatch.save_checkpoint(role, storage.join(directory, role), self._tokenizer)
            self._manager.save_state(directory, state, dataloader_state)
        self._manager.cleanup()
        return self._manager.path_of(state.global_step)

    def load(self, point: ResumePoint) -> tuple[TrainerState, dict[str, Any] | None]:
        """Load the roles' models, optimizers and schedulers; returns the controller's state and the loader's."""
        state = self._manager.load_state(point)
        for role in self._stored_roles:
            self._dispatch.load_checkpoint(role, storage.join(point.path, role))
        return state, self._manager.load_dataloader_state(point)

    def export(self, global_step: int) -> str:
        """Write each trained model as a Hugging Face directory; returns the parent directory."""
        parent = storage.join(self._cfg.export_path, f"global_step_{global_step}")
        for role in self._roles:
            self._dispatch.save_hf_model(role, storage.join(parent, role), self._tokenizer)
        return parent
