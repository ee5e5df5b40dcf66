"""Log-probs over the candidates that the sampler kept."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.sampler_support import (
    candidate_entropy,
    candidate_log_probs,
    positions_among,
    require_distinct,
    require_support,
    take_positions,
    unite,
)

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def score(logits, support, sampled, temperature=1.0):
    """Log-prob and entropy of one token, from logits over the whole vocabulary."""
    ids, missed = unite(torch.tensor([support], dtype=torch.int32), torch.tensor([sampled]))
    log_probs = candidate_log_probs(logits[ids.clamp(min=0).long()], ids, temperature)
    return log_probs[0, 0], candidate_entropy(log_probs)[0], bool(missed)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.313262), (0.5, -0.126928)])
def test_the_log_prob_has_the_spec_values(temperature, expected):
    log_prob, _, missed = score(LOGITS, [0, 1], 0, temperature)
    assert log_prob.item() == pytest.approx(expected, abs=1e-6)
    assert not missed


def test_the_entropy_has_the_spec_value():
    assert score(LOGITS, [0, 1], 0)[1].item() == pytest.approx(0.582203, abs=1e-6)


def test_the_whole_vocabulary_is_the_standard_log_prob():
    log_prob, entropy, _ = score(LOGITS, [0, 1, 2, 3], 0)
    assert log_prob.item() == pytest.approx(-0.440190, abs=1e-6)
    log_p = torch.log_softmax(LOGITS, -1)
    assert entropy.item() == pytest.approx(-(log_p.exp() * log_p).sum().item(), abs=1e-6)


def test_a_set_of_one_has_log_prob_zero_and_no_gradient():
    logits = LOGITS.clone().requires_grad_()
    log_prob, entropy, _ = score(logits, [2, -1], 2)
    assert log_prob.item() == 0.0
    assert entropy.item() == 0.0
    (log_prob + entropy).backward()
    assert not logits.grad.any()


def test_a_token_without_a_set_is_its_only_candidate_and_no_miss():
    log_prob, entropy, missed = score(LOGITS, [-1, -1], 3)
    assert (log_prob.item(), entropy.item(), missed) == (0.0, 0.0, False)


def test_a_sampled_token_that_the_set_lacks_joins_it_and_is_counted():
    log_prob, _, missed = score(LOGITS, [0, 1], 3)
    assert missed
    total = math.exp(2) + math.exp(1) + math.exp(-1)
    assert log_prob.item() == pytest.approx(-1 - math.log(total), abs=1e-6)


def test_what_stands_at_pads_never_leaks():
    ids = torch.tensor([[0, 1, -1]])
    logits = torch.tensor([[2.0, 1.0, float("nan")]], requires_grad=True)
    log_probs = candidate_log_probs(logits, ids)
    assert log_probs[0, 0].item() == pytest.approx(-0.313262, abs=1e-6)
    assert log_probs[0, 2] == -torch.inf
    (log_probs[0, 0] + candidate_entropy(log_probs)[0]).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 2] == 0


def test_half_precision_is_reduced_in_float32():
    ids = torch.tensor([[0, 1]])
    assert candidate_log_probs(torch.tensor([[2.0, 1.0]], dtype=torch.bfloat16), ids).dtype == torch.float32


@given(st.data())
def test_value_and_gradient_are_those_of_a_masked_log_softmax(data):
    """Order of the ids and pads among them make no difference."""
    logits = torch.tensor(data.draw(st.lists(st.floats(-5, 5), min_size=6, max_size=6)), dtype=torch.float64)
    kept = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
    sampled = data.draw(st.sampled_from(kept))
    row = data.draw(st.permutations(kept + [-1] * data.draw(st.integers(0, 3))))
    temperature = data.draw(st.floats(0.3, 2.0))
    plain, mine = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    mask = torch.full((6,), -torch.inf, dtype=torch.float64)
    mask[kept] = 0.0
    log_p = torch.log_softmax(plain / temperature + mask, -1)
    entropy = -(log_p[kept].exp() * log_p[kept]).sum()
    log_prob, own_entropy, _ = score(mine, list(row), sampled, temperature)
    torch.testing.assert_close(log_prob, log_p[sampled], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(own_entropy, entropy, atol=1e-12, rtol=1e-12)
    (log_p[sampled] + 0.3 * entropy).backward()
    (log_prob + 0.3 * own_entropy).backward()
    torch.testing.assert_close(mine.grad, plain.grad, atol=1e-12, rtol=1e-12)


def test_members_are_found_by_id():
    positions = positions_among(torch.tensor([[7, 3, 9, -1]]), torch.tensor([[3, 5, 7, -1]]))
    assert positions.tolist() == [[2, 0, -1, -1]]
    log_probs = torch.tensor([[-1.0, -2.0, -3.0, -torch.inf]], requires_grad=True)
    taken = take_positions(log_probs, positions)
    assert taken.tolist() == [[-3.0, -1.0, -math.inf, -math.inf]]
    torch.where(taken > -torch.inf, taken, 0.0).sum().backward()
    assert log_probs.grad.tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_a_trained_token_without_a_set_names_the_flag_of_the_engine():
    support = torch.tensor([[[-1, -1], [4, -1]]])
    require_support(support, torch.tensor([[0.0, 1.0]]))
    with pytest.raises(
        ValueError, match=r"1 trained tokens.*generator\.inference_engine\.enable_return_sample_support_set=true"
    ):
        require_support(support, torch.tensor([[0.5, 1.0]]))


def test_an_id_that_is_named_twice_is_refused():
    require_distinct(torch.tensor([[1, 2, -1, -1]]), "sample_support")
    with pytest.raises(ValueError, match="sample_support names an id twice"):
        require_distinct(torch.tensor([[1, 2, -1, 1]]), "sample_support")
