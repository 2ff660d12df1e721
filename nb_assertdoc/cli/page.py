"""docs/asserts.md, from the package's own data: `python -m nb_assertdoc.cli.page [FILE]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from nb_assertdoc.catalogue import Entry, entries
from nb_assertdoc.diagnosis import cause_keys, explain_cause

_HEAD = """\
# Asserts and causes

Made by `python -m nb_assertdoc.cli.page` from the package's data: do not edit. The same words come
from `%assertdoc explain NAME` and `nb-assertdoc explain NAME`, for each name below."""


def page() -> str:
    """The whole page, in Markdown."""
    known = sorted(entries(), key=lambda one: (not one.user_reachable, _order(one)))
    lines = [_HEAD, "", "## Asserts", ""]
    for _, members in groupby(known, key=lambda one: one.family):
        lines += _family(list(members))
    lines += ["## Causes", ""]
    for key in cause_keys():
        title, _, words = (explain_cause(key) or "").partition("\n\n")
        lines += [f"### `{key}`", "", f"**{title}.** {' '.join(words.split())}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _order(one: Entry) -> int:
    """Families in the order of the catalogue."""
    return next(i for i, other in enumerate(entries()) if other.family == one.family)


def _family(members: list[Entry]) -> Iterator[str]:
    first = members[0]
    yield f"### {first.explanation}"
    yield ""
    yield "Usual causes:"
    yield ""
    yield from (f"- {cause}" for cause in first.causes)
    yield ""
    yield "| name | file | text | operators | argument | what must hold |"
    yield "|---|---|---|---|---|---|"
    for one in members:
        operators = ", ".join(f"`{name}`" for name in one.operators) or "-"
        argument = f"`{one.argument}`" if one.argument else "-"
        texts = "<br>".join(map(_code, (one.assertion, *one.older)))
        row = (f"`{one.id}`", _code(one.file), texts, operators, argument, _cell(one.rule))
        yield f"| {' | '.join(row)} |"
    yield ""
    notes = [one for one in members if one.note]
    if notes:
        yield from (f"- `{one.id}`: {one.note}" for one in notes)
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _code(text: str) -> str:
    """Code in a table's cell; some asserts have no text."""
    text = text.replace("\n", "\\n").replace("|", "\\|")
    if not text:
        return "(no text)"
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def main() -> None:
    """Write the page."""
    path = Path(*sys.argv[1:2] or ["docs/asserts.md"])
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
