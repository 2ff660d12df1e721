"""A replay from its order to its evidence.

The host sends three kinds of requests to this kernel: `prepare(folder)`, then the cells as they are
(earlier ones for `history`, last the failing one), then `finish()`. A fault ends the process.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import salvage
from ..frames import Cells, at_top, here, user_frames
from ..model import (
    REBUILT,
    Evidence,
    Observed,
    Order,
    Outcome,
    RealError,
    batches,
    from_json,
    to_json,
)
from .output import Captured
from .process import die_with_the_host, draw_nothing, name_cells, peak_rss

if TYPE_CHECKING:
    from .capsule import Capsule
    from .checks import Checker
    from .hooks import ReplayHooks
    from .loaders import Loaders
    from .loops import LoopCounter
    from .madeup import Decisions
    from .measure import Measure
    from .observer import Observer
    from .sandbox import Sandbox

GRACE_SECONDS = 1.5  # for further faults of the same batch
GRACE_OPERATORS = 3000


class Run:
    """One replay in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order = from_json((folder / "order.json").read_bytes(), Order)
        self.started = time.monotonic()
        self.cells = Cells((*self.order.sources, *self.order.history, self.order.cell))
        self.cells.teach_linecache()
        # Made by `prepare`: torch is imported in the user's folder, with their paths.
        self.output: Captured
        self.sandbox: Sandbox
        self.hooks: ReplayHooks
        self.checker: Checker
        self.decisions: Decisions | None = None  # of ghosts only
        self.loops: LoopCounter
        self.loaders: Loaders
        self.namespace: dict[str, Any]
        self.observer: Observer
        self.measure: Measure | None = None  # where ranges are asked for
        self.capsule: Capsule
        # What is met.
        self.observed: list[Observed] = []
        self.differences: list[str] = []
        self.error: BaseException | None = None  # that ended the cell
        self.chance: str | None = None  # the first random number that no replay can repeat
        self._undescribed = False  # a fault was met of which there is no evidence
        self._fault_at: tuple[float, int] | None = None
        self._fault_step: tuple[Any, ...] | None = None
        self._in_cell = False
        self._cell_began = self.started
        self._steps = self._unused = 0  # batches fetched for no step

    # ---- before the cell

    def prepare(self) -> None:
        """Make this process answer as the user's, and fill its namespace."""
        from IPython import get_ipython

        order = self.order
        self.output = Captured()
        self.output.install()
        die_with_the_host()
        sys.path[:] = list(dict.fromkeys([*order.sys_path, *sys.path]))
        os.chdir(order.cwd)
        from .sandbox import Sandbox

        self.sandbox = Sandbox(self.folder / "scratch", Path(order.cwd), free=(self.folder,))
        from .. import devices, indexing
        from . import capsule, chance, counters, ghosts, hooks, loaders, loops, measure, observer
        from .checks import Checker

        self.hooks = hooks.ReplayHooks() if order.real_floats else hooks.GhostHooks()
        self.checker = Checker(
            self.hooks.unknown,
            self._fault,
            lambda: self.observer.module(),
            lambda usage: self.loaders.learn(usage),
        )
        self.hooks.checker = self.checker
        devices.install(
            devices.Devices(
                count=order.device_count,
                name=order.device_name,
                capability=order.capability,
                total_memory=order.device_memory,
                random_from_cpu=True,
            ),
            self.hooks,
        )
        if isinstance(self.hooks, hooks.GhostHooks):
            self.decisions = ghosts.install(self.hooks, self.cells)
            self.decisions.on_endless = self._endless
        indexing.wrap_functions(self._function_usage)
        self.loops = loops.LoopCounter(self.cells, self._step)
        self.loaders = loaders.Loaders(
            order,
            self.folder,
            self.cells,
            lambda: self.hooks.operators,
            self._used_up,
        )
        shell = get_ipython()
        self.namespace = shell.user_ns
        self.observer = observer.Observer(
            self.cells,
            self.namespace,
            self.checker,
            self.loops,
            self.loaders,
            tuple(c.source for c in self.cells),
        )
        if order.batches:
            self.measure = measure.Measure(order.batches, self.observer.site)
        chance.install(self.cells, self._chance)
        counters.install(self.cells, lambda: self.loaders.passed)
        name_cells(shell, self.cells)
        shell.events.register("post_run_cell", self._ended)
        self.capsule = capsule.Capsule(self.folder, order, self.differences)
        self.capsule.fill(self.namespace, self.loaders.generators)
        shell.system = shell.getoutput = self._no_shell
        draw_nothing(shell)
        shell.kernel.raw_input = self._no_input  # becomes `input` as each cell begins
        self.sandbox.install()
        if not order.history:
            self.begin_cell()

    def _chance(self, words: str) -> None:
        if self._in_cell and self.chance is None:
            self.chance = words

    def _ended(self, result: Any) -> None:
        self.error = result.error_before_exec or result.error_in_exec

    def _no_shell(self, command: str, *args: Any, **kwargs: Any) -> Any:
        self.differences.append(f"shell command not run: {command[:200]}")
        return []

    def _no_input(self, prompt: object = "") -> str:
        self.differences.append("the cell asks for input(): a replay has no one to answer")
        raise EOFError("input() in a replay")

    def begin_cell(self) -> None:
        """From here on it is the failing cell."""
        self._in_cell = True
        self._cell_began = time.monotonic()
        if self.order.history:
            self.capsule.set_random()
        self.capsule.set_defaults()
        self.loaders.install()
        self.loops.start()
        self.checker.reset()
        if self.measure is not None:
            self.checker.measure, self.loaders.most = self.measure.note, self.order.batches
        if self.decisions is not None:
            self.decisions.leak = None
        salvage.placeholders.forget_touched()

    # ---- while the cell runs

    def _function_usage(self, usage: Any) -> Any:
        """A public function that checks on the host, before any operator: see `indexing`."""
        if not self._in_cell:
            return None
        unknown = self.hooks.unknown(usage.tensor)
        most = () if usage.bound is None else (usage.bound.high,)
        from .. import devices, indexing
        from .hooks import is_ghost

        with devices.raw():
            self.checker.check((usage,), usage.op, (usage.tensor, *most), {})
            mended = None if is_ghost(usage.tensor) else indexing.mended(usage)
        if mended is None or mended is usage.tensor:
            return None
        devices.tag(mended, devices.tag_of(usage.tensor))
        if unknown is not None:
            mended._nb_why = unknown  # type: ignore[attr-defined]
        return replace(usage, tensor=mended)  # the function itself would refuse the other

    def _fault(self, usage: Any, bad: Any, func: Any, args: Any, kwargs: Any) -> None:
        if not self._in_cell:
            return
        try:
            observed = self.observer.observe(usage, bad, func, args, kwargs, self._unknown(usage))
            if observed is None or self._known(observed):
                return
            self.observed.append(observed)
            self.write("fault")
            if len(self.observed) == 1:
                self._fault_at = (time.monotonic(), self.hooks.operators)
                step = observed.finding.step
                self._fault_step = (step.loop, step.iteration) if step else None
            self.observed[-1] = self.observer.scanned(observed, usage)
            self.write("fault")
        except Exception:
            self._undescribed = True
            text = f"a fault was met and could not be described: {traceback.format_exc(limit=-3)}"
            self.differences.append(text)

    def _known(self, new: Observed) -> bool:
        f = new.finding
        same = [
            o
            for o in self.observed
            if o.finding.location == f.location and o.finding.module == f.module
        ]
        return any(o.finding.argument == f.argument for o in same) or len(self.observed) >= 8

    def _unknown(self, usage: Any) -> tuple[str, ...]:
        """What the finding depends on that was made up."""
        found = []
        soft = self.hooks.soft(usage.tensor)
        if soft:
            found.append(soft)
        leak = self.decisions.leak if self.decisions is not None else None
        if leak and usage.bound is not None:  # a number such as `num_classes`, or a layer's size
            size = usage.size_of
            if size is None or self.hooks.soft(size) == leak:
                found.append(f"the bound: {leak}")
        if self.decisions is not None:
            found += [
                f"a value that was not computed decided a branch ({place})"
                for place in self.decisions.places
            ]
        if usage.kind != "index" and self.order.real_floats:
            found.append("floats differ on the CPU: rounding, random numbers of the GPU")
        found += [*self.checker.notes, *self.capsule.remade]
        if self.order.history:
            found.append(REBUILT)
        if self.hooks.lost_read:
            found.append("a number that was only on the GPU went to Python, and is not known")
        found += [
            f"`{name}` was changed by the cell before it died, and could not be put back"
            for name in self.capsule.not_rewound
        ]
        if usage.op in self.checker.unchecked:
            found.append(f"an earlier `{usage.op}` was not checked: its values were not computed")
        if self.chance is not None:
            found.append(self.chance)
        found += self.loaders.doubts(usage.tensor, user_frames(here(), self.cells))
        found += [f"lost value touched: {m}" for m in salvage.touched()]
        found += [f"{m} began anew: its place was lost" for m in salvage.began_anew()]
        return tuple(found)

    def _step(self, frame: Any, loop: Any, iteration: int) -> None:
        self._check_grace(
            (loop.source, iteration) if self._fault_step is not None else None, loop.source
        )
        if at_top(frame.f_code):
            enough = self.measure is not None and self.measure.enough(loop)
            if enough or iteration >= (self.order.max_steps or sys.maxsize):
                self._unused = int(self.loaders.window.given == iteration + 1)  # fetched by now
                self._leave("fault" if self.observed else "clean")
            self._steps = max(self._steps, iteration + 1)

    def _check_grace(self, step: tuple[Any, ...] | None, loop: str) -> None:
        if self._fault_at is None or self.measure is not None:
            return
        began, operators = self._fault_at
        next_step = (
            step is not None
            and self._fault_step is not None
            and loop == self._fault_step[0]
            and step != self._fault_step
        )
        late = time.monotonic() - began > GRACE_SECONDS
        if next_step or late or self.hooks.operators - operators > GRACE_OPERATORS:
            self._leave("fault")

    def _used_up(self) -> None:
        self._leave("fault" if self.observed else "clean")

    def _endless(self, place: str) -> None:
        self.differences.append(
            f"stopped: a value that was not computed keeps a loop going, {place}"
        )
        self._leave("fault" if self.observed else "stopped")

    # ---- the end

    def write(self, outcome: Outcome, error: RealError | None = None) -> None:
        """Write the evidence, whole or not at all."""
        hooks = self.hooks
        differences = [*self.differences, *self.checker.notes, *self.sandbox.notes]
        if self.loaders.left_out:
            differences.append(f"{batches(self.loaders.left_out)} not re-run")
        if self.loaders.truncated:
            differences.append("other loops over a DataLoader got few of their batches")
        if getattr(hooks, "emulated_skipped", False):
            differences.append("random numbers of large initialisations were not drawn")
        if self.order.engine == "ghost":
            differences.append("float values were not needed, and not computed")
        evidence = Evidence(
            engine=self.order.engine,
            outcome=outcome,
            seconds=time.monotonic() - self.started,
            cell_seconds=time.monotonic() - self._cell_began,
            observed=tuple(self.observed),
            checks=self.checker.checks(),
            differences=tuple(dict.fromkeys(differences)),
            decisions=tuple(self.decisions.places) if self.decisions else (),
            ghost_operators=tuple(sorted(self.checker.ghost_operators)),
            missing=salvage.touched(),
            measured=self.measure.records() if self.measure is not None else (),
            shortened=self.loaders.shortened,
            floats_lost=self.capsule.floats_lost,
            loop=self.loaders.replayed,
            error=error,
            warnings=self.output.warnings(),
            peak_rss_bytes=peak_rss(),
            steps=max(self._steps, self.loaders.window.given - self._unused) or None,
        )
        part = self.folder / "evidence.part"
        part.write_bytes(to_json(evidence))
        part.replace(self.folder / "evidence.json")

    def _leave(self, outcome: Outcome, error: RealError | None = None) -> None:
        self.write("stopped" if outcome == "clean" and self._undescribed else outcome, error)
        os._exit(0)

    def finish(self) -> None:
        """The cell has ended."""
        error = self.error
        if self.observed:
            self._leave("fault")
        if error is None:
            self._leave("clean")
            return
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        stopped = isinstance(error, KeyboardInterrupt)
        real = RealError(
            type=type(error).__name__,
            message=str(error)[:2000],
            traceback=tuple("".join(lines).splitlines()[-30:]),
        )
        self._leave("stopped" if stopped else "other_error", real)


_run: Run | None = None


def prepare(folder: str) -> None:
    """First request of a replay."""
    global _run
    _run = Run(Path(folder))
    _run.prepare()


def begin_earlier(execution_count: int | None) -> None:
    """One of the earlier cells comes next."""
    from .rewind import begin_earlier

    assert _run is not None
    begin_earlier(_run.folder, execution_count)


def begin_cell() -> None:
    """The earlier cells have run; the failing cell comes next."""
    assert _run is not None
    _run.begin_cell()


def finish() -> None:
    """Last request of a replay: writes the evidence and ends the process."""
    assert _run is not None
    _run.finish()
