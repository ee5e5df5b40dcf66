"""How a user's losses reach ranks that run already; the rest of the dispatch is tested on real workers."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.algorithms.policy_losses import PolicyLossRegistry, register_policy_loss
from skyrl.algorithms.registries import repopulate_all_registries
from skyrl.backends.skyrl_train import cluster
from skyrl.backends.skyrl_train.workers.dispatch import WorkerDispatch
from skyrl.config.root import SkyRLTrainConfig


class FakeGroup:
    """Writes down the names of the losses that are shipped to its ranks."""

    def __init__(self) -> None:
        self.shipped: list[list[str]] = []

    def run(self, how: str, method: str, *args: Any, **kwargs: Any) -> list[float]:
        if method == "import_user_functions":
            self.shipped.append(sorted(args[0]["policy_loss"]))
        return [0.0]


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def dispatch(monkeypatch, group):
    monkeypatch.setattr(cluster, "cluster_device_type", lambda: "cpu")
    yield WorkerDispatch(SkyRLTrainConfig(), group)
    for name in PolicyLossRegistry.user_functions():
        PolicyLossRegistry.unregister(name)
    repopulate_all_registries()


def train(dispatch: WorkerDispatch) -> None:
    dispatch.forward_backward("policy", None)


def first(log_probs, old_log_probs, advantages):
    return log_probs.sum()


def second(log_probs, old_log_probs, advantages):
    return -log_probs.sum()


def test_built_in_losses_are_not_shipped(dispatch, group):
    train(dispatch)
    assert group.shipped == []


def test_a_loss_is_shipped_once(dispatch, group):
    register_policy_loss("mine")(first)
    train(dispatch)
    train(dispatch)
    assert group.shipped == [["mine"]]


def test_another_function_under_the_same_name_is_shipped_again(dispatch, group):
    register_policy_loss("mine")(first)
    train(dispatch)
    PolicyLossRegistry.unregister("mine")
    register_policy_loss("mine")(second)
    train(dispatch)
    assert group.shipped == [["mine"], ["mine"]]


def test_a_users_function_in_the_place_of_a_built_in_is_shipped(dispatch, group):
    train(dispatch)
    PolicyLossRegistry.unregister("regular")
    register_policy_loss("regular")(first)
    train(dispatch)
    assert group.shipped == [["regular"]]
