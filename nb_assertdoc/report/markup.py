"""The HTML views: no script, no stylesheet, no SVG, so that untrusted notebooks keep them whole."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from nb_assertdoc import model
from nb_assertdoc.report import evidence, figures, words
from nb_assertdoc.report.cards import Card, card_lines
from nb_assertdoc.report.layout import encodable, printable, short
from nb_assertdoc.report.picture import picture
from nb_assertdoc.report.plain import oneline

if TYPE_CHECKING:
    import jinja2

ROWS = 20  # of the values table
SHOWN_ROWS = 5  # of them, without a click
COLUMNS = ("value", "stands for", "position", "batch row", "dataset index", "file")


def html(
    report: model.Report, how: str | None = None, *, past: bool = False, live: bool = True
) -> str:
    """The whole report. `how`: the platform's way to restart, such as "Kernel > Restart".

    `past`: the kernel has been restarted since. `live`: there is a kernel, which takes magics.
    """
    finding = report.finding
    rows = _rows(finding) if finding else []
    return _render(
        "report.html.jinja",
        report=report,
        finding=finding,
        past=past,
        live=live,
        situation=words.situation(report, how, past, live),
        picture=picture(finding) if finding else None,
        columns=[name for name in COLUMNS if any(name in row for row in rows)],
        rows=rows,
        shown_rows=SHOWN_ROWS,
        callers=[f for f in finding.user_frames if f != finding.location] if finding else [],
    )


def oneline_html(report: model.Report) -> str:
    """The line for a later failure of the same dead context."""
    return _render("card.html.jinja", lines=[oneline(report)])


def card_html(card: Card) -> str:
    """The first card."""
    return _render("card.html.jinja", lines=card_lines(card))


def _rows(finding: model.Finding) -> list[dict[str, str]]:
    """The first bad elements: value, position, and what else is known, by column."""
    rows = []
    for example in finding.examples[:ROWS]:
        row = {
            "value": figures.number(example.value),
            "position": figures.position(example.position),
        }
        if example.meaning:
            row["stands for"] = short(example.meaning, 100)
        if example.batch_row is not None:
            row["batch row"] = figures.number(example.batch_row)
        if example.dataset_index is not None:
            row["dataset index"] = figures.number(example.dataset_index)
        if example.file:
            row["file"] = short(example.file, 100)
        rows.append(row)
    return rows


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2  # only a report needs it

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("nb_assertdoc.report", "templates"),
        autoescape=True,
        finalize=_safe,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(words=words, evidence=evidence, figures=figures)
    made.filters["short"] = short
    made.filters["ticks"] = _ticks
    return made


def _safe(value: Any) -> Any:
    """Each string that a template shows; what is markup already is left alone."""
    if type(value) is str:
        return printable(encodable(value[:20_000]))
    return "" if value is None else value


def _ticks(text: str) -> Any:
    """A sentence as markup, with what stands in backticks as code."""
    from markupsafe import Markup, escape

    marked = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(_safe(text))))
    return Markup(marked)


def _render(template: str, **names: Any) -> str:
    return _environment().get_template(template).render(**names).strip()
