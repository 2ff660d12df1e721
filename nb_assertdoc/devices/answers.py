"""What a tensor says of itself: its device, and its values, which leave for Python here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from nb_assertdoc.devices.moves import to_cpu
from nb_assertdoc.devices.state import TAG, device_of, pretended, state, tag_of

READS = (
    "item tolist is_nonzero equal __bool__ __int__ __float__ __index__ __complex__ "
    "__repr__ __format__"
).split()


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if pretended(self):
            state.hooks.read(self)
        return original(self, *args, **kwargs)

    return read


def _install_data() -> None:
    """`.data` and `_make_subclass` (nn.Parameter) make a new object without any operator."""
    data: Any = torch._C.TensorBase.data
    get: Callable[[torch.Tensor], torch.Tensor] = data.__get__
    set_: Callable[[torch.Tensor, torch.Tensor], None] = data.__set__

    def get_data(self: torch.Tensor) -> torch.Tensor:
        return _same(get(self), self)

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        set_(self, value)
        _same(self, value)

    torch.Tensor.data = property(get_data, set_data)  # type: ignore[assignment]

    make = torch.Tensor._make_subclass

    def make_subclass(  # torch._dynamo compares the signature with its own
        cls: type[Any], data: torch.Tensor, requires_grad: bool = False, **kwargs: Any
    ) -> Any:
        return _same(make(cls, data, requires_grad, **kwargs), data)

    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[assignment]

    as_ = torch.Tensor.as_subclass

    def as_subclass(self: torch.Tensor, cls: type) -> torch.Tensor:
        return _same(as_(self, cls), self)

    torch.Tensor.as_subclass = as_subclass  # type: ignore[assignment,method-assign]


def _same(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    device = tag_of(source)
    if device is None:
        tensor.__dict__.pop(TAG, None)
    else:
        tensor.__dict__[TAG] = device
    return tensor


def install() -> None:
    """Replace the getters and the methods that read values."""

    def get_device(self: torch.Tensor) -> int:
        device = pretended(self)
        return -1 if device is None or device.index is None else device.index

    def is_meta(self: torch.Tensor) -> bool:
        return device_of(self).type == "meta"

    def is_cuda(self: torch.Tensor) -> bool:
        return device_of(self).type == "cuda"

    def is_cpu(self: torch.Tensor) -> bool:
        return device_of(self).type == "cpu"

    torch.Tensor.device = property(device_of)  # type: ignore[assignment]
    torch.Tensor.is_cuda = property(is_cuda)  # type: ignore[assignment]
    torch.Tensor.is_cpu = property(is_cpu)  # type: ignore[assignment]
    torch.Tensor.is_meta = property(is_meta)  # type: ignore[assignment]
    torch.Tensor.get_device = get_device  # type: ignore[assignment,method-assign]
    _install_data()

    for name in READS:
        setattr(torch.Tensor, name, _reading(getattr(torch.Tensor, name)))
    torch.equal = _reading(torch.equal)

    original = torch.Tensor.numpy

    @functools.wraps(original)
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        device = pretended(self)
        if device and not force:
            raise TypeError(
                f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy "
                "the tensor to host memory first."
            )
        return original(to_cpu(self), force=force)

    torch.Tensor.numpy = numpy  # type: ignore[assignment,method-assign]
