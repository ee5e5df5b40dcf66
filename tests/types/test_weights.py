import pytest
import torch

from skyrl.types.weights import (
    FingerprintPlan,
    TensorSample,
    TensorShard,
    WeightChunk,
    WeightUpdateRequest,
    fingerprint_key,
    torch_dtype,
)


def test_a_chunk_counts_elements_and_bytes_of_each_dtype():
    chunk = WeightChunk(
        ["a", "b"], ["torch.float32", "torch.bfloat16"], [[2, 3], [5]], [torch.zeros(2, 3), torch.zeros(5)]
    )
    assert len(chunk) == 2
    assert chunk.total_numel == 11
    assert chunk.total_size_bytes == 6 * 4 + 5 * 2


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="must have the same length"):
        WeightChunk(["a", "b"], ["torch.float32"], [[1], [1]], [torch.zeros(1), torch.zeros(1)])
    with pytest.raises(ValueError, match="must have the same length"):
        WeightUpdateRequest(["a"], ["torch.float32"], [])


def test_a_request_survives_json():
    request = WeightUpdateRequest(["a"], ["torch.float16"], [[4, 2]])
    assert WeightUpdateRequest.from_json_dict(request.to_json_dict()) == request


def test_a_plan_survives_json():
    samples = (
        TensorSample(name="a", shape=(4, 6), columns=(0, 5), shards=(None, TensorShard(dim=1, start=0, stop=3))),
        TensorSample(name="b", shape=(3,)),
    )
    plan = FingerprintPlan(version=7, samples=samples)
    assert FingerprintPlan.from_json_dict(plan.to_json_dict()) == plan
    assert plan.names == ["a", "b"]
    assert len(plan) == 2


def test_a_slice_is_part_of_the_key():
    assert fingerprint_key("w", None) == "w"
    assert fingerprint_key("w", TensorShard(dim=0, start=8, stop=16)) == "w[0:8:16]"


@pytest.mark.parametrize("bad", [{"dim": -1, "start": 0, "stop": 1}, {"dim": 0, "start": 2, "stop": 1}])
def test_impossible_slices_are_refused(bad):
    with pytest.raises(ValueError, match="a shard needs"):
        TensorShard(**bad)


def test_dtypes_are_found_with_and_without_prefix():
    assert torch_dtype("torch.bfloat16") is torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="not a torch dtype"):
        torch_dtype("Tensor")
