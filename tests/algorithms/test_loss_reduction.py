"""The weights of a mini-batch, and that no cut changes a loss."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.critic_loss import critic_loss
from skyrl.algorithms.kl import compute_approx_kl
from skyrl.algorithms.loss_reduction import (
    LOSS_REDUCTIONS,
    apply_loss_reduction_to_advantages_minibatch,
    compute_loss_weights,
)
from skyrl.algorithms.masked import weighted_sum
from skyrl.algorithms.policy_losses import compute_policy_loss
from skyrl.config.algorithm import AlgorithmConfig
from skyrl.errors import ConfigError

MASK = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
LOSSES = torch.tensor([[1.0, 2, 3], [4, float("nan"), float("inf")], [5, 6, float("nan")], [7, 8, 9]])
UIDS = ["p", "p", "q", "q"]


def weights_of(reduction, mask=MASK, **needs):
    return compute_loss_weights(mask, reduction, **({"uids": UIDS, "max_seq_len": 10, "micro_batch_size": 1} | needs))


@pytest.mark.parametrize(
    ("reduction", "micro", "expected"),
    [
        ("token_mean", 1, 5.0),
        ("sequence_mean", 1, 4.875),
        ("seq_mean_token_sum_norm", 1, 1.125),
        ("prompt_mean", 1, 4.75),
        ("token_mean_legacy", 1, 4.875),
        ("token_mean_legacy", 2, 4.75),
    ],
)
def test_reductions_have_the_spec_values(reduction, micro, expected):
    weights = weights_of(reduction, micro_batch_size=micro)
    assert weights.dtype == torch.float32
    assert weighted_sum(LOSSES, MASK, weights).item() == pytest.approx(expected)


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_a_fully_masked_mini_batch_has_loss_zero(reduction):
    weights = weights_of(reduction, torch.zeros(4, 3))
    assert weights.isfinite().all()
    assert weighted_sum(torch.full((4, 3), float("nan")), torch.zeros(4, 3), weights).item() == 0.0


def test_prompts_are_recognised_wherever_their_rows_stand():
    order = [2, 0, 3, 1]
    mixed = compute_loss_weights(MASK[order], "prompt_mean", uids=[UIDS[i] for i in order])
    assert torch.equal(mixed, weights_of("prompt_mean")[order])


def test_a_short_last_chunk_is_a_chunk():
    """Rows 0-1, 2-3 and 4 alone: chunk means 2.5, 7 and 9."""
    mask = torch.cat([MASK, MASK[:1]])
    weights = compute_loss_weights(mask, "token_mean_legacy", micro_batch_size=2)
    losses = torch.cat([LOSSES, torch.full((1, 3), 9.0)])
    assert weighted_sum(losses, mask, weights).item() == pytest.approx((2.5 + 7 + 9) / 3)


@pytest.mark.parametrize(
    ("reduction", "needs", "text"),
    [
        ("token_men", {}, r"loss_reduction=token_men: .*did you mean token_mean\?"),
        ("prompt_mean", {"uids": None}, "uid of each of the 4 rows"),
        ("prompt_mean", {"uids": ["p"]}, "got 1"),
        ("seq_mean_token_sum_norm", {"max_seq_len": None}, "max_seq_len"),
        ("token_mean_legacy", {"micro_batch_size": 0}, "micro_train_batch_size_per_gpu"),
    ],
)
def test_what_is_missing_is_named(reduction, needs, text):
    with pytest.raises(ConfigError, match=text):
        weights_of(reduction, **needs)


def test_upstreams_scaled_advantages_give_the_same_loss():
    advantages = torch.where(MASK.bool(), LOSSES, 0.0)
    scaled = apply_loss_reduction_to_advantages_minibatch(advantages, MASK, "sequence_mean", 1, 10)
    assert (scaled * MASK).sum().item() == pytest.approx(4.875)


@st.composite
def ragged_batches(draw):
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    mask = torch.tensor([[draw(st.booleans()) for _ in range(width)] for _ in range(rows)]).float()
    uids = [draw(st.sampled_from("abc")) for _ in range(rows)]
    losses = torch.randn(rows, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    return mask, uids, losses.double()


def slow_reduction(reduction, mask, uids, losses, max_seq_len, micro):
    """The table of the specification, row by row."""
    rows = list(range(len(mask)))
    units = {
        "token_mean": [rows],
        "sequence_mean": [[row] for row in rows],
        "seq_mean_token_sum_norm": [[row] for row in rows],
        "prompt_mean": [[row for row in rows if uids[row] == uid] for uid in sorted(set(uids))],
        "token_mean_legacy": [rows[start : start + micro] for start in range(0, len(rows), micro)],
    }[reduction]
    means = []
    for unit in units:
        kept = [losses[r, t].item() for r in unit for t in range(mask.shape[1]) if mask[r, t] == 1]
        size = max_seq_len if reduction == "seq_mean_token_sum_norm" else max(1, len(kept))
        means.append(sum(kept) / size)
    return sum(means) / len(means)


@given(ragged_batches(), st.sampled_from(LOSS_REDUCTIONS), st.integers(1, 50), st.integers(1, 4))
def test_reductions_agree_with_a_loop(batch, reduction, max_seq_len, micro):
    mask, uids, losses = batch
    weights = compute_loss_weights(mask, reduction, uids=uids, max_seq_len=max_seq_len, micro_batch_size=micro)
    expected = slow_reduction(reduction, mask, uids, losses, max_seq_len, micro)
    assert weighted_sum(losses, mask, weights.double()).item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def compositions(total):
    """All ways to write `total` as an ordered sum: the ways to cut rows into consecutive parts."""
    for cuts in itertools.product([False, True], repeat=total - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [total]
        yield list(zip([0, *ends[:-1]], ends, strict=True))


@settings(max_examples=25, deadline=None)
@given(ragged_batches(), st.sampled_from([name for name in LOSS_REDUCTIONS if name != "token_mean_legacy"]))
def test_every_cut_into_micro_batches_and_ranks_gives_the_same_loss_and_gradient(batch, reduction):
    """Policy loss, KL, entropy-like term and critic loss, as a worker sums them.

    Ranks take equal consecutive chunks of the padded rows; each cuts its own in all ways, and all parts are summed.
    """
    mask, uids, noise = batch
    rows, width = mask.shape
    config = AlgorithmConfig()
    columns = {
        "old": noise * 0.3, "advantages": noise.flip(0), "base": noise.flip(1) * 0.2,
        "returns": noise.square(), "mask": mask,
        "weights": compute_loss_weights(mask, reduction, uids=uids, max_seq_len=9).double(),
    }  # fmt: skip

    def part_loss(logp, start, end, columns):
        cut = {name: column[start:end] for name, column in columns.items()}
        policy, _ = compute_policy_loss(
            "regular", log_probs=logp, old_log_probs=cut["old"], advantages=cut["advantages"], config=config,
            loss_mask=cut["mask"], loss_weights=cut["weights"],
        )  # fmt: skip
        kl = weighted_sum(compute_approx_kl(logp, cut["base"], cut["mask"], "k3"), cut["mask"], cut["weights"])
        entropy = weighted_sum(logp.sin(), cut["mask"], cut["weights"])
        value, _ = critic_loss(
            logp, cut["old"], cut["returns"], loss_mask=cut["mask"], loss_weights=cut["weights"], value_clip=0.2
        )
        return policy + 0.1 * kl - 0.01 * entropy + value

    start_at = noise * 0.5
    whole = start_at.clone().requires_grad_()
    loss = part_loss(whole, 0, rows, columns)
    loss.backward()
    for num_ranks in (1, 2, 3):
        extra = -rows % num_ranks
        padded = {name: torch.cat([column, column[:1].expand(extra, width)]) for name, column in columns.items()}
        for name in ("mask", "weights"):
            padded[name] = torch.cat([columns[name], torch.zeros(extra, width, dtype=columns[name].dtype)])
        share = (rows + extra) // num_ranks
        for cut in compositions(share):
            logp = torch.cat([start_at, start_at[:1].expand(extra, width)]).requires_grad_()
            total = 0.0
            for rank in range(num_ranks):
                for start, end in cut:
                    first, last = rank * share + start, rank * share + end
                    part = part_loss(logp[first:last], first, last, padded)
                    part.backward()
                    total += part.item()
            assert total == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)
            assert torch.allclose(logp.grad[:rows], whole.grad, rtol=1e-9, atol=1e-12)
            assert not logp.grad[rows:].any()


@pytest.mark.parametrize("shape", [(3,), (2, 3, 1)])
@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_a_mask_has_rows_and_tokens(reduction, shape):
    with pytest.raises(ValueError, match=r"loss_mask has shape \(.*\); it must be \(batch, response\)"):
        compute_loss_weights(torch.ones(shape), reduction, uids=["a"] * shape[0], max_seq_len=5, micro_batch_size=1)
