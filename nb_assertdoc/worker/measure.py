"""What range each operator's indices had, over the first batches of a cell's loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..indexing import Usage
from ..indexing.usage import widened
from ..model import Bound, Measured


@dataclass
class _Met:
    """All calls of one operator at one module against one bound."""

    calls: int = 0
    count: int = 0
    ignored: int = 0
    bad: int = 0
    minimum: float | None = None
    maximum: float | None = None


class Measure:
    """Takes in each call that is checked. `site(op)`: its public name, and the module that runs."""

    def __init__(self, batches: int, site: Callable[[str], tuple[str, str | None]]) -> None:
        self._batches = batches
        self._site = site
        self._met: dict[tuple[str, str, str | None, str | None, Bound | None], _Met] = {}
        self._calls = 0
        self._steps: dict[Any, tuple[int, int]] = {}  # loop: steps that checked, calls before

    def note(self, usage: Usage) -> None:
        """One argument of one call."""
        self._calls += 1
        tensor = usage.tensor.detach()
        if tensor.is_complex() or not tensor.numel():
            return
        values = widened(tensor).reshape(-1)
        op, module = self._site(usage.op)
        met = self._met.setdefault((op, usage.argument, module, usage.table, usage.bound), _Met())
        met.calls += 1
        met.count += values.numel()
        met.bad += int(usage.rule(tensor).sum())
        if usage.bound is not None and usage.bound.ignore is not None:
            values = values[values != usage.bound.ignore]
        met.ignored = met.ignored + tensor.numel() - values.numel()
        if values.numel():
            low, high = values.min().item(), values.max().item()
            met.minimum = low if met.minimum is None else min(met.minimum, low)
            met.maximum = high if met.maximum is None else max(met.maximum, high)

    def enough(self, loop: Any) -> bool:
        """A loop of the cell begins another step: were there enough with a checked call?"""
        steps, before = self._steps.get(loop, (0, self._calls))
        steps += self._calls > before
        self._steps[loop] = steps, self._calls
        return steps >= self._batches

    def records(self) -> tuple[Measured, ...]:
        """What was met, in the order of the first calls."""
        return tuple(
            Measured(
                op=op,
                argument=argument,
                module=module,
                table=table,
                bound=bound,
                calls=met.calls,
                count=met.count,
                ignored=met.ignored,
                bad=met.bad,
                minimum=met.minimum,
                maximum=met.maximum,
            )
            for (op, argument, module, table, bound), met in self._met.items()
        )
