"""Checks every indexing call before it runs, and keeps count of what was checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import indexing
from ..indexing import Bad, Usage
from ..model import SHOWN_VALUES, Checks, Number, Tightest, Values
from .madeup import MadeUp
from .standins import LOST


@dataclass
class Seen:
    """All values of one argument of one operator at one module, over all calls so far."""

    count: int = 0
    minimum: float | None = None
    maximum: float | None = None
    distinct: set[Number] = field(default_factory=set)

    def add(self, tensor: torch.Tensor) -> None:
        """Take in the values of one call."""
        if not tensor.numel() or tensor.is_complex():
            return
        if tensor.dtype == torch.bool:
            tensor = tensor.byte()  # JSON's True is no number
        low, high = (v.item() for v in torch.aminmax(tensor.detach()))
        self.count += tensor.numel()
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)
        if not tensor.is_floating_point() and len(self.distinct) <= SHOWN_VALUES:
            self.distinct.update(_distinct(tensor.detach(), int(low), int(high)))

    def values(self) -> Values:
        """The record of it."""
        distinct = sorted(self.distinct)[:SHOWN_VALUES]
        return Values(
            count=self.count,
            minimum=self.minimum,
            maximum=self.maximum,
            distinct=tuple(distinct),
            distinct_count=len(self.distinct),
            complete=len(self.distinct) <= SHOWN_VALUES,
        )


def _distinct(tensor: torch.Tensor, low: int, high: int) -> list[int]:
    if high - low < 4096:  # a count is linear, where `unique` sorts a mask of millions of pixels
        counts = torch.bincount((tensor.reshape(-1).long() - low), minlength=1)
        return [int(i) + low for i in counts.nonzero().reshape(-1)]
    return [int(v) for v in torch.unique(tensor).tolist()]


def seen_key(usage: Usage) -> tuple[Any, ...]:
    """One argument of one operator against one table, over all calls."""
    return usage.op, usage.argument, usage.bound.high if usage.bound else None, usage.table


def _in_range(usage: Usage) -> bool:
    """Values that were not computed, but cannot be bad: the positions that `argmax` gives."""
    limit, bound = usage.tensor.__dict__.get("_nb_below"), usage.bound
    if limit is None or bound is None or isinstance(bound.high, MadeUp):
        return False
    return bool(bound.low <= 0 and limit <= bound.high)


class Checker:
    """Looks at the usages of one call at a time.

    `unknown(tensor)` answers why a tensor's values are made up, or None. `on_fault(usage, bad,
    func, args, kwargs)` is called for each faulty argument, before the call runs, `on_pass(usage)`
    for each good one.
    """

    def __init__(
        self,
        unknown: Callable[[torch.Tensor], str | None],
        on_fault: Callable[[Usage, Bad, Any, Any, Any], None],
        module: Callable[[], str | None],
        on_pass: Callable[[Usage], None],
    ) -> None:
        self._unknown = unknown
        self._on_fault = on_fault
        self._module = module
        self._on_pass = on_pass
        self._calls = 0
        self._operators: set[str] = set()
        self._tightest: dict[tuple[str, str], Tightest] = {}
        self.seen: dict[tuple[Any, ...], Seen] = {}
        self.ghost_operators: set[str] = set()
        self.unchecked: set[str] = set()  # those of them whose index was not computed
        self.passed_over: set[str] = set()  # those whose index was only on the GPU
        self.notes: list[str] = []  # of calls that could not be read
        self.measure: Callable[[Usage], None] | None = None

    def reset(self) -> None:
        """Forget what earlier cells did: the failing cell begins."""
        self._calls = 0
        self._operators.clear()
        self._tightest.clear()
        self.seen.clear()
        self.ghost_operators.clear()
        self.unchecked.clear()
        self.passed_over.clear()
        self.notes.clear()

    def unread(self, call: indexing.Unread) -> None:
        """A call ran that could not be read: it may be the culprit, whatever is found later."""
        self.ghost_operators.add(call.op)
        self.unchecked.add(call.op)
        note = f"a call of `{call.op}` was not checked, it could not be read ({call})"
        if note not in self.notes:
            self.notes.append(note)

    def check(
        self, usages: tuple[Usage, ...], func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Check one call; returns the arguments to run it with (repaired where bad or made up)."""
        repair = False
        for usage in usages:
            why = self._unknown(usage.tensor)
            if why is not None or self._unknown_bound(usage):
                if why == LOST:
                    self.passed_over.add(usage.op)
                if not _in_range(usage):
                    self.ghost_operators.add(usage.op)
                    if usage.kind == "index":
                        self.unchecked.add(usage.op)
                repair = True
                continue
            self._calls += 1
            self._operators.add(usage.op)
            if self.measure is not None:
                self.measure(usage)
            bad = indexing.bad(usage)
            if bad is None:
                self._note(usage)
                self._on_pass(usage)
                continue
            repair = True
            self._on_fault(usage, bad, func, args, kwargs)
        if repair and not isinstance(
            func, str
        ):  # a str: a public function, seen before any operator
            repaired = indexing.repaired(func, args, kwargs, usages)
            if repaired is not None:
                return repaired
        return args, kwargs

    def _unknown_bound(self, usage: Usage) -> bool:
        """The size of the table, or the number of classes, was made up."""
        made_up = usage.bound is not None and isinstance(usage.bound.high, MadeUp)
        return made_up or "_nb_size" in getattr(usage.size_of, "__dict__", ())

    def _note(self, usage: Usage) -> None:
        self.seen.setdefault(seen_key(usage), Seen()).add(usage.tensor)
        if usage.bound is None:
            return
        found = indexing.tightest(usage)
        if found is None:
            return
        value, margin = found
        old = self._tightest.get((usage.op, usage.argument))
        if old is None or margin < old.margin:
            self._tightest[usage.op, usage.argument] = Tightest(
                op=usage.op,
                argument=usage.argument,
                module=self._module(),
                value=value,
                bound=usage.bound,
                margin=margin,
            )

    def checks(self) -> Checks:
        """What was checked so far."""
        tightest = sorted(self._tightest.values(), key=lambda t: t.margin)
        return Checks(
            calls=self._calls, operators=len(self._operators), tightest=tuple(tightest[:8])
        )
