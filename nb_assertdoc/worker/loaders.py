"""DataLoaders of a replay: one process, and only the batches that matter.

Each loop of the cell that the host recorded gets the batches that it had there: the loop that
failed those around the failing one, one that is in step with it the batches that go with them, a
loop around it its last batch, one that had ended its last two. Nothing is rewritten: accumulators,
loop variables and library code just run.
"""

from __future__ import annotations

import contextlib
import pathlib
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from ..frames import Cells, data_key, here, loader_key, stack, user_frames
from ..indexing import Usage
from ..model import Bound, Order, Span
from .batches import Path, field, path_to
from .counters import branching, counted
from .sources import Batches, Given, Recorded, Window, marks, note_indices, one_process, set_rng

_TEACHERS = 2  # batches that are run first, to learn what a step does and costs
_FREE_SECONDS = 0.3
_SHARE = 0.6  # of the time, for batches that need not be run
QUEUE = 1024  # kernels that can be queued before the host must wait: how late an assert can be
_SEARCHED = 2  # times that: not each operator launches a kernel
_ENDED = 2  # batches of a loop that had ended: an assert in the last one may have come late


class Loaders:
    """Patches `DataLoader.__iter__` of this process.

    `operators()` tells how many operators have run: the window of batches must cover the launch
    queue of the GPU. `finished()` is called when the window is used up and the host went no
    further.
    """

    def __init__(
        self,
        order: Order,
        folder: pathlib.Path,
        cells: Cells,
        operators: Callable[[], int],
        finished: Callable[[], None],
    ) -> None:
        self._order = order
        self._plan = order.loader
        self._cells = cells
        self._operators = operators
        self._finished = finished
        self._seconds = order.seconds / 3
        self._recorded: dict[str, Recorded] = {}
        if order.loader is not None:
            records = pickle.loads((folder / "loader.pickle").read_bytes())
            for plan, record in zip((order.loader, *order.other_loaders), records, strict=True):
                self._recorded[plan.key] = Recorded(plan, *pickle.loads(record))
        self.recent: deque[Given] = deque(maxlen=4)
        self.left_out: list[Span] = []  # of the planned loop's batches
        self.skipped: list[Span] = []  # of them, those between two that were run
        self._windows = [Window()]
        self.passed = 0  # batches that the user's loops had before those that they get here
        self._distance: int | None = None  # of the leader's batch from its last one
        self._lacks_partner = False  # a batch has not the one of another loader beside it
        self.body_draws = False  # the loop's body draws random numbers
        self.replayed = ""  # how the planned loop was run: see `Evidence.loop`
        self._learning = False
        self._fields: dict[Path, Bound] = {}
        self._length = DataLoader.__len__
        self.whole = self._plan is None  # without a plan every loop runs in full
        self.generators: list[Any] = []  # random generators among the notebook's variables
        self.truncated: list[str] = []
        self.most: int | None = None  # batches of each loop; one that begins again ends the replay
        self._times: dict[str, int] = {}  # that a loop was begun, by its key
        self._open: dict[str, tuple[Any, Any]] = {}  # the loader of a loop, and whether it runs
        self._made: dict[str, tuple[Window, dict[str, Recorded]]] = {}  # the newest, by its key
        self._leader: Window | None = None
        self._began = time.monotonic()

    def install(self) -> None:
        """Patch the class."""
        mine = self
        self._began = time.monotonic()

        def iterate(loader: Any) -> Any:
            return mine._iterate(loader)

        def length(loader: Any) -> int:
            known = mine._length(loader)
            return min(known, 1) if mine._is_other(loader) and mine._library(here()) else known

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        DataLoader.__len__ = length  # type: ignore[method-assign]

    @property
    def window(self) -> Window:
        """The innermost loop that runs, else the one that ran last."""
        return next((w for w in reversed(self._windows) if w.active), self._windows[-1])

    @property
    def shortened(self) -> bool:
        """Batches that the user's loops had were left out."""
        plan = self._plan
        cut = plan is not None and not self._order.whole and (plan.round > 1 or plan.first > 0)
        return bool(self.skipped or self.truncated or cut)

    def doubts(self, tensor: Any, users: list[FrameType]) -> Iterator[str]:
        """Why what the tensor was made of may differ from what the user's loop had.

        `users`: the frames of the user's code that run.
        """
        given = next((g for g in reversed(self.recent) if path_to(g.batch, tensor)), None)
        newest = given or (self.recent[-1] if self.recent else None)
        if newest is not None and newest.doubt and (given or self.window.active):
            yield newest.doubt
        branch = branching(users) if self.shortened else None
        if branch is not None:
            yield f"`{branch}` counts rounds and decides what is run, and the replay left some out"
        if given is not None:
            return
        if self._lacks_partner:
            yield "batches of two loaders did not come together as in the user's loop"
        if self.body_draws and self.shortened:
            yield "the cell draws random numbers in its loop, of which the replay left rounds out"
        counter = counted(users) if self.shortened else None
        if counter is not None:
            yield f"`{counter}` counts rounds of the loop, and the replay left some out"
        if self._order.real_floats and self.shortened:
            yield "batches were left out: the weights are not those of the user's step"

    # ---- who asks

    def _is_other(self, loader: Any) -> bool:
        """Not the loop that failed: it gets one batch."""
        plan = self._plan
        planned = plan.key.partition(" @ ")[0].partition("#")[0] if plan is not None else ""
        return plan is not None and not _alike(data_key(loader), planned, plan.edited)

    def _library(self, frame: FrameType | None) -> bool:
        """A trainer asks, which counts its batches: it must expect no more than will come."""
        for f in stack(frame):
            module = str(f.f_globals.get("__name__", ""))
            if not module.startswith(("torch.utils.data", "nb_assertdoc.")):
                return not self._cells.is_user_frame(f)
        return False

    def _iterate(self, loader: Any) -> Any:
        key = loader_key(loader, self._cells, here())
        idle = key in self._made and not self._made[key][0].given
        if self.most is not None and key in self._times and not idle:
            self._finished()
        other, running = self._open.get(key, (loader, None))
        if other is not loader and running is not None and running() is not None:
            key = key.replace(" @ ", "#2 @ ", 1)  # as the host names it
        if key in self._made and not self._made[key][0].given:  # tqdm makes one that it never asks
            self._times[key] -= 1
            self._recorded |= self._made[key][1]
        self._times[key] = self._times.get(key, 0) + 1
        window = Window(loader, _reads_ahead(here()))
        window.sites = tuple((f.f_code, f.f_lineno) for f in user_frames(here(), self._cells))
        window.by_library = self._library(here())
        self._made[key] = window, {k: r for k, r in self._recorded.items() if k == key}
        batches = self._batches(key, loader, window, window.by_library)
        found = self._running(batches, window)
        self._open[key] = loader, weakref.ref(found)
        return found

    def _running(self, batches: Iterator[Given], window: Window) -> Iterator[Any]:
        """Hands the batches out, and keeps the books."""
        for given in batches:
            if window in self._windows:  # loops inside of it have ended
                del self._windows[self._windows.index(window) + 1 :]
            elif not window.follows:
                self._windows.append(window)
            window.given += 1
            window.active = True
            given = replace(given, loader=window.loader)
            self.recent.append(given)
            window.mine.append(given)
            yield given.batch
        window.end()

    def _batches(self, key: str, loader: Any, window: Window, library: bool) -> Iterator[Given]:
        """What a loop gets; all that the user's loop did before its first batch is done now."""
        plan = self._plan
        alike = next((k for k in self._recorded if plan and _alike(key, k, plan.edited)), "")
        recorded = self._recorded.get(key) or self._recorded.get(alike)
        if recorded is None:
            endless = self.whole or (self._order.whole and self._left() > 0)
            return self._unplanned(
                loader, one_process(loader), self.most or (None if endless else 1)
            )
        if key != recorded.plan.key:  # the recorded indices are of another data set
            self.replayed = "anew"
            del self._recorded[recorded.plan.key]
            return self._unplanned(loader, one_process(loader), None)
        if self._order.whole:
            if self._times[key] < recorded.plan.round:
                return self._early(loader, one_process(loader), recorded, window, None)
            if recorded.plan.first:
                set_rng(recorded.rng)
                first = recorded.plan.first
                return self._early(loader, one_process(loader), recorded, window, first)
        return self._planned(loader, recorded, window, library)

    def _unplanned(self, loader: Any, iterator: Any, limit: int | None) -> Iterator[Given]:
        """A loop of which nothing was recorded, or not this round."""
        total: int | None = None
        with contextlib.suppress(TypeError):
            total = self._length(loader)
        known = limit is None or type(loader.sampler) is SequentialSampler
        doubt = None if known else "its batches are not those that the user's loop had"
        asked, led = note_indices(iterator), self._step()
        for i, batch in enumerate(iterator):
            self._lacks_partner |= limit is not None and led != self._step()
            yield Given(i, asked[-1] if asked else None, batch, doubt)
            if limit is not None and i + 1 >= limit:
                if self.most is None and (total is None or total > limit):
                    self.truncated.append(type(loader.dataset).__name__)
                break

    # ---- loops that were recorded

    def _planned(
        self, loader: Any, recorded: Recorded, window: Window, library: bool
    ) -> Iterator[Given]:
        plan = recorded.plan
        del self._recorded[plan.key]
        set_rng(recorded.rng)
        batches = Batches(loader, one_process(loader), recorded, self.generators, self._seconds)
        if plan.part == "leads":
            self.replayed = "left"
            return self._leading(batches, window)
        if plan.part == "follows":
            window.follows = True
            return self._following(batches)
        return self._last_ones(batches, 1 if library or plan.part == "around" else _ENDED)

    def _early(
        self, loader: Any, iterator: Any, recorded: Recorded, window: Window, most: int | None
    ) -> Iterator[Given]:
        """Batches of which no list is kept, from the start, while there is time for it."""
        for i, batch in enumerate(iterator):
            if i == most:
                break
            if self._left() <= 0:
                self.truncated.append("a round")
                break
            yield Given(i, None, batch)
        else:
            return
        yield from self._planned(loader, recorded, window, False)

    def _left(self) -> float:
        """Seconds that may be spent on batches that need not be run."""
        return self._order.seconds * _SHARE - (time.monotonic() - self._began)

    def _step(self) -> int | None:
        """Which batch of the leading loop is worked on."""
        return self._leader.given if self._leader is not None else None

    def _last_ones(self, batches: Batches, count: int) -> Iterator[Given]:
        """Of a loop that had ended, or around the others."""
        plan, led = batches.plan, self._step()
        first = max(plan.first, batches.last + 1 - count)
        if self._order.whole and self._left() > 0:
            first = plan.first
        if first > plan.first:
            self.truncated.append(plan.key)
        self.passed += first
        for ordinal in range(first, batches.last + 1):
            if ordinal < batches.last + 1 - count and self._left() <= 0:
                self.truncated.append(plan.key)
                continue
            try:
                given = batches.make(ordinal)
            except StopIteration:
                return
            # Beside a loop that leads: which batches came together is not known.
            self._lacks_partner |= plan.part == "before" and led != self._step()
            yield given
        if plan.part == "around":
            self._finished()  # the host went no further

    def _following(self, batches: Batches) -> Iterator[Given]:
        """The batch that goes with the leader's."""
        while True:
            behind = (self._distance or 0) - batches.plan.late
            ordinal = batches.last - behind
            if behind < 0:
                return
            self._lacks_partner = self._distance is None or ordinal < batches.plan.first
            try:
                yield batches.make(max(ordinal, batches.plan.first))
            except StopIteration:
                return

    def _leading(self, batches: Batches, window: Window) -> Iterator[Given]:
        plan = batches.plan
        self._leader = window
        self.passed += plan.first
        i, last, operators, before = plan.first, batches.last, 0, window.given
        if before < i:
            self.left_out.append(Span(first=before, last=i - 1))
        given: Given | None = None
        while i <= last:
            try:
                given = given or batches.make(i)
            except StopIteration:  # an iterable data set is at its end
                break
            self._distance = last - i
            if i > last - max(1, plan.must_run):
                self.replayed = "recorded"
            self._learning = window.given - before < _TEACHERS
            began, drawn = time.monotonic(), marks(()) if self._learning else None
            operators -= self._operators()
            yield given
            operators += self._operators()
            self.body_draws |= drawn is not None and drawn != marks(())
            given = None
            i, done = i + 1, window.given - before
            if done <= _TEACHERS:
                cost = time.monotonic() - began, operators // done
                start, given = self._ahead(batches, i, *cost, done == _TEACHERS)
                if start > i:
                    self.skipped.append(Span(first=i, last=start - 1))
                    self.left_out.append(self.skipped[-1])
                    self.passed += start - i
                    if self.body_draws:
                        batches.rounds_left_out()
                    i = start
        self._leader = self._distance = None
        if not plan.finished:
            self._finished()

    def learn(self, usage: Usage) -> None:
        """A checked call: where its values are a field of the batch, that field is remembered.

        Later batches that no model has seen are searched by what the first ones taught.
        """
        if self._learning and usage.kind == "index" and usage.bound is not None:
            path = path_to(self.recent[-1].batch, usage.tensor)
            if path is not None:
                self._fields[path] = usage.bound

    def _ahead(
        self, batches: Batches, i: int, seconds: float, operators: int, taught: bool
    ) -> tuple[int, Given | None]:
        """The next batch to replay, after one or two told what a step does and costs.

        All that are left, where that takes no time worth saving. Else the first one that holds a
        bad value in a field that is known, found without running the model; else, after two, those
        that the GPU's queue can have held.
        """
        last, plan = batches.last, batches.plan
        free = max(self._left(), _FREE_SECONDS) if self._order.whole else _FREE_SECONDS
        if (last - i + 1) * seconds <= free:
            return i, None
        queued = max(-(-QUEUE // max(1, operators)) + 2, plan.must_run)
        first, stop = max(i, last + 1 - _SEARCHED * queued), last
        if batches.in_order:  # each batch is made once
            if not taught:
                return i, None
            first, stop = i, last - queued
        end = time.monotonic() + self._seconds
        for j in range(first, stop + 1):
            if not self._fields or time.monotonic() > end:
                break
            try:
                given = batches.make(j)
            except StopIteration:  # of a stream
                break
            if self._holds_bad(given.batch):
                return j, given
        return (max(i, last - queued + 1) if taught else i), None

    def _holds_bad(self, batch: Any) -> bool:
        for path, bound in self._fields.items():
            try:
                values = field(batch, path)
            except (LookupError, TypeError, AttributeError):
                continue
            bad = (values < bound.low) | (values >= bound.high)
            if bound.ignore is not None:
                bad &= values != bound.ignore
            if bool(bad.any()):
                return True
        return False


def _alike(key: str, planned: str, edited: bool) -> bool:
    """The keys are equal; after an edit, up to the length of the data set."""
    if not edited:
        return key == planned
    kinds_and_sites = ((k.partition("[")[0], k.partition(" @ ")[2]) for k in (key, planned))
    return len(set(kinds_and_sites)) == 1


def _reads_ahead(frame: FrameType | None) -> int:
    """How many batches who asks holds back: accelerate's loaders fetch the next one first."""
    asking = [str(f.f_globals.get("__name__")) for f in stack(frame)[:4]]
    return int(any(name.startswith("accelerate.") for name in asking))
