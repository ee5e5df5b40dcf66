"""Random ragged batches, and the comparison of a loss with a slow loop and with autograd of its plain formula."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

GARBAGE = (float("nan"), float("inf"), float("-inf"), 0.0)


class Token(NamedTuple):
    """A token that trains; log-probs in nats."""

    logp: float
    old: float
    rollout: float
    advantage: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of trained tokens, and the same as right-aligned float64 tensors with garbage where the mask is 0."""

    rows: list[list[Token]]
    tensors: dict[str, Tensor]
    weights: Tensor

    @property
    def tokens(self) -> list[Token]:
        return [token for row in self.rows for token in row]

    @property
    def trained(self) -> Tensor:
        return self.tensors["loss_mask"] != 0

    def columns(self) -> list[Tensor]:
        """The trained tokens, row after row: log_probs (a leaf with gradient), old, rollout, advantages, weights."""
        log_probs, *others = torch.tensor(self.tokens, dtype=torch.float64).reshape(-1, 5).unbind(-1)
        return [log_probs.clone().requires_grad_(), *others]


def make_batch(seed: int, lengths: list[int]) -> Batch:
    """Rows of these lengths; within a row a token in five does not train."""
    rng = random.Random(seed)
    width = max(lengths)
    columns = torch.tensor([[rng.choice(GARBAGE) for _ in range(5)] for _ in range(len(lengths) * width)])
    cells = columns.double().reshape(len(lengths), width, 5)
    mask = torch.zeros(len(lengths), width, dtype=torch.float64)
    rows: list[list[Token]] = []
    for i, length in enumerate(lengths):
        rows.append([])
        for t in range(width - length, width):
            if rng.random() < 0.2:
                continue
            logp = -rng.expovariate(1.0)
            old, rollout = min(logp + rng.gauss(0, 0.4), 0.0), min(logp + rng.gauss(0, 0.4), 0.0)
            token = Token(logp, old, rollout, rng.gauss(0, 1.5), rng.uniform(0.1, 2.0))
            rows[-1].append(token)
            cells[i, t], mask[i, t] = torch.tensor(token, dtype=torch.float64), 1.0
    log_probs, old, rollout, advantages, _ = cells.clone().unbind(-1)
    tensors = {
        "log_probs": log_probs.clone(), "old_log_probs": old.clone(), "rollout_logprobs": rollout.clone(),
        "advantages": advantages.clone(), "loss_mask": mask,
    }  # fmt: skip
    return Batch(rows=rows, tensors=tensors, weights=torch.where(mask != 0, cells[..., 4], 1.0))


def ragged_batches() -> st.SearchStrategy[Batch]:
    """One to five rows of up to seven tokens; the sizes shrink, the numbers come from a seed."""
    lengths = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
    return st.builds(make_batch, st.integers(0, 2**32), lengths)


def run(loss_fn: Callable[..., tuple[Tensor, dict]], batch: Batch, config) -> tuple[Tensor, dict, Tensor]:
    """The loss, its metrics and the gradient by log_probs, all with the weights of the batch."""
    log_probs = batch.tensors["log_probs"].clone().requires_grad_()
    loss, metrics = loss_fn(**(batch.tensors | {"log_probs": log_probs}), config=config, loss_weights=batch.weights)
    loss.backward()
    assert log_probs.grad is not None
    return loss, metrics, log_probs.grad


def assert_same(
    loss_fn: Callable[..., tuple[Tensor, dict]],
    batch: Batch,
    config,
    loop: Callable[[Batch], tuple[float, dict[str, float]]],
    formula: Callable[..., Tensor],
) -> None:
    """The value and metrics are those of a loop, the gradient is that of a formula, and 0 where nothing trains.

    Args:
        loss_fn: The loss.
        batch: Its input.
        config: `trainer.algorithm`.
        loop: Gives the weighted sum and the metrics.
        formula: Of log_probs, old, rollout, advantages (one entry for each trained token) to the token losses.
    """
    loss, metrics, gradient = run(loss_fn, batch, config)
    total, numbers = loop(batch)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-11)
    assert metrics.keys() == numbers.keys()
    for name, number in numbers.items():
        assert metrics[name].item() == pytest.approx(number, rel=1e-5, abs=1e-9), name
    assert (gradient[~batch.trained] == 0).all()
    if batch.tokens:
        log_probs, old, rollout, advantages, weights = batch.columns()
        (expected,) = torch.autograd.grad((formula(log_probs, old, rollout, advantages) * weights).sum(), log_probs)
        assert gradient[batch.trained].tolist() == pytest.approx(expected.tolist(), rel=1e-8, abs=1e-10)


def per_token(token_loss: Callable[[Token], float], clipped: Callable[[Token], bool]):
    """The loop of a loss that looks at one token at a time, and whose one metric is the share of clipped tokens."""

    def loop(batch: Batch) -> tuple[float, dict[str, float]]:
        total = sum(token.weight * token_loss(token) for token in batch.tokens)
        return total, {"clip_ratio": sum(map(clipped, batch.tokens)) / max(1, len(batch.tokens))}

    return loop
