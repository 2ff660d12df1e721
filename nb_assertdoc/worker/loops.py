"""Counts the iterations of the user's loops, without rewriting code.

A trace function sees the line events of user frames only; a step from a loop's header into its
body begins an iteration. Library frames pay for one call event each.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from ..frames import Cells, at_top

_GENERATOR = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Loop:
    """One `for` or `while` statement."""

    header: range  # line numbers
    body: range
    source: str
    targets: tuple[str, ...]

    @property
    def one_line(self) -> bool:
        """The body stands on the header's line."""
        return not self.header


@dataclass
class _Counts:
    loops: tuple[Loop, ...]
    counts: list[int]
    previous: int = 0


class LoopCounter:
    """The tracer. `on_step(frame, loop, iteration)` is called as an iteration begins."""

    def __init__(
        self, cells: Cells, on_step: Callable[[FrameType, Loop, int], None] | None = None
    ) -> None:
        self._cells = cells
        self._on_step = on_step
        self._loops: dict[CodeType, tuple[Loop, ...]] = {}
        self._files: dict[str, dict[int, list[Loop]]] = {}
        self._of_user: dict[str, bool] = {}
        self._running: dict[FrameType, _Counts] = {}

    def start(self) -> None:
        """Trace this thread's future frames and every later thread."""
        sys.settrace(self._call)
        threading.settrace(self._call)

    def innermost(self, frame: FrameType, line: int) -> tuple[Loop, int] | None:
        """The innermost loop of `frame` around `line`, and its 0-based iteration."""
        found = self.around(frame, line)
        return found[-1] if found else None

    def around(self, frame: FrameType, line: int) -> list[tuple[Loop, int]]:
        """All loops of `frame` around `line`, outermost first, with their iterations."""
        state = self._running.get(frame)
        if state is None:
            return []
        pairs = zip(state.loops, state.counts, strict=True)
        return [(loop, max(count, 0)) for loop, count in pairs if line in loop.body]

    def heads(self, code: CodeType, line: int) -> bool:
        """A loop of the code begins in this line."""
        return any(line in loop.header for loop in self._loops.get(code, ()))

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        of_user = self._of_user.get(code.co_filename)  # a code's own hash is slow to compute
        if of_user is None:
            of_user = self._of_user[code.co_filename] = self._cells.is_user(code.co_filename)
        if not of_user:
            return None
        loops = self._loops.get(code)
        if loops is None:
            loops = self._loops[code] = self._find(code)
        if not loops:
            return None
        if frame not in self._running:
            self._running[frame] = _Counts(loops, [-1] * len(loops))
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            if not is_generator(frame.f_code):  # a generator comes back after its yield
                self._running.pop(frame, None)
            return None
        if event != "line":
            return self._line
        state = self._running[frame]
        line, previous = frame.f_lineno, state.previous
        state.previous = line
        for i, loop in enumerate(state.loops):
            if loop.one_line:
                if line in loop.body:
                    state.counts[i] = state.counts[i] + 1 if previous in loop.body else 0
                    self._step(frame, loop, state.counts[i])
            elif line in loop.header:
                if previous not in loop.header and previous not in loop.body:
                    state.counts[i] = -1
            elif previous in loop.header and line in loop.body:
                state.counts[i] += 1
                self._step(frame, loop, state.counts[i])
        return self._line

    def _step(self, frame: FrameType, loop: Loop, iteration: int) -> None:
        if self._on_step is not None:
            self._on_step(frame, loop, iteration)

    def _find(self, code: CodeType) -> tuple[Loop, ...]:
        filename = code.co_filename
        if filename not in self._files:
            self._files[filename] = _loops_of("".join(linecache.getlines(filename)))
        first = 0 if at_top(code) else code.co_firstlineno
        return tuple(self._files[filename].get(first, ()))


def is_generator(code: CodeType) -> bool:
    """Its frames come back after they have returned."""
    return bool(code.co_flags & _GENERATOR)


def _loops_of(text: str) -> dict[int, list[Loop]]:
    """Loops by the first line of the function that holds them (0: the module)."""
    found: dict[int, list[Loop]] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    lines = text.splitlines()

    def visit(node: ast.AST, scope: int) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            elif isinstance(child, ast.For | ast.AsyncFor | ast.While):
                found.setdefault(scope, []).append(_loop(child, lines))
            visit(child, inner)

    visit(tree, 0)
    return found


def _loop(node: ast.For | ast.AsyncFor | ast.While, lines: list[str]) -> Loop:
    first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
    targets: tuple[str, ...] = ()
    if not isinstance(node, ast.While):
        targets = tuple(n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))
    source = " ".join(part.strip() for part in lines[node.lineno - 1 : max(first - 1, node.lineno)])
    return Loop(range(node.lineno, first), range(first, last + 1), source, targets)
