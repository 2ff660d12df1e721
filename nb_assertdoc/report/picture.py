"""The picture of the bad values against the valid range, as shares of a bar."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from nb_assertdoc import model
from nb_assertdoc.report import figures

SIDE = 30  # percent of the bar for the values on one side of the range
CELLS = 12  # marks on one side


@dataclass(frozen=True)
class Segment:
    """A piece of the bar: its share in percent, its labels, which of its cells hold a value."""

    valid: bool
    percent: int
    left: str
    right: str
    cells: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Picture:
    """The bar, and the same in words."""

    segments: tuple[Segment, ...]
    words: str


def picture(finding: model.Finding) -> Picture | None:
    """None where there is no numeric range, or no finite number outside it."""
    limit = finding.bound
    if limit is None:
        return None
    numbers = [
        v
        for v in finding.bad_values
        if isinstance(v, int) or (isinstance(v, float) and math.isfinite(v))
    ]
    low = [v for v in numbers if v < limit.low]
    high = [v for v in numbers if v > limit.high or (v == limit.high and not limit.high_inclusive)]
    if not low and not high:
        return None
    middle = 100 - SIDE * (bool(low) + bool(high))
    last = limit.high if limit.high_inclusive else limit.high - 1
    segments = [_side(low)] if low else []
    first = 0 if figures.wraps(limit) and not low else limit.low
    segments += [Segment(True, middle, figures.number(first), figures.number(last))]
    segments += [_side(high)] if high else []
    found = figures.values(finding.bad_values, finding.distinct_bad)
    return Picture(tuple(segments), f"valid {figures.bound(finding)}; found {found}")


def _side(values: list[int | float]) -> Segment:
    """The values in CELLS equal steps from the smallest to the largest."""
    low, high = min(values), max(values)
    if low == high:
        return Segment(False, SIDE, figures.number(low), "", (True,))
    # Fractions are exact where the difference of two huge numbers is not a float.
    span = Fraction(high) - Fraction(low)
    steps = {min(int((Fraction(v) - Fraction(low)) / span * CELLS), CELLS - 1) for v in values}
    cells = tuple(step in steps for step in range(CELLS))
    return Segment(False, SIDE, figures.number(low), figures.number(high), cells)
