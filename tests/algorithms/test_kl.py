"""KL estimators and controllers."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    compute_approx_kl,
    get_kl_controller,
)
from skyrl.config.algorithm import AlgorithmConfig, KLCtrlConfig
from skyrl.errors import ConfigError

LOG_PROBS = torch.tensor([[-1.0, -2.0, -0.5]])
BASE = torch.tensor([[-1.5, -1.0, -0.5]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("abs", [0.5, 1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0]),
        ("k3", [0.106531, 0.718282, 0.0]),
    ],
)
def test_estimators_have_the_spec_values(estimator, expected):
    kl = compute_approx_kl(LOG_PROBS, BASE, torch.ones(1, 3), estimator)
    assert kl.tolist()[0] == pytest.approx(expected, abs=1e-6)
    assert torch.equal(kl, compute_approx_kl(LOG_PROBS, BASE, None, estimator))


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_masked_nan_and_infinity_become_exactly_zero(estimator):
    log_probs = torch.tensor([[float("nan"), float("-inf"), -1.0]], requires_grad=True)
    base = torch.tensor([[-1.0, float("-inf"), -2.0]])
    kl = compute_approx_kl(log_probs, base, torch.tensor([[0.0, 0.0, 1.0]]), estimator)
    kl.sum().backward()
    assert kl[0, :2].tolist() == [0.0, 0.0]
    assert log_probs.grad[0, :2].tolist() == [0.0, 0.0]
    assert log_probs.grad.isfinite().all()


def test_k3_is_bounded():
    far = compute_approx_kl(torch.tensor([[-100.0, 0.0]]), torch.tensor([[0.0, -100.0]]), None, "k3")
    assert far.tolist() == [[10.0, 10.0]]


def test_k2_has_the_gradient_of_the_reverse_kl():
    """Exact for one categorical step: E_p[∇(d²/2)] = Σ p·d·∇log p = ∇KL(p‖q)."""
    logits = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    exact = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)[0]
    k2 = compute_approx_kl(log_p.unsqueeze(0), log_q.unsqueeze(0), None, "k2")[0]
    estimate = torch.autograd.grad((log_p.exp().detach() * k2).sum(), logits)[0]
    assert estimate.tolist() == pytest.approx(exact.tolist(), abs=1e-12)


def slow_kl(estimator, one, other):
    """The table of the specification, one token."""
    diff = one - other
    c = min(max(-diff, -20.0), 20.0)
    k3 = min(max(math.exp(c) - c - 1.0, -10.0), 10.0)
    return {"k1": diff, "abs": abs(diff), "k2": diff * diff / 2, "k3": k3}[estimator]


tokens = st.tuples(st.floats(-60, 0), st.floats(-60, 0), st.sampled_from([0.0, 1.0, 0.5]))


@given(st.lists(st.lists(tokens, min_size=3, max_size=3), min_size=1, max_size=4), st.sampled_from(KL_ESTIMATORS))
def test_estimators_agree_with_a_loop(rows, estimator):
    """Masked tokens hold NaN and come back as zeros; other mask values scale."""
    expected = [[slow_kl(estimator, one, other) * m if m else 0.0 for one, other, m in row] for row in rows]
    table = torch.tensor(rows, dtype=torch.float64)
    mask = table[..., 2]
    one, other = (table[..., side].masked_fill(mask == 0, float("nan")) for side in (0, 1))
    kl = compute_approx_kl(one, other, mask, estimator)
    torch.testing.assert_close(kl, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_an_unknown_estimator_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"kl_estimator_type=k4: must be one of k1, abs, k2, k3"):
        compute_approx_kl(LOG_PROBS, BASE, None, "k4")


@pytest.mark.parametrize(("kl", "expected"), [(0.3, 0.100512), (0.09, 0.099744)])
def test_the_adaptive_coefficient_has_the_spec_values(kl, expected):
    controller = AdaptiveKLController(0.1, target=0.1, horizon=10000)
    controller.update(kl, 256)
    assert controller.value == pytest.approx(expected, abs=1e-9)


def test_a_horizon_and_a_target_must_be_positive():
    with pytest.raises(ConfigError, match="horizon=0"):
        AdaptiveKLController(0.1, 0.1, 0)
    with pytest.raises(ConfigError, match="kl_target=0"):
        AdaptiveKLController(0.1, 0.0, 10)


def test_the_config_chooses_the_controller():
    fixed = get_kl_controller(AlgorithmConfig(kl_loss_coef=0.02))
    assert isinstance(fixed, FixedKLController)
    fixed.update(5.0, 100)
    assert fixed.value == 0.02
    adaptive = get_kl_controller(
        AlgorithmConfig(kl_loss_coef=0.02, kl_ctrl=KLCtrlConfig(type="adaptive", kl_target=0.5, horizon=10))
    )
    adaptive.update(0.25, 5)  # error clipped to -0.2
    assert adaptive.value == pytest.approx(0.02 * 0.9)
    with pytest.raises(ConfigError, match=r"kl_ctrl\.type=adaptiv: .*did you mean adaptive\?"):
        get_kl_controller(AlgorithmConfig(kl_ctrl=KLCtrlConfig(type="adaptiv")))


def test_the_adaptive_coefficient_survives_a_checkpoint():
    saved = AdaptiveKLController(0.1, 0.1, 1000)
    saved.update(0.5, 100)
    resumed = AdaptiveKLController(0.1, 0.1, 1000)
    resumed.load_state_dict(saved.state_dict())
    for controller in (saved, resumed):
        controller.update(0.05, 100)
    assert resumed.value == saved.value


@pytest.mark.parametrize("shape", [(1, 1), (3,), (1, 4)])
def test_a_wrong_shape_is_named_and_not_broadcast(shape):
    text = rf"{re.escape(str(shape))} but log_probs has shape \(1, 3\)"
    with pytest.raises(ValueError, match=f"log_probs_base has shape {text}"):
        compute_approx_kl(LOG_PROBS, torch.zeros(shape), None, "k1")
    with pytest.raises(ValueError, match=f"loss_mask has shape {text}"):
        compute_approx_kl(LOG_PROBS, BASE, torch.ones(shape), "k1")


def test_a_nan_never_becomes_the_coefficient():
    controller = AdaptiveKLController(0.1, target=0.1, horizon=100)
    with pytest.raises(ValueError, match="KL of the batch is NaN"):
        controller.update(math.nan, 10)
    assert controller.value == 0.1


def test_a_horizon_that_would_end_the_penalty_for_good_is_refused():
    """e = -0.2 and 500 rows: the factor is 1 - 0.2·500/100 = 0."""
    controller = AdaptiveKLController(0.1, target=0.1, horizon=100)
    with pytest.raises(ConfigError, match="horizon=100 is too small for 500 rows"):
        controller.update(0.0, 500)
    assert controller.value == 0.1
    controller.update(0.0, 499)
    assert controller.value == pytest.approx(0.1 * 0.002)
