"""One `Execution` a cell: what the notebook looked like just before it ran."""

from __future__ import annotations

import functools
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..lazy import Lazy
from .bindings import Bindings
from .integers import IntegerCopies

if TYPE_CHECKING:
    from .. import frames, model
else:
    frames, model = Lazy("frames"), Lazy("model")

KEPT_SOURCES = 5000
_FIXED_NAMES = {  # of the code that a cell magic compiles, whatever the cell
    "time": ("<timed exec>", "<timed eval>"),
    "timeit": ("<magic-timeit>",),
}
KEPT_BINDINGS = 3  # newest executions whose bindings are kept; older ones keep their source
KEPT_STATES = 1000  # newest ones whose random states are kept: at most some 30 kB each


class Execution:
    """One run of one cell. `number` is our own: front ends' silent requests share counts."""

    def __init__(
        self,
        number: int,
        execution_count: int | None,
        source: str,
        cell_id: str | None,
        naming: Callable[[str, int | None], str],
    ) -> None:
        self.number = number
        self.execution_count = execution_count
        self.source = source
        self.cell_id = cell_id
        self._naming = naming
        self.succeeded: bool | None = None  # None: that is not known
        self.met_dead = False  # it ended in an error of the dead GPU context
        self.seconds = 0.0
        self.bindings: Bindings | None = None
        self.rng: tuple[Any, Any, Any] | None = None
        self.integers: Mapping[int, tuple[Any, Any]] = {}  # see `IntegerCopies.take`
        self.reached: int | None = None  # the line of its text at which an assert's error ended it
        self.mark = 0  # of the stderr tap
        self.adopted = False  # from before the load: its text is all that is known
        self.joined = False  # the cell itself loaded the extension: its start was not recorded
        self._began = time.perf_counter()

    @functools.cached_property
    def filename(self) -> str:
        """The name under which the shell compiles this cell; asked for when it is needed, since the
        shell transforms the cell for it."""
        return self._naming(self.source, self.execution_count)

    def ended(self, succeeded: bool) -> None:
        """The cell is over."""
        self.succeeded = succeeded
        self.seconds = time.perf_counter() - self._began

    def as_source(self) -> model.Source:
        """The record of it."""
        return self._record

    @functools.cached_property
    def _record(self) -> model.Source:
        return self._source(self.filename, self.source, frames.unpadded(self.source)[1])

    @functools.cached_property
    def bodies(self) -> tuple[model.Source, ...]:
        """What cell magics of this cell compile: the text below them, under names of their own."""
        found: list[model.Source] = []
        text, above = self.source, 0
        while True:
            text, blank = frames.unpadded(text)
            first, _, rest = text.partition("\n")
            if not first.startswith("%%") or not rest.strip():
                return tuple(found)
            text, above = rest if rest.endswith("\n") else f"{rest}\n", above + blank + 1
            names = _FIXED_NAMES.get(first[2:].partition(" ")[0])
            names = names or (self._naming(text, self.execution_count),)
            padded = frames.unpadded(text)[1]
            found += [self._source(name, text, above + padded) for name in names]

    def _source(self, filename: str, text: str, above: int) -> model.Source:
        return model.Source(
            filename=filename,
            source=text,
            execution_count=self.execution_count,
            cell_id=self.cell_id,
            above=above,
        )


class Recorder:
    """Keeps the executions of one shell."""

    def __init__(self, shell: Any, integer_bytes: int) -> None:
        self._shell = shell
        self._copies = IntegerCopies(integer_bytes)
        self._number = 0
        self.executions: deque[Execution] = deque(maxlen=KEPT_SOURCES)
        self.restored: tuple[model.Source, ...] = ()  # of the last kernel, whose code came back
        self.context_dead = False  # once dead, nothing is copied from the GPU any more
        self._cells: tuple[Any, frames.Cells] | None = None  # as they were told last, and of what

    @property
    def current(self) -> Execution | None:
        """The newest execution."""
        return self.executions[-1] if self.executions else None

    def begin(self, raw_cell: str, cell_id: str | None, mark: int) -> tuple[Execution, Any]:
        """A cell is about to run: its execution, and the error that the copies met, if any."""
        self._number += 1
        # `shell.execution_count` is already that of the next cell on IPython 9, not yet on 7.
        count = len(self._shell.history_manager.input_hist_parsed)
        execution = Execution(self._number, count, raw_cell, cell_id, self.filename)
        execution.mark = mark
        before = self.executions[-1].rng if self.executions else None
        # First of all: whatever the user's objects answer, this is now the cell that may fail.
        self.executions.append(execution)
        if len(self.executions) > KEPT_BINDINGS:
            old = self.executions[-1 - KEPT_BINDINGS]
            old.bindings, old.integers = None, {}
        if len(self.executions) > KEPT_STATES:
            self.executions[-1 - KEPT_STATES].rng = None
        error = None
        if not self.context_dead:
            execution.rng = _shared(random_states(), before)
            bindings = Bindings(self._shell.user_ns)
            execution.integers, error = self._copies.take(self._shell.user_ns)
            execution.bindings = bindings
        return execution, error

    def adopt(self, count: int, source: str) -> Execution:
        """An execution from before the load, of which only the text is known."""
        self._number = max(self._number, count)
        execution = Execution(count, count, source, None, self.filename)
        execution.adopted = True
        self.executions.append(execution)
        return execution

    def integers_now(self) -> Mapping[int, Any]:
        """Copies, by `id`, of integer CUDA tensors that are still as they were when copied."""
        return self._copies.current()

    def filename(self, raw_cell: str, count: int | None) -> str:
        """The name under which this shell will compile the cell."""
        code = self._shell.transform_cell(raw_cell) if raw_cell else ""
        try:
            return str(self._shell.compile.get_code_name(raw_cell, code, count))
        except Exception:
            # The name is IPython's private matter; without it, lines have no cell number.
            return f"<cell {self._number}>"

    def cells(self) -> frames.Cells:
        """Every execution so far, for the text of a line. Made anew once a cell at most: a loop
        over a data loader asks at each epoch."""
        of = (self.current, self.restored)
        if self._cells is None or self._cells[0] != of:
            self._cells = of, frames.Cells(self.sources())
        return self._cells[1]

    def sources(self) -> tuple[model.Source, ...]:
        """The record of every execution so far, and of what their cell magics compile; before them
        the cells of the last kernel whose functions were restored."""
        found = list(self.restored)
        for execution in self.executions:
            found.append(execution.as_source())
            # Of cells that share a fixed name only the one that runs is told apart.
            running = execution is self.current
            found += [b for b in execution.bodies if running or not b.filename.startswith("<")]
        return tuple(found)

    @property
    def last_failed(self) -> Execution | None:
        """The newest execution that ended in an error."""
        return next((e for e in reversed(self.executions) if e.succeeded is False), None)

    def by_count(self, count: int) -> Execution | None:
        """The newest execution with this `In [count]`, also from before the extension's load."""
        for execution in reversed(self.executions):
            if execution.execution_count == count:
                return execution
        sources = self._shell.user_ns.get("In", [])
        if 0 < count < len(sources) and sources[count]:
            return Execution(count, count, str(sources[count]), None, self.filename)
        return None


def random_states() -> tuple[Any, Any, Any]:
    """States of the random generators of Python, numpy and torch's CPU, where they are loaded."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    numpy_random = getattr(numpy, "random", None)
    generator = getattr(torch, "default_generator", None)
    return (
        random.getstate(),
        numpy_random.get_state() if numpy_random is not None else None,
        generator.get_state() if generator is not None else None,
    )


def _shared(states: tuple[Any, ...], before: tuple[Any, ...] | None) -> Any:
    """`states`, with the objects of `before` where they are equal: most cells draw nothing."""
    return tuple(
        old if old is not None and new is not None and _same(new, old) else new
        for new, old in zip(states, before or (None,) * len(states), strict=True)
    )


def _same(new: Any, old: Any) -> bool:
    if isinstance(new, tuple):  # numpy's holds an array
        pairs = zip(new, old, strict=True)
        return all(bytes(a) == bytes(b) if hasattr(a, "tobytes") else a == b for a, b in pairs)
    return bool(new.equal(old))
