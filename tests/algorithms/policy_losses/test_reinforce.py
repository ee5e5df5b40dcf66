"""The plain policy gradient."""

import pytest
import torch

from skyrl.algorithms.policy_losses import PolicyLossRegistry, compute_policy_loss
from skyrl.algorithms.policy_losses.reinforce import reinforce_loss
from skyrl.config.algorithm import AlgorithmConfig

CONFIG = AlgorithmConfig()


def test_the_loss_is_minus_advantage_times_log_prob():
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, -1.0], [4.0, 1.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    weights = torch.tensor([[0.5, 0.25], [0.125, 9.0]])
    loss, metrics = reinforce_loss(log_probs, None, advantages, CONFIG, mask, loss_weights=weights)
    loss.backward()
    assert loss.item() == 0.5 * 2.0 - 0.25 * 2.0 + 0.125 * 2.0  # -w·A·ℓ of the three trained tokens
    assert log_probs.grad.tolist() == [[-1.0, 0.25], [-0.5, 0.0]]
    assert metrics["clip_ratio"].item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["log_probs", "advantages"])
def test_a_masked_bad_value_leaks_into_nothing(bad, where):
    tensors = {"log_probs": torch.tensor([[-1.0, -2.0]]), "advantages": torch.tensor([[1.0, 1.0]])}
    tensors[where][0, 1] = bad
    tensors["log_probs"].requires_grad_()
    loss, _ = reinforce_loss(**tensors, old_log_probs=None, config=CONFIG, loss_mask=torch.tensor([[1.0, 0.0]]))
    loss.backward()
    assert loss.item() == 1.0
    assert tensors["log_probs"].grad.tolist() == [[-1.0, 0.0]]


def test_it_reads_neither_old_log_probs_nor_the_samplers():
    traits = PolicyLossRegistry.traits("reinforce")
    assert (traits.needs_old_logprobs, traits.needs_rollout_logprobs) == (False, False)
    loss, _ = compute_policy_loss(
        "reinforce",
        log_probs=torch.full((1, 1), -2.0),
        old_log_probs=None,
        advantages=torch.ones(1, 1),
        config=CONFIG,
    )
    assert loss.item() == 2.0
