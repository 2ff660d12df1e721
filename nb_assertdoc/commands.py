"""`!python train.py`: an assert in a program that a cell starts is another process's death."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .lazy import Lazy

if TYPE_CHECKING:
    from . import catalogue, detector
else:
    catalogue, detector = Lazy("catalogue"), Lazy("detector")

_KEPT = 2000  # pieces of output


class _Tee(io.TextIOBase):
    """Hands on what is written, and keeps the end of it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.pieces: deque[str] = deque(maxlen=_KEPT)

    def write(self, text: str) -> int:
        self.pieces.append(text)
        self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def watch(shell: Any) -> Callable[[], None]:
    """Look at the output of a shell's `!` commands that fail. Returns what undoes it."""
    plain = shell.system
    own = "system" in vars(shell)

    def system(command: str) -> Any:
        tee = _Tee(sys.stdout)
        with contextlib.redirect_stdout(tee):
            result = plain(command)
        with contextlib.suppress(Exception):  # the command has run; advice must not fail its cell
            _advise("".join(tee.pieces), shell.user_ns.get("_exit_code"))
        return result

    shell.system = system

    def undo() -> None:
        if vars(shell).get("system") is system:
            if own:
                shell.system = plain
            else:
                del shell.system

    return undo


def _advise(output: str, code: Any) -> None:
    if not code or "CUDA" not in output:
        return
    sighting = detector.recognise_text(output)
    if sighting is None:
        return
    print(
        "\nnb_assertdoc: the program that this cell started died of a CUDA device-side assert.\n"
        "This kernel is another process: it needs no restart. Run the program in a cell, or\n"
        "`nb-assertdoc run` on a notebook of it, and the report names the line and the value."
    )
    if sighting.assert_lines:
        print(catalogue.explain(sighting.assert_lines[0].catalogue_id or output))
