"""What a replay prints goes nowhere: only the last of it is kept, for the warnings in it."""

from __future__ import annotations

import io
import os
import re
import sys
from collections import deque
from typing import Any

_KEPT = 400  # pieces of text
_WARNING = re.compile(r"warn|longer than|deprecat|indexing errors|mismatch", re.IGNORECASE)


class _Sink(io.TextIOBase):
    """A text stream that keeps only its last pieces, so that 100 MB of output cost nothing."""

    def __init__(self, pieces: deque[str]) -> None:
        self._pieces = pieces

    def write(self, text: str) -> int:
        self._pieces.append(text[-2000:])
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


class Captured:
    """Takes the place of this process's outputs."""

    def __init__(self) -> None:
        self._pieces: deque[str] = deque(maxlen=_KEPT)

    def install(self) -> None:
        """Replace `sys.stdout`, `sys.stderr`, displays and the file descriptors 1 and 2."""
        sys.stdout = sys.stderr = _Sink(self._pieces)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
        from IPython import get_ipython

        shell = get_ipython()
        shell.display_pub.publish = _nothing
        shell.displayhook.write_format_data = _nothing

    def warnings(self) -> tuple[str, ...]:
        """Lines that look like a warning, the newest 20."""
        lines = "".join(self._pieces).splitlines()
        found = [line.strip()[:300] for line in lines if _WARNING.search(line)]
        return tuple(dict.fromkeys(found))[-20:]


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
