"""One local Ray cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.config.root import SkyRLTrainConfig


def make_cfg(model: Path, log_path: Path, *, ranks: int = 1, micro: int = 2) -> SkyRLTrainConfig:
    """A small fp32 run on a CPU, built by hand."""
    cfg = SkyRLTrainConfig()
    trainer = cfg.trainer
    trainer.bf16 = False
    trainer.log_path = str(log_path)
    trainer.cpu_threads = 1
    trainer.worker_timeout_s = 100.0
    trainer.micro_train_batch_size_per_gpu = micro
    trainer.micro_forward_batch_size_per_gpu = micro
    trainer.train_batch_size = trainer.policy_mini_batch_size = trainer.critic_mini_batch_size = 8
    trainer.algorithm.temperature = 0.8
    trainer.algorithm.kl_loss_coef = 0.1
    trainer.policy.model.path = trainer.ref.model.path = str(model)
    trainer.policy.optimizer_config.lr = 1e-3
    trainer.policy.optimizer_config.max_grad_norm = 0.5
    trainer.critic.optimizer_config.lr = 1e-3
    placement = trainer.placement
    placement.policy_num_gpus_per_node = ranks
    cfg.generator.inference_engine.run_engines_locally = False
    return cfg


@pytest.fixture(scope="session")
def ray_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A local cluster started the way a run starts it; its log folder."""
    import ray

    from skyrl.backends.skyrl_train.cluster import initialize_ray

    logs = tmp_path_factory.mktemp("logs")
    initialize_ray(make_cfg(tiny_model, logs))
    yield logs
    ray.shutdown()
