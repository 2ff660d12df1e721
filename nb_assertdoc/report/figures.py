"""Numbers, values and ranges in few characters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nb_assertdoc import model
from nb_assertdoc.report.layout import short


def number(value: model.Number | None) -> str:
    """A number in few characters; integers of up to 20 digits in full."""
    if value is None:
        return "?"
    if isinstance(value, str):
        return short(value, 20)
    if isinstance(value, int):
        digits = int(abs(value).bit_length() * math.log10(2))
        return str(value) if digits < 20 else f"about {'-' if value < 0 else ''}10^{digits}"
    return f"{value:.8g}"


def plural(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def ranges(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive integers, in the order given."""
    start = None
    for index, value in enumerate(values):
        start = value if start is None else start
        if index + 1 == len(values) or values[index + 1] != value + 1:
            yield start, value
            start = None


def values(shown: Sequence[model.Number], distinct: int, pieces: int = 6) -> str:
    """Distinct values folded into ranges: "-1, 512..581"; says how many are not listed."""
    integers = [v for v in shown if isinstance(v, int)]
    parts = [
        (number(low) if low == high else f"{number(low)}..{number(high)}", high - low + 1)
        for low, high in ranges(integers)
    ]
    parts += [(number(v), 1) for v in shown if not isinstance(v, int)]
    if not parts:
        return plural(distinct, "value") if distinct else "nothing"
    more = distinct - sum(count for _, count in parts[:pieces])
    text = ", ".join(name for name, _ in parts[:pieces])
    return f"{text} and {number(more)} more" if more > 0 else text


def bound(finding: model.Finding) -> str:
    """The valid range of a finding in words."""
    if finding.bound is None:
        if finding.op == "multinomial":
            return "finite, >= 0, sum of a row > 0"
        return "no fixed range"
    return valid_range(finding.bound)


def wraps(limit: model.Bound) -> bool:
    """Negative indices count from the end."""
    return not limit.high_inclusive and limit.low == -limit.high < 0


def valid_range(limit: model.Bound) -> str:
    """ "0 <= index < 512", "0 <= value <= 1", with the ignored index where there is one."""
    name, sign = ("value", "<=") if limit.high_inclusive else ("index", "<")
    if wraps(limit):
        return f"0 <= index < {number(limit.high)}, or {number(limit.low)}..-1 from the end"
    text = f"{number(limit.low)} <= {name} {sign} {number(limit.high)}"
    return text if limit.ignore is None else f"{text}, or {number(limit.ignore)} (ignored)"


def position(indices: Sequence[int]) -> str:
    return f"[{', '.join(number(i) for i in indices[:8])}]"


def listed(items: Sequence[int], most: int = 6) -> str:
    """ "3, 7, 12 and 9 more"."""
    text = ", ".join(number(item) for item in items[:most])
    return f"{text} and {len(items) - most} more" if len(items) > most else text


def size(count: int) -> str:
    """Bytes as "38 MB"."""
    power = min((len(str(min(max(count, 1), 10**18))) - 1) // 3, 4)
    return f"{number(max(count, 0) // 1000**power)} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
