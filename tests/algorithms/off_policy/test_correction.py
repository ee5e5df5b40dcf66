"""All corrections together: their order, factors and metrics, against a loop over rows and tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.algorithms.mean import Mean
from skyrl.algorithms.off_policy import (
    apply_off_policy_correction,
    compute_correction,
    compute_off_policy_correction,
    is_active,
)
from skyrl.config.algorithm import OffPolicyCorrectionConfig as Config
from skyrl.errors import ConfigError

NAN = float("nan")
ICEPOP = {
    "tis_ratio_type": "token",
    "token_tis_ratio_clip_high": 5.0,
    "token_mask_is_threshold_low": 0.5,
    "token_mask_is_threshold_high": 5.0,
}


def correct(ratios, mask=None, **fields):
    old = torch.tensor(ratios, dtype=torch.float64).log()
    mask = torch.ones_like(old) if mask is None else torch.tensor(mask)
    correction = compute_correction(old, torch.zeros_like(old), mask, Config(**fields))
    metrics = {name: value.item() for name, value in correction.metrics.items()}
    return correction.factors, metrics


def test_icepop_drops_ratios_outside_its_interval_and_weighs_the_others():
    assert correct([[0.4, 1.0, 6.0]], **ICEPOP)[0].tolist() == [[0.0, 1.0, 0.0]]
    assert correct([[0.6, 4.0, 5.5]], **ICEPOP)[0].tolist() == [pytest.approx([0.6, 4.0, 0.0])]


def test_decoupled_ppo_weighs_by_the_bare_ratio():
    factors, metrics = correct([[0.01, 1.0, 80.0]], tis_ratio_type="token", token_tis_ratio_clip_high=math.inf)
    assert factors.tolist() == [pytest.approx([0.01, 1.0, 80.0])]
    assert metrics["tis_token_clip_high_ratio"] == 0.0


def test_diagnostics_cover_trained_tokens_only():
    """Ratios 2, 4 and 1 with mean 7/3; weights after the cap of 2: 2, 2 and 1."""
    _, metrics = correct(
        [[2.0, 4.0, 0.001], [1.0, NAN, NAN]], [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], tis_ratio_type="token"
    )
    assert metrics == {
        "is_ratio_mean": pytest.approx(7 / 3),
        "is_ratio_sq_mean": pytest.approx((4 + 16 + 1) / 3),
        "is_ratio_max": pytest.approx(4.0),
        "is_ratio_min": pytest.approx(1.0),
        "tis_token_clip_high_ratio": pytest.approx(1 / 3),
        "correction_weight_mean": pytest.approx(5 / 3),
        "correction_weight_sq_mean": pytest.approx(3.0),
        "kept_token_ratio": 1.0,
    }


def test_each_step_sees_what_the_ones_before_it_kept():
    """The token mask takes the 8; the product of the row is then .5·.5, not 2."""
    fields = {
        "token_mask_is_threshold_low": 0.1,
        "token_mask_is_threshold_high": 5.0,
        "tis_ratio_type": "sequence",
        "sequence_mask_metric": "product",
        "product_mask_low": 0.2,
        "product_mask_high": 0.3,
    }
    factors, metrics = correct([[8.0, 0.5, 0.5]], **fields)
    assert factors.tolist() == [pytest.approx([0.0, 0.25, 0.25])]
    assert metrics["product_sequence_mask_masked_ratio"] == 0.0
    assert metrics["kept_token_ratio"] == pytest.approx(2 / 3)


def test_a_row_that_the_outlier_mask_drops_counts_in_no_later_share():
    factors, metrics = correct(
        [[50.0, 1.0], [1.0, 1.0]],
        outlier_token_is_threshold_high=10.0,
        sequence_mask_metric="geometric",
        geo_mask_high=1.01,
    )
    assert factors.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert metrics["outlier_seq_masked_ratio"] == 0.5
    assert metrics["geo_sequence_mask_masked_ratio"] == 0.0


def test_without_a_correction_nothing_happens():
    assert not is_active(Config())
    factors, metrics = correct([[3.0, 1.0]], [[1.0, 0.0]])
    assert factors.tolist() == [[1.0, 0.0]]
    assert metrics == {}
    loss, mask = torch.tensor([[1.0, NAN]]), torch.tensor([[1.0, 0.0]])
    assert apply_off_policy_correction(loss, loss, None, mask, Config()) == (loss, mask, {})
    assert compute_off_policy_correction(loss, loss, mask, Config()) == (None, {}, mask)


@pytest.mark.parametrize(
    "fields",
    [
        {"tis_ratio_type": "token"},
        {"sequence_mask_metric": "product"},
        {"outlier_token_is_threshold_low": 0.1},
        {"outlier_token_is_threshold_high": 9.0},
        {"token_mask_is_threshold_low": 0.1, "token_mask_is_threshold_high": 9.0},
    ],
)
def test_any_kind_alone_is_active(fields):
    assert is_active(Config(**fields))


def test_upstreams_form_returns_corrected_losses_and_the_mask_that_is_left():
    """Ratios .4, 2, 6 and a masked one under IcePop: the loss of the second doubles, the mask keeps it alone."""
    old = torch.tensor([[0.4, 2.0, 6.0, 1.0]]).log()
    old[0, 3] = NAN
    loss = torch.tensor([[10.0, 20.0, 30.0, NAN]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    corrected, left, metrics = apply_off_policy_correction(loss, old, torch.zeros(1, 4), mask, Config(**ICEPOP))
    assert corrected.tolist() == [pytest.approx([0.0, 40.0, 0.0, 0.0])]
    assert left.tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert metrics["token_mask_ratio"].item() == pytest.approx(2 / 3)


def test_a_mask_that_scales_keeps_its_values():
    weights, _, mask = compute_off_policy_correction(
        torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[0.5, 0.0]]), Config(tis_ratio_type="sequence")
    )
    assert weights is not None
    assert (weights.tolist(), mask.tolist()) == ([[1.0]], [[0.5, 0.0]])


def test_what_is_missing_or_misshapen_is_named():
    ones, config = torch.ones(2, 2), Config(tis_ratio_type="token")
    with pytest.raises(ValueError, match=r"needs rollout_logprobs; set generator\.sampling_params\.logprobs"):
        apply_off_policy_correction(ones, ones, None, ones, config)
    with pytest.raises(ValueError, match=r"rollout_logprobs has shape \(2, 3\) but old_log_probs has shape \(2, 2\)"):
        compute_correction(ones, torch.ones(2, 3), ones, config)
    with pytest.raises(ValueError, match=r"loss_mask has shape \(2, 3\) but old_log_probs has shape \(2, 2\)"):
        compute_correction(ones, ones, torch.ones(2, 3), config)
    with pytest.raises(ConfigError, match="set both token_mask_is_threshold_low"):
        compute_correction(ones, ones, ones, Config(token_mask_is_threshold_low=0.5))


def slow_factors(old, sampler, mask, config):
    """The table of the specification, token by token: the factors of one row."""

    def ratio(log):
        return math.exp(min(max(log, -20.0), 20.0))

    kept = [t for t in range(len(mask)) if mask[t]]
    diff = {t: old[t] - sampler[t] for t in kept}
    low, high = config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high
    if any((high is not None and ratio(diff[t]) > high) or (low is not None and ratio(diff[t]) < low) for t in kept):
        kept = []
    if config.token_mask_is_threshold_low is not None:
        low, high = config.token_mask_is_threshold_low, config.token_mask_is_threshold_high
        kept = [t for t in kept if low <= ratio(diff[t]) <= high]
    total = sum(diff[t] for t in kept)
    weights = dict.fromkeys(kept, 1.0)
    if config.tis_ratio_type == "token":
        weights = {t: min(ratio(diff[t]), config.token_tis_ratio_clip_high) for t in kept}
    elif config.tis_ratio_type == "sequence":
        weights = dict.fromkeys(kept, min(ratio(total), config.sequence_tis_ratio_clip_high))
    if config.sequence_mask_metric == "geometric":
        inside = config.geo_mask_low <= ratio(total / max(1, len(kept))) <= config.geo_mask_high
    elif config.sequence_mask_metric == "product":
        inside = config.product_mask_low <= ratio(total) <= config.product_mask_high
    else:
        inside = True
    return [weights.get(t, 0.0) if inside else 0.0 for t in range(len(mask))]


configs = st.builds(
    Config,
    tis_ratio_type=st.sampled_from([None, "token", "sequence"]),
    token_tis_ratio_clip_high=st.sampled_from([1.3, 2.0, math.inf]),
    sequence_tis_ratio_clip_high=st.sampled_from([1.3, 5.0, math.inf]),
    sequence_mask_metric=st.sampled_from([None, "geometric", "product"]),
    geo_mask_low=st.just(0.83),
    geo_mask_high=st.just(1.21),
    outlier_token_is_threshold_low=st.sampled_from([None, 0.31]),
    outlier_token_is_threshold_high=st.sampled_from([None, 3.3]),
)
bounds = st.sampled_from([(None, None), (0.57, 1.9)])


@st.composite
def ragged(draw):
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    cells = [[draw(st.booleans()) for _ in range(width)] for _ in range(rows)]
    noise = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    return torch.tensor(cells), noise.double() * draw(st.sampled_from([0.1, 0.6, 30.0]))


@settings(deadline=None)
@given(ragged(), configs, bounds)
def test_factors_and_their_moments_agree_with_a_loop(batch, config, token_bounds):
    mask, (old, sampler) = batch
    config.token_mask_is_threshold_low, config.token_mask_is_threshold_high = token_bounds
    expected = [slow_factors(*rows, config) for rows in zip(old.tolist(), sampler.tolist(), mask.tolist(), strict=True)]
    hidden = [tensor.masked_fill(~mask, NAN) for tensor in (old, sampler)]
    correction = compute_correction(*hidden, mask.float(), config)
    table = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(correction.factors.double(), table, rtol=1e-9, atol=0)
    assert bool(correction.metrics) is is_active(config)
    if is_active(config) and mask.any():
        trained = table[mask].tolist()
        moments = {"mean": sum(trained), "sq_mean": sum(value**2 for value in trained)}
        for name, total in moments.items():
            found = correction.metrics[f"correction_weight_{name}"].item()
            assert found == pytest.approx(total / len(trained), rel=1e-5)


@settings(deadline=None)
@given(ragged(), configs, st.integers(0, 5))
def test_shares_add_up_over_any_cut_of_the_rows(batch, config, cut):
    mask, (old, sampler) = batch
    whole = compute_correction(old, sampler, mask, config).metrics
    parts = [
        compute_correction(old[rows], sampler[rows], mask[rows], config).metrics
        for rows in (slice(0, cut), slice(cut, None))
        if len(old[rows])
    ]
    for name, value in whole.items():
        if isinstance(value, Mean):
            joined = Mean(sum(part[name].total for part in parts), sum(part[name].count for part in parts))
            assert joined.item() == pytest.approx(value.item(), rel=1e-5), name
        else:
            best = max if name.endswith("_max") else min
            assert best(part[name].item() for part in parts) == value.item()
