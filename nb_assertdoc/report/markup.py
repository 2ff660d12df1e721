"""The HTML views: no script, no stylesheet, no SVG, so that untrusted notebooks keep them whole."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from nb_assertdoc import model
from nb_assertdoc.report import figures, words
from nb_assertdoc.report.cards import Card, card_lines
from nb_assertdoc.report.layout import encodable, printable, short
from nb_assertdoc.report.picture import picture
from nb_assertdoc.report.plain import oneline

if TYPE_CHECKING:
    import jinja2

ROWS = 20  # of the values table


def html(report: model.Report, how: str | None = None) -> str:
    """The whole report. `how`: the platform's way to restart, such as "Kernel > Restart"."""
    finding = report.finding
    return _render(
        "report.html.jinja",
        report=report,
        finding=finding,
        situation=words.situation(report, how),
        picture=picture(finding) if finding else None,
        rows=_rows(finding) if finding else [],
        callers=[f for f in finding.user_frames if f != finding.location] if finding else [],
    )


def oneline_html(report: model.Report) -> str:
    """The line for a later failure of the same dead context."""
    return _render("card.html.jinja", lines=[oneline(report)])


def card_html(card: Card) -> str:
    """The first card."""
    return _render("card.html.jinja", lines=card_lines(card))


def _rows(finding: model.Finding) -> list[dict[str, str]]:
    """Position, batch row and data set's index of the first bad elements, where known."""
    step = finding.step
    dataset = dict(zip(step.batch_rows, step.dataset_indices or (), strict=False)) if step else {}
    rows = []
    for indices in finding.positions[:ROWS]:
        row = {"position": figures.position(indices)}
        if step and indices and indices[0] in step.batch_rows:
            row["batch row"] = figures.number(indices[0])
            if indices[0] in dataset:
                row["dataset index"] = figures.number(dataset[indices[0]])
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
    made.globals.update(words=words, figures=figures)
    made.filters["short"] = short
    return made


def _safe(value: Any) -> Any:
    """Each string that a template shows; what is markup already is left alone."""
    if type(value) is str:
        return printable(encodable(value[:20_000]))
    return "" if value is None else value


def _render(template: str, **names: Any) -> str:
    return _environment().get_template(template).render(**names).strip()
