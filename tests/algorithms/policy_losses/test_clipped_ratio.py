"""PPO's clip."""

import pytest
import torch

from skyrl.algorithms.policy_losses.clipped_ratio import pessimistic_ratio
from skyrl.config.algorithm import AlgorithmConfig

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "chosen", "binds"),
    [
        (1.5, 1.0, 1.3, True),  # likelier, and to become likelier: bounded
        (1.5, -1.0, 1.5, False),
        (0.5, 1.0, 0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.1, 1.0, 1.1, False),
        (1.5, 0.0, 1.5, False),  # without advantage both products are 0
    ],
)
def test_the_clip_binds_only_where_the_step_went_on_far_enough(ratio, advantage, chosen, binds):
    leaf = torch.tensor([[ratio]], requires_grad=True)
    result, where = pessimistic_ratio(leaf, torch.tensor([[advantage]]), CONFIG)
    result.sum().backward()
    assert result.item() == pytest.approx(chosen)
    assert where.item() == float(binds)
    assert leaf.grad.item() == (0.0 if binds else 1.0)


def test_a_ratio_on_the_bound_keeps_its_gradient():
    leaf = torch.tensor([[1.25]], requires_grad=True)
    result, where = pessimistic_ratio(leaf, torch.ones(1, 1), AlgorithmConfig(eps_clip_high=0.25))
    result.sum().backward()
    assert not where.item()
    assert leaf.grad.item() == 1.0
