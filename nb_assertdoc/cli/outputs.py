"""The files that a command writes: refused before it runs, or written at its end."""

from __future__ import annotations

import argparse
from pathlib import Path

from nb_assertdoc.errors import UsageError
from nb_assertdoc.files import check_writable


def check(options: argparse.Namespace) -> None:
    """Refuse, before anything runs, files that could not be written or should not be."""
    taken = {} if options.notebook is None else {options.notebook.resolve(): "the input"}
    for name in ("output", "report", "html"):
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        if (other := taken.get(path.resolve())) is not None:
            hint = "; --inplace writes it" if (name, other) == ("output", "the input") else ""
            raise UsageError(f"--{name} {path}: this file is {other}{hint}")
        taken[path.resolve()] = f"--{name}, too"
        check_writable(path, f"--{name}")
    if options.inplace:
        check_writable(options.notebook, "--inplace")


def write(path: Path, text: str) -> None:
    """Write a text in UTF-8; UsageError where that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
