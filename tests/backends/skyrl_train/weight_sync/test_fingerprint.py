import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.backends.skyrl_train.weight_sync.fingerprint import (
    draw_plan,
    fingerprint_tensor,
    fingerprint_tensors,
    full_plan,
    hash_values,
    local_columns,
)
from skyrl.types.weights import TensorSample, TensorShard

METADATA = {
    "names": [f"layer.{i}.weight" for i in range(30)] + ["norm.weight"],
    "dtype_names": ["float32"] * 31,
    "shapes": [[8, 40]] * 30 + [[12]],
}


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in zip(METADATA["names"], METADATA["shapes"], strict=True)
    }


def test_a_plan_depends_on_seed_and_version_only():
    plan = draw_plan(METADATA, seed=3, version=5)
    assert plan == draw_plan(METADATA, seed=3, version=5)
    assert plan.names != draw_plan(METADATA, seed=3, version=6).names
    assert plan.names != draw_plan(METADATA, seed=4, version=5).names


def test_a_plan_does_not_depend_on_the_order_of_tensors():
    backwards = {key: values[::-1] for key, values in METADATA.items()}
    assert draw_plan(METADATA, seed=0, version=1) == draw_plan(backwards, seed=0, version=1)


def test_a_plan_draws_distinct_tensors_and_columns():
    plan = draw_plan(METADATA, seed=0, version=1)
    assert len(set(plan.names)) == 16
    for sample in plan:
        assert len(set(sample.columns)) == min(16, sample.shape[-1])
        assert list(sample.columns) == sorted(sample.columns)


def test_few_tensors_are_all_drawn():
    small = {key: values[:3] for key, values in METADATA.items()}
    assert sorted(draw_plan(small, seed=0, version=1).names) == small["names"]


def test_equal_values_hash_equal_in_any_dtype_and_layout():
    values = torch.randn(5, 7).to(torch.bfloat16)
    assert hash_values(values) == hash_values(values.float()) == hash_values(values.T.contiguous().T)


def test_minus_zero_is_zero_and_shape_counts():
    assert hash_values(torch.tensor([-0.0, 1.0])) == hash_values(torch.tensor([0.0, 1.0]))
    assert hash_values(torch.zeros(2, 3)) != hash_values(torch.zeros(3, 2))


@given(row=st.integers(0, 7), column=st.integers(0, 39))
def test_one_changed_element_is_found_iff_its_column_is_sampled(row, column):
    sample = TensorSample(name="w", shape=(8, 40), columns=tuple(range(0, 40, 2)))
    before = weights()["layer.0.weight"]
    after = before.clone()
    after[row, column] = torch.nextafter(after[row, column], torch.tensor(9.0))
    changed = fingerprint_tensor(before, sample) != fingerprint_tensor(after, sample)
    assert changed == (column % 2 == 0)


def test_swapped_layers_stale_weights_and_a_cast_are_found():
    plan, right = full_plan(METADATA, version=1), weights()
    expected = fingerprint_tensors(right.items(), plan)
    swapped = right | {"layer.1.weight": right["layer.2.weight"], "layer.2.weight": right["layer.1.weight"]}
    got = fingerprint_tensors(swapped.items(), plan)
    assert {name for name in expected if expected[name] != got[name]} == {"layer.1.weight", "layer.2.weight"}
    stale = fingerprint_tensors(weights(seed=1).items(), plan)
    assert all(stale[name] != expected[name] for name in expected)
    cast = fingerprint_tensors(((name, t.to(torch.bfloat16).float()) for name, t in right.items()), plan)
    assert all(cast[name] != expected[name] for name in expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_hashes_like_the_piece_that_a_worker_holds(dim):
    whole = weights()["layer.0.weight"]
    shard = TensorShard(dim=dim, start=4, stop=8)
    sample = TensorSample(name="w", shape=(8, 40), columns=(1, 5, 7, 30), shards=(None, shard))
    hashes = fingerprint_tensor(whole, sample)
    assert hashes["w"] == hash_values(whole[:, [1, 5, 7, 30]])
    held = whole[4:8][:, [1, 5, 7, 30]] if dim == 0 else whole[:, 4:8][:, [1, 3]]
    assert hashes[f"w[{dim}:4:8]"] == hash_values(held)
    assert local_columns(sample, shard) == ([1, 5, 7, 30] if dim == 0 else [1, 3])


def test_a_scalar_has_one_column():
    sample = TensorSample(name="s", shape=(), columns=(0,))
    assert fingerprint_tensor(torch.tensor(2.0), sample) == {"s": hash_values(torch.tensor([2.0]))}


def test_a_stream_that_differs_from_the_plan_is_refused():
    plan = full_plan({"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[2], [2]]}, version=1)
    with pytest.raises(ValueError, match="asked for 'b', the extractor gave nothing"):
        fingerprint_tensors([("a", torch.zeros(2))], plan)
    with pytest.raises(ValueError, match="asked for 'a', the extractor gave 'b'"):
        fingerprint_tensors([("b", torch.zeros(2))], plan)
    with pytest.raises(ValueError, match="the plan says"):
        fingerprint_tensors([("a", torch.zeros(3))], plan)
