"""Numbers that were made up in Python: they stay marked, in arithmetic and back in tensors."""

from __future__ import annotations

import functools
import linecache
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..devices.state import thread
from ..frames import Cells, here, stack

_OURS = __name__.rpartition(".")[0]
_LOOKED_AT = 4096  # of the elements of a list that becomes a tensor
_OFTEN = 50  # times that a `while` may go on with a made-up value
WHY = "it was made of a number that was not computed"


class Decisions:
    """Places in user code where a made-up value decided a branch."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self.places: dict[str, int] = {}
        self.on_endless: Callable[[str], None] | None = None  # a `while` that may never end
        self.leak: str | None = None  # the first integers that left for Python without values

    def leaked(self) -> None:
        """Integers that were not computed went to Python: as an index they leave no trace."""
        for frame in stack(here()) if self.leak is None else ():
            if self._cells.is_user_frame(frame):
                cell = self._cells.get(frame.f_code.co_filename)
                where = f"In [{cell.execution_count}]" if cell else frame.f_code.co_filename
                self.leak = (
                    f"numbers that were not computed had gone to Python before ({where}, line "
                    f"{frame.f_lineno}), and may have chosen these values"
                )
                return

    def note(self) -> None:
        """A comparison or a truth value of something made up was asked for, here."""
        for frame in stack(here()):
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith((_OURS, "torch.", "nb_assertdoc.devices")) or module == "torch":
                continue
            name = frame.f_code.co_filename
            if self._cells.is_user_frame(
                frame
            ):  # a trainer's own health checks decide nothing of ours
                cell = self._cells.get(name)
                where = f"In [{cell.execution_count}]" if cell else name
                place = f"{where}, line {frame.f_lineno}"
                self.places[place] = self.places.get(place, 0) + 1
                line = linecache.getline(name, frame.f_lineno).lstrip()
                if self.places[place] > _OFTEN and line.startswith("while ") and self.on_endless:
                    self.on_endless(place)
            return


class MadeUp:
    """What a `GhostFloat` and a `GhostInt` have in common."""

    decisions: Decisions | None = None


class GhostFloat(MadeUp, float):
    """A float that was made up; its comparisons are noted."""

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return (float, (float(self),))


class GhostInt(MadeUp, int):
    """An int that was made up. A plain float on its left (`100. * n`) makes it a plain float."""

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return (int, (int(self),))


class GhostArray(MadeUp, np.ndarray):  # type: ignore[misc]  # numpy is Any to mypy
    """An array that was made up, and what numpy's operators make of it: for numpy an array."""

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()


GhostArray.__module__, GhostArray.__name__ = "numpy", "ndarray"  # loaders collate by these

_PLAIN: dict[type, Callable[[Any], Any]] = {GhostFloat: float.__float__, GhostInt: int.__int__}


def plain(value: Any) -> Any:
    """A number without its mark."""
    change = _PLAIN.get(type(value))
    return value if change is None else change(value)


def marked(value: Any) -> Any:
    """A number, or the numbers of nested lists, with the mark; bools cannot carry it."""
    if type(value) is list:
        return [marked(v) for v in value]
    return {float: GhostFloat, int: GhostInt}.get(type(value), lambda v: v)(value)


def _noted(name: str) -> Callable[..., Any]:
    compute = getattr(operator, "truth" if name == "bool" else name)

    def compare(self: Any, *other: Any) -> Any:
        if MadeUp.decisions is not None:
            MadeUp.decisions.note()
        return compute(plain(self), *map(plain, other))

    return compare


def _arithmetic(name: str) -> Callable[..., Any]:
    def compute(self: Any, *other: Any) -> Any:
        return marked(getattr(type(plain(self)), name)(plain(self), *map(plain, other)))

    return compute


def _mixed(name: str) -> Callable[..., Any]:
    """An int meets a float, which `int`'s own method leaves to the float."""
    compute = getattr(operator, name)

    def compute_(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return marked(compute(plain(self), plain(other)))

    return compute_


for _kind in (GhostFloat, GhostInt):
    for _name in ("lt", "le", "gt", "ge", "bool"):
        setattr(_kind, f"__{_name}__", _noted(_name))
    for _name in "add sub mul truediv floordiv mod pow".split():
        setattr(_kind, f"__{_name}__", _mixed(_name))
        setattr(_kind, f"__r{_name}__", _arithmetic(f"__r{_name}__"))
    for _name in "neg pos abs round".split():
        setattr(_kind, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _name in ("eq", "ne"):
    setattr(GhostInt, f"__{_name}__", _noted(_name))


# torch's functions and methods that make a tensor of numbers, or whose result hangs on one. A
# TorchFunctionMode would see all of them, and also answer the getters that `devices` relies on.
_FUNCTIONS = (
    "tensor as_tensor from_numpy full arange linspace zeros ones empty rand randn "
    "randint randperm eye clamp add sub mul where full_like remainder fmod div"
).split()
_METHODS = (
    "__getitem__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __mod__ __floordiv__ "
    "__truediv__ __pow__ __iadd__ __isub__ __imul__ add sub mul clamp clamp_ add_ sub_ mul_ fill_ "
    "masked_fill masked_fill_ new_zeros new_ones new_full new_empty new_tensor expand repeat view "
    "reshape narrow select split chunk roll"
).split()
_OF_DATA = {"tensor", "as_tensor", "from_numpy", "new_tensor"}
_OF_NUMBERS = {*_OF_DATA, "arange", "full", "full_like", "new_full"}


def install() -> None:
    """Mark what a made-up number makes: `torch.arange(n)`, `x[:n]`, `ids + n`.

    A made-up size that is read (`mask.nonzero().size(0)`) gives such numbers.
    """
    for owner, names in ((torch, _FUNCTIONS), (Tensor, _METHODS)):
        for name in names:
            setattr(owner, name, _marking(getattr(owner, name)))
    for name in ("size", "numel", "nelement"):
        setattr(Tensor, name, _sized(getattr(Tensor, name)))
    length: Callable[[Tensor], int] = Tensor.__len__

    def counted(self: Tensor) -> int:
        if "_nb_size" in self.__dict__ and not thread.raw and MadeUp.decisions is not None:
            MadeUp.decisions.leaked()  # `len` gives a plain number, which has no mark
        return length(self)

    Tensor.__len__ = counted  # type: ignore[method-assign]
    Tensor.shape = property(_sized(_shape))  # type: ignore[assignment]


def _marking(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = make(*args, **kwargs)
        if any(isinstance(n, MadeUp) for n in _numbers((*args, *kwargs.values()))):
            for made in result if _many(result) else (result,):
                if isinstance(made, Tensor):
                    _mark(made, make.__name__, args)
        decisions = MadeUp.decisions
        leak = decisions.leak if decisions is not None and make.__name__ in _OF_NUMBERS else None
        if leak and isinstance(result, Tensor) and not _in_loader():
            result._nb_soft = leak  # type: ignore[attr-defined]
        return result

    return call


def _in_loader() -> bool:
    """A data set makes its tensors, which no prediction has a part in."""
    names = (str(f.f_globals.get("__name__")) for f in stack(here()))
    return any(name.startswith("torch.utils.data") for name in names)


def _sized(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = read(self, *args, **kwargs)
        return _size(found) if "_nb_size" in self.__dict__ and not thread.raw else found

    return call


def _mark(made: Tensor, name: str, args: Any) -> None:
    """Its values are made up; so is its size, unless an argument or a list has the same."""
    made._nb_why = WHY  # type: ignore[attr-defined]
    same = args and isinstance(args[0], Tensor) and _shape(args[0]) == _shape(made)
    if name not in _OF_DATA and not same:
        made._nb_size = True  # type: ignore[attr-defined]


_shape: Callable[[Tensor], Any] = vars(torch._C.TensorBase)["shape"].__get__


def _many(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _size(value: Any) -> Any:
    if isinstance(value, int):
        return GhostInt(value)
    return torch.Size([GhostInt(n) for n in value])


def _numbers(values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    for value in values:
        if type(value) is slice:
            yield from (value.start, value.stop, value.step)
        elif not _many(value):
            yield value
        elif depth:
            yield from _numbers(islice(value, _LOOKED_AT), depth - 1)
