from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

from skyrl.backends.skyrl_train.workers import build
from skyrl.backends.skyrl_train.workers.actor_group import cpu_threads_per_rank, worker_env
from skyrl.backends.skyrl_train.workers.build import (
    ModelGroups,
    RoleClasses,
    model_paths,
    scheduler_steps,
    start_models,
)
from skyrl.backends.skyrl_train.workers.dispatch import _group_names
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ResourceError, WorkerError


def test_a_schedule_counts_optimizer_steps() -> None:
    cfg = SkyRLTrainConfig()
    trainer = cfg.trainer
    trainer.train_batch_size, trainer.policy_mini_batch_size, trainer.critic_mini_batch_size = 16, 8, 4
    trainer.update_epochs_per_batch = 3
    assert scheduler_steps(cfg, "policy", 10) == 10 * 2 * 3
    assert scheduler_steps(cfg, "critic", 10) == 10 * 4 * 3
    assert scheduler_steps(cfg, "policy", None) is None
    assert scheduler_steps(cfg, "ref", 10) is None


def test_the_reference_is_the_policy_unless_it_is_named() -> None:
    cfg = SkyRLTrainConfig()
    cfg.trainer.policy.model.path = "a"
    assert model_paths(cfg)["ref"] == "a"
    cfg.trainer.ref.model.path = "b"
    assert model_paths(cfg)["ref"] == "b"


def test_parameters_travel_in_runs_of_bounded_size() -> None:
    assert _group_names([("a", 3), ("b", 3), ("c", 9), ("d", 1)], 6) == [["a", "b"], ["c"], ["d"]]
    assert _group_names([], 6) == []


def test_cores_are_shared_among_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [cpu_threads_per_rank(None, ranks) for ranks in (1, 3, 16)] == [8, 2, 1]
    assert cpu_threads_per_rank(3, 1) == 3
    with pytest.raises(ResourceError, match=r"trainer.cpu_threads=0"):
        cpu_threads_per_rank(0, 1)
    assert worker_env(3)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in worker_env(None)


class FakeDispatch:
    """Notes what is loaded, and whether something else was resident on the shared GPUs then."""

    def __init__(self, cfg, policy, critic, ref, client) -> None:
        self.calls: list[tuple[str, str]] = []
        for role, group in (("policy", policy), ("critic", critic), ("ref", ref)):
            if group is not None:
                group.offload_to_cpu = lambda role=role: self.calls.append(("offload", role))

    def init_model(self, role: str, path: str, steps: int | None) -> None:
        self.calls.append(("load", role))

    def mark_as_offloaded(self, role: str) -> None:
        self.calls.append(("mark", role))


class FakeGroup:
    """A group of ranks that are not there."""

    made: ClassVar[list[FakeGroup]] = []

    def __init__(self, cfg, *, role: str, pg: object, **options: object) -> None:
        if role == "ref":
            raise WorkerError("ref: rank 0 died")
        self.role, self.pg, self.running = role, pg, True
        FakeGroup.made.append(self)

    def async_run_ray_method(self, dispatch_type: str, method: str, path: str) -> list[str]:
        return [f"{self.role}.{method}"]

    def shutdown(self) -> None:
        self.running = False


def turns(calls: list[tuple[str, str]], *roles: str) -> list[tuple[str, str]]:
    return [call for call in calls if call[1] in roles]


def in_turn(*roles: str) -> list[tuple[str, str]]:
    return [(what, role) for role in roles for what in ("load", "offload", "mark")]


def test_roles_that_share_gpus_load_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WorkerDispatch", FakeDispatch)
    monkeypatch.setattr(build.cluster, "cluster_device_type", lambda: "cuda")
    groups = ModelGroups(policy=SimpleNamespace(), critic=SimpleNamespace(), ref=SimpleNamespace())
    cfg = SkyRLTrainConfig()
    cfg.trainer.placement.colocate_all = True
    assert groups.load(cfg, None).calls == in_turn("ref", "policy", "critic")
    cfg.trainer.placement.colocate_all, cfg.trainer.placement.colocate_policy_ref = False, True
    calls = groups.load(cfg, None).calls
    assert turns(calls, "ref", "policy") == in_turn("ref", "policy")
    assert turns(calls, "critic") == [("load", "critic")]
    cfg.trainer.placement.colocate_policy_ref = False
    assert sorted(groups.load(cfg, None).calls) == [("load", "critic"), ("load", "policy"), ("load", "ref")]


def test_a_group_that_cannot_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[object] = []
    monkeypatch.setattr(build, "PPORayActorGroup", FakeGroup)
    monkeypatch.setattr(build.cluster, "cluster_device_type", lambda: "cuda")
    monkeypatch.setattr(build, "placement_group", lambda bundles, strategy: "shared")
    monkeypatch.setattr(build, "get_ray_pg_ready_with_timeout", lambda group: None)
    monkeypatch.setattr(build, "remove_placement_group", removed.append)
    monkeypatch.setattr(FakeGroup, "made", [])
    cfg = SkyRLTrainConfig()
    cfg.trainer.algorithm.use_kl_loss = True
    cfg.trainer.critic.model.path = "c"
    cfg.trainer.placement.colocate_all, cfg.trainer.placement.colocate_policy_ref = False, True
    with pytest.raises(WorkerError, match="rank 0 died"):
        start_models(cfg, RoleClasses(policy=None, critic=None, ref=None))
    assert sorted((group.role, group.running) for group in FakeGroup.made) == [("critic", False), ("policy", False)]
    assert removed == ["shared"]
