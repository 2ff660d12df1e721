"""Where ghosts are born and where they leave for Python: patches of this worker process alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import devices
from ..frames import Cells, here, stack
from .hooks import GhostHooks, _to_meta, is_ghost, made_up

_OURS = __name__.rpartition(".")[0]


class Decisions:
    """Places in user code where a made-up value decided a branch."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self.places: dict[str, int] = {}

    def note(self) -> None:
        """A comparison or a truth value of something made up was asked for, here."""
        for frame in stack(here()):
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith((_OURS, "torch.", "nb_assertdoc.devices")) or module == "torch":
                continue
            name = frame.f_code.co_filename
            if self._cells.is_user(name):  # a trainer's own health checks decide nothing of ours
                cell = self._cells.get(name)
                where = f"In [{cell.execution_count}]" if cell else name
                place = f"{where}, line {frame.f_lineno}"
                self.places[place] = self.places.get(place, 0) + 1
            return


class GhostFloat(float):
    """A float that was made up; its comparisons are noted."""

    decisions: Decisions | None = None

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return (float, (float(self),))


def _comparison(name: str) -> Callable[[GhostFloat, Any], Any]:
    plain = getattr(float, name)

    def compare(self: GhostFloat, other: Any) -> Any:
        if GhostFloat.decisions is not None:
            GhostFloat.decisions.note()
        return plain(float(self), other)

    return compare


def _arithmetic(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def compute(self: GhostFloat, *other: Any) -> Any:
        result = plain(float(self), *other)
        return GhostFloat(result) if type(result) is float else result

    return compute


for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(GhostFloat, _name, _comparison(_name))
for _name in (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ "
    "__neg__ __abs__ __round__ __pow__ __rpow__"
).split():
    setattr(GhostFloat, _name, _arithmetic(_name))


def install(hooks: GhostHooks, cells: Cells) -> Decisions:
    """Patch tensors, parameters, optimizers and savers of this process for ghosts."""
    decisions = GhostFloat.decisions = Decisions(cells)
    _births(hooks)
    _leaving(hooks, decisions)
    _recurrent()
    _steps()
    return decisions


def _births(hooks: GhostHooks) -> None:
    """A floating parameter is a ghost from birth: moves then only change its tag."""
    new = torch.nn.Parameter.__new__

    def born(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        device = None
        if type(data) is Tensor and data.is_floating_point() and not is_ghost(data):
            device = devices.device_of(data)
            with devices.raw():
                data = _to_meta(data)
        elif isinstance(data, Tensor):
            device = devices.device_of(data)
        parameter = new(cls, data, requires_grad)
        if device is not None and is_ghost(parameter):
            devices.tag(parameter, device)
        return parameter

    torch.nn.Parameter.__new__ = born  # type: ignore[method-assign]


def _array(tensor: Tensor) -> Any:
    dtype = torch.empty(0, dtype=tensor.dtype)
    if tensor.dtype == torch.bfloat16:
        raise TypeError("Got unsupported ScalarType BFloat16")  # torch's own words
    return np.full(tuple(tensor.shape), made_up(tensor.dtype), dtype=_NUMPY(dtype).dtype)


_NUMPY = Tensor.numpy


def _leaving(hooks: GhostHooks, decisions: Decisions) -> None:
    """`item`, `tolist`, `numpy`, `bool`, `format`, `repr` of what was not computed."""

    def patched(name: str, ghost: Callable[..., Any]) -> None:
        plain = getattr(Tensor, name)

        @functools.wraps(plain)
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_ghost(self):
                return ghost(self, *args, **kwargs)
            return plain(self, *args, **kwargs)

        setattr(Tensor, name, method)

    def truth(self: Tensor) -> bool:
        known = self.__dict__.get("_nb_truth")
        if known is None:
            decisions.note()
        return bool(made_up(self.dtype) if known is None else known)

    def item(self: Tensor) -> Any:
        if self.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {self.numel()} elements cannot be converted to Scalar"
            )
        known = self.__dict__.get("_nb_truth")
        value = made_up(self.dtype) if known is None else known
        return GhostFloat(value) if type(value) is float else value

    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _array(self)

    def array(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return _array(self).astype(dtype) if dtype is not None else _array(self)

    def shown(self: Tensor, *args: Any, **kwargs: Any) -> str:
        return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype})"

    def formatted(self: Tensor, spec: str) -> str:
        return format(item(self), spec) if self.dim() == 0 else shown(self)

    def number(kind: type) -> Callable[[Tensor], Any]:
        return lambda self: kind(item(self))

    patched("item", item)
    patched("tolist", lambda self: _array(self).tolist() if self.dim() else item(self))
    patched("numpy", numpy)
    patched("__array__", array)
    patched("__repr__", shown)
    patched("__format__", formatted)
    patched("__bool__", truth)
    patched("__float__", number(float))
    patched("__int__", number(int))
    patched("__index__", number(int))
    patched("data_ptr", lambda self: id(self))


def _recurrent() -> None:
    """torch's own LSTM and GRU refuse a solid input beside ghost weights, above the dispatch."""

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            leaves = pytree.tree_leaves(args)
            if any(isinstance(t, Tensor) and is_ghost(t) for t in leaves):

                def weightless(t: Any) -> Any:
                    if isinstance(t, Tensor) and t.is_floating_point() and not is_ghost(t):
                        return devices.tag(_to_meta(t), devices.device_of(t))
                    return t

                args = pytree.tree_map(weightless, args)
            return plain(*args)

        return call

    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        setattr(torch._VF, name, wrap(getattr(torch._VF, name)))


def _steps() -> None:
    """Optimizer steps change nothing on ghosts; a closure still runs: trainers train in it."""

    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def visit(cls: type[torch.optim.Optimizer]) -> None:
        for sub in cls.__subclasses__():
            if "step" in sub.__dict__ and sub.__module__.startswith("torch."):
                step_ = functools.wraps(sub.__dict__["step"])(step)
                step_.hooked = True  # type: ignore[attr-defined]  # Optimizer would wrap it again
                sub.step = step_  # type: ignore[method-assign]
            visit(sub)

    visit(torch.optim.Optimizer)
