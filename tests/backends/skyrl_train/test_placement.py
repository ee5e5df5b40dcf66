from __future__ import annotations

import pytest

from skyrl.backends.skyrl_train.placement import (
    Demand,
    cpu_processes,
    gpu_demands,
    require_cpus,
    require_gpus,
    sort_bundles,
)
from skyrl.config.root import SkyRLTrainConfig
from skyrl.errors import ResourceError


def demand(name: str, per_node: int, nodes: int = 1) -> Demand:
    return Demand(key=f"trainer.placement.{name}_num_gpus_per_node", nodes=nodes, per_node=per_node)


def test_enough_gpus_pass() -> None:
    require_gpus([demand("policy", 2), demand("critic", 2)], [4])
    require_gpus([demand("policy", 4, nodes=2)], [4, 4])


def test_too_many_gpus_on_one_node_name_key_value_and_stock() -> None:
    with pytest.raises(ResourceError, match=r"policy_num_gpus_per_node=16 .*the largest has 8"):
        require_gpus([demand("policy", 16)], [8, 8])


def test_too_many_gpus_in_all_list_the_parts() -> None:
    with pytest.raises(
        ResourceError, match=r"needs 6 GPUs and the cluster has 4: .*policy.* takes 4, .*critic.* takes 2"
    ):
        require_gpus([demand("policy", 4), demand("critic", 2)], [4])


def test_colocated_roles_and_engines_count_once() -> None:
    cfg = SkyRLTrainConfig()
    cfg.trainer.placement.policy_num_gpus_per_node = 4
    assert [d.total for d in gpu_demands(cfg)] == [4]


def test_separate_roles_and_engines_add_up() -> None:
    cfg = SkyRLTrainConfig()
    cfg.trainer.placement.colocate_all = False
    cfg.trainer.placement.colocate_policy_ref = False
    cfg.trainer.critic.model.path = "x"
    engines = cfg.generator.inference_engine
    engines.num_engines, engines.tensor_parallel_size, engines.data_parallel_size = 2, 2, 2
    assert [d.total for d in gpu_demands(cfg)] == [1, 1, 1, 8]  # policy, ref, critic, engines
    cfg.trainer.placement.colocate_policy_ref = True
    assert [d.total for d in gpu_demands(cfg)] == [1, 1, 8]


@pytest.mark.parametrize("colocate_all", [True, False])
def test_without_training_only_the_engines_count(colocate_all: bool) -> None:
    cfg = SkyRLTrainConfig()
    cfg.trainer.placement.colocate_all = colocate_all
    cfg.trainer.placement.policy_num_gpus_per_node = 8
    cfg.trainer.critic.model.path = "x"
    engines = cfg.generator.inference_engine
    engines.num_engines, engines.tensor_parallel_size, engines.data_parallel_size = 2, 2, 3
    assert [d.total for d in gpu_demands(cfg, trains=False)] == [12]
    assert cpu_processes(cfg, trains=False) == 6
    assert cpu_processes(cfg) == 6 + 8 + 1 + 1  # engines, policy, ref, critic
    engines.run_engines_locally = False
    assert (gpu_demands(cfg, trains=False), cpu_processes(cfg, trains=False)) == ([], 0)


def test_a_lone_engine_demand_is_not_told_to_share_gpus() -> None:
    with pytest.raises(ResourceError, match=r"needs 4 GPUs and the cluster has 1: .*lower these, or add nodes"):
        require_gpus([Demand(key="generator.inference_engine.num_engines", nodes=4, per_node=1)], [1])


def test_processes_without_gpus_must_fit_the_cpus() -> None:
    require_cpus(5, 2.0)  # 1 for the controller, 0.2 each
    with pytest.raises(ResourceError, match=r"num_engines ask for 6 processes.* 2 CPUs .* holds 5"):
        require_cpus(6, 2.0)


def test_bundles_are_ordered_by_node_then_gpu_and_rank_zero_stays() -> None:
    assert sort_bundles([("b", 1), ("a", 1), ("b", 0), ("a", 0)]) == [2, 0, 3, 1]
