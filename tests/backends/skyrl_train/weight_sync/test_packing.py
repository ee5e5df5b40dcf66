import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.backends.skyrl_train.weight_sync.packing import (
    ALIGNMENT_BYTES,
    BucketLayout,
    bucket_views,
    checksum_bytes,
    pack_buckets,
    plan_buckets,
    require_checksum,
)
from skyrl.types.weights import WeightChunk

DTYPES = ["float32", "bfloat16", "float16", "int8", "float64"]


def metadata_of(tensors):
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def chunks_of(tensors, per_chunk=1):
    names = list(tensors)
    for start in range(0, len(names), per_chunk):
        part = names[start : start + per_chunk]
        yield WeightChunk(
            part,
            [str(tensors[name].dtype) for name in part],
            [list(tensors[name].shape) for name in part],
            [tensors[name] for name in part],
        )


def fresh(size):
    return torch.full((size,), 0xAB, dtype=torch.uint8)


tensor_specs = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=12
)


@given(specs=tensor_specs, bucket_bytes=st.integers(1, 300), per_chunk=st.integers(1, 4))
def test_what_goes_in_comes_out(specs, bucket_bytes, per_chunk):
    tensors = {
        f"t{i}": torch.arange(int(torch.Size(shape).numel())).to(vars(torch)[dtype]).reshape(shape)
        for i, (dtype, shape) in enumerate(specs)
    }
    layouts = plan_buckets(metadata_of(tensors), bucket_bytes)
    got = {}
    for layout, buffer in pack_buckets(chunks_of(tensors, per_chunk), layouts, fresh):
        assert buffer.numel() == layout.size_bytes
        got |= dict(bucket_views(buffer, layout))
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


@given(specs=tensor_specs, bucket_bytes=st.integers(1, 300))
def test_buckets_keep_order_and_size(specs, bucket_bytes):
    metadata = {
        "names": [f"t{i}" for i in range(len(specs))],
        "dtype_names": [dtype for dtype, _ in specs],
        "shapes": [shape for _, shape in specs],
    }
    layouts = plan_buckets(metadata, bucket_bytes)
    assert [name for layout in layouts for name in layout.names] == metadata["names"]
    assert [layout.index for layout in layouts] == list(range(len(layouts)))
    for layout in layouts:
        assert layout.count == len(layouts)
        assert all(size % ALIGNMENT_BYTES == 0 for size in layout.num_bytes)
        assert layout.size_bytes <= bucket_bytes or sum(size > 0 for size in layout.num_bytes) == 1
    assert [layout.is_last for layout in layouts] == [False] * (len(layouts) - 1) + [True]


def test_a_tensor_larger_than_a_bucket_gets_one_of_its_own():
    metadata = {"names": ["a", "b", "c"], "dtype_names": ["int8"] * 3, "shapes": [[16], [100], [16]]}
    assert [layout.names for layout in plan_buckets(metadata, 48)] == [["a"], ["b"], ["c"]]


def test_packing_casts_to_the_wire_dtype():
    master = torch.tensor([1.0, 1.0 + 2**-9])
    layouts = plan_buckets({"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2]]}, 64)
    chunk = WeightChunk(["w"], ["torch.bfloat16"], [[2]], [master])
    ((layout, buffer),) = pack_buckets([chunk], layouts, fresh)
    assert torch.equal(bucket_views(buffer, layout)[0][1], master.to(torch.bfloat16))


def test_draining_touches_no_buffer():
    tensors = {"a": torch.zeros(3), "b": torch.zeros(4)}
    layouts = plan_buckets(metadata_of(tensors), 16)
    assert [buffer for _, buffer in pack_buckets(chunks_of(tensors), layouts, None)] == [None, None]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({"a": torch.zeros(3)}, "expected 'b', got None"),
        ({"b": torch.zeros(4), "a": torch.zeros(3)}, "expected 'a', got 'b'"),
        ({"a": torch.zeros(3), "b": torch.zeros(5)}, "extracted shape"),
        ({"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(1)}, "'c' comes after the last"),
    ],
)
def test_a_stream_that_differs_from_its_metadata_is_refused(stream, message):
    layouts = plan_buckets(metadata_of({"a": torch.zeros(3), "b": torch.zeros(4)}), 64)
    with pytest.raises(ValueError, match=message):
        list(pack_buckets(chunks_of(stream), layouts, fresh))


def test_one_flipped_bit_changes_the_checksum_and_names_the_bucket():
    (layout,) = plan_buckets({"names": ["w.first", "w.last"], "dtype_names": ["int8"] * 2, "shapes": [[9], [9]]}, 64)
    buffer = torch.arange(layout.size_bytes, dtype=torch.uint8)
    announced = checksum_bytes(buffer)
    require_checksum(buffer, announced, layout)
    buffer[20] ^= 1
    with pytest.raises(ValueError, match=r"bucket 1 of 1 \(w.first … w.last\) arrived damaged"):
        require_checksum(buffer, announced, layout)


def test_a_sum_from_a_gpu_sender_is_checked_on_the_cpu():
    (layout,) = plan_buckets({"names": ["w"], "dtype_names": ["int8"], "shapes": [[32]]}, 64)
    buffer = torch.arange(32, dtype=torch.uint8)
    total = sum(int.from_bytes(bytes(range(start, start + 8)), "little", signed=True) for start in range(0, 32, 8))
    wrapped = (total + 2**63) % 2**64 - 2**63
    require_checksum(buffer, f"sum64:{wrapped}", layout)
    with pytest.raises(ValueError, match="arrived damaged"):
        require_checksum(buffer, f"sum64:{wrapped + 1}", layout)
    with pytest.raises(ValueError, match="unknown checksum"):
        require_checksum(buffer, "crc32:1", layout)


def test_a_layout_that_contradicts_itself_is_refused():
    common = {"index": 0, "count": 1, "names": ["w"], "dtype_names": ["float32"], "shapes": [[8]]}
    with pytest.raises(ValueError, match="cannot hold"):
        BucketLayout(**common, num_bytes=[16])
    with pytest.raises(ValueError, match="cannot hold"):
        BucketLayout(**common, num_bytes=[33])
    with pytest.raises(ValueError, match="same length"):
        BucketLayout(**common, num_bytes=[])
    with pytest.raises(ValueError, match="positive size"):
        plan_buckets({"names": [], "dtype_names": [], "shapes": []}, 0)
