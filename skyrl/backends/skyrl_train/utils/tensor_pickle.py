"""Tensors through pickle without copies.

With protocol 5 and a `buffer_callback` (Ray's object store) the bytes of a tensor travel out of band, and the
reader's tensor is a view of the store's memory: nobody may write to it.
"""

from __future__ import annotations

import math
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor

PackedTensor = tuple[str, tuple[int, ...], Any]
"""Name of the dtype, shape, and the bytes: a `PickleBuffer` or `bytes`."""


def pack_tensor(tensor: Tensor, protocol: int) -> PackedTensor:
    """Describe a CPU tensor of any dtype for pickle; only the bytes of the view itself are taken.

    Raises:
        ValueError: The tensor is on another device.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"only CPU tensors can be pickled, this one is on {tensor.device}; call .to('cpu') first")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    data = pickle.PickleBuffer(flat.data) if protocol >= 5 else flat.tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def unpack_tensor(packed: PackedTensor) -> Tensor:
    """Make the tensor that `pack_tensor` described, on the same memory where that is possible."""
    dtype_name, shape, data = packed
    dtype = getattr(torch, dtype_name)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # The store's memory is read-only; readers keep to that (see above).
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=dtype).reshape(shape)
