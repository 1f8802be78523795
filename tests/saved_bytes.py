"""How much memory the graph of a call keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


def kept(call: Callable[[], torch.Tensor], *without: torch.Tensor) -> int:
    """Bytes that the graph of a call keeps, each storage once."""
    storages: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = call()
    assert loss.requires_grad
    own = {tensor.untyped_storage().data_ptr() for tensor in without}
    return sum(storage.nbytes() for place, storage in storages.items() if place not in own)
