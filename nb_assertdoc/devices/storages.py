"""Saving and loading: a file written here says `cuda:0` as one written on a GPU does."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._utils

from nb_assertdoc.devices.state import TAG, index_of, lazy_init, pretend, pretended, state, tag


def _location(storage: Any) -> str | None:
    device = getattr(storage, TAG, None)
    return None if device is None else str(device)


def _restore(storage: Any, location: Any) -> Any:
    device = pretend(location) if str(location).startswith("cuda") else None
    if device is None:
        return None  # another package's business
    lazy_init()
    setattr(storage, TAG, device)
    return storage


def install() -> None:
    """Teach torch.save, torch.load and pickle the tags."""
    torch.serialization.register_package(1, _location, _restore)
    reduce: Any = torch.Tensor._reduce_ex_internal
    rebuild: Any = torch._utils._rebuild_tensor
    state_of: Any = torch._utils._get_obj_state

    @functools.wraps(reduce)
    def reduce_ex(self: torch.Tensor, proto: Any) -> Any:
        device = pretended(self)
        if device is not None:
            state.hooks.read(self)
        if self.layout == torch.strided:
            setattr(self.untyped_storage(), TAG, device)
        return reduce(self, proto)

    @functools.wraps(rebuild)
    def rebuild_tensor(storage: Any, *args: Any) -> torch.Tensor:
        tensor: torch.Tensor = rebuild(storage, *args)
        tensor.__dict__.pop(TAG, None)
        device = getattr(storage._untyped_storage, TAG, None)
        if device is None:
            return tensor
        moved = state.hooks.move(tensor, device)
        return tag(tensor, device) if moved is None else moved

    @functools.wraps(state_of)
    def get_obj_state(obj: Any) -> Any:
        found = state_of(obj)
        if isinstance(obj, torch.Tensor) and isinstance(found, dict):
            found = {key: value for key, value in found.items() if not key.startswith("_nb_")}
        return found

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        copy = self.clone()
        setattr(copy, TAG, pretend(index_of(device)))
        return copy

    torch.Tensor._reduce_ex_internal = reduce_ex  # type: ignore[method-assign]
    torch._utils._rebuild_tensor = rebuild_tensor
    torch._utils._get_obj_state = get_obj_state
    torch.UntypedStorage.cuda = cuda  # type: ignore[method-assign]
