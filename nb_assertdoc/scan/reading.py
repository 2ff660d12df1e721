"""Numbers in what a data set gives: tensors, arrays, lists, also inside tuples and dicts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # of numpy
_PLAIN = (int, float, np.integer, np.floating, np.bool_, type(None))
BAD = "[row for row, fine in enumerate({inside}) if not fine]"
BAD_OF_MANY = "[row for row, fine in enumerate({inside}) if not fine.all()]"  # values a row
_MOST_PARTS = 64  # of a list whose parts are fields of their own


class Unreadable(Exception):
    """There are values, and they cannot be had. The text says why."""


@dataclasses.dataclass(frozen=True)
class Access:
    """How the user's code reaches the values of a field: `value`, for each turn of `loop`."""

    value: str
    loop: str = ""
    array: bool = False  # `value` is compared element by element
    keep: str = ""  # the line that leaves bad rows out; {inside}: the test of one row
    each: str = ""  # `value` in that line, where it is another
    part: str = ""  # the code of one column of the field, whose number replaces COLUMN
    length: str = ""  # the code of the number of values in one row
    over: str = ""  # the loop of these two
    bad: str = ""  # without a loop: the code of the bad rows' numbers; {inside}: the test of all


@dataclasses.dataclass(frozen=True)
class Block:
    """The values of one field in some rows."""

    field: str  # "train_ds[row][1]"
    access: Access | None  # None: no short expression reaches them
    values: Array  # flat
    rows: Callable[[Array], Array]  # from positions in `values` to numbers of rows
    alone: bool = False  # there is no other field
    width: int = 1  # values in each row; 0: rows differ

    def lengths(self) -> Block | None:
        """How many values each row has, in place of them; None where it has one by its nature."""
        access = self.access
        if access is None or not access.length:
            return None
        numbers, counts = np.unique(self.rows(np.arange(self.values.size)), return_counts=True)
        return dataclasses.replace(
            self,
            field=f"len of {self.field}",
            access=Access(access.length, access.over, keep=access.keep, each=access.length),
            values=counts,
            rows=lambda positions: numbers[positions],
            width=1,
        )

    def column(self, number: int) -> Block:
        """One value of each row."""
        access, width, rows = self.access, self.width, self.rows
        if access is None or not access.part or number >= width:
            return self
        code = access.part.replace("COLUMN", str(number))
        return dataclasses.replace(
            self,
            field=f"{self.field}[{'' if access.over else ':, '}{number}]",
            access=Access(
                code, access.over, array=not access.over, keep=access.keep, each=code, bad=BAD
            ),
            values=self.values[number::width],
            rows=lambda positions: rows(positions * width + number),
            width=1,
        )


@dataclasses.dataclass(frozen=True)
class Failed:
    """The user's own code raised."""

    text: str


@dataclasses.dataclass(frozen=True)
class Unread:
    """A field that is left out, and why."""

    field: str
    why: str


Event = Block | Failed | Unread | int  # int: so many more rows were looked at


def is_tensor(thing: Any) -> bool:
    """A tensor of torch, which is asked for only where it is loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def readable(thing: Any, dead: bool) -> None:
    """Raise `Unreadable` for a tensor whose values cannot be had; only its metadata is looked at.

    `dead`: the GPU context is gone, and no call may reach it.
    """
    if not is_tensor(thing):
        return
    if thing.is_meta:
        raise Unreadable("its tensors have no values (meta)")
    if thing.device.type != "cpu" and dead:
        raise Unreadable("on the GPU, which cannot be read after an assert")
    if str(thing.layout) != "torch.strided":
        raise Unreadable(f"its tensors are not dense ({thing.layout})")


def array(thing: Any, dead: bool) -> Array | None:
    """The numbers of a leaf; None where it holds none. Raises `Unreadable`."""
    if is_tensor(thing):
        readable(thing, dead)
        if thing.is_complex():
            return None
        plain = thing.detach().cpu().resolve_neg()
        small = plain.is_floating_point() and plain.element_size() < 4  # numpy has no bfloat16
        found: Array = (plain.float() if small else plain).numpy()
        return found
    if isinstance(thing, np.ndarray):
        return _numbers(thing.tolist()) if thing.dtype.kind == "O" else _numeric(thing)
    if isinstance(thing, list | tuple):
        return _numbers(thing)
    if isinstance(thing, _PLAIN):
        return _numbers([thing])
    if hasattr(thing, "to_numpy"):  # a column of pandas or polars
        return _column(thing)
    return None


def _numeric(values: Array) -> Array | None:
    return values if values.dtype.kind in "iubf" else None


def _numbers(values: Any) -> Array | None:
    """The numbers of a list, or of lists in it; None where there is anything else."""
    kinds = set(map(type, values))
    if all(issubclass(kind, _PLAIN) for kind in kinds):
        if type(None) in kinds:
            values = [np.nan if v is None else v for v in values]
        made = np.array(values) if values else np.array([], dtype=np.int64)
        exact = made.dtype.kind != "f" or any(issubclass(k, float | np.floating) for k in kinds)
        return made if exact or type(None) in kinds else np.array(values, dtype=object)
    if not all(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
        return None
    parts = [array(value, True) for value in values]
    if any(part is None for part in parts):
        return None
    return np.concatenate([part.reshape(-1) for part in parts if part is not None])


def _column(column: Any) -> Array | None:
    values = column.to_numpy()
    if values.dtype.kind != "O":
        return _numeric(values)
    return array(column.astype(object).where(column.notna(), None).to_numpy(), True)


def form(leaf: Any) -> str | None:
    """How a leaf is compared: "one", "list" (each of it), "array", "arrays" (at once); or None."""
    if is_tensor(leaf) or isinstance(leaf, np.ndarray):
        return ("one", "array")[leaf.ndim] if leaf.ndim < 2 else "arrays"
    if isinstance(leaf, list | tuple):
        return "list" if all(isinstance(v, _PLAIN) for v in leaf) else None
    return "one" if isinstance(leaf, _PLAIN) else None


def leaves(item: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What one row, or one batch, holds, each with the code that leads to it: `["label"]`."""
    if isinstance(item, str | bytes) or item is None:
        return
    if isinstance(item, Mapping) or (callable(getattr(item, "keys", None)) and _indexed(item)):
        for key in list(item.keys())[:_MOST_PARTS]:
            yield from leaves(item[key], f"{path}[{key!r}]")
    elif isinstance(item, list) and _numbers(item) is not None:
        yield path, item
    elif isinstance(item, list | tuple):
        for i, part in enumerate(item[:_MOST_PARTS]):
            yield from leaves(part, f"{path}[{i}]")
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            yield from leaves(getattr(item, field.name, None), f"{path}.{field.name}")
    else:
        yield path, item


def _indexed(item: Any) -> bool:
    return hasattr(item, "__getitem__") and not hasattr(item, "to_numpy")


def reached(one: str, loop: str, how: str | None, keep: str = "") -> Access | None:
    """The access to a field that is `one` in each turn of `loop`, by the `form` of its values."""
    if how is None:
        return None
    in_row = how in ("list", "array")
    part, length = (f"{one}[COLUMN]", f"len({one})") if in_row else ("", "")
    value, inner = ("v", f"{loop} for v in {one}") if how == "list" else (one, loop)
    array = how in ("array", "arrays")
    return Access(value, inner, array, keep, part=part, length=length, over=loop)
