"""The batch container: rows, pickling, files, padding."""

import copy
import pickle
from typing import get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl.backends.skyrl_train.training_batch import (
    TensorBatch,
    TensorList,
    TrainingInput,
    TrainingInputBatch,
    TrainingOutputBatch,
    pad_training_input_batch,
)

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
    torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


def make_batch(rows=5):
    return TrainingInputBatch(
        {
            "sequences": torch.arange(rows * 4).reshape(rows, 4),
            "loss_mask": torch.ones(rows, 2),
            "values": None,
            "pixel_values": TensorList([torch.full((i + 1, 2), float(i)) for i in range(rows)]),
        },
        {"uids": [f"u{i}" for i in range(rows)], "response_length": 2},
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def test_length_is_rows():
    batch = make_batch(3)
    assert len(batch) == batch.batch_size == 3
    assert batch.device == torch.device("cpu")
    assert len(TensorBatch()) == 0
    assert TensorBatch().device is None


def test_the_first_column_may_be_none():
    batch = TensorBatch({"a": None, "b": torch.zeros(2, 3)})
    assert len(batch) == 2
    assert batch["a"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(4), "Batch size mismatch in new: 4 rows, but sequences has 5"),
        (TensorList([torch.zeros(1)]), "Batch size mismatch in new"),
        ([1, 2, 3, 4, 5], "new must be a tensor or TensorList, got list"),
        (torch.tensor(1.0), "new must have rows"),
        (torch.zeros(5, device="meta"), "Device mismatch in new"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(value, text):
    for change in (
        lambda batch: batch.__setitem__("new", value),
        lambda batch: batch.update(new=value),
        lambda batch: batch.update({"new": value}),
        lambda batch: batch.setdefault("new", value),
        lambda batch: batch.__ior__({"new": value}),
    ):
        batch = make_batch()
        with pytest.raises(ValueError, match=text):
            change(batch)
        assert "new" not in batch


def test_all_columns_may_be_exchanged_for_others_of_another_length_one_by_one_only_when_alone():
    batch = TensorBatch({"a": torch.zeros(2)})
    batch["a"] = torch.zeros(3)
    assert len(batch) == 3


def test_an_int_gives_one_row_and_a_slice_several():
    batch = make_batch()
    for row in (1, -4):
        one = batch[row]
        assert isinstance(one, TrainingInputBatch)
        assert one["sequences"].tolist() == [[4, 5, 6, 7]]
        assert one["values"] is None
        assert [t.tolist() for t in one["pixel_values"]] == [[[1.0, 1.0], [1.0, 1.0]]]
    assert batch[1:3]["sequences"][:, 0].tolist() == [4, 8]
    assert batch.slice(0, 5, 2)["sequences"][:, 0].tolist() == [0, 8, 16]
    with pytest.raises(IndexError):
        batch[5]


def test_sub_batches_share_memory_but_not_the_metadata_dict():
    batch = make_batch()
    part = batch[:2]
    part.metadata["pad_size"] = 1
    assert "pad_size" not in batch.metadata
    assert part.metadata["uids"] == batch.metadata["uids"]
    assert part["sequences"].data_ptr() == batch["sequences"].data_ptr()


def test_the_last_chunk_may_be_short():
    assert [len(part) for part in make_batch(5).chunk(2)] == [2, 2, 1]


def test_repeat_tiles_and_repeat_interleave_repeats_each_row():
    batch = make_batch(2)
    assert batch.repeat(2)["sequences"][:, 0].tolist() == [0, 4, 0, 4]
    assert batch.repeat_interleave(2)["sequences"][:, 0].tolist() == [0, 0, 4, 4]
    assert [len(t) for t in batch.repeat(2)["pixel_values"]] == [1, 2, 1, 2]
    assert [len(t) for t in batch.repeat_interleave(2)["pixel_values"]] == [1, 1, 2, 2]
    assert batch.repeat(2).metadata == batch.metadata


def test_cat_joins_what_chunk_cut():
    batch = make_batch()
    assert TrainingInputBatch.cat(batch.chunk(2)) == batch
    with pytest.raises(ValueError, match="keys"):
        TensorBatch.cat([TensorBatch({"a": torch.zeros(1)}), TensorBatch({"b": torch.zeros(1)})])
    with pytest.raises(ValueError, match="cannot join a"):
        TensorBatch.cat([TensorBatch({"a": torch.zeros(1)}), TensorBatch({"a": None})])
    with pytest.raises(ValueError, match="at least one"):
        TensorBatch.cat([])


def test_select_keeps_what_it_is_told():
    chosen = make_batch().select(["sequences"], ["response_length"])
    assert list(chosen) == ["sequences"]
    assert chosen.metadata == {"response_length": 2}
    with pytest.raises(KeyError):
        make_batch().select(["no_such"])


def test_a_type_change_leaves_ids_alone():
    batch = make_batch().to("cpu", torch.bfloat16)
    assert batch["loss_mask"].dtype == torch.bfloat16
    assert batch["pixel_values"][0].dtype == torch.bfloat16
    assert batch["sequences"].dtype == torch.int64


def test_contiguous_works_in_place():
    batch = TensorBatch({"a": torch.zeros(3, 2).t()})
    assert batch.contiguous() is batch
    assert batch["a"].is_contiguous()


def test_equality_is_by_content_type_and_metadata():
    assert make_batch() == make_batch()
    changed = make_batch()
    changed["loss_mask"][0, 0] = 0
    assert changed != make_batch()
    retyped = make_batch().to(dtype=torch.float64)
    assert retyped != make_batch()
    renamed = make_batch()
    renamed.metadata["response_length"] = 3
    assert renamed != make_batch()
    assert make_batch() != {"sequences": 1}


def test_a_copy_takes_new_columns_alone():
    batch = make_batch()
    other = batch.copy()
    other["rewards"] = torch.zeros(5, 2)
    assert "rewards" not in batch
    assert type(other) is TrainingInputBatch


def test_tensor_list_indexing():
    ragged = TensorList([torch.full((i,), i) for i in range(1, 5)])
    assert ragged[1].tolist() == [2, 2]
    assert [len(t) for t in ragged[1:3]] == [2, 3]
    assert [len(t) for t in ragged[[3, 0]]] == [4, 1]
    assert [len(t) for t in ragged[torch.tensor([2, 2])]] == [3, 3]
    assert ragged == TensorList([t.clone() for t in ragged])
    assert ragged != ragged[:3]


def test_a_tensor_list_is_not_empty_and_lives_on_one_device():
    with pytest.raises(ValueError, match="at least one"):
        TensorList([])
    with pytest.raises(ValueError, match="share a device"):
        TensorList([torch.zeros(1), torch.zeros(1, device="meta")])


# --- pickle and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_survives_pickle(dtype, protocol):
    batch = TensorBatch(
        {"a": torch.arange(6).reshape(2, 3).to(dtype), "b": TensorList([torch.ones(2).to(dtype), torch.empty(0, 3)])},
        {"uids": ["x", "y"]},
    )
    assert pickle.loads(pickle.dumps(batch, protocol=protocol)) == batch


def test_out_of_band_buffers_are_not_copied():
    column = torch.arange(1000, dtype=torch.bfloat16).reshape(10, 100)
    batch = TensorBatch({"a": column, "ragged": TensorList([column[i, : i + 1] for i in range(10)])})
    buffers = []
    frame = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(frame) < 2000  # no tensor bytes inside
    back = pickle.loads(frame, buffers=buffers)
    assert back == batch
    assert back["a"].data_ptr() == column.data_ptr()
    read_only = pickle.loads(frame, buffers=[bytes(buffer) for buffer in buffers])
    assert read_only == batch


def test_a_row_slice_ships_its_own_rows_only():
    batch = TensorBatch({"a": torch.zeros(1000, 100)})
    assert len(pickle.dumps(batch[3:4], protocol=5)) < 1000


def test_transposed_columns_and_ones_with_gradient_survive_pickle():
    column = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    back = pickle.loads(pickle.dumps(TensorBatch({"a": column}), protocol=5))
    assert back["a"].tolist() == column.tolist()
    assert copy.deepcopy(back) == back


def test_pickling_asks_for_the_cpu():
    with pytest.raises(ValueError, match=r"only CPU tensors.*meta"):
        pickle.dumps(TensorBatch({"a": torch.zeros(1, device="meta")}), protocol=5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_brings_everything_back(tmp_path, dtype):
    batch = make_batch(3)
    batch["typed"] = torch.arange(6).reshape(3, 2).to(dtype)
    batch["returns"] = batch["advantages"] = torch.randn(3, 2)  # shared memory
    batch.metadata |= {
        "boundaries": [(0, 1), (1, 3)], "nested": {"share": 0.5, "flag": True, "none": None}, "n": np.int64(3)
    }  # fmt: skip
    batch.save(tmp_path / "deep" / "batch.safetensors")
    back = TrainingInputBatch.load(tmp_path / "deep" / "batch.safetensors")
    assert back == batch
    assert type(back) is TrainingInputBatch
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["batch.safetensors"]


def test_metadata_that_json_cannot_hold_is_named(tmp_path):
    batch = TensorBatch({"a": torch.zeros(1)}, {"info": {"thing": object()}})
    with pytest.raises(ValueError, match=r"metadata\.info\.thing holds a object"):
        batch.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_foreign_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="holds no batch"):
        TensorBatch.load(tmp_path / "foreign")


@pytest.mark.ray
def test_ray_hands_out_views_of_its_store():
    import ray

    ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    try:
        batch = make_batch(4)
        batch["big"] = torch.randn(4, 100_000).bfloat16()
        reference = ray.put(batch)
        one, two = ray.get(reference), ray.get(reference)
        assert one == two == batch
        assert one["big"].data_ptr() == two["big"].data_ptr()
    finally:
        ray.shutdown()


# --- padding ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "sequences": (4,), "attention_mask": (4,), "router_padding_mask": (4,), "rollout_expert_indices": (4, 2, 3),
    "valid_rows": (), "sample_support": (2, 3), "sampler_topk_ids": (2, 3), "sampler_topk_logprobs": (2, 3),
    "baseline_scores": (),
}  # fmt: skip
RAGGED = {"pixel_values", "image_grid_thw", "sub_seq_lengths"}
BOOLEAN = {"valid_rows", "router_padding_mask"}
FLOATING = {"sampler_topk_logprobs"}
EMPTY = {"sample_support": -1, "sampler_topk_ids": -1, "sampler_topk_logprobs": -torch.inf}


def full_batch(rows=5):
    """Every field of `TrainingInput`."""
    columns = {}
    for key in get_type_hints(TrainingInput):
        if key in RAGGED:
            columns[key] = TensorList([torch.full((i + 1,), i) for i in range(rows)])
        elif key in BOOLEAN:
            columns[key] = torch.tensor([i % 2 == 0 for i in range(rows)]).reshape(
                rows, *[1] * len(SHAPES[key])
            ).expand(rows, *SHAPES[key]).clone()  # fmt: skip
        else:
            shape = SHAPES.get(key, (2,))
            columns[key] = torch.arange(1, rows + 1).reshape(rows, *[1] * len(shape)).expand(rows, *shape).clone()
            if key in FLOATING:
                columns[key] = columns[key].float()
    return TrainingInputBatch(
        columns, {"uids": list("aabbc")[:rows], "is_last_step": [True] * rows, "response_length": 2}
    )


def test_padding_changes_no_result():
    batch = full_batch()
    before = copy.deepcopy(batch)
    padded = pad_training_input_batch(batch, 3)
    assert batch == before
    assert len(padded) == 8
    assert padded.metadata == {
        "uids": ["a", "a", "b", "b", "c", "pad0", "pad1", "pad2"],
        "is_last_step": [True] * 8,
        "response_length": 2,
        "pad_size": 3,
    }
    assert type(padded) is TrainingInputBatch
    for key in get_type_hints(TrainingInput):
        real, added = padded[:5][key], padded[5:][key]
        assert real == batch[key] if key in RAGGED else torch.equal(real, batch[key]), key
        if key in {"loss_mask", "loss_weights", "valid_rows"}:
            assert not added.any(), key
        elif key == "rollout_expert_indices":
            assert (added == torch.arange(3)).all()
        elif key == "router_padding_mask":
            assert added.all()
        elif key in EMPTY:
            assert (added == EMPTY[key]).all(), key
        elif key in RAGGED:
            assert all(torch.equal(t, batch[key][0]) for t in added), key
        else:
            assert (added == batch[key][:1]).all(), key


def test_no_padding_returns_the_same_object():
    batch = make_batch()
    assert pad_training_input_batch(batch, 0) is batch
    assert batch.metadata["pad_size"] == 0


def test_absent_columns_and_metadata_stay_absent():
    padded = pad_training_input_batch(TrainingInputBatch({"a": torch.ones(2, 2), "b": None}), 1)
    assert padded["b"] is None
    assert padded.metadata == {"pad_size": 1}


def test_padding_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="-1 padding rows"):
        pad_training_input_batch(make_batch(), -1)
    with pytest.raises(ValueError, match="batch of 0"):
        pad_training_input_batch(TrainingInputBatch(), 1)
    with pytest.raises(ValueError, match="on the CPU"):
        pad_training_input_batch(TrainingInputBatch({"a": torch.ones(1, device="meta")}), 1)


def test_output_batches_are_batches():
    assert TrainingOutputBatch({"output": torch.zeros(2, 3)})[0]["output"].shape == (1, 3)


@given(st.integers(1, 7), st.integers(1, 8), st.integers(0, 3))
def test_cutting_joining_and_padding_keep_the_rows(rows, size, pad):
    batch = make_batch(rows)
    padded = pad_training_input_batch(batch, pad)
    joined = TrainingInputBatch.cat(padded.chunk(size))
    assert joined == padded
    assert torch.equal(joined[:rows]["sequences"], batch["sequences"])
