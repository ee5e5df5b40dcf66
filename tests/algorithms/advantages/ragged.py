"""Random ragged batches, and the estimators of whole rollouts again, row by row in plain Python."""

import itertools
import math
import statistics
from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st

from skyrl.algorithms.advantages import compute_advantages_and_returns
from skyrl.config.algorithm import AlgorithmConfig

NAN, INF = float("nan"), float("inf")
OUTCOME = ("grpo", "rloo", "maxrl", "opo", "remax", "gpg", "pass_at_k", "liteppo", "gdpo")
RECURSIVE = ("gae", "reinforce++", "turn_level", "no_op")
EPSILON = 1e-6


@dataclass
class Batch:
    """Tensors of an estimator, rewards and values in float64."""

    rewards: torch.Tensor
    response_mask: torch.Tensor
    loss_mask: torch.Tensor
    values: torch.Tensor
    uids: list[str]
    valid: torch.Tensor
    baseline: torch.Tensor
    style: torch.Tensor
    grade: torch.Tensor

    def take(self, rows):
        """The same rows of everything."""
        return Batch(
            **{
                field.name: [self.uids[i] for i in rows] if field.name == "uids" else getattr(self, field.name)[rows]
                for field in fields(self)
            }
        )

    def estimate(self, name, config=None, **options):
        """Advantages and returns of the library."""
        return compute_advantages_and_returns(
            self.rewards, self.response_mask, self.uids, name, config or AlgorithmConfig(), self.values,
            loss_mask=self.loss_mask, valid_rows=self.valid, baseline_scores=self.baseline,
            reward_components={"style": self.style, "grade": self.grade}, **options,
        )  # fmt: skip


@st.composite
def batches(draw, max_rows=12, max_width=9):
    """Interleaved groups of any size, failed rows, several turns a row; rows may have nothing that trains."""
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    length = torch.randint(0, width + 1, (rows, 1), generator=generator)
    response = (torch.arange(width) >= width - length).long()
    loss = (response * (torch.rand(rows, width, generator=generator) > 0.35)).float()

    def numbers(*shape):
        if draw(st.booleans()):
            return torch.randint(-1, 2, shape, generator=generator).double()
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    names = st.sampled_from(["p0", "p1", "p2", "p10"])
    return Batch(
        rewards=numbers(rows, width) * response * draw(st.sampled_from([1e-2, 1.0, 100.0])),
        response_mask=response,
        loss_mask=loss,
        values=numbers(rows, width),
        uids=draw(st.lists(names, min_size=rows, max_size=rows)),
        valid=torch.rand(rows, generator=generator) > 0.2,
        baseline=numbers(rows),
        style=numbers(rows),
        grade=numbers(rows) * 10,
    )


def mean_of(values):
    """0 without any."""
    return sum(values) / len(values) if values else 0.0


def std_of(values):
    """Sample standard deviation, 0 for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


class Rows:
    """What the loops below need to know of each row."""

    def __init__(self, batch):
        self.batch = batch
        self.alive = [i for i in range(len(batch.uids)) if batch.valid[i]]
        self.score = [sum(r for r, m in zip(*pair, strict=True) if m) for pair in self._pairs(batch.rewards)]
        self.length = [sum(row) for row in batch.loss_mask.tolist()]

    def _pairs(self, tensor):
        return zip(tensor.tolist(), self.batch.response_mask.tolist(), strict=True)

    def group(self, row):
        """Rows of the same prompt that did not fail."""
        return [i for i in self.alive if self.batch.uids[i] == self.batch.uids[row]]

    def groups(self):
        """Every group once."""
        return [self.group(i) for i in self.alive if i == self.group(i)[0]]


def slow_advantages(name, batch, *, norm=True, k=2, weights=(1.0, 1.0)):
    """One advantage for each row, 0 for failed ones."""
    rows = Rows(batch)
    if name == "gdpo":
        return slow_gdpo(rows, weights)
    return [slow_row(name, rows, i, norm, k) if i in rows.alive else 0.0 for i in range(len(batch.uids))]


def slow_row(name, rows, row, norm, k):
    group = rows.group(row)
    scores = [rows.score[i] for i in group]
    score, mean, alone = rows.score[row], mean_of(scores), len(group) == 1
    if name == "grpo":
        centred, std = (score, 1.0) if alone else (score - mean, std_of(scores))
        return centred / (std + EPSILON) if norm else centred
    if name == "rloo":
        return 0.0 if alone else score - (sum(scores) - score) / (len(group) - 1)
    if name == "maxrl":
        return score if alone else (score - mean) / (mean + EPSILON)
    if name == "opo":
        tokens = sum(rows.length[i] for i in group)
        weighted = sum(rows.length[i] * rows.score[i] for i in group)
        return score - (weighted / tokens if tokens else mean)
    if name == "remax":
        return score - rows.batch.baseline[row].item()
    if name == "gpg":
        spread = [g for g in rows.groups() if len({rows.score[i] for i in g}) > 1]
        return len(rows.groups()) / len(spread) * (score - mean) if spread else 0.0
    if name == "liteppo":
        return (score - mean) / (std_of([rows.score[i] for i in rows.alive]) + EPSILON)
    return slow_pass_at_k([s > 0 for s in scores], group.index(row), k)


def slow_pass_at_k(passed, row, k):
    """Mean over all subsets of size k that hold the row, standardised over all subsets."""
    subsets = list(itertools.combinations(range(len(passed)), min(k, len(passed))))
    rewards = [float(any(passed[i] for i in subset)) for subset in subsets]
    mean = mean_of(rewards)
    std = math.sqrt(mean_of([(r - mean) ** 2 for r in rewards]))
    own = [r for r, subset in zip(rewards, subsets, strict=True) if row in subset]
    return (mean_of(own) - mean) / std if std else 0.0


def slow_gdpo(rows, weights):
    total = [0.0] * len(rows.batch.uids)
    for weight, component in zip(weights, (rows.batch.style.tolist(), rows.batch.grade.tolist()), strict=True):
        for i in rows.alive:
            group = [component[j] for j in rows.group(i)]
            total[i] += weight * (component[i] - mean_of(group)) / (std_of(group) + EPSILON)
    alive = [total[i] for i in rows.alive]
    return [
        (total[i] - mean_of(alive)) / (std_of(alive) + EPSILON) if i in rows.alive else 0.0 for i in range(len(total))
    ]
