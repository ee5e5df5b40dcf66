"""Actor groups of a test: started, loaded, and gone at the end."""

from __future__ import annotations

from pathlib import Path

import torch

from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.config.root import SkyRLTrainConfig


class started:
    """Groups of a run, loaded; gone at the end."""

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        from skyrl.backends.skyrl_train.workers.build import RoleClasses, start_models
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import CriticWorker, PolicyWorker, RefWorker

        self.groups = start_models(cfg, RoleClasses(policy=PolicyWorker, critic=CriticWorker, ref=RefWorker))
        self.cfg = cfg

    def __enter__(self) -> WorkerDispatch:
        return self.groups.load(self.cfg, total_training_steps=10)

    def __exit__(self, *_: object) -> None:
        self.groups.shutdown()


def fresh(dispatch: WorkerDispatch, model: Path) -> WorkerDispatch:
    """The dispatch with the policy's first weights and a new optimizer."""
    dispatch.init_model("policy", str(model), num_training_steps=10)
    return dispatch


def parameters(dispatch: WorkerDispatch, role: str = "policy") -> dict[str, torch.Tensor]:
    """Whole parameters of a role."""
    group = dispatch._groups[role]
    names = [name for name, _ in group.run("pass_through", "parameter_sizes")[0]]
    whole: dict[str, torch.Tensor] = group.run("pass_through", "gather_parameters", names)[0]
    return whole
