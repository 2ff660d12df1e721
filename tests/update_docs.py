"""Puts the answers of `nb-assertdoc explain` into docs/troubleshooting.md.

`python -m tests.update_docs`, after a change of a topic.
"""

from __future__ import annotations

import re
from pathlib import Path

from nb_assertdoc import explain

PAGE = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
BLOCK = re.compile(r"(?<=`nb-assertdoc explain )([\w-]+)(`:\n\n```\n)(.*?)(?=\n```)", re.DOTALL)


def topics(page: str) -> list[str]:
    """The topics that the page quotes."""
    return [match[1] for match in BLOCK.finditer(page)]


def filled(page: str) -> str:
    """The page with what the tool says now."""
    return BLOCK.sub(lambda match: f"{match[1]}{match[2]}{explain(match[1])}", page)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
