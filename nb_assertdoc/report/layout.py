"""Strings made safe for a terminal or a page, and laid out in columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator

COLUMNS = 100
JOINERS = "\u200c\u200d"  # ordinary parts of Persian words and of emoji
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def printable(text: str) -> str:
    r"""The text with every control, bidi and half character shown as an escape such as \x1b.

    Line feeds stay, tabs become spaces.
    """
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    if char == "\n" or char in JOINERS or unicodedata.category(char) not in HIDDEN:
        return char
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def encodable(text: str) -> str:
    """The text with lone surrogates replaced: what UTF-8, and so JSON and Jupyter, can carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def short(text: str, limit: int = 300) -> str:
    """One printable line of at most `limit` characters."""
    line = " ".join(printable(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 3] + "..."


def width(text: str) -> int:
    """The columns that a printable line takes in a terminal."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(char: str) -> int:
    if unicodedata.category(char) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, columns: int) -> Iterator[str]:
    """The line in pieces of at most `columns` columns; at least one piece."""
    piece, used = "", 0
    for char in text:
        if used + _columns(char) > columns:
            yield piece
            piece, used = "", 0
        piece += char
        used += _columns(char)
    yield piece


def fit(text: str, columns: int = COLUMNS) -> str:
    """The line, cut with "..." where it is wider than `columns`."""
    return text if width(text) <= columns else next(cut(text, columns - 3)) + "..."


def wrap(text: str, columns: int) -> list[str]:
    """The text as lines of at most `columns` columns; runs of spaces within a line are kept."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.rstrip().split(" "):
            longer = f"{line} {word}" if line else word
            if width(longer) <= columns:
                line = longer
                continue
            if line.strip():
                lines.append(line.rstrip())
            *full, line = cut(word, columns)
            lines += full
        lines.append(line.rstrip())
    return lines


def block(label: str, lines: Iterable[str], indent: int = 8) -> list[str]:
    """Lines under a label in the margin."""
    margins = [label.ljust(indent)]
    return [((margins.pop() if margins else " " * indent) + line).rstrip() for line in lines]
