"""The functions that the examples of own algorithms register, by hand-made numbers and by the library's own calls."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry, compute_advantages_and_returns
from skyrl.algorithms.policy_losses import PolicyLossRegistry, compute_policy_loss
from skyrl.config.algorithm import AlgorithmConfig

NAN = float("nan")
FOLDER = "examples.train.algorithms"


@pytest.fixture
def estimator():
    module = _import(f"{FOLDER}.custom_advantage_estimator.main_custom_adv_est")
    yield module.simple_baseline
    AdvantageEstimatorRegistry.unregister("simple_baseline")


@pytest.fixture
def loss():
    module = _import(f"{FOLDER}.custom_policy_loss.main_custom_policy_loss")
    yield module.reinforce_loss
    PolicyLossRegistry.unregister("reinforce")
    PolicyLossRegistry.repopulate_registry()


def _import(name: str) -> ModuleType:
    """Run a module's decorators: a second import alone would not, and registries are shared by all tests."""
    loaded = sys.modules.pop(name, None)
    assert loaded is None, f"{name} is left over from another test"
    module = importlib.import_module(name)
    del sys.modules[name]
    return module


def test_the_estimator_subtracts_the_mean_score_of_the_whole_batch(estimator):
    rewards = torch.tensor([[0.0, 1.0], [3.0, 0.0], [NAN, 2.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 1]])
    advantages, returns = estimator(token_level_rewards=rewards, response_mask=mask)
    # Scores 1, 3 and 2; their mean is 2.
    assert advantages.tolist() == returns.tolist() == [[-1.0, -1.0], [1.0, 0.0], [0.0, 0.0]]


def test_the_estimator_is_called_without_failed_rollouts(estimator):
    advantages, _ = compute_advantages_and_returns(
        torch.tensor([[1.0], [3.0], [8.0]]),
        torch.ones(3, 1),
        ["a", "a", "b"],
        "simple_baseline",
        AlgorithmConfig(),
        valid_rows=torch.tensor([True, True, False]),
    )
    assert advantages.tolist() == [[-1.0], [1.0], [0.0]]


def test_the_loss_is_minus_the_sum_of_log_prob_times_advantage(loss):
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, NAN]], requires_grad=True)
    advantages = torch.tensor([[2.0, 0.5], [-1.0, NAN]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    value, metrics = loss(log_probs, log_probs, advantages, AlgorithmConfig(), loss_mask=mask)
    assert value.item() == 2.0 + 1.0 - 3.0
    assert metrics["chosen_log_prob"].item() == -2.0
    (gradient,) = torch.autograd.grad(value, log_probs)
    assert gradient.tolist() == [[-2.0, -0.5], [1.0, 0.0]]


def test_the_library_calls_the_loss_with_reduced_advantages_and_no_rollout_logprobs(loss):
    assert PolicyLossRegistry.get("reinforce") is loss
    log_probs = torch.tensor([[-1.0, -2.0]])
    value, metrics = compute_policy_loss(
        "reinforce",
        log_probs=log_probs,
        old_log_probs=log_probs,
        advantages=torch.tensor([[1.0, 3.0]]),
        config=AlgorithmConfig(),
        loss_mask=torch.ones(1, 2),
        rollout_logprobs=torch.zeros(1, 2),
        loss_weights=torch.full((1, 2), 0.5),
    )
    assert value.item() == 0.5 * (1.0 + 6.0)
    assert set(metrics) == {"chosen_log_prob"}
