"""The worker-side view of a batch."""

from typing import get_type_hints

import pytest
import torch

from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInput, TrainingInputBatch
from skyrl.train.dataset.replay_buffer import Experience


def test_it_shows_every_column_of_a_batch():
    assert set(get_type_hints(TrainingInput)) <= set(get_type_hints(Experience))


def test_columns_become_attributes_and_move_together():
    batch = TrainingInputBatch(
        {"sequences": torch.ones(2, 4), "kl": None, "pixel_values": TensorList([torch.ones(1), torch.ones(3)])},
        {"response_length": 3, "uids": ["a", "b"]},
    )
    view = Experience.from_batch(batch)
    assert view.sequences is batch["sequences"]
    assert (view.num_actions, view.kl, view.metadata) == (3, None, batch.metadata)
    moved = view.to_device("meta")
    assert moved.sequences.device.type == moved.pixel_values.device.type == "meta"
    assert view.sequences.device.type == "cpu"


def test_what_a_batch_must_have_is_asked_for():
    with pytest.raises(KeyError, match="response_length"):
        Experience.from_batch(TrainingInputBatch({"sequences": torch.ones(1, 1)}))
