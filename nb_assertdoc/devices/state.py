"""What all of `devices` shares: the tag, the thread's state, the hooks, and the reading of specs.

A tensor on a pretended device is a plain CPU (or meta) tensor that carries a tag in its `__dict__`:
a `torch.device`, what the user sees. The tag `None` marks a tensor that an operator made inside
itself without saying for which device (`one_hot` builds its zeros so): it is at home on any.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

TAG = "_nb_device"
Device = torch.device  # the real class: `torch.device` itself is replaced on CPU builds
CPU = Device("cpu")

_real = torch._C.TensorBase.device.__get__
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped = torch._C._functorch.get_unwrapped


@dataclass(frozen=True)
class Devices:
    """The GPUs that a process pretends to have; `total_memory` in bytes.

    `random_from_cpu`: after a seed, a device's random numbers go on from where the CPU's are as the
    first one is drawn. They are then those of the same code run on the CPU, as long as the CPU
    itself draws none in between.
    """

    count: int = 1
    name: str = "NVIDIA GPU"
    capability: tuple[int, int] = (8, 0)
    total_memory: int = 16 << 30
    random_from_cpu: bool = False


class Hooks:
    """What the owner of the pretence wants to know and to change. The defaults change nothing."""

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """A tensor goes to pretended `device`: its tagged result, or None for a tagged clone."""
        return None

    def leave(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor goes from a pretended device to the CPU: its result, or None for a clone."""
        return None

    def make(self, name: str, device: torch.device) -> torch.device | None:
        """Operator `name` is about to make a tensor on `device`: where really; None for the CPU."""
        return None

    def api(self, name: str) -> None:
        """A call of torch.cuda or torch.accelerator that makes a CUDA call on a GPU; may raise."""

    def read(self, tensor: torch.Tensor) -> None:
        """Values of a tensor on a pretended device are about to reach Python; may raise."""

    def dispatch(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Every aten operator. Lying is off inside; tags are read with `tag_of`."""
        return func(*args, **kwargs)


class _Thread(threading.local):
    raw = False
    current = 0  # index of the current device
    non_blocking = False  # the move that is going on was asked for with non_blocking=True


class _State:
    devices = Devices()
    hooks = Hooks()
    installed = False
    initialized = False  # as `torch.cuda.is_initialized()` says
    forked = False


thread = _Thread()
state = _State()


def _after_fork() -> None:
    state.forked = state.initialized


os.register_at_fork(after_in_child=_after_fork)


def lazy_init() -> None:
    """Start pretended CUDA.

    Raises `RuntimeError` in the forked child of a process that has started it, as torch does.
    """
    if state.forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
            "multiprocessing, you must use the 'spawn' start method"
        )
    state.initialized = True


def pretend(spec: Any) -> torch.device | None:
    """The pretended device, with its index, that `spec` names; None where it names another one.

    Raises `RuntimeError` (torch's own class and words) for a device that does not exist.
    """
    if spec is None or isinstance(spec, bool):
        return None
    if isinstance(spec, int):
        spec = Device("cuda", spec)
    elif not isinstance(spec, Device):
        spec = Device(str(spec))
    if spec.type != "cuda":
        return None
    if spec.index is None:
        return Device("cuda", thread.current)
    if spec.index >= state.devices.count:
        raise getattr(torch, "AcceleratorError", RuntimeError)(
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have "
            "enough GPUs?\n"
        )
    return Device(spec.type, spec.index)


def index_of(spec: Any) -> int:
    """The index of the device that `spec` names; the current one for None."""
    if isinstance(spec, int):
        return spec
    if hasattr(spec, "idx"):  # a torch.cuda.device
        return int(spec.idx)
    device = pretend("cuda" if spec is None else spec)
    if device is None or device.index is None:
        raise ValueError(f"Expected a cuda device, but got: {spec}")
    return device.index


def real_device(tensor: torch.Tensor) -> torch.device:
    """Where the tensor really is."""
    device: torch.device = _real(tensor)
    return device


def tag_of(tensor: torch.Tensor) -> torch.device | None:
    """The tag, also while lying is off; None where there is none."""
    tag: torch.device | None = tensor.__dict__.get(TAG)
    return tag


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device that the user sees."""
    if thread.raw:
        return real_device(tensor)
    tag = tag_of(tensor)
    while tag is None and _is_wrapped(tensor):  # torch.vmap and its kin
        tensor = _unwrapped(tensor)
        tag = tag_of(tensor)
    return real_device(tensor) if tag is None else tag


def pretended(tensor: torch.Tensor) -> torch.device | None:
    """The pretended device of a tensor; None for one that is elsewhere, or while lying is off."""
    device = device_of(tensor)
    return device if device.type == "cuda" else None


def tag(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Set what the user sees (None: the real device), and give the tensor back."""
    if device is None or device == real_device(tensor):
        tensor.__dict__.pop(TAG, None)
    else:
        tensor.__dict__[TAG] = device
    return tensor


@contextlib.contextmanager
def raw() -> Iterator[None]:
    """In this thread, tensors answer where they really are, and no hook is called."""
    before, thread.raw = thread.raw, True
    try:
        yield
    finally:
        thread.raw = before


def patch(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of torch where this torch has it."""
    if hasattr(owner, name):
        setattr(owner, name, value)
