"""Where ghosts are born and where they leave for Python: patches of this worker process alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import devices
from ..frames import Cells
from . import madeup
from .hooks import GhostHooks, _to_meta, is_ghost, made_up
from .madeup import Decisions, GhostArray, MadeUp, marked

_DRAWN = 1 << 24  # most elements of a tensor that is filled with values only to draw them


def install(hooks: GhostHooks, cells: Cells) -> Decisions:
    """Patch tensors, parameters, optimizers and savers of this process for ghosts."""
    decisions = MadeUp.decisions = Decisions(cells)
    torch.backends.mha.set_fastpath_enabled(False)  # nested tensors have no shape to be a ghost of
    _births(hooks, decisions)
    _gradients()
    _leaving(hooks, decisions)
    _recurrent()
    _steps()
    _rejections()
    madeup.install()
    return decisions


def _births(hooks: GhostHooks, decisions: Decisions) -> None:
    """A floating parameter is a ghost from birth: moves then only change its tag."""
    new = torch.nn.Parameter.__new__

    def born(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        device, sized = None, False
        if type(data) is Tensor and data.is_floating_point() and not is_ghost(data):
            device = devices.device_of(data)
            sized = "_nb_size" in data.__dict__
            with devices.raw():
                data = _to_meta(data)
        elif isinstance(data, Tensor):
            device = devices.device_of(data)
        parameter = new(cls, data, requires_grad)
        if device is not None and is_ghost(parameter):
            devices.tag(parameter, device)
        if sized:
            parameter._nb_size = True
        if decisions.leak:  # its size may be one of the numbers that went to Python
            parameter._nb_soft = decisions.leak
        return parameter

    torch.nn.Parameter.__new__ = born  # type: ignore[method-assign]


def _gradients() -> None:
    """What needs a gradient is a ghost, as a parameter is: a ghost's gradient fits no solid."""

    def weightless(tensor: Tensor) -> None:
        solid = type(tensor) is Tensor and not is_ghost(tensor) and tensor.is_leaf
        if solid and tensor.is_floating_point() and tensor.layout == torch.strided:
            with devices.raw():
                ghost = _to_meta(tensor)
            ghost.__dict__.update(tensor.__dict__)
            devices.tag(ghost, devices.device_of(tensor))
            with contextlib.suppress(RuntimeError):  # C++ holds the tensor: it stays solid
                torch.utils.swap_tensors(tensor, ghost)

    needs: Any = Tensor.requires_grad_
    plain: Any = vars(torch._C.TensorBase)["requires_grad"]

    def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
        if requires_grad:
            weightless(self)
        needs(self, requires_grad)
        return self

    def write(self: Tensor, requires_grad: bool) -> None:
        if requires_grad:
            weightless(self)
        plain.__set__(self, requires_grad)

    Tensor.requires_grad_ = requires_grad_  # type: ignore[assignment,method-assign]
    Tensor.requires_grad = property(plain.__get__, write)  # type: ignore[assignment]

    def born(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def call(*args: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            return made.requires_grad_() if requires_grad else made

        return call

    variable: Any = torch.autograd.Variable  # the old way to ask for a gradient
    variable.__new__ = born(lambda cls, data, *rest: data.detach())
    for name in "tensor zeros ones empty full rand randn zeros_like ones_like randn_like".split():
        setattr(torch, name, born(getattr(torch, name)))


def _array(tensor: Tensor) -> Any:
    dtype = torch.empty(0, dtype=tensor.dtype)
    if tensor.dtype == torch.bfloat16:
        raise TypeError("Got unsupported ScalarType BFloat16")  # torch's own words
    filled = np.full(tuple(tensor.shape), made_up(tensor.dtype), dtype=_NUMPY(dtype).dtype)
    return filled.view(GhostArray)


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

    def leave(self: Tensor) -> None:
        integers = not (self.is_floating_point() or self.is_complex() or self.dtype == torch.bool)
        if integers and "_nb_tally" not in self.__dict__:
            decisions.leaked()

    def item(self: Tensor) -> Any:
        if self.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {self.numel()} elements cannot be converted to Scalar"
            )
        known = self.__dict__.get("_nb_truth")
        value = made_up(self.dtype)
        if known is None:
            leave(self)
        return marked(value) if known is None else type(value)(known)

    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        leave(self)
        return _array(self)

    def array(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        leave(self)
        return _array(self).astype(dtype) if dtype is not None else _array(self)

    def shown(self: Tensor, *args: Any, **kwargs: Any) -> str:
        return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype})"

    def formatted(self: Tensor, spec: str) -> str:
        return format(item(self), spec) if self.dim() == 0 else shown(self)

    def number(kind: type) -> Callable[[Tensor], Any]:
        return lambda self: kind(item(self))  # C wants the very type

    plain_tensor = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        """A list may hold ghosts without dimensions: they go as numbers."""
        return plain_tensor(_as_numbers(data, item), *args, **kwargs)

    torch.tensor = functools.wraps(plain_tensor)(tensor)

    patched("item", item)
    patched("tolist", lambda self: marked(numpy(self).tolist() if self.dim() else item(self)))
    patched("numpy", numpy)
    patched("__array__", array)
    patched("__repr__", shown)
    patched("__format__", formatted)
    patched("__bool__", truth)
    patched("__float__", number(float))
    patched("__int__", number(int))
    patched("__index__", number(int))
    patched("data_ptr", lambda self: id(self))


def _as_numbers(data: Any, number: Callable[[Tensor], Any]) -> Any:
    if type(data) in (list, tuple) and data and isinstance(data[0], Tensor | list | tuple):
        return [
            number(d) if isinstance(d, Tensor) and is_ghost(d) else _as_numbers(d, number)
            for d in data
        ]
    return data


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


def _rejections() -> None:
    """This initialiser draws until the values suit it: on values, then, as the host does."""
    plain: Any = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)
    if plain is None:
        return

    def trunc_normal_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_ghost(tensor) or tensor.is_cuda or tensor.numel() > _DRAWN:
            plain(tensor, *args, **kwargs)
            return tensor
        plain(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal_


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
