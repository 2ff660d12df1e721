"""`torch.cuda.FloatTensor` and the other old names of a type together with a device."""

from __future__ import annotations

import functools
from typing import Any

import torch

from nb_assertdoc.devices.moves import to_pretended
from nb_assertdoc.devices.state import Device, device_of, patch, thread


class _TensorType(type):
    """The class of the stand-ins: one makes tensors, and answers to isinstance as the old does."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = getattr(torch, cls.__name__)(*args, **kwargs)
        return to_pretended(made, Device("cuda", thread.current))

    def __instancecheck__(cls, value: Any) -> bool:
        tensor = isinstance(value, torch.Tensor)
        return tensor and value.dtype == cls.dtype and device_of(value).type == "cuda"


def install() -> None:
    """Replace the types, and what makes one of them the default."""
    for name in dir(torch.cuda):
        plain = getattr(torch, name, None) if name.endswith("Tensor") else None
        dtype = getattr(plain, "dtype", None)
        if isinstance(dtype, torch.dtype):
            made = _TensorType(name, (), {"__module__": "torch.cuda"})
            made.dtype = dtype
            patch(torch.cuda, name, made)
    original = torch.set_default_tensor_type

    @functools.wraps(original)
    def set_default_tensor_type(t: Any) -> None:
        name = f"{t.__module__}.{t.__name__}" if isinstance(t, type) else str(t)
        original(name.replace("torch.cuda.", "torch."))
        torch.set_default_device("cuda" if "cuda" in name else None)

    torch.set_default_tensor_type = set_default_tensor_type
