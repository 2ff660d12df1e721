"""Lines of Python broken where the code stays the same."""

from __future__ import annotations

import itertools
import re

from nb_assertdoc.report.layout import cut, width

# White space, string, comment, name or number, operator, any other character.
_TOKEN = re.compile(
    r"""\s+|[A-Za-z]{0,2}(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|\#.*|[\w.]+|[-+*/%@&|^<>=!:~]+|.""",
    re.DOTALL,
)


def wrap_code(line: str, columns: int, indent: int = 4, backslash: bool = True) -> list[str]:
    """A line of Python as lines of at most `columns` columns.

    It is broken between tokens, at a space if there is one; what goes on is indented. Only a token
    that is wider than a line is cut. `backslash`: one is added where no bracket is open, so that
    the lines can be pasted.
    """
    if width(line) <= columns:
        return [line]
    tokens = _TOKEN.findall(line)
    start = " " * (len(line) - len(line.lstrip()) + indent)
    rows, row, depth = [], "", 0
    for at, token in enumerate(tokens):
        whole = token
        if tokens[at - 1].isspace():  # up to the next space all stays together, where it fits
            word = "".join(_until_space(tokens, at))
            whole = word if width(start + word) + 2 <= columns else token
        if width(row + whole) + 2 > columns and row.strip():
            rows.append(row.rstrip() + (" \\" if backslash and not depth else ""))
            row = start
        *full, last = cut(token, columns - len(start) - 2)
        rows += [start + piece for piece in full]
        if rows and not row.strip() and last.isspace():
            continue
        row = (start if full else row) + last
        depth += (token in "([{") - (token in ")]}")
    return [*rows, row.rstrip()]


def _until_space(tokens: list[str], at: int) -> list[str]:
    return list(itertools.takewhile(lambda token: not token.isspace(), tokens[at:]))
