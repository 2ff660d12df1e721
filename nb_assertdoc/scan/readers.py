"""Reads columns, rows and Arrow tables, a block at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ..salvage import Unsaveable
from .reading import (
    BAD,
    BAD_OF_MANY,
    Access,
    Array,
    Block,
    Event,
    Failed,
    Unread,
    Unreadable,
    array,
    form,
    is_tensor,
    leaves,
    reached,
    readable,
)

STREAM_ROWS = 100_000  # of what has no length
_VALUES = 1 << 20  # in one block of a column
_ITEMS, _ITEMS_SECONDS = 256, 0.2  # in one block of rows


class Source(Protocol):
    """Rows with one or more fields."""

    counted: bool  # False: another column of rows that are counted already

    @property
    def total(self) -> int | None:
        """How many rows there are; None: a stream."""

    def read(self, dead: bool, rows: Sequence[int] | None = None) -> Iterator[Event]:
        """All rows in order, or those given. `dead`: nothing may touch the GPU."""


@dataclass
class Columnar:
    """One column that is cut, not indexed row by row: a tensor, an array, a column of a frame."""

    name: str
    column: Any
    total: int
    alone: bool
    keep: str = ""
    counted: bool = True

    def read(self, dead: bool, rows: Sequence[int] | None = None) -> Iterator[Event]:
        try:
            readable(self.column, dead)
            yield from self._blocks(dead, rows)
        except Unreadable as error:
            yield Unread(self.name, str(error))

    def _blocks(self, dead: bool, rows: Sequence[int] | None) -> Iterator[Event]:
        column = self.column
        shape = getattr(column, "shape", (self.total,))
        if not shape:  # one number
            column, shape = column.reshape(1), (1,)
        each = max(1, int(np.prod(shape[1:], dtype=np.int64)))
        step = max(1, _VALUES // each)
        wanted = range(self.total) if rows is None else rows
        for start in range(0, len(wanted), step):
            part = wanted[start : start + step]
            index = slice(start, start + step) if rows is None else list(part)
            cut = column.iloc[index] if hasattr(column, "iloc") else column[index]
            values = array(cut, dead)
            if values is None:
                yield len(wanted)
                return
            numbers = np.arange(start, start + len(part)) if rows is None else np.asarray(part)
            flat = values.reshape(-1)
            width = max(1, flat.size // len(part))
            value = self._compared(flat.dtype)
            bad = BAD if len(shape) == 1 else BAD_OF_MANY
            access = Access(value, array=True, keep=self.keep, each=value, bad=bad)
            if len(shape) == 2:
                column, length = f"{value}[:, COLUMN]", f"{self.name}.shape[1]"
                access = replace(access, part=column, length=length)
            yield Block(self.name, access, flat, _rows_of(numbers, width), self.alone, width)
            yield len(part)

    def _compared(self, dtype: Any) -> str:
        """torch compares small integers modulo their size, and pandas no categories."""
        if str(getattr(self.column, "dtype", "")) == "category":
            return f"{self.name}.to_numpy()"
        small = is_tensor(self.column) and dtype.kind in "iub" and dtype.itemsize < 8
        return f"{self.name}.long()" if small else self.name


def _rows_of(numbers: Array, width: int) -> Callable[[Array], Array]:
    return lambda positions: numbers[positions // width]


@dataclass
class Rows:
    """Things that are asked for one by one: `get(row)`; or a stream, where `total` is None."""

    name: str
    things: Any
    total: int | None
    one: str  # the code of one row
    loop: str  # the code of the loop over all rows
    keep: str = ""
    collate: Callable[[list[Any]], Any] | None = None
    size: int = _ITEMS  # rows that are collated
    most: int = STREAM_ROWS  # rows of a stream
    counted: bool = True

    def read(self, dead: bool, rows: Sequence[int] | None = None) -> Iterator[Event]:
        if dead and (where := _on_gpu(self.things)):
            yield Unread(self.name, f"{where} is on the GPU, which cannot be read after an assert")
            return
        chunk: list[tuple[int, Any]] = []
        began, done = time.monotonic(), 0
        for row, item, error in self._items(rows):
            done += 1
            if error is not None:
                if not (refused := isinstance(error, Unsaveable)):
                    yield Failed(f"row {row}: {_said(error)}")
                if refused or (dead and "CUDA" in str(error)):
                    yield Unread(self.name, "its code uses the GPU")
                    return
            else:
                chunk.append((row, item))
            full = self.collate is None and time.monotonic() - began > _ITEMS_SECONDS
            if len(chunk) >= self.size or full:
                yield from self._blocks(chunk, dead)
                yield done
                chunk, began, done = [], time.monotonic(), 0
        yield from self._blocks(chunk, dead)
        yield done

    def _items(self, rows: Sequence[int] | None) -> Iterator[tuple[int, Any, BaseException | None]]:
        if self.total is not None:
            for row in range(self.total) if rows is None else rows:
                try:
                    yield row, self.things[row], None
                except (Exception, SystemExit) as error:  # the user's code; others may be fine
                    yield row, None, error
            return
        stream = iter(self.things)
        for row in range(self.most):
            try:
                yield row, next(stream), None
            except StopIteration:
                return
            except (Exception, SystemExit) as error:  # a generator that raised is at its end
                yield row, None, error
                return

    def _blocks(self, chunk: list[tuple[int, Any]], dead: bool) -> Iterator[Event]:
        numbers = [row for row, _ in chunk]
        gathered: dict[str, list[tuple[int, Any]]] = {}
        if self.collate is not None and chunk and not (dead and _any_on_gpu(i for _, i in chunk)):
            try:
                batch = self.collate([item for _, item in chunk])
            except (Exception, SystemExit) as error:
                yield Failed(f"rows {numbers[0]}..{numbers[-1]}: collate_fn: {_said(error)}")
                return
            yield from self._batch(batch, numbers, dead)
            return
        kinds = {type(item) for _, item in chunk}
        if len(kinds) == 1 and kinds <= {int, float, bool}:  # a list of numbers, which may be long
            access = reached(self.one, self.loop, "one", self.keep)
            values, at = array([item for _, item in chunk], dead), np.asarray(numbers)
            yield Block(self.name, access, values, lambda p: at[p], True)
            return
        for row, item in chunk:
            for path, leaf in leaves(item):
                gathered.setdefault(path, []).append((row, leaf))
        for path, found in gathered.items():
            yield from self._field(path, found, dead, len(found) == len(chunk))

    def _batch(self, batch: Any, numbers: list[int], dead: bool) -> Iterator[Event]:
        """The fields of a batch, which are not those of its rows."""
        for path, leaf in leaves(batch):
            name = f"batch{path}"
            try:
                values = array(leaf, dead)
            except Unreadable as error:
                yield Unread(name, str(error))
                continue
            if values is None:
                continue
            flat = values.reshape(-1)
            aligned = bool(values.ndim) and len(values) == len(numbers)
            rows = np.asarray(numbers if aligned else numbers[:1])
            if not aligned and flat.dtype.kind != "f":
                yield Unread(f"rows of {name}", "its batches mix rows: the first one is named")
            access = reached(name, self.loop, form(leaf))
            if access is not None and aligned and values.ndim == 2:
                access = replace(access, length=f"{name}.shape[1]")
            yield Block(name, access, flat, _rows_of(rows, max(1, flat.size // len(rows))))

    def _field(
        self, path: str, found: list[tuple[int, Any]], dead: bool, in_all: bool
    ) -> Iterator[Event]:
        """One field; no code reaches it where a row lacks it (`in_all` is False)."""
        name = f"{self.name}[row]{path}" if path else self.name
        arrays: list[Array] = []
        rows: list[int] = []
        for row, leaf in found:
            try:
                values = array(leaf, dead)
            except Unreadable as error:
                yield Unread(name, str(error))
                continue
            if values is not None:
                arrays.append(values.reshape(-1))
                rows.append(row)
        if not arrays:
            return
        repeated = np.repeat(np.asarray(rows), [a.size for a in arrays])
        how = form(found[0][1])
        access = reached(f"{self.one}{path}", self.loop, how, self.keep) if in_all else None
        widths = {a.size for a in arrays}
        width = widths.pop() if len(widths) == 1 else 0
        values = np.concatenate(arrays)
        yield Block(name, access, values, lambda p: repeated[p], not path, width)


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__


@dataclass
class Arrow:
    """A data set of Hugging Face, or an Arrow table: read by columns, without its own format."""

    name: str
    data: Any
    total: int
    counted: bool = True

    def read(self, dead: bool, rows: Sequence[int] | None = None) -> Iterator[Event]:
        import pyarrow as pa
        import pyarrow.compute as pc

        start = 0
        for table in self._tables(rows):
            numbers = np.arange(start, start + len(table)) if rows is None else np.asarray(rows)
            start += len(table)
            for key in table.column_names:
                column = table[key].combine_chunks()
                if isinstance(column, pa.ChunkedArray):
                    column = pa.concat_arrays(column.chunks)
                of_row, depth = numbers, 0
                while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
                    of_row = of_row[pc.list_parent_indices(column).to_numpy()]
                    column, depth = pc.list_flatten(column), depth + 1
                if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
                    continue
                values = column.to_numpy(zero_copy_only=False)
                one = f"{self.name}[{key!r}]"
                yield Block(one, self._access(key, depth), values, _rows_of(of_row, 1))
            yield len(table)

    def _access(self, key: str, depth: int) -> Access | None:
        one, each = f"{self.name}[{key!r}]", f"row[{key!r}]"
        if depth == 0:
            keep = f"{self.name} = {self.name}.filter(lambda row: " + "{inside})"
            keep = keep if hasattr(self.data, "with_format") else ""
            return Access("v", f"for v in {one}", keep=keep, each=each)
        over = f"for row in {one}"
        whole = Access("v", f"{over} for v in row", length="len(row)", over=over)
        return whole if depth == 1 else None

    def _tables(self, rows: Sequence[int] | None) -> Iterator[Any]:
        if not hasattr(self.data, "with_format"):
            taken = self.data if rows is None else self.data.take(list(rows))
            for start in range(0, len(taken), 10_000):
                yield taken.slice(start, 10_000)
            return
        plain = self.data.with_format("arrow")  # a view: the user's own keeps its format
        if rows is not None:
            yield plain[list(rows)]
            return
        for start in range(0, len(plain), 10_000):
            yield plain[start : start + 10_000]


def _any_on_gpu(items: Iterable[Any]) -> bool:
    return any(
        is_tensor(leaf) and leaf.device.type != "cpu" for item in items for _, leaf in leaves(item)
    )


def _on_gpu(thing: Any, depth: int = 3) -> str:
    """The attribute of a data set through which its code may touch the GPU; "" if there is none.

    Only metadata is looked at.
    """
    for key, value in list(getattr(thing, "__dict__", {}).items()):
        parts = value if isinstance(value, list | tuple) else [value]
        parts = list(value.values()) if isinstance(value, dict) else parts
        for part in parts[:_ITEMS]:
            if _of_gpu(part):
                return f"its `{key}`"
            if depth and hasattr(part, "__getitem__") and (inner := _on_gpu(part, depth - 1)):
                return inner
    return ""


def _of_gpu(thing: Any) -> bool:
    """A tensor or a module on the GPU, or its name: `self.device = "cuda"`."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(thing, torch.nn.Module):
        return any(p.device.type not in ("cpu", "meta") for p in thing.parameters())
    if isinstance(thing, torch.Tensor):
        return thing.device.type not in ("cpu", "meta")
    return isinstance(thing, str | torch.device) and str(thing).startswith("cuda")
