from __future__ import annotations

import pytest

from skyrl.config.root import SkyRLTrainConfig
from skyrl.config.rules.batches import check_batches, data_parallel_sizes, megatron_data_parallel_size
from skyrl.errors import ConfigError


def trainer(**keys: object):
    """A trainer of 8 prompts in mini-batches of 4 on 2 nodes x 2 GPUs, without a reference."""
    config = SkyRLTrainConfig().trainer
    config.train_batch_size, config.policy_mini_batch_size = 8, 4
    config.placement.policy_num_nodes = config.placement.policy_num_gpus_per_node = 2
    config.algorithm.use_kl_loss = False
    for key, value in keys.items():
        setattr(config, key, value)
    return config


def test_sequence_parallel_ranks_share_data():
    config = trainer()
    config.policy.sequence_parallel_size = 2
    assert data_parallel_sizes(config).policy == 2  # 4 GPUs / 2
    config.micro_train_batch_size_per_gpu = 5  # 4 prompts x 5 samples / 2 ranks = 10 sequences
    check_batches(config, num_samples=5)
    config.micro_train_batch_size_per_gpu = 4
    with pytest.raises(ConfigError, match=r"micro_train_batch_size_per_gpu=4 must divide the 10 .*try 2 or 5"):
        check_batches(config, num_samples=5)


def test_megatron_divides_by_tensor_and_pipeline_size():
    megatron = trainer().policy.megatron_config
    megatron.tensor_model_parallel_size = megatron.pipeline_model_parallel_size = 2
    assert megatron_data_parallel_size("policy", 4, megatron) == 1
    megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size = 3, 1
    with pytest.raises(ConfigError, match="3 x 1 x 1 must divide the 4 GPUs"):
        megatron_data_parallel_size("policy", 4, megatron)


def test_megatron_experts_must_divide_too():
    megatron = trainer().policy.megatron_config
    megatron.expert_model_parallel_size = 3
    with pytest.raises(ConfigError, match="expert"):
        megatron_data_parallel_size("policy", 4, megatron)
    megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size = 2, 2
    assert megatron_data_parallel_size("policy", 4, megatron) == 4


def test_every_rank_of_policy_and_reference_gets_a_sequence():
    config = trainer(train_batch_size=1, policy_mini_batch_size=1)
    config.placement.policy_num_nodes, config.placement.policy_num_gpus_per_node = 1, 3
    config.placement.ref_num_gpus_per_node = 2
    config.algorithm.use_kl_loss = True
    with pytest.raises(ConfigError, match="5 sequences: must be at least 6"):
        check_batches(config, num_samples=5)
    check_batches(config, num_samples=6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy_mini_batch_size": 3}, r"policy_mini_batch_size=3 must divide .*train_batch_size=8; try 2 or 4"),
        ({"policy_mini_batch_size": 16}, "at most trainer.train_batch_size=8"),
        ({"policy_mini_batch_size": 0}, "above 0"),
        ({"train_batch_size": 0}, "train_batch_size=0"),
        ({"micro_forward_batch_size_per_gpu": 0}, "micro_forward_batch_size_per_gpu=0"),
        ({"policy_mini_batch_size": 1}, "less than one sequence each"),
    ],
)
def test_sizes_that_do_not_fit(keys: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        check_batches(trainer(**keys), num_samples=1)


def test_the_critic_counts_only_when_there_is_one():
    config = trainer(critic_mini_batch_size=3)
    check_batches(config, num_samples=4)
    config.critic.model.path = "some/model"
    with pytest.raises(ConfigError, match="critic_mini_batch_size=3 must divide"):
        check_batches(config, num_samples=4)


def test_micro_batches_by_tokens_need_no_divisor():
    config = trainer(micro_train_batch_size_per_gpu=7, max_tokens_per_microbatch=1000)
    check_batches(config, num_samples=5)
