from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from skyrl.backends.skyrl_train.distributed.fsdp.optimizer import OptimizerSteps, make_scheduler
from skyrl.config.roles import OptimizerConfig
from skyrl.errors import ConfigError


def steps(**fields: object) -> tuple[OptimizerSteps, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    config = OptimizerConfig(lr=0.1, weight_decay=0.0, **fields)  # type: ignore[arg-type]
    return OptimizerSteps([parameter], config, num_training_steps=10), parameter


def test_the_norm_before_clipping_is_returned_and_the_gradient_is_clipped() -> None:
    optimizer, parameter = steps(max_grad_norm=1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step() == pytest.approx(5.0)
    assert parameter.grad is None
    moment = optimizer.optimizer.state[parameter]["exp_avg"]
    torch.testing.assert_close(moment, 0.1 * torch.tensor([0.6, 0.8]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf])
def test_clipping_can_be_off_and_the_norm_is_still_known(limit: float) -> None:
    optimizer, parameter = steps(max_grad_norm=limit)
    parameter.grad = torch.tensor([30.0, 40.0])
    assert optimizer.step() == pytest.approx(50.0)
    torch.testing.assert_close(optimizer.optimizer.state[parameter]["exp_avg"], torch.tensor([3.0, 4.0]))


def test_a_norm_that_is_not_finite_skips_optimizer_and_schedule() -> None:
    optimizer, parameter = steps(num_warmup_steps=4)
    parameter.grad = torch.tensor([float("inf"), 0.0])
    assert optimizer.step() == math.inf
    assert (optimizer.lr, optimizer.skipped_steps, parameter.grad) == (0.0, 1, None)
    assert parameter.tolist() == [3.0, 4.0]


def test_a_rate_set_by_hand_stays() -> None:
    optimizer, parameter = steps(num_warmup_steps=4)
    optimizer.set_lr(0.5)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.lr == 0.5


@pytest.mark.parametrize("name", ["constant_with_warmup", "cosine", "linear"])
def test_schedules_are_those_of_transformers(name: str) -> None:
    from transformers.optimization import get_scheduler

    rates = []
    for make in (
        lambda optimizer: make_scheduler(optimizer, OptimizerConfig(scheduler=name, num_warmup_steps=3), 10),
        lambda optimizer: get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=10),
    ):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = make(optimizer)
        seen = []
        for _ in range(10):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        rates.append(seen)
    assert rates[0] == rates[1]
    assert rates[0][:3] == pytest.approx([0.0, 1 / 3, 2 / 3])


def test_a_schedule_that_needs_the_number_of_steps_says_so() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigError, match=r"optimizer_config.scheduler='cosine'"):
        make_scheduler(optimizer, OptimizerConfig(scheduler="cosine"), None)
    with pytest.raises(ConfigError, match=r"optimizer_config.scheduler='nothing'"):
        make_scheduler(optimizer, OptimizerConfig(scheduler="nothing"), 10)
