import torch

from skyrl.backends.skyrl_train.weight_sync.buffers import ReceiveBuffers


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_a_buffer_is_used_again_only_when_no_view_of_it_is_left():
    buffers = ReceiveBuffers(1000)
    first = buffers.take(100)
    view = first[12:16].view(torch.float32)
    where = address(first)
    del first
    second = buffers.take(100)
    assert address(second) != where
    del view
    assert address(buffers.take(80)) == where


def test_a_buffer_that_is_too_small_makes_room_for_a_larger_one():
    buffers = ReceiveBuffers(120)
    buffers.take(50)
    large = address(buffers.take(100))
    assert address(buffers.take(100)) == large


def test_what_does_not_fit_is_not_kept():
    buffers = ReceiveBuffers(120)
    held = buffers.take(100)
    extra = buffers.take(100)
    assert address(extra) != address(held)
    del extra
    assert len(buffers._buffers) == 1
    assert buffers.take(100).numel() == 100
