"""`!python train.py`: an assert in a program that a cell starts is another process's death."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
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

    def system(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return plain(*args, **kwargs)  # `sys.stdout` is the whole process's
        tee = _Tee(sys.stdout)
        with contextlib.redirect_stdout(tee), _names_of_the_caller(shell):
            result = plain(*args, **kwargs)
        with contextlib.suppress(Exception):  # the command has run; advice must not fail its cell
            if shell.user_ns.get("_exit_code"):
                _look("".join(tee.pieces))
        return result

    shell.system = system

    def undo() -> None:
        if vars(shell).get("system") is system:
            if own:
                shell.system = plain
            else:
                del shell.system

    return undo


@contextlib.contextmanager
def _names_of_the_caller(shell: Any) -> Iterator[None]:
    """`$name` and `{expression}` are looked up so many frames above; two of ours are between."""
    own = vars(shell).get("var_expand")
    expand = shell.var_expand

    def restore() -> None:
        if vars(shell).get("var_expand") is deeper:
            if own is not None:
                shell.var_expand = own
            else:
                del shell.var_expand

    def deeper(command: str, depth: int = 0, *args: Any, **kwargs: Any) -> Any:
        restore()  # a command is expanded once, before it runs; other threads may do so meanwhile
        return expand(command, depth + 2, *args, **kwargs)

    shell.var_expand = deeper
    try:
        yield
    finally:
        restore()


def _look(output: str) -> None:
    if "CUDA" in output and (sighting := detector.recognise_text(output)) is not None:
        advise(sighting)


def advise(sighting: detector.Sighting) -> None:
    """Say that the assert is that of another process; nothing where it may be no assert."""
    if not sighting.certain:
        return
    rank = "" if sighting.rank is None else f" (rank {sighting.rank})"
    print(
        "\nnb_assertdoc: the program that this cell started died of a CUDA device-side assert"
        f"{rank}.\n"
        "This kernel is another process: it needs no restart. Run the program in a cell, or\n"
        "`nb-assertdoc run` on a notebook of it, and the report names the line and the value."
    )
    if sighting.assert_lines:
        text = sighting.assert_lines[0].catalogue_id or sighting.assert_lines[0].text
        print(catalogue.explain(text))
