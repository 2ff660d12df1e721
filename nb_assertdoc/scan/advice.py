"""Lines to paste after a scan: an assertion that keeps the range, the bad rows, a filter."""

from __future__ import annotations

import ast
from dataclasses import replace

import msgspec

from ..model import SHOWN_VALUES, Bound
from .reading import Access
from .tally import Column, Scan

_LISTED = SHOWN_VALUES  # rows in a line of code; of more the code that finds them
_OF_DATA = "  # rows of the data, counted from 0; not of a batch"
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
        code += _lines(column, scan, only=len(scan.bad) == 1)
    return replace(scan, code=tuple(code))


def _lines(column: Column, scan: Scan, only: bool) -> list[str]:
    bound = scan.bound
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
    listed = str(list(column.rows[:_LISTED])) if column.bad_rows <= _LISTED else ""
    rows = listed or _row_finder(column.access, inside, scan.total is None)
    more = "" if rows else f"; the first {_LISTED} of {column.bad_rows}"
    lines.append(f"bad_rows = {rows or list(column.rows[:_LISTED])}{_OF_DATA}{more}")
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


def _row_finder(access: Access, inside: str, stream: bool) -> str:
    """The expression that gives all bad rows, in the user's names; "" where none is known."""
    if not access.loop:
        return access.bad.replace("{inside}", inside)
    over = access.over or access.loop
    within = access.loop[len(over) :]
    test = f"{inside}.all()" if access.array else inside
    test = f"all({test}{within})" if within else test
    start, _, data = over.partition(" in ")
    if start == "for batch" and stream:
        return ""
    if start == "for batch":  # each row through the loader's own `collate_fn`
        rows = f"for row in range(len({data}.dataset))"
        over = f"{rows} for batch in [{data}.collate_fn([{data}.dataset[row]])]"
    elif not data.startswith("range("):  # the values themselves, or things that hold them
        over = f"for number, {start[len('for ') :]} in enumerate({data})"
        return f"[number {over} if not ({test})]"
    return f"[row {over} if not ({test})]"


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
