"""Time and memory of every advantage estimator and every policy loss, against one pass over the batch.

    python benchmarks/algorithms.py [--rows 8192] [--tokens 4096] [--threads 2] [--only grpo regular]

Goes through both registries. One pass is ``x + 1`` into a fresh tensor of the batch's shape, timed in turns with each
method; the least of the repeats counts for both. Losses run forward and backward over micro-batches, with the
weights of the loss reduction. Peak memory is the high water of the process's resident memory (Linux, reset before the
call, with freed memory returned to the system; the least of three calls) minus what was there before, inputs included,
and minus the results; one unit is a tensor of the batch's shape. The last column is a loop over rows, timed on a part
of them and scaled: GRPO with a dictionary for outcome estimators, the discounted sum token by token for the others,
and for losses the same function on micro-batches of one row. The exit code is 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from skyrl.algorithms.advantages import AdvantageEstimatorRegistry, compute_advantages_and_returns
from skyrl.algorithms.loss_reduction import compute_loss_weights
from skyrl.algorithms.policy_losses import PolicyLossRegistry
from skyrl.algorithms.policy_losses.call import compute_policy_loss
from skyrl.config.algorithm import AlgorithmConfig

OUTCOME_PASSES, RECURSIVE_PASSES, LOSS_PASSES = 3.0, 10.0, 15.0
MEMORY_TENSORS = 2.0
LOOP_ROWS = 128
MEMORY_REPEATS = 3
"""The allocator's fragmentation adds to some calls and not to others."""
GAMMA, LAMBDA = 0.99, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the trainer has: float32 tensors (rows, tokens), an int64 response mask, right-aligned."""

    rewards: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    valid_rows: Tensor
    values: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    rollout_logprobs: Tensor
    weights: Tensor
    uids: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One line of the table."""

    name: str
    kind: str
    limit_passes: float
    run: Callable[[], list[Tensor]]
    """Returns the results; losses keep none."""
    loop: Callable[[int], None]
    """Does the same for the first rows only, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was seen of a method."""

    seconds: float
    passes: float
    tensors: float
    """Peak memory in tensors of the batch's shape."""
    loop_seconds: float

    def holds(self, method: Method) -> bool:
        """Whether both limits are kept."""
        return self.passes <= method.limit_passes and self.tensors <= MEMORY_TENSORS


def make_batch(rows: int, tokens: int, group: int) -> Batch:
    """Rows of 1/8 to all of the width, turns of 384 tokens with 128 observed ones between, one row in 128 failed."""
    generator = torch.Generator().manual_seed(0)
    column = torch.arange(tokens)
    length = torch.randint(max(1, tokens // 8), tokens + 1, (rows, 1), generator=generator)
    response_mask = (column >= tokens - length).long()
    loss_mask = (response_mask * ((column - tokens + length) % 512 < 384)).float()
    uids = [f"prompt-{row // group}" for row in range(rows)]

    def noise(scale: float) -> Tensor:
        return torch.empty(rows, tokens).normal_(0.0, scale, generator=generator)

    old_log_probs = noise(1.0).abs_().neg_()
    return Batch(
        rewards=noise(0.01).mul_(response_mask),
        response_mask=response_mask,
        loss_mask=loss_mask,
        valid_rows=torch.arange(rows) % 128 != 7,
        values=noise(1.0),
        log_probs=noise(0.1).add_(old_log_probs),
        old_log_probs=old_log_probs,
        rollout_logprobs=noise(0.01).add_(old_log_probs),
        weights=compute_loss_weights(loss_mask, "token_mean", uids=uids),
        uids=uids,
    )


def estimator_method(name: str, batch: Batch) -> Method:
    """An estimator, called as the trainer calls it."""
    rows = len(batch.uids)
    outcome = AdvantageEstimatorRegistry.traits(name).outcome
    scores = batch.rewards.sum(dim=-1)

    def run() -> list[Tensor]:
        results = compute_advantages_and_returns(
            batch.rewards, batch.response_mask, batch.uids, name, AlgorithmConfig(), batch.values,
            gamma=GAMMA, lambd=LAMBDA, loss_mask=batch.loss_mask, valid_rows=batch.valid_rows,
            baseline_scores=torch.zeros(rows), reward_components={"answer": scores, "style": scores.square()},
        )  # fmt: skip
        return list(results)

    return Method(
        name=name,
        kind="outcome" if outcome else "tokens",
        limit_passes=OUTCOME_PASSES if outcome else RECURSIVE_PASSES,
        run=run,
        loop=lambda count: (loop_over_groups if outcome else loop_over_tokens)(batch, count),
    )


def loss_method(name: str, batch: Batch, micro_rows: int) -> Method:
    """A loss, forward and backward, as a worker calls it."""
    config = AlgorithmConfig(policy_loss_type=name)

    def step(start: int, stop: int) -> None:
        part = slice(start, stop)
        log_probs = batch.log_probs[part].detach().requires_grad_()
        loss, _ = compute_policy_loss(
            name,
            log_probs=log_probs,
            old_log_probs=batch.old_log_probs[part],
            advantages=batch.values[part],
            config=config,
            loss_mask=batch.loss_mask[part],
            rollout_logprobs=batch.rollout_logprobs[part],
            loss_weights=batch.weights[part],
        )
        loss.backward()

    def steps(rows: int, size: int) -> list[Tensor]:
        for start in range(0, rows, size):
            step(start, min(start + size, rows))
        return []

    return Method(
        name=name,
        kind="loss",
        limit_passes=LOSS_PASSES,
        run=lambda: steps(len(batch.uids), micro_rows),
        loop=lambda count: (steps(count, 1), None)[1],
    )


def loop_over_groups(batch: Batch, count: int) -> None:
    """GRPO row by row."""
    scores = defaultdict(list)
    advantages = torch.zeros(count, batch.rewards.shape[1])
    masks = [batch.response_mask[row].bool() for row in range(count)]
    for row in range(count):
        scores[batch.uids[row]].append(batch.rewards[row][masks[row]].sum().item())
    for row in range(count):
        group = scores[batch.uids[row]]
        score = batch.rewards[row][masks[row]].sum().item()
        spread = statistics.stdev(group) if len(group) > 1 else 1.0
        advantages[row] = torch.where(masks[row], (score - statistics.fmean(group)) / (spread + 1e-6), 0.0)


def loop_over_tokens(batch: Batch, count: int) -> None:
    """Discounted rewards to go, token by token."""
    results = torch.zeros(count, batch.rewards.shape[1])
    for row in range(count):
        to_go, running = [], 0.0
        for reward in reversed(batch.rewards[row].tolist()):
            running = reward + GAMMA * running
            to_go.append(running)
        results[row] = torch.tensor(to_go[::-1])


def measure(method: Method, batch: Batch, repeats: int) -> Measured:
    """Memory in a first call, then seconds in turns with a pass, then the loop."""
    tensor_bytes = batch.rewards.numel() * batch.rewards.element_size()
    tensors = min(peak_bytes(method.run) for _ in range(MEMORY_REPEATS)) / tensor_bytes
    seconds, pass_seconds = [], []
    for _ in range(repeats):
        pass_seconds.append(timed(lambda: batch.rewards + 1))
        seconds.append(timed(method.run))
    count = min(LOOP_ROWS, len(batch.uids))
    loop_seconds = timed(lambda: method.loop(count)) * len(batch.uids) / count
    return Measured(
        seconds=min(seconds),
        passes=min(seconds) / min(pass_seconds),
        tensors=tensors,
        loop_seconds=loop_seconds,
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call that finds no memory left over; giving its results back does not count."""
    give_memory_back()
    began = time.perf_counter()
    results = work()
    seconds = time.perf_counter() - began
    del results
    return seconds


def peak_bytes(work: Callable[[], list[Tensor]]) -> float:
    """Resident memory at its highest during a call, beyond what was there before and beyond the results."""
    give_memory_back()
    Path("/proc/self/clear_refs").write_text("5")  # starts a new high water
    before = resident_bytes("VmRSS")
    results = {result.untyped_storage().data_ptr(): result.untyped_storage().nbytes() for result in work()}
    return max(0.0, resident_bytes("VmHWM") - before - sum(results.values()))


def give_memory_back() -> None:
    """Return freed memory to the system: a call that found it would need no page faults, and show no growth."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident_bytes(field: str) -> int:
    """A field of the process's status, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")
    return int(match[1]) * 1024


def report(method: Method, seen: Measured) -> str:
    """One line of the table."""
    holds = "yes" if seen.holds(method) else "NO"
    return (
        f"{method.name:20} {method.kind:8} {seen.seconds:8.3f} {seen.passes:7.2f} {method.limit_passes:6.0f} "
        f"{seen.tensors:7.2f} {MEMORY_TENSORS:6.0f}  {holds:5} {seen.loop_seconds:7.1f}"
    )


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--group", type=int, default=16, help="rows of one prompt")
    parser.add_argument("--micro-rows", type=int, default=64, help="rows of a micro-batch of the losses")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=None, help="names; default: all that are registered")
    return parser.parse_args()


def main() -> int:
    """Run; 1 when a limit is missed."""
    args = parse_arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    batch = make_batch(args.rows, args.tokens, args.group)
    torch.ones(64, 64).mm(torch.ones(64, 64))  # loads the code of matrix products, which is memory of no method
    methods = [estimator_method(name, batch) for name in AdvantageEstimatorRegistry.list_available()]
    methods += [loss_method(name, batch, args.micro_rows) for name in PolicyLossRegistry.list_available()]
    pass_seconds = min(timed(lambda: batch.rewards + 1) for _ in range(args.repeats))
    print(f"{args.rows} x {args.tokens} tokens, groups of {args.group}, float32, {args.threads} threads")
    print(f"one pass: {pass_seconds:.4f} s; memory: peak resident memory beyond inputs and results, in batch tensors")
    print(f"losses: forward and backward, micro-batches of {args.micro_rows}; loop: scaled from {LOOP_ROWS} rows\n")
    print(
        f"{'name':20} {'kind':8} {'seconds':>8} {'passes':>7} {'limit':>6} {'memory':>7} {'limit':>6}  holds   loop s"
    )
    missed = []
    for method in methods:
        if args.only is None or method.name in args.only:
            seen = measure(method, batch, args.repeats)
            print(report(method, seen), flush=True)
            missed += [] if seen.holds(method) else [method.name]
    print(f"\nlimits missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
