"""Counts the values of the fields of a data set against a range."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..model import SHOWN_VALUES, Bound, Number
from ..salvage import refusing_cuda
from .readers import Source
from .reading import Access, Array, Block, Failed, Unread

SHOWN_ERRORS = 5
_OFTEN = 0.25  # seconds between two words on the progress
Progress = Callable[[int, int | None], None]  # rows looked at, rows in all


@dataclass(frozen=True)
class Column:
    """One field of the data. Counts are exact; `rows` and `values` hold the first 256."""

    name: str  # in the user's names: "train_ds[row][1]"
    count: int
    minimum: Number | None
    maximum: Number | None
    bad: int
    bad_rows: int
    rows: tuple[int, ...]
    distinct: int  # different bad values
    values: tuple[Number, ...]  # sorted, "nan" last
    access: Access | None
    alone: bool
    kind: str  # numpy's letter of the dtype: "i", "u", "b", "f", "O" (integers past 64 bits)


@dataclass(frozen=True)
class Scan:
    """What a scan has seen."""

    name: str
    bound: Bound
    columns: tuple[Column, ...]
    rows: int  # looked at
    total: int | None  # rows in all; None: a stream
    seconds: float
    stopped: bool = False
    errors: tuple[str, ...] = ()  # the first ones
    failed: int = 0  # rows whose reading raised
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    why: str = ""  # where the range comes from
    code: tuple[str, ...] = ()  # lines to paste
    lengths: bool = False  # of each row the number of its values was counted, not the values

    @property
    def bad(self) -> tuple[Column, ...]:
        """The fields that hold values out of range."""
        return tuple(c for c in self.columns if c.bad)


class Tally:
    """The count of one field."""

    def __init__(self, block: Block, bound: Bound) -> None:
        self._first = block
        self._bound = bound
        self._kind = block.values.dtype.kind
        self._count = self._bad = self._bad_rows = 0
        self._low: int | float | None = None
        self._high: int | float | None = None
        self._rows: list[int] = []
        self._distinct = _Distinct()
        self._nan = False
        self._access = block.access

    def add(self, block: Block) -> None:
        """Take in the values of more rows."""
        values = block.values
        if not values.size:
            return
        self._count += values.size
        if block.access is None:
            self._access = None
        if values.dtype.kind == "f":
            self._kind = "f"
        numbers = values[~np.isnan(values)] if values.dtype.kind == "f" else values
        if numbers.size:
            low, high = _plain(numbers.min()), _plain(numbers.max())
            self._low = low if self._low is None else min(self._low, low)
            self._high = high if self._high is None else max(self._high, high)
        bad = np.flatnonzero(outside(values, self._bound))
        if not bad.size:
            return
        rows = _once(block.rows(bad))  # ascending
        self._bad += bad.size
        self._bad_rows += rows.size
        self._rows += [int(r) for r in rows[: SHOWN_VALUES - len(self._rows)]]
        found = values[bad]
        if found.dtype.kind == "f":
            self._nan |= bool(np.isnan(found).any())
            found = found[~np.isnan(found)]
        self._distinct.add(found)

    def column(self) -> Column:
        """The record of it."""
        distinct, least = self._distinct.found()
        shown: list[Number] = [_number(v) for v in least]
        values = (*shown, "nan") if self._nan else tuple(shown)
        return Column(
            name=self._first.field,
            count=self._count,
            minimum=None if self._low is None else _number(self._low),
            maximum=None if self._high is None else _number(self._high),
            bad=self._bad,
            bad_rows=self._bad_rows,
            rows=tuple(self._rows),
            distinct=distinct + self._nan,
            values=values[:SHOWN_VALUES],
            access=self._access,
            alone=self._first.alone,
            kind=self._kind,
        )


class _Distinct:
    """Different values, exactly: sorted arrays, merged where two are about as long."""

    def __init__(self) -> None:
        self._sorted: dict[Any, list[Array]] = {}  # by dtype: numpy's common one may be inexact

    def add(self, values: Array) -> None:
        parts = self._sorted.setdefault(values.dtype, [])
        parts.append(_once(np.sort(values)))  # np.unique hashes, which is slow for many
        while len(parts) > 1 and parts[-2].size <= 2 * parts[-1].size:
            parts.append(_merged([parts.pop(), parts.pop()]))

    def found(self) -> tuple[int, list[int | float]]:
        """How many there are, and the least of them."""
        whole = [_merged(parts) for parts in self._sorted.values()]
        if len(whole) == 1:
            return whole[0].size, [_plain(v) for v in whole[0][:SHOWN_VALUES]]
        values = {_plain(v) for each in whole for v in each}
        return len(values), sorted(values)[:SHOWN_VALUES]


def _merged(parts: Sequence[Array]) -> Array:
    return _once(np.sort(np.concatenate(parts), kind="stable"))  # it merges what is sorted


def _once(ordered: Array) -> Array:
    """A sorted array without repetitions."""
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: ordered.size]]


def outside(values: Array, bound: Bound) -> Array:
    """Which values are not in `bound`; NaN never is."""
    low = max(bound.low, 0) if values.dtype.kind in "ub" else bound.low  # no unsigned below 0
    below = values <= bound.high if bound.high_inclusive else values < bound.high
    mask: Array = ~((values >= low) & below).astype(bool)
    return mask if bound.ignore is None else mask & (values != bound.ignore).astype(bool)


def _plain(value: Any) -> int | float:
    plain: int | float = value.item() if isinstance(value, np.generic) else value
    return plain


def _number(value: int | float) -> Number:
    value = int(value) if isinstance(value, bool) else value
    return value if math.isfinite(value) else str(value)


def scan(
    sources: Sequence[Source],
    bound: Bound,
    *,
    name: str,
    dead: bool = False,
    fields: Mapping[str, int | None] | None = None,
    lengths: bool = False,
    progress: Progress = lambda done, total: None,
) -> Scan:
    """Look at every row of `sources`; a KeyboardInterrupt gives what was seen until then.

    `fields`: the only ones to count, each with the number of one column of it, or None. Without
    them, fields of integers count, of floats only where there is no other field or the range is one
    of values (`high_inclusive`). `lengths`: count how many values each row has, not the values.
    `dead`: the GPU's context is gone, and nothing may touch it. The global random generators are
    put back.
    """
    began = told = time.monotonic()
    tallies: dict[str, Tally] = {}
    errors: list[str] = []
    unread: dict[str, None] = {}
    failed = rows = 0
    stopped = False
    totals = [source.total for source in sources if source.counted]
    total = None if None in totals else sum(t for t in totals if t is not None)
    with harmless(dead):
        try:
            for source in sources:
                for event in source.read(dead):
                    if isinstance(event, Block):
                        block = _counted(event, fields, bound, lengths)
                        if block is not None:
                            tallies.setdefault(block.field, Tally(block, bound)).add(block)
                    elif isinstance(event, Failed):
                        failed += 1
                        errors += [event.text] if len(errors) < SHOWN_ERRORS else []
                    elif isinstance(event, Unread):
                        unread[f"{event.field}: {event.why}"] = None
                    elif source.counted:
                        rows += event
                    if time.monotonic() - told > _OFTEN:
                        progress(rows, total)
                        told = time.monotonic()
        except KeyboardInterrupt:
            stopped = True
    columns = sorted((t.column() for t in tallies.values()), key=lambda c: not c.bad)
    return Scan(
        name=name,
        bound=bound,
        columns=tuple(columns),
        rows=rows,
        total=total,
        seconds=time.monotonic() - began,
        stopped=stopped,
        errors=tuple(errors),
        failed=failed,
        unread=tuple(unread),
        lengths=lengths,
    )


def _counted(
    block: Block, fields: Mapping[str, int | None] | None, bound: Bound, lengths: bool
) -> Block | None:
    """What of a block is to be counted."""
    if lengths:
        return block.lengths() if block.values.dtype.kind in "iuO" else None
    if fields:
        column = fields.get(block.field)
        chosen = block.column(column) if column is not None else block
        return chosen if block.field in fields else None
    integer = block.values.dtype.kind != "f"
    return block if integer or block.alone or bound.high_inclusive else None


def holders(
    sources: Sequence[Source],
    rows: Sequence[int],
    bad: Collection[Number],
    *,
    dead: bool,
    each: bool,
) -> dict[str, int | None]:
    """The fields that hold one of the values `bad` in each of these rows.

    `each`: the faulty call took one value of each row; of a field that holds several, the number of
    their one column is given.
    """
    seen: dict[str, set[int]] = {}
    columns: dict[str, set[int]] = {}
    with harmless(dead):
        for source in sources:
            if source.total is None or source.total <= max(rows):
                continue
            for event in source.read(dead, rows):
                if not isinstance(event, Block):
                    continue
                mask = np.isin(event.values, [v for v in bad if not isinstance(v, str)])
                if "nan" in bad and event.values.dtype.kind == "f":
                    mask |= np.isnan(event.values)
                at = np.flatnonzero(mask)
                seen.setdefault(event.field, set()).update(int(r) for r in event.rows(at))
                if each and event.width > 1:
                    columns.setdefault(event.field, set()).update(int(i) for i in at % event.width)
    one = {name: min(found) for name, found in columns.items() if len(found) == 1}
    return {name: one.get(name) for name, found in seen.items() if found >= set(rows)}


@contextmanager
def harmless(dead: bool) -> Iterator[None]:
    """The user's own code runs: nothing changes for the next, and `dead` keeps it from the GPU."""
    with random_states_kept(), refusing_cuda() if dead else nullcontext():
        yield


@contextmanager
def random_states_kept() -> Iterator[None]:
    """The user's next random numbers are the same as without us."""
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    states = random.getstate(), np.random.get_state()
    of_torch = generator.get_state() if generator is not None else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if generator is not None:
            generator.set_state(of_torch)
