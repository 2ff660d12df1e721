"""What a scan of the data has seen, and what range each operator met, as text and as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_assertdoc.report import figures, words
from nb_assertdoc.report.layout import COLUMNS, encodable, printable, short, wrap
from nb_assertdoc.report.markup import _render as render

if TYPE_CHECKING:
    from nb_assertdoc.model import Evidence, Measured
    from nb_assertdoc.scan import Column, Scan

_SHOWN_FINE = 12  # fields without a bad value
_PLACE = 30  # characters of a module's name: its end says more than its beginning


def scan_bundle(scan: Scan) -> dict[str, Any]:
    """A scan for one display."""
    return {"text/html": scan_html(scan), "text/plain": scan_text(scan)}


def progress_bundle(name: str, done: int, total: int | None) -> dict[str, Any]:
    """One line while a scan runs."""
    of = f" of {total:,} rows ({100 * done // max(1, total)}%)" if total is not None else " rows"
    line = f"Scanning {short(name, 60)}: {done:,}{of} ... Interrupt (\u25a0) shows what is known."
    return {"text/html": render("card.html.jinja", lines=[line]), "text/plain": encodable(line)}


def scan_text(scan: Scan) -> str:
    """A scan as text; lines of code are not wrapped, since they are to be copied."""
    rows = [*wrap(headline(scan), COLUMNS)]
    for label, said in facts(scan):
        first, *rest = wrap(said, COLUMNS - 12)
        rows += [f"  {label:<9} {first}", *(f"{'':12}{line}" for line in rest)]
    for column in scan.bad:
        rows += ["", f"  {short(column.name, 90)}"]
        rows += [f"    {label:<7} {said}" for label, said in found(column)]
    if scan.code:
        rows += ["", "  to paste:", *(f"    {printable(line)}" for line in scan.code)]
    return encodable("\n".join(rows))


def scan_html(scan: Scan) -> str:
    """A scan as HTML without script, style sheet or SVG."""
    return render(
        "scan.html.jinja", scan=scan, headline=headline(scan), facts=facts(scan), found=found
    )


def headline(scan: Scan) -> str:
    """One sentence."""
    name = short(scan.name, 60)
    until = "" if not scan.stopped else " as far as it was scanned"
    if scan.bad:
        worst = max(scan.bad, key=lambda c: c.bad_rows)
        fields = f" in {len(scan.bad)} fields; the worst:" if len(scan.bad) > 1 else ":"
        counts = f"{worst.bad:,} value{'' if worst.bad == 1 else 's'} in {_rows(worst.bad_rows)}"
        return f"{name} holds values out of range{fields} {counts}{until}."
    if any(c.count for c in scan.columns):
        return f"{name} holds no value out of range{until}."
    return f"Nothing in {name} could be compared{until}."


def facts(scan: Scan) -> list[tuple[str, str]]:
    """What the numbers stand on, each with its label."""
    of = f" of {scan.total:,}" if scan.total is not None else ""
    why = f"  ({scan.why})" if scan.why else ""
    said = [
        ("valid", scan.why if scan.lengths else f"{figures.valid_range(scan.bound)}{why}"),
        ("looked at", f"{scan.rows:,}{of} rows in {scan.seconds:.1f} s"),
    ]
    if scan.stopped:
        said.append(
            ("stopped", "The scan was interrupted: the counts are those of the rows so far.")
        )
    fine = [c for c in scan.columns if not c.bad and c.count]
    listed = "; ".join(
        f"{c.name} {figures.number(c.minimum)}..{figures.number(c.maximum)}"
        for c in fine[:_SHOWN_FINE]
    )
    if listed:
        more = f" and {len(fine) - _SHOWN_FINE} more" if len(fine) > _SHOWN_FINE else ""
        said.append(("in range", f"{short(listed)}{more}"))
    if scan.failed:
        many = f"{scan.failed:,} error{'' if scan.failed == 1 else 's'} in the data's own code"
        said.append(("errors", f"{many}: {short('; '.join(scan.errors), 400)}"))
    said += [("not read", short(text, 200)) for text in scan.unread]
    return said + [("note", note) for note in scan.notes]


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def found(column: Column) -> list[tuple[str, str]]:
    """What is wrong with one field."""
    more = column.bad_rows - len(column.rows[:20])
    rows = ", ".join(str(r) for r in column.rows[:20]) + (f" and {more:,} more" if more else "")
    return [
        ("bad", f"{column.bad:,} of {column.count:,} values, in {_rows(column.bad_rows)}"),
        ("values", figures.values(column.values, column.distinct)),
        ("rows", rows),
        ("min max", f"{figures.number(column.minimum)} .. {figures.number(column.maximum)}"),
    ]


# ---- ranges


def ranges_bundle(
    evidence: Evidence, cell: int | None, batches: int, why: str = ""
) -> dict[str, Any]:
    """What operators were given in the first batches of a cell, for one display.

    `why`: why this cell was taken, and how to name another.
    """
    said, rows = (
        ranges_headline(evidence, cell, batches),
        [ranges_row(m) for m in evidence.measured],
    )
    bad = any(m.bad for m in evidence.measured)
    notes = [*ranges_notes(evidence), *([why] if why else [])]
    page = render("ranges.html.jinja", headline=said, rows=rows, bad=bad, notes=notes)
    lines = wrap(said, COLUMNS)
    widths = (
        {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]} if rows else {}
    )
    for row in [{key: key for key in widths}, *rows] if rows else []:
        cells = [row[key].ljust(width) for key, width in widths.items()]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    lines += [f"  {line}" for note in notes for line in wrap(note, COLUMNS - 2)]
    return {"text/html": page, "text/plain": encodable("\n".join(lines))}


def ranges_headline(evidence: Evidence, cell: int | None, batches: int) -> str:
    """One sentence."""
    bad = [m for m in evidence.measured if m.bad]
    where = f"{words.execution(cell)}, first {figures.plural(batches, 'batch')}".replace(
        "batchs", "batches"
    )
    if bad:
        names = ", ".join(dict.fromkeys(f"{m.op} `{m.argument}`" for m in bad))
        return f"{where}: OUT OF RANGE: {short(names, 200)}."
    if not evidence.measured:
        return f"{where}: no operator with an index or a value to check has run."
    return f"{where}: all values are in range."


def ranges_row(met: Measured) -> dict[str, str]:
    """One line of the table."""
    bound, place = met.bound, short(met.module or met.table or "-", 200)
    margin = "-"
    if bound is not None and met.minimum is not None and met.maximum is not None:
        above = bound.high - (not bound.high_inclusive) - met.maximum
        below = met.minimum - bound.low  # the low end is near only where negative values are valid
        margin = figures.number(min(above, below) if met.minimum < 0 else above)
    return {
        "operator": short(met.op, 24),
        "argument": short(met.argument, 12),
        "where": place if len(place) <= _PLACE else f"...{place[3 - _PLACE :]}",
        "min": figures.number(met.minimum) if met.minimum is not None else "-",
        "max": figures.number(met.maximum) if met.maximum is not None else "-",
        "valid": figures.valid_range(bound) if bound is not None else "no one range",
        "margin": f"{margin} BAD" if met.bad else margin,
        "calls": figures.number(met.calls),
    }


def ranges_notes(evidence: Evidence) -> list[str]:
    """What the table leaves open."""
    notes = []
    bad = [m for m in evidence.measured if m.bad]
    notes += [f"Bad: {m.bad:,} of {m.count:,} values of {m.op} `{m.argument}`." for m in bad]
    if evidence.ghost_operators:
        names = ", ".join(evidence.ghost_operators)
        notes.append(f"Not measured, since they hang on values that were not computed: {names}.")
    if evidence.error is not None:
        text = f"{evidence.error.type}: {evidence.error.message}"
        notes.append(f"The replay ended early, with {short(text, 200)}")
    if evidence.outcome == "stopped":
        notes.append(f"The replay was stopped: {short('; '.join(evidence.differences), 200)}")
    return notes
