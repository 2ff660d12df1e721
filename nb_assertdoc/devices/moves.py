"""Tensors move to pretended devices and back; `Tensor.to` and its kin."""

from __future__ import annotations

import functools
from typing import Any

import torch

from nb_assertdoc.devices.state import (
    CPU,
    Device,
    device_of,
    lazy_init,
    patch,
    pretend,
    pretended,
    state,
    tag,
    thread,
)

_clone = torch.Tensor.clone
PINNED = "_nb_pinned"


class _Move(torch.autograd.Function):
    """A move that the gradient goes back: it must arrive on the source's device."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.source = device_of(tensor)
        return tag(_clone(tensor), device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        return move(grads[0], ctx.source), None


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        moved: torch.Tensor = _Move.apply(tensor, device)  # type: ignore[no-untyped-call]
        return moved
    return tag(_clone(tensor), device)


def to_pretended(tensor: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
    """The tensor on a pretended device; itself where it is there already, unless `copy`."""
    if not copy and device_of(tensor) == device:
        return tensor
    lazy_init()
    result = state.hooks.move(tensor, device)
    return _moved(tensor, device) if result is None else result


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; itself where it is there already."""
    if device_of(tensor).type != "cuda":
        return tensor
    result = state.hooks.leave(tensor)
    return _moved(tensor, CPU) if result is None else result


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on any device that is pretended or the CPU."""
    return to_pretended(tensor, device) if device.type == "cuda" else to_cpu(tensor)


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The device (or None) and the other options of a call of `Tensor.to`."""
    options = dict(kwargs)
    target = options.pop("device", None)
    other = options.pop("other", None)
    names: tuple[str, ...] = ("dtype", "non_blocking", "copy")
    if args and not isinstance(args[0], torch.dtype):
        target, args = args[0], args[1:]
        if isinstance(target, torch.Tensor):
            other = target
    if other is not None:
        target, options["dtype"], names = device_of(other), other.dtype, names[1:]
    options.update(zip(names, args, strict=False))
    return target, {name: value for name, value in options.items() if value is not None}


def _install_to() -> None:
    original = torch.Tensor.to

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if thread.raw:
            return original(self, *args, **kwargs)
        target, options = _target(args, kwargs)
        device = pretend(target)
        if target is not None and device is None:
            target = Device(target)
            if target.type != "cpu":
                return original(self, target, **options)
        non_blocking = bool(options.pop("non_blocking", False))
        result = original(self, **options) if options.keys() - {"copy"} else self
        if target is not None:
            thread.non_blocking = non_blocking
            try:
                result = move(result, device or CPU)
            finally:
                thread.non_blocking = False
        return _clone(result) if result is self and options.get("copy") else result

    torch.Tensor.to = to  # type: ignore[assignment,method-assign]

    parse = torch._C._nn._parse_to

    def parse_to(*args: Any, **kwargs: Any) -> Any:  # `module.to(0)`, which a CPU build refuses
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (Device("cuda", args[0]), *args[1:])
        return parse(*args, **kwargs)

    patch(torch._C._nn, "_parse_to", parse_to)


def _install_type() -> None:
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        if dtype is None:
            name = original(self)
            return name.replace("torch.", "torch.cuda.") if pretended(self) else name
        if isinstance(dtype, type):
            dtype = f"{dtype.__module__}.{dtype.__name__}"
        if not isinstance(dtype, str):
            return original(self, dtype)
        result = original(self, dtype.replace("torch.cuda.", "torch."))
        if "cuda" not in dtype:
            return to_cpu(result)
        return result if pretended(result) else to_pretended(result, Device("cuda", thread.current))

    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]


def install() -> None:
    """Replace the methods that move tensors."""
    _install_to()
    _install_type()

    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        wanted = "cuda" if device is None else device
        return self.to(wanted, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(
        self: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format
    ) -> torch.Tensor:
        return self.to(CPU, memory_format=memory_format)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if self.__dict__.get(PINNED):
            return self
        if pretended(self):
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        lazy_init()
        state.hooks.api("pin_memory")
        pinned = _clone(self.detach())
        pinned.__dict__[PINNED] = True
        return pinned

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        if not pretended(self):
            state.hooks.api("is_pinned")
        return bool(self.__dict__.get(PINNED))

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        state.hooks.api("record_stream")

    for method in (cuda, cpu, pin_memory, is_pinned, record_stream):
        setattr(torch.Tensor, method.__name__, method)
