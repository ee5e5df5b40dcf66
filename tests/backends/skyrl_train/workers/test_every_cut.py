"""However a mini-batch is cut into ranks and micro-batches, loss, gradient and metrics are those of the whole.

Policy loss, KL, entropy, off-policy correction and critic together, in float64, with what masks hide set to NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from skyrl.algorithms.loss_reduction import compute_loss_weights
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.backends.skyrl_train.workers.critic import critic_micro_batch_loss
from skyrl.backends.skyrl_train.workers.metrics import MetricBuffer, finish_moments
from skyrl.backends.skyrl_train.workers.policy import LossScale, PolicyRows, finish_policy_metrics, policy_loss
from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from tests.backends.skyrl_train.workers.batches import make_batch

ROWS = 5
PLAIN = AlgorithmConfig(
    use_kl_loss=True, kl_loss_coef=0.5, use_entropy_loss=True, entropy_loss_coef=0.1, temperature=1.0
)
CORRECTED = AlgorithmConfig(
    **vars(PLAIN)
    | {
        "off_policy_correction": OffPolicyCorrectionConfig(
            tis_ratio_type="token",
            token_tis_ratio_clip_high=1.05,
            sequence_mask_metric="geometric",
            geo_mask_low=0.95,
            geo_mask_high=1.05,
            outlier_token_is_threshold_high=1.45,
            token_mask_is_threshold_low=0.9,
            token_mask_is_threshold_high=1.3,
        )
    }
)
Edges = tuple[int, ...]


def compositions(total: int) -> Iterator[Edges]:
    """All ways to write `total` as an ordered sum, as the edges of its parts."""
    for inner in itertools.product([False, True], repeat=total - 1):
        yield (0, *(i + 1 for i, cut in enumerate(inner) if cut), total)


def mini_batch(reduction: str) -> TrainingInputBatch:
    batch = make_batch(rows=ROWS)
    batch["loss_mask"][3] = 0.0  # a failed rollout
    batch["loss_weights"] = compute_loss_weights(
        batch["loss_mask"], reduction, uids=["a", "a", "b", "b", "b"], max_seq_len=16
    )
    hidden = batch["loss_mask"] == 0
    for key in ("advantages", "base_action_log_probs", "rollout_logprobs", "values", "returns"):
        batch[key] = batch[key].masked_fill(hidden, float("nan"))
    return batch.to(dtype=torch.float64)


def run(
    batch: TrainingInputBatch, cuts: tuple[Edges, ...], algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Train ranks with equal shares of the rows, each cut at its own edges.

    Returns:
        Gradients by log-probs and by values, averaged over ranks as FSDP does, and metrics over all ranks.
    """
    share, ranks = len(batch) // len(cuts), len(cuts)
    log_probs = (batch["action_log_probs"] + 0.3 * batch["action_log_probs"].sin()).requires_grad_()
    values = torch.nan_to_num(batch["values"] + 0.15).requires_grad_()
    buffers = []
    for rank, edges in enumerate(cuts):
        buffers.append(MetricBuffer())
        for start, end in itertools.pairwise(edges):
            rows = slice(rank * share + start, rank * share + end)
            scale = LossScale(dp_size=ranks, row_share=(end - start) / share)
            now = log_probs[rows]
            policy_loss(
                PolicyRows.from_batch(batch[rows]), now, now.square(), "regular", algorithm, scale, buffers[-1]
            ).backward()
            critic = critic_micro_batch_loss(batch[rows], values[rows], algorithm, buffers[-1])
            (critic * ranks).backward()
    assert log_probs.grad is not None
    assert values.grad is not None
    return log_probs.grad / ranks, values.grad / ranks, finish_moments(finish_policy_metrics(all_reduced(buffers)))


def all_reduced(buffers: list[MetricBuffer]) -> dict[str, float]:
    """What every rank reads after the collectives."""
    sent: list[list[tuple[str, Tensor]]] = []
    for buffer in buffers:
        calls: list[tuple[str, Tensor]] = []

        def record(packed: Tensor, op: str, calls: list[tuple[str, Tensor]] = calls) -> Tensor:
            calls.append((op, packed))
            return packed

        buffer.result(record)
        sent.append(calls)
    answers = []
    for calls_of_one in zip(*sent, strict=True):
        ops, packed = zip(*calls_of_one, strict=True)
        assert len(set(ops)) == 1, "ranks disagree on the order of collectives"
        stacked = torch.stack(packed)
        answers.append({"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[ops[0]])
    replay = iter(answers)
    return buffers[0].result(lambda packed, op: next(replay))


@pytest.mark.parametrize("algorithm", [PLAIN, CORRECTED], ids=["plain", "corrected"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_every_cut_has_the_loss_gradient_and_metrics_of_the_whole(reduction: str, algorithm: AlgorithmConfig) -> None:
    batch = mini_batch(reduction)
    by_log_probs, by_values, whole = run(batch, ((0, ROWS),), algorithm)
    assert by_log_probs.isfinite().all()
    assert by_log_probs.any()
    num_cuts = 0
    for ranks in (1, 2, 4):
        padded = pad_training_input_batch(batch, -ROWS % ranks)
        shares = list(compositions(len(padded) // ranks))
        for cuts in itertools.product(shares, repeat=ranks):
            num_cuts += 1
            found_log_probs, found_values, metrics = run(padded, cuts, algorithm)
            for found, expected in ((found_log_probs, by_log_probs), (found_values, by_values)):
                torch.testing.assert_close(found[:ROWS], expected, rtol=1e-12, atol=1e-15)
                assert not found[ROWS:].any()
            assert metrics.keys() == whole.keys()
            for name in ("policy_loss", "final_loss", "critic_loss", "policy_kl", "policy_entropy"):
                assert metrics[name] == pytest.approx(whole[name], rel=1e-12), name
            for name, value in metrics.items():  # a loss reports in float32
                assert value == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    assert num_cuts == 16 + 4**2 + 2**4


def test_the_corrected_run_drops_and_weighs_some_tokens() -> None:
    """Else the test above would say nothing about the correction."""
    metrics = run(mini_batch("token_mean"), ((0, ROWS),), CORRECTED)[2]
    for name in ("token_mask_ratio", "tis_token_clip_high_ratio", "geo_sequence_mask_masked_ratio"):
        assert 0 < metrics[f"loss_metrics/{name}"] < 1
    assert 0 < metrics["loss_metrics/kept_token_ratio"] < 1
    assert 0 < metrics["loss_metrics/ess"] < metrics["loss_metrics/kept_token_ratio"]
    assert metrics["loss_metrics/correction_weight_std"] > 0
