"""What holds for every loss of the library."""

from itertools import pairwise, product

import pytest
import torch

from skyrl.algorithms.policy_losses import PolicyLossRegistry, compute_policy_loss, reads_old_log_probs
from skyrl.algorithms.policy_losses.registry import holds
from skyrl.config.algorithm import AlgorithmConfig, CISPOConfig, ClipCovConfig, DPPOConfig
from tests.algorithms.policy_losses.ragged import Batch, make_batch

NAMES = [
    *("regular", "dual_clip", "gspo", "sapo", "cispo", "dppo", "clip_cov", "kl_cov", "cross_entropy"),
    *("importance_sampling", "rollout_is", "reinforce"),
]
BY_MICRO_BATCH = {"clip_cov", "kl_cov"}  # they centre and choose within the micro-batch
INPUTS = ("log_probs", "old_log_probs", "rollout_logprobs", "advantages")
CONFIG = AlgorithmConfig(loss_reduction="sequence_mean", clip_cov=ClipCovConfig(clip_ratio=0.2, clip_cov_lb=0.0))


def call(name: str, tensors: dict[str, torch.Tensor], weights: torch.Tensor | None = None, config=CONFIG):
    """Loss, metrics and gradient."""
    tensors = tensors | {"log_probs": tensors["log_probs"].detach().clone().requires_grad_()}
    loss, metrics = PolicyLossRegistry.get(name)(**tensors, config=config, loss_weights=weights)
    loss.backward()
    return loss.detach(), metrics, tensors["log_probs"].grad


def clean_batch(seed: int = 1) -> Batch:
    """A ragged batch with zeros instead of garbage where nothing trains."""
    batch = make_batch(seed, [5, 7, 3, 6])
    for name in INPUTS:
        batch.tensors[name][~batch.trained] = 0.0
    return batch


def test_the_list_is_complete():
    assert set(NAMES) <= set(PolicyLossRegistry.list_available())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mask_type", [torch.bool, torch.int64, torch.float64])
def test_a_masked_value_leaks_into_nothing(name, bad, mask_type):
    batch = clean_batch()
    batch.tensors["loss_mask"] = batch.tensors["loss_mask"].to(mask_type)
    loss, metrics, gradient = call(name, batch.tensors, batch.weights)
    for where in (*INPUTS, None):
        dirty = dict(batch.tensors)
        for column in [where] if where else INPUTS:
            dirty[column] = dirty[column].masked_fill(~batch.trained, bad)
        dirty_loss, dirty_metrics, dirty_gradient = call(name, dirty, batch.weights)
        assert dirty_loss.item() == loss.item()
        assert torch.equal(dirty_gradient, gradient)
        assert (dirty_gradient[~batch.trained] == 0).all()
        assert {key: value.item() for key, value in dirty_metrics.items()} == {
            key: value.item() for key, value in metrics.items()
        }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_masked_weight_leaks_into_nothing(name, bad):
    batch = clean_batch()
    loss, _, gradient = call(name, batch.tensors, batch.weights)
    dirty_loss, _, dirty_gradient = call(name, batch.tensors, batch.weights.masked_fill(~batch.trained, bad))
    assert dirty_loss.item() == loss.item()
    assert torch.equal(dirty_gradient, gradient)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("correct", [False, True])
def test_a_micro_batch_without_a_token_gives_zero(name, shape, correct):
    config = AlgorithmConfig(loss_reduction="sequence_mean")
    if correct and PolicyLossRegistry.traits(name).correctable:
        config.off_policy_correction.sequence_mask_metric = "product"
    log_probs = torch.zeros(shape, requires_grad=True)
    others = dict.fromkeys(("old_log_probs", "advantages", "loss_mask", "rollout_logprobs"), torch.zeros(shape))
    loss, metrics = compute_policy_loss(name, log_probs=log_probs, config=config, **others)
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.grad.shape == shape
    for metric, value in metrics.items():
        of_nothing = metric in {"is_ratio_max", "is_ratio_min"}
        assert torch.as_tensor(value.item()).isfinite() != of_nothing


@pytest.mark.parametrize("name", NAMES)
def test_a_fully_masked_micro_batch_gives_zero(name):
    batch = make_batch(2, [4, 3])
    loss, metrics, gradient = call(name, batch.tensors | {"loss_mask": torch.zeros(2, 4)}, batch.weights)
    assert loss.item() == 0.0
    assert (gradient == 0).all()
    assert all(torch.as_tensor(value.item()).isfinite() for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_no_mask_means_that_all_tokens_train(name):
    tensors = {column: values[:, 2:5].nan_to_num(-0.5, -0.5, -0.5) for column, values in clean_batch().tensors.items()}
    tensors["loss_mask"] = torch.ones_like(tensors["loss_mask"])
    loss, _, gradient = call(name, tensors)
    unmasked_loss, _, unmasked_gradient = call(name, tensors | {"loss_mask": None})
    assert loss.item() == pytest.approx(unmasked_loss.item(), rel=1e-12)
    assert torch.allclose(gradient, unmasked_gradient, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(name, dtype):
    half = {column: values.to(dtype) for column, values in clean_batch().tensors.items()}
    loss, metrics, _ = call(name, half)
    single, single_metrics, _ = call(name, {column: values.float() for column, values in half.items()})
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(single.item(), rel=1e-5)
    for key, value in single_metrics.items():
        assert metrics[key].item() == pytest.approx(value.item(), rel=1e-5), key


@pytest.mark.parametrize("name", NAMES)
def test_double_precision_is_kept(name):
    assert call(name, clean_batch().tensors)[0].dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_an_extreme_gap_stays_finite(name):
    gaps = torch.tensor([[500.0, -500.0], [-500.0, -500.0], [500.0, 500.0]])
    tensors = {
        "log_probs": gaps.clamp(max=0.0), "old_log_probs": (-gaps).clamp(max=0.0),
        "rollout_logprobs": (-gaps).clamp(max=0.0), "advantages": torch.tensor([[1.0, -1.0], [-1.0, 1.0], [2.0, -2.0]]),
        "loss_mask": torch.ones(3, 2),
    }  # fmt: skip
    loss, metrics, gradient = call(name, tensors)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(torch.as_tensor(value.item()).isfinite() for value in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_left_padding_changes_nothing(name):
    batch = clean_batch()
    loss, metrics, gradient = call(name, batch.tensors, batch.weights)
    padded = {
        column: torch.nn.functional.pad(values, (3, 0), value=0.0 if column == "loss_mask" else float("nan"))
        for column, values in batch.tensors.items()
    }
    wide_loss, wide_metrics, wide_gradient = call(name, padded, torch.nn.functional.pad(batch.weights, (3, 0)))
    assert wide_loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(wide_gradient[:, 3:], gradient, rtol=1e-12)
    assert (wide_gradient[:, :3] == 0).all()
    for key, value in metrics.items():
        assert wide_metrics[key].item() == pytest.approx(value.item(), rel=1e-6), key


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_changes_nothing(name):
    batch, order = clean_batch(), torch.tensor([2, 0, 3, 1])
    loss, _, gradient = call(name, batch.tensors, batch.weights)
    shuffled = {column: values[order] for column, values in batch.tensors.items()}
    other_loss, _, other_gradient = call(name, shuffled, batch.weights[order])
    assert other_loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(other_gradient, gradient[order], rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_MICRO_BATCH])
@pytest.mark.parametrize("cuts", list(product([False, True], repeat=3)))
def test_micro_batches_add_up_to_the_whole(name, cuts):
    """Every way to cut four rows, kept in order."""
    batch = clean_batch()
    loss, _, gradient = call(name, batch.tensors, batch.weights)
    bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 4]
    total, parts = 0.0, []
    for start, end in pairwise(bounds):
        rows = {column: values[start:end] for column, values in batch.tensors.items()}
        part, _, part_gradient = call(name, rows, batch.weights[start:end])
        total += part.item()
        parts.append(part_gradient)
    assert total == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(torch.cat(parts), gradient, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_mask_factors_multiply_token_losses(name):
    """A mask of 2 and weights of 3 are a factor of 6 at every token, and a weight of 0 silences one."""
    batch = clean_batch()
    loss, _, gradient = call(name, batch.tensors)
    factor = {"loss_mask": batch.tensors["loss_mask"] * 2}
    scaled, _, scaled_gradient = call(name, batch.tensors | factor, torch.full_like(batch.weights, 3.0))
    assert scaled.item() == pytest.approx(6 * loss.item(), rel=1e-12)
    assert torch.allclose(scaled_gradient, 6 * gradient, rtol=1e-12)
    weights = torch.ones_like(batch.weights)
    weights[1] = 0.0
    assert (call(name, batch.tensors, weights)[2][1] == 0).all()


def test_what_each_loss_reads():
    reads = {}
    for name in NAMES:
        config = AlgorithmConfig(policy_loss_type=name)
        needs_rollout = holds(PolicyLossRegistry.traits(name).needs_rollout_logprobs, config)
        reads[name] = (reads_old_log_probs(config), needs_rollout)
    old_only, neither = (True, False), (False, False)
    assert reads == {
        "regular": old_only, "dual_clip": old_only, "gspo": old_only, "sapo": old_only, "cispo": old_only,
        "clip_cov": old_only, "kl_cov": old_only, "importance_sampling": old_only,
        "dppo": neither, "cross_entropy": neither, "reinforce": neither, "rollout_is": (False, True),
    }  # fmt: skip
    anchored = AlgorithmConfig(policy_loss_type="cispo", cispo=CISPOConfig(cispo_anchor="rollout"))
    assert not reads_old_log_probs(anchored)
    assert holds(PolicyLossRegistry.traits("cispo").needs_rollout_logprobs, anchored)


def test_only_the_covariance_losses_refuse_corrections():
    assert {name for name in NAMES if not PolicyLossRegistry.traits(name).correctable} == {"clip_cov", "kl_cov"}


@pytest.mark.parametrize("kind", ["binary_tv", "binary_kl"])
def test_both_divergences_of_dppo_hide_what_is_masked(kind):
    batch, config = make_batch(4, [5, 2, 6]), AlgorithmConfig(dppo=DPPOConfig(dppo_type=kind))
    loss, _, gradient = call("dppo", batch.tensors, batch.weights, config)
    assert loss.isfinite()
    assert gradient.isfinite().all()
