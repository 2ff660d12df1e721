"""Lines to paste after a scan: an assertion that keeps the range, the bad rows, a filter."""

from __future__ import annotations

import ast
from dataclasses import replace

import msgspec

from ..model import Bound
from .reading import Access
from .tally import Column, Scan

_LISTED = 25  # rows in a line of code
_MOST_FIELDS = 4


def advised(scan: Scan) -> Scan:
    """The scan with its lines to paste: for the fields that hold bad values, else for all."""
    code: list[str] = []
    if scan.lengths:
        access = [c.access for c in (scan.bad or scan.columns) if c.access is not None]
        most = scan.bound.high - 1
        lines = [f"assert all({a.value} <= {most} {a.loop})" for a in access if a.loop]
        lines += [f"assert {a.value} <= {most}" for a in access if not a.loop]
        return replace(scan, code=tuple(lines[:_MOST_FIELDS]))
    for column in (scan.bad or scan.columns)[:_MOST_FIELDS]:
        code += _lines(column, scan.bound, only=len(scan.bad) == 1)
    return replace(scan, code=tuple(code))


def _lines(column: Column, bound: Bound, only: bool) -> list[str]:
    if column.access is None:
        return []
    least, most = column.minimum, column.maximum
    within = isinstance(least, int) and isinstance(most, int) and least <= -100 <= most
    if bound.ignore == -100 and not within:  # torch's default, which this data does not use
        bound = msgspec.structs.replace(bound, ignore=None)
    inside = _inside(column.access, bound, "nan" in column.values)
    shown = f"{_words(column.name)} outside {span(bound)}"
    whole = f"{inside}.all()" if column.access.array else inside
    test = f"all({whole} {column.access.loop})" if column.access.loop else whole
    lines = [f"assert {test}, {shown!r}"]
    if not column.bad:
        return lines
    more = "" if column.bad_rows <= _LISTED else f"  # the first {_LISTED} of {column.bad_rows}"
    lines.append(f"bad_rows = {list(column.rows[:_LISTED])}{more}")
    # Of several fields some may have another range; and rows have other numbers after a filter.
    keep = _filter(column.access, bound, "nan" in column.values, not more) if only else ""
    return [*lines, keep] if keep else lines


def span(bound: Bound) -> str:
    """The valid values: "0..9", "0..9 or -100", "0..1"."""
    last = bound.high if bound.high_inclusive else bound.high - 1
    text = f"{bound.low:g}..{last:g}" if bound.high_inclusive else f"{bound.low}..{last}"
    return text if bound.ignore is None else f"{text} or {bound.ignore}"


def _inside(access: Access, bound: Bound, holes: bool) -> str:
    value, sign = access.value, "<=" if bound.high_inclusive else "<"
    if access.array:
        test = f"(({value} >= {bound.low}) & ({value} {sign} {bound.high}))"
        return test if bound.ignore is None else f"({test} | ({value} == {bound.ignore}))"
    test = f"{bound.low} <= {value} {sign} {bound.high}"
    test = test if bound.ignore is None else f"({test} or {value} == {bound.ignore})"
    return f"{value} is not None and {test}" if holes else test


def _filter(access: Access, bound: Bound, holes: bool, all_listed: bool) -> str:
    """The line that leaves the bad rows out, where one line does."""
    if "bad_rows" in access.keep and not all_listed:
        return ""
    inside = _inside(replace(access, value=access.each), bound, holes)
    inside = inside[1:-1] if inside.startswith("((") else inside
    line = access.keep.replace("{inside}", inside)
    try:
        ast.parse(line)
    except SyntaxError:  # what was scanned is no variable
        return ""
    return line


def _words(name: str) -> str:
    return name.replace("[row]", "")
