"""The text view: for terminals, saved notebooks and logs, 100 columns at most."""

from __future__ import annotations

from collections.abc import Iterable

from nb_assertdoc import model
from nb_assertdoc.report import evidence, figures, words
from nb_assertdoc.report.code import wrap_code
from nb_assertdoc.report.layout import (
    COLUMNS,
    block,
    encodable,
    fit,
    printable,
    short,
    width,
    wrap,
)

MARGIN = 8


def text(
    report: model.Report, how: str | None = None, *, past: bool = False, live: bool = True
) -> str:
    """The whole report. `how`: the platform's way to restart, such as "Kernel > Restart".

    `past`: the kernel has been restarted since. `live`: there is a kernel, which takes magics.
    """
    blocks = [
        block("WHERE", _where(report)),
        block("WHAT", _what(report)),
        block("FROM", _wrapped([words.origin(report)])),
        block("ALSO", _also(report)),
        block("WHY", _wrapped([" ".join(words.because(report))])),
        block("FIX", _fixes(report)),
        block("RAN", [] if report.finding else _wrapped(evidence.ran(report), hanging="    ")),
        block("NEXT", _next(report, past, live)),
        block("TRUST", _trust(report, live)),
    ]
    situation = words.situation(report, how, past, live)
    lines = [*_head(report, situation), "", *(line for rows in blocks for line in rows)]
    return encodable("\n".join(lines))


def oneline(report: model.Report, execution_count: int | None = None) -> str:
    """The line for a later failure of the same dead context.

    `execution_count` is that of the later failure; by default the report's own.
    """
    crash = report.crash
    if crash is None:
        return encodable(fit(words.headline(report)))
    count = crash.execution_count if crash.stale and execution_count is None else execution_count
    said = words.innocent(crash, count)
    return encodable(fit(f"{said} Restart it; see %assertdoc report"))


def _wrapped(texts: Iterable[str], hanging: str = "") -> list[str]:
    rows = []
    for said in texts:
        first, *rest = wrap(said, COLUMNS - MARGIN - len(hanging))
        rows += [first, *(hanging + line for line in rest)] if said else []
    return rows


def _head(report: model.Report, situation: list[str]) -> list[str]:
    tag = words.tag(report)
    first, *rest = wrap(words.headline(report), COLUMNS - 14)
    gap = max(COLUMNS - 7 - width(first) - 7, 2)
    rows = [first + " " * gap + tag, *rest]
    said = words.sentence(report.headline)
    rows += ["  " + line for line in wrap(said, COLUMNS - 2)] if said else []
    rows += ["  " + line for line in wrap(" ".join(situation), COLUMNS - 2) if line]
    return rows


def _where(report: model.Report) -> list[str]:
    finding = report.finding
    if finding is not None:
        rows = _wrapped([_place(finding.location, words.surface(report))])
        for frame in finding.user_frames[-5:]:
            if frame != finding.location:
                rows.append(fit(f"  {_place(frame)}: {short(frame.source, 90)}", COLUMNS - MARGIN))
        return rows + _source(finding.location)
    if report.crash is None:
        return []
    place = report.crash.surface
    rows = _wrapped([words.noticed(report.crash)])
    rows += _source(place) if place.source else []
    if report.crash.stale and report.crash.first_failed is not None:
        source = printable(report.crash.first_failed.source[:5000]).strip("\n").split("\n")
        rows.append(f"the cell that failed, {words.culprit(report.crash)}, as it was then:")
        rows += [fit(f"  {line}", COLUMNS - MARGIN) for line in source[:12]]
        rows += ["  ..."] if len(source) > 12 else []
    return rows


def _place(place: model.Place, noticed: str = "") -> str:
    name = ", ".join(filter(None, [words.where(place), words.function(place)]))
    return f"{name}     ({noticed})" if noticed else name


def _source(place: model.Place) -> list[str]:
    """The source with an arrow at the line and carets under the sub-expression."""
    rows = []
    lines = words.marked(place)
    arrow = next((n for n, _, start, end in lines if end > start), place.line)
    for number, line, start, end in lines:
        prefix = f"{'->' if number == arrow else '  '} {figures.number(number)}  "
        room = COLUMNS - MARGIN - len(prefix)
        skip = 0
        if width(line) > room and width(line[:end]) > room - 3:  # show a long line around the mark
            skip = max(min(start, end - room // 2) - 10, 0)
        line, start, end = line[skip:], start - skip, end - skip
        line = "..." + line[3:] if skip else line
        rows.append(prefix + fit(line, room))
        carets = min(width(line[start:end]), room - width(line[:start]))
        if carets > 0:
            rows.append(" " * (len(prefix) + width(line[:start])) + "^" * carets)
    return rows


def _what(report: model.Report) -> list[str]:
    if report.finding is None:
        return []
    finding = report.finding
    facts = [
        f"valid {figures.bound(finding)}",
        f"found {figures.values(finding.bad_values, finding.distinct_bad)}",
        words.amount(finding),
    ]
    joined = "     ".join(facts)
    rows = [joined] if width(joined) <= COLUMNS - MARGIN - 2 else facts
    rows += filter(None, ["; ".join(words.meanings(finding))])
    return [
        *_wrapped([words.operator(finding)], hanging="  "),
        *("  " + line for row in rows for line in wrap(row, COLUMNS - MARGIN - 2)),
    ]


def _also(report: model.Report) -> list[str]:
    others = report.other_findings
    rows = _wrapped([words.brief(finding) for finding in others[:5]], hanging="  ")
    return rows + (
        [f"and {figures.plural(len(others) - 5, 'more finding')}"] if len(others) > 5 else []
    )


def _fixes(report: model.Report) -> list[str]:
    rows: list[str] = []
    for fix, code in words.fixes(report):
        title, why = words.sentence(fix.title), words.sentence(fix.explanation)
        rows += _wrapped([" ".join(filter(None, [title, "" if why == title else why]))])
        if fix.edit is not None:
            cell = words.edited(report, fix.edit)
            margin = 4 + len(cell)
            room = COLUMNS - MARGIN - margin
            lines = [
                piece
                for line in words.changed(fix.edit)
                for piece in wrap_code(line, room, indent=7, backslash=False)
            ]
            rows += block("  " + cell, lines, margin)
        if code is not None:
            lines = printable(code[:20_000]).strip("\n").split("\n")
            room = COLUMNS - MARGIN - 2
            rows += ["  " + piece for line in lines[:40] for piece in wrap_code(line, room)]
    return rows


def _next(report: model.Report, past: bool, live: bool) -> list[str]:
    rows: list[str] = []
    for index, step in enumerate(words.steps(report, past, live), 1):
        rows += _wrapped([f"{index} {printable(step).strip()}"], hanging="  ")
    return rows + _wrapped(words.losses(report, past, live))


def _trust(report: model.Report, live: bool) -> list[str]:
    save = words.SAVE if live else words.SAVE_OPTIONS
    rows = _wrapped([" ".join(evidence.trust(report))])
    if not rows and live:  # a step says it
        return []
    if rows and width(rows[-1]) + 5 + len(save) <= COLUMNS - MARGIN:
        return [*rows[:-1], f"{rows[-1]}     {save}"]
    return [*rows, save]
