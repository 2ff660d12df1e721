"""Numbers that were made up in Python: they stay marked, in arithmetic and back in tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..frames import Cells, here, stack

_OURS = __name__.rpartition(".")[0]
_LOOKED_AT = 4096  # of the elements of a list that becomes a tensor
WHY = "it was made of a number that was not computed"


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


class Numbers(TorchFunctionMode):
    """Marks what a made-up number makes: `torch.arange(n)`, `x[:n]`, `ids + n`.

    A made-up size that is read (`mask.nonzero().size(0)`) gives such numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _SIZES:
            return _size(result) if "_nb_size" in args[0].__dict__ else result
        if any(isinstance(n, MadeUp) for n in _numbers((*args, *kwargs.values()))):
            for made in result if _many(result) else (result,):
                if isinstance(made, Tensor):
                    _mark(made, func, args)
        return result


_SIZES = {Tensor.size, Tensor.numel, Tensor.nelement, torch._C.TensorBase.shape.__get__}
_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}


def _mark(made: Tensor, func: Any, args: Any) -> None:
    """Its values are made up; so is its size, unless an argument or a list has the same."""
    made._nb_why = WHY  # type: ignore[attr-defined]
    same = args and isinstance(args[0], Tensor) and args[0].shape == made.shape
    if func not in _OF_DATA and not same:
        made._nb_size = True  # type: ignore[attr-defined]


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
