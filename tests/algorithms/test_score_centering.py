"""The centred score: its expectation under the sampler is zero."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.policy_losses import compute_policy_loss
from skyrl.algorithms.score_centering import SamplerHead
from skyrl.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig, ScoreCenteringConfig
from skyrl.errors import ConfigError

LOSSES = ["reinforce", "rollout_is"]
TAILS = ["proportional", "drop", "renormalize"]


def config(tail="proportional", *, enabled=True, low=0.5, high=1.0):
    centering = ScoreCenteringConfig(enabled=enabled, tail=tail)
    return AlgorithmConfig(score_centering=centering, eps_clip_low=low, eps_clip_high=high)


def distribution(seed, size, dtype=torch.float64):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.log_softmax(logits, -1).to(dtype)


def every_token(logits, log_q, head_ids, name, algorithm):
    """The loss Σ_a q(a)·L(a) of one prefix with advantage 1: one row for each token that could be sampled."""
    size, log_p = len(logits), torch.log_softmax(logits, -1)
    ids = torch.tensor(head_ids)
    head = SamplerHead(
        ids=ids.expand(size, 1, -1),
        sampler_log_probs=log_q[ids].expand(size, 1, -1),
        log_probs=log_p[ids].expand(size, 1, -1),
        sampled_ids=torch.arange(size).unsqueeze(1),
    )
    return compute_policy_loss(
        name,
        log_probs=log_p.unsqueeze(1),
        old_log_probs=None,
        advantages=torch.ones(size, 1, dtype=logits.dtype),
        config=algorithm,
        loss_mask=torch.ones(size, 1),
        rollout_logprobs=log_q.unsqueeze(1),
        loss_weights=log_q.exp().unsqueeze(1),
        topk=head,
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tail", TAILS)
def test_the_expected_gradient_is_zero_when_the_head_is_the_whole_vocabulary(name, tail):
    logits = distribution(0, 9).requires_grad_()
    algorithm = config(tail)
    loss, metrics = every_token(logits, distribution(1, 9), list(range(9)), name, algorithm)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max().item() < 1e-7
    assert metrics["score_centering_sampled_in_head_frac"].item() == 1.0
    plain, _ = every_token(logits, distribution(1, 9), list(range(9)), name, config(enabled=False))
    assert torch.autograd.grad(plain, logits)[0].abs().max().item() > 0.05  # what centering took away


def test_the_whole_vocabulary_in_float32_stays_centred():
    logits = distribution(0, 9, torch.float32).requires_grad_()
    loss, _ = every_token(logits, distribution(1, 9, torch.float32), list(range(9)), "reinforce", config())
    assert torch.autograd.grad(loss, logits)[0].abs().max().item() < 1e-6


def test_a_tail_that_is_proportional_is_exact():
    log_p = distribution(2, 8)
    head, outside = [4, 1, 6], [0, 2, 3, 5, 7]
    q = torch.zeros(8, dtype=torch.float64)
    q[head] = torch.tensor([0.5, 0.2, 0.05], dtype=torch.float64)
    q[outside] = 0.25 * log_p[outside].exp() / log_p[outside].exp().sum()
    logits = log_p.clone().requires_grad_()
    loss, metrics = every_token(logits, q.log(), head, "reinforce", config())
    assert torch.autograd.grad(loss, logits)[0].abs().max().item() < 3e-8
    assert metrics["score_centering_sampled_in_head_frac"].item() == pytest.approx(3 / 8)
    dropped, _ = every_token(logits, q.log(), head, "reinforce", config("drop"))
    assert torch.autograd.grad(dropped, logits)[0].abs().max().item() > 0.01


@pytest.mark.parametrize("sampled", [1, 6])
def test_on_policy_the_correction_has_no_gradient(sampled):
    """κ_v = π_v - 1·π_v: the centred gradient is the plain one, whichever token was sampled."""
    logits = distribution(3, 8).requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    ids = torch.tensor([[[1, 2, 3]]])
    head = SamplerHead(
        ids=ids, sampler_log_probs=log_p[ids].detach(), log_probs=log_p[ids], sampled_ids=torch.tensor([[sampled]])
    )
    gradients = []
    for enabled in (True, False):
        loss, metrics = compute_policy_loss(
            "reinforce",
            log_probs=log_p[sampled].reshape(1, 1),
            old_log_probs=None,
            advantages=torch.full((1, 1), 1.7, dtype=torch.float64),
            config=config(enabled=enabled),
            rollout_logprobs=log_p[sampled].detach().reshape(1, 1),
            topk=head,
        )
        gradients.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
        if enabled:
            assert metrics["score_centering_tail_mass_ratio"].item() == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("width", [1, 5, 50, 1999, 2000])
def test_on_policy_the_tail_ratio_is_of_order_one(width):
    """Also where float32 leaves nothing of the tail."""
    log_p = (8 * distribution(4, 2000)).log_softmax(-1).float()
    ids = log_p.topk(width).indices.reshape(1, 1, -1)
    head = SamplerHead(
        ids=ids, sampler_log_probs=log_p[ids], log_probs=log_p[ids], sampled_ids=log_p.argmax().reshape(1, 1)
    )
    _, metrics = compute_policy_loss(
        "reinforce",
        log_probs=log_p.max().reshape(1, 1),
        old_log_probs=None,
        advantages=torch.ones(1, 1),
        config=config(),
        rollout_logprobs=log_p.max().reshape(1, 1),
        topk=head,
    )
    assert 0.0 <= metrics["score_centering_tail_mass_ratio"].item() < 1.5


def random_case(seed=0, rows=3, width=6, k=4, vocab=40):
    """Ragged heads with pads, tokens without a head, a mask, weights, sampled tokens in and out of the head."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, rows, width, vocab, generator=draw, dtype=torch.float64)
    log_p, log_q = noise[0].log_softmax(-1), noise[1].log_softmax(-1)
    ids = noise[2].topk(k).indices
    lengths = torch.randint(0, k + 1, (rows, width, 1), generator=draw)
    ids = torch.where(torch.arange(k) < lengths, ids, -1)
    sampled = torch.where(torch.rand(rows, width, generator=draw) < 0.5, ids[..., 0], -1)
    sampled = torch.where(sampled < 0, torch.randint(0, vocab, (rows, width), generator=draw), sampled)
    pad = ids < 0
    gathered = [source.gather(-1, ids.clamp(min=0)).masked_fill(pad, -torch.inf) for source in (log_p, log_q)]
    head = SamplerHead(ids=ids, sampler_log_probs=gathered[1], log_probs=gathered[0], sampled_ids=sampled)
    own = [source.gather(-1, sampled.unsqueeze(-1)).squeeze(-1) for source in (log_p, log_q)]
    tensors = {
        "log_probs": own[0],
        "rollout_logprobs": own[1],
        "advantages": noise[3, ..., 0],
        "loss_mask": (torch.rand(rows, width, generator=draw) < 0.8).double(),
        "loss_weights": torch.rand(rows, width, generator=draw, dtype=torch.float64),
    }
    return head, tensors


def slow(head, tensors, name, algorithm):
    """Token by token: the loss, its gradients by the sampled and the head's log-probs, and the metrics' lists."""
    low, high = 1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high
    tail = algorithm.score_centering.tail

    def c(now, sampler):
        ratio = math.exp(now - sampler)
        return 1.0 if name == "reinforce" else ratio if low < ratio < high else 0.0

    rows, width, k = head.ids.shape
    loss, grad, head_grad = 0.0, torch.zeros(rows, width).double(), torch.zeros(rows, width, k).double()
    lists = {key: [] for key in ("in", "term", "sampler", "trainer", "ratio", "missing")}
    for i in range(rows):
        for t in range(width):
            if not tensors["loss_mask"][i, t]:
                continue
            now, sampler, a, w = (
                tensors[key][i, t].item() for key in ("log_probs", "rollout_logprobs", "advantages", "loss_weights")
            )
            own, members = head.sampled_ids[i, t].item(), {}
            for j in range(k):
                if head.ids[i, t, j] >= 0:
                    members[head.ids[i, t, j].item()] = (
                        head.log_probs[i, t, j].item(), head.sampler_log_probs[i, t, j].item(), j,
                    )  # fmt: skip
            lists["missing"].append(float(not members))
            score = c(now, sampler) * now
            grad[i, t] -= w * a * c(now, sampler)
            if members:
                lists["in"].append(float(own in members))
                members.setdefault(own, (now, sampler, None))
                q_sum = sum(math.exp(q) for _, q, _ in members.values())
                p_sum = sum(math.exp(p) for p, _, _ in members.values())
                ratio = max(0.0, 1 - q_sum) / max(1e-6, 1 - p_sum)
                term = 0.0
                for p, q, j in members.values():
                    kappa = math.exp(q) * c(p, q) / (q_sum if tail == "renormalize" else 1.0)
                    kappa -= ratio * math.exp(p) if tail == "proportional" else 0.0
                    term += kappa * p
                    if j is None:
                        grad[i, t] += w * a * kappa
                    else:
                        head_grad[i, t, j] += w * a * kappa
                score -= term
                for key, value in zip(
                    ("term", "sampler", "trainer", "ratio"), (abs(a * term), q_sum, p_sum, ratio), strict=True
                ):
                    lists[key].append(value)
            loss -= w * a * score
    return loss, grad, head_grad, lists


def run(head, tensors, name, algorithm):
    log_probs, head_log_probs = tensors["log_probs"].clone().requires_grad_(), head.log_probs.clone().requires_grad_()
    loss, metrics = compute_policy_loss(
        name,
        **tensors | {"log_probs": log_probs},
        old_log_probs=None,
        config=algorithm,
        topk=replace(head, log_probs=head_log_probs),
    )
    loss.backward()
    return loss, log_probs.grad, head_log_probs.grad, metrics


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(LOSSES), tail=st.sampled_from(TAILS))
def test_loss_gradient_and_metrics_agree_with_a_loop(seed, name, tail):
    head, tensors = random_case(seed)
    loss, grad, head_grad, metrics = run(head, tensors, name, config(tail))
    slow_loss, slow_grad, slow_head_grad, lists = slow(head, tensors, name, config(tail))
    assert loss.item() == pytest.approx(slow_loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(grad, slow_grad, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(head_grad, slow_head_grad, atol=1e-9, rtol=1e-9)
    names = {
        "sampled_in_head_frac": "in", "term_abs_mean": "term", "sampler_head_mass": "sampler",
        "trainer_head_mass": "trainer", "tail_mass_ratio": "ratio", "missing_ratio": "missing",
    }  # fmt: skip
    for metric, key in names.items():
        mean = sum(lists[key]) / len(lists[key]) if lists[key] else 0.0
        assert metrics[f"score_centering_{metric}"].item() == pytest.approx(mean, rel=1e-5, abs=1e-6), metric


@pytest.mark.parametrize("name", LOSSES)
def test_switched_off_it_is_bit_identical_to_the_base_loss(name):
    head, tensors = random_case()
    off, _, head_grad, metrics = run(head, tensors, name, config(enabled=False))
    plain, plain_metrics = compute_policy_loss(
        name, **tensors, old_log_probs=None, config=config(enabled=False), topk=None
    )
    without, _ = compute_policy_loss(name, **tensors, old_log_probs=None, config=config(), topk=None)
    assert torch.equal(off, plain)
    assert torch.equal(without, plain)
    assert head_grad is None
    assert metrics.keys() == plain_metrics.keys() == {"clip_ratio"}


@pytest.mark.parametrize("name", LOSSES)
def test_without_advantage_there_is_no_loss(name):
    head, tensors = random_case()
    tensors["advantages"] = torch.zeros_like(tensors["advantages"])
    loss, grad, head_grad, metrics = run(head, tensors, name, config())
    assert loss.item() == 0.0
    assert not grad.any()
    assert not head_grad.any()
    assert metrics["score_centering_term_abs_mean"].item() == 0.0


def test_a_token_without_a_head_keeps_the_base_loss_and_is_counted():
    head, tensors = random_case()
    ids, lowest = torch.full_like(head.ids, -1), torch.full_like(head.log_probs, -torch.inf)
    empty = replace(head, ids=ids, sampler_log_probs=lowest, log_probs=lowest)
    loss, grad, head_grad, metrics = run(empty, tensors, "reinforce", config())
    plain, _ = compute_policy_loss("reinforce", **tensors, old_log_probs=None, config=config(), topk=None)
    assert torch.equal(loss, plain)
    torch.testing.assert_close(grad, -tensors["loss_weights"] * tensors["loss_mask"] * tensors["advantages"])
    assert not head_grad.any()
    assert metrics["score_centering_missing_ratio"].item() == 1.0
    assert metrics["score_centering_sampled_in_head_frac"].item() == 0.0


def test_a_head_that_is_shifted_by_one_position_misses_the_sampled_tokens():
    draw = torch.Generator().manual_seed(0)
    sampled = torch.randint(0, 10_000, (4, 64), generator=draw)
    others = torch.randint(0, 10_000, (4, 64, 5), generator=draw)
    aligned = torch.cat([sampled.unsqueeze(-1), others], dim=-1)
    seen = []
    for ids in (aligned, aligned.roll(1, dims=1)):
        flat = torch.full(ids.shape, -3.0)
        _, metrics = compute_policy_loss(
            "reinforce",
            log_probs=torch.full((4, 64), -3.0),
            old_log_probs=None,
            advantages=torch.ones(4, 64),
            config=config(),
            rollout_logprobs=torch.full((4, 64), -3.0),
            topk=SamplerHead(ids=ids, sampler_log_probs=flat, log_probs=flat, sampled_ids=sampled),
        )
        seen.append(metrics["score_centering_sampled_in_head_frac"].item())
    assert seen[0] == 1.0
    assert seen[1] < 0.02


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_masked_bad_value_leaks_into_nothing(name, bad):
    head, tensors = random_case()
    clean, clean_grad, clean_head_grad, clean_metrics = run(head, tensors, name, config())
    hidden = tensors["loss_mask"] == 0
    for key in ("log_probs", "rollout_logprobs", "advantages", "loss_weights"):
        tensors[key] = tensors[key].masked_fill(hidden, bad)
    dirty = replace(
        head,
        log_probs=head.log_probs.masked_fill(hidden.unsqueeze(-1), bad),
        sampler_log_probs=head.sampler_log_probs.masked_fill(hidden.unsqueeze(-1), bad),
    )
    tensors["loss_weights"] = torch.where(hidden, 0.0, tensors["loss_weights"])
    loss, grad, head_grad, metrics = run(dirty, tensors, name, config())
    assert loss.item() == clean.item()
    assert torch.equal(grad, clean_grad)
    assert torch.equal(head_grad, clean_head_grad)
    assert {key: value.item() for key, value in metrics.items()} == {
        key: value.item() for key, value in clean_metrics.items()
    }


def test_a_member_that_the_sampler_excludes_has_no_weight_of_its_own():
    """An id with sampler log-prob -inf: q = 0, so only -α·π stays, whatever the ratio."""
    head = SamplerHead(
        ids=torch.tensor([[[0, 1]]]),
        sampler_log_probs=torch.tensor([[[math.log(0.5), -math.inf]]]),
        log_probs=torch.tensor([[[math.log(0.5), math.log(0.25)]]]),
        sampled_ids=torch.tensor([[0]]),
    )
    own = torch.full((1, 1), math.log(0.5))
    tensors = {"log_probs": own, "rollout_logprobs": own, "advantages": torch.ones(1, 1), "loss_mask": torch.ones(1, 1)}
    for name in LOSSES:
        _, _, head_grad, _ = run(head, tensors, name, config())
        # q_T = 0.5, π_T = 0.25, α = 2: κ = [0.5 - 2·0.5, 0 - 2·0.25]
        assert head_grad[0, 0].tolist() == pytest.approx([-0.5, -0.5], abs=1e-6)


def test_truncated_importance_sampling_and_a_missing_log_prob_are_refused():
    head, tensors = random_case()
    algorithm = config()
    algorithm.off_policy_correction = OffPolicyCorrectionConfig(tis_ratio_type="token")
    arguments = {"old_log_probs": None, "advantages": tensors["advantages"], "topk": head}
    from skyrl.algorithms.policy_losses.reinforce import reinforce_loss

    with pytest.raises(ConfigError, match="tis_ratio_type=token"):
        reinforce_loss(tensors["log_probs"], config=algorithm, **arguments)
    with pytest.raises(ValueError, match=r"generator\.sampling_params\.logprobs=1"):
        reinforce_loss(tensors["log_probs"], config=config(), **arguments)
    with pytest.raises(ConfigError, match="proportional, drop or renormalize"):
        compute_policy_loss("reinforce", **tensors, old_log_probs=None, config=config("no"), topk=head)
