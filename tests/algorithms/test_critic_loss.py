"""The critic's clipped squared error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.algorithms.critic_loss import critic_loss
from skyrl.algorithms.loss_reduction import compute_loss_weights


def test_the_loss_has_the_spec_value():
    """Clipped values .7 and 2.3: errors 1.69 against 1, and .09 against 0; half the mean of 1.69 and .09."""
    mask = torch.ones(1, 2)
    loss, metrics = critic_loss(
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([[0.5, 2.5]]),
        torch.tensor([[2.0, 2.0]]),
        loss_mask=mask,
        loss_weights=compute_loss_weights(mask, "sequence_mean"),
        value_clip=0.2,
    )
    assert loss.item() == pytest.approx(0.445)
    assert metrics["values_clipfrac"].item() == 1.0
    assert metrics["values_mean"].item() == 1.5


@pytest.mark.parametrize("value_clip", [None, 0.0])
def test_without_a_clip_it_is_the_squared_error(value_clip):
    loss, metrics = critic_loss(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[9.0, 9.0]]), torch.tensor([[2.0, 5.0]]), value_clip=value_clip
    )
    assert loss.item() == pytest.approx((1 + 9) / 2)
    assert metrics["values_clipfrac"].item() == 0.0


def test_masked_nan_and_infinity_stay_out():
    values = torch.tensor([[1.0, float("nan"), 3.0]], requires_grad=True)
    old = torch.tensor([[1.0, 0.0, float("inf")]])
    returns = torch.tensor([[2.0, 0.0, float("nan")]])
    loss, metrics = critic_loss(values, old, returns, loss_mask=torch.tensor([[1.0, 0, 0]]), value_clip=0.5)
    loss.backward()
    assert loss.item() == 0.5
    assert values.grad.tolist() == [[-1.0, 0.0, 0.0]]
    assert metrics["values_mean"].item() == 1.0


def test_a_fully_masked_batch_has_loss_zero():
    loss, metrics = critic_loss(torch.ones(2, 2), torch.ones(2, 2), torch.zeros(2, 2), loss_mask=torch.zeros(2, 2))
    assert loss.item() == 0.0
    assert all(value.isfinite() for value in metrics.values())


@given(
    st.lists(st.tuples(*[st.floats(-5, 5, width=32)] * 3, st.booleans()), min_size=1, max_size=12), st.floats(0.1, 2)
)
def test_the_loss_agrees_with_a_loop(cells, clip):
    total, clipped_count = 0.0, 0
    for value, old, target, shown in cells:
        bounded = min(max(value, old - clip), old + clip)
        if shown:
            total += max((bounded - target) ** 2, (value - target) ** 2) / 2
            clipped_count += (bounded - target) ** 2 > (value - target) ** 2
    columns = [torch.tensor([column], dtype=torch.float64) for column in zip(*cells, strict=True)]
    loss, metrics = critic_loss(*columns[:3], loss_mask=columns[3], value_clip=clip)
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    shown = sum(cell[3] for cell in cells)
    assert metrics["values_clipfrac"].item() == pytest.approx(clipped_count / max(1, shown))


@pytest.mark.parametrize("name", ["old_values", "returns", "loss_mask", "loss_weights"])
@pytest.mark.parametrize("shape", [(2, 1), (3,), (2, 4)])
def test_a_wrong_shape_is_named_and_not_broadcast(name, shape):
    arguments = {key: torch.zeros(2, 3) for key in ("values", "old_values", "returns", "loss_mask", "loss_weights")}
    with pytest.raises(ValueError, match=rf"{name} has shape .* but values has shape \(2, 3\)"):
        critic_loss(**(arguments | {name: torch.zeros(shape)}))
