from __future__ import annotations

import pytest

from skyrl.backends.skyrl_train.workers.actor_group import cpu_threads_per_rank, worker_env
from skyrl.backends.skyrl_train.workers.build import model_paths, scheduler_steps
from skyrl.backends.skyrl_train.workers.dispatch import _group_names
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ResourceError


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
