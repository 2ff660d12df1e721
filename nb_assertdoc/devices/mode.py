"""The one dispatch mode: it carries the tags from operator to operator."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nb_assertdoc.devices import seeds
from nb_assertdoc.devices.state import CPU, TAG, pretend, state, thread

# These give one result on the CPU whatever the device of their input: its place in the tuple.
_CPU_RESULTS = {"_pack_padded_sequence": 1, "_pad_packed_sequence": 1}
_RANDOM = torch.Tag.nondeterministic_seeded


def _owner(values: Sequence[Any]) -> tuple[torch.device | None, bool, bool]:
    """The first pretended device among arguments; whether one is loose; whether there are any."""
    loose = tensors = False
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                tensors = True
                tag = item.__dict__.get(TAG, CPU)
                if tag is None:
                    loose = True
                elif tag.type == "cuda":
                    return tag, loose, True
    return None, loose, tensors


def _label(result: Any, device: torch.device | None, loose: bool, given: Any) -> None:
    if isinstance(result, torch.Tensor):
        attributes = result.__dict__
        if attributes.get(TAG) is not None or (result is given and TAG not in attributes):
            return  # in-place, or `out=`: the tensor stays where it is
        if device is not None:
            if TAG in attributes:
                _adopt(result, device)
            attributes[TAG] = device
        elif loose:
            attributes[TAG] = None
    elif isinstance(result, (list, tuple)):
        for item in result:
            _label(item, device, loose, given)


def _adopt(view: torch.Tensor, device: torch.device) -> None:
    """What a loose tensor is a view of goes with it: operators fill results piece by piece."""
    base = view._base
    if base is not None and base.__dict__.get(TAG, CPU) is None:
        base.__dict__[TAG] = device


@functools.cache
def _composite(func: Any) -> bool:
    """The operator is a function of other operators on every device: they tell what it does."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


class TagMode(TorchDispatchMode):
    """Gives each result of an operator the tag of its arguments, or of the device asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if thread.raw:
            return func(*args, **kwargs)
        if _composite(func):  # of `inference_mode`, where no autograd takes it apart before
            with self:
                return func.decompose(*args, **kwargs)
        device, loose, tensors = _owner((*args, *kwargs.values()) if kwargs else args)
        name = func._schema.name.removeprefix("aten::")
        wanted = kwargs.get("device")
        if wanted is not None and wanted.type == "cuda":
            device = pretend(wanted)
            assert device is not None
            kwargs = {**kwargs, "device": state.hooks.make(name, device) or CPU}
        elif not tensors:
            loose = True
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        thread.raw = True
        try:
            if device is not None and _RANDOM in func.tags and kwargs.get("generator") is None:
                with seeds.of(device):
                    result = state.hooks.dispatch(func, types, args, kwargs)
            else:
                result = state.hooks.dispatch(func, types, args, kwargs)
        finally:
            thread.raw = False
        if device is not None or loose:
            given = kwargs["out"] if "out" in kwargs else args[0] if args else None
            _label(result, device, loose, given)
            if name in _CPU_RESULTS:
                result[_CPU_RESULTS[name]].__dict__.pop(TAG, None)
        return result


def install() -> None:
    """Enter the mode in this thread, and in every thread that starts later."""
    TagMode().__enter__()  # type: ignore[no-untyped-call]
    original = threading.Thread.run

    @functools.wraps(original)
    def run(self: threading.Thread) -> None:
        with TagMode():  # type: ignore[no-untyped-call]
            original(self)

    threading.Thread.run = run  # type: ignore[method-assign]
