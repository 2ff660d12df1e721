"""Functions that make tensors. With a device they reach the dispatch mode, which does the rest;
here are those that do not, and the mark that the user's own tensors are where they say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

from nb_assertdoc.devices.moves import PINNED, to_pretended
from nb_assertdoc.devices.state import CPU, TAG, Device, pretend, tag, tag_of, thread

# Made by an operator: only the mark has to go.
_OPERATORS = (
    "zeros ones empty full rand randn randint randperm arange linspace logspace eye empty_strided "
    "empty_permuted tril_indices triu_indices scalar_tensor hann_window hamming_window "
    "blackman_window bartlett_window kaiser_window normal range"
).split()
# Made of Python data, which torch copies to the device by itself.
_CONSTRUCTORS = (
    "tensor as_tensor asarray sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor "
    "sparse_compressed_tensor"
).split()


def _context_device() -> torch.device | None:
    """The device of `with torch.device(...)` or `torch.set_default_device`."""
    if torch._C._len_torch_function_stack():
        mode = torch._C._get_function_stack_at(0)  # torch keeps it at the bottom
        if isinstance(mode, torch.utils._device.DeviceContext):
            return mode.device
    return None


def _operator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), int):  # an accelerator's index; a CPU build has none
            kwargs["device"] = pretend(kwargs["device"])
        result = original(*args, **kwargs)
        if not thread.raw and tag_of(result) is None:
            result.__dict__.pop(TAG, None)
            if kwargs.get("pin_memory"):
                result.__dict__[PINNED] = True
        return result

    return make


def _constructor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if thread.raw:
            return original(*args, **kwargs)
        wanted = kwargs.get("device")
        source = next((tag_of(a) for a in args if isinstance(a, torch.Tensor)), None)
        if wanted is None and source is None:
            wanted = _context_device()
        device = pretend(wanted)
        if device is None and source is None:
            return original(*args, **kwargs)
        kwargs["device"] = CPU if device else kwargs.get("device")
        requires_grad = kwargs.pop("requires_grad", False)
        result = original(*args, **kwargs)
        if device is not None:
            result = to_pretended(result, device)
        elif source is not None and wanted is None:
            tag(result, source)
        return result.requires_grad_() if requires_grad else result

    return make


class _AnyDevice(type):
    """Makes the stand-in of `torch.device` indistinguishable to isinstance, ==, and callers."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, Device)

    def __subclasscheck__(cls, value: type) -> bool:
        return issubclass(value, Device)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is Device

    def __hash__(cls) -> int:
        return hash(Device)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        if len(args) == 1 and isinstance(args[0], int) and not kwargs:
            return Device("cuda", args[0])
        return Device(*args, **kwargs)


def _install_device() -> None:
    """`torch.device(0)` raises on a CPU build, and C++ offers no seam: replace the class."""
    try:
        if Device(0).type == "cuda":
            return
    except RuntimeError:
        pass
    stand_in = _AnyDevice("device", (), {"__module__": "torch", "__doc__": Device.__doc__})
    torch.device = stand_in  # type: ignore[misc,assignment]


def install() -> None:
    """Wrap the functions that make tensors."""
    torch.utils._device._device_constructors()  # cached: it must hold the functions as they were
    for name in _OPERATORS:
        if hasattr(torch, name):
            setattr(torch, name, _operator(getattr(torch, name)))
    for name in _CONSTRUCTORS:
        if hasattr(torch, name):
            setattr(torch, name, _constructor(getattr(torch, name)))
    new_tensor, new = torch.Tensor.new_tensor, torch.Tensor.new

    def _new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        kwargs["device"] = kwargs.get("device") or self.device
        kwargs["dtype"] = kwargs.get("dtype") or self.dtype
        if pretend(kwargs["device"]) is None:
            return new_tensor(self, data, **kwargs)
        made: torch.Tensor = torch.tensor(data, **kwargs)
        return made

    def _new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tag(new(self, *args, **kwargs), tag_of(self))

    for original, method in ((new_tensor, _new_tensor), (new, _new)):
        setattr(torch.Tensor, original.__name__, functools.wraps(original)(method))
    _install_device()
