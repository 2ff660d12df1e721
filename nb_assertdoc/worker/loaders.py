"""DataLoaders of a replay: one process, and only the batches that matter.

The loop that failed on the host gets the index lists that were recorded there; every other loop
over a loader in the same cell gets one batch. Nothing is rewritten: accumulators, loop variables
and library code just run.
"""

from __future__ import annotations

import pathlib
import pickle
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as _dataloader

from ..frames import Cells, data_key, here, loader_key, stack
from ..indexing import Usage
from ..model import Bound, LoaderPlan
from .batches import Path, field, path_to

_TEACHERS = 2  # batches that are run first, to learn what a step does and costs
_FREE_SECONDS = 0.3
QUEUE = 1024  # kernels that can be queued before the host must wait: how late an assert can be
_SEARCHED = 2  # times that: not each operator launches a kernel


@dataclass(frozen=True)
class Given:
    """One batch, as it left the loader."""

    ordinal: int  # in its epoch, on the host
    indices: Any
    batch: Any


class Window:
    """The batches of the failing loop that a replay has handed out."""

    def __init__(self) -> None:
        self.loader: Any = None
        self.recent: deque[Given] = deque(maxlen=4)  # newest last
        self.given = 0
        self.active = False  # inside the loop
        self.ahead = 0  # batches that who asks for them holds back (accelerate: one)
        self.skipped: list[str] = []

    def end(self) -> None:
        """The loader has no more batches; one that was held back is still to be worked on."""
        self.active, self.ahead = self.ahead > 0, 0


class Loaders:
    """Patches `DataLoader.__iter__` of this process.

    `operators()` tells how many operators have run: the window of batches must cover the launch
    queue of the GPU. `finished()` is called when the window is used up and the host went no
    further.
    """

    def __init__(
        self,
        plan: LoaderPlan | None,
        folder: pathlib.Path,
        cells: Cells,
        operators: Callable[[], int],
        finished: Callable[[], None],
        seconds: float,
    ) -> None:
        self._plan = plan
        self._cells = cells
        self._operators = operators
        self._finished = finished
        self._seconds = seconds
        self._lists: list[Any] = []
        self._rng: Any = None
        if plan is not None:
            self._lists, self._rng = pickle.loads((folder / "loader.pickle").read_bytes())
        self.window = Window()
        self._used = False
        self._learning = False
        self._fields: dict[Path, Bound] = {}
        self._length = DataLoader.__len__
        self.whole = plan is None  # without a plan every loop runs in full
        self.in_order = False  # a batch hangs on those before it: random numbers, a stream
        self.generators: list[Any] = []  # random generators among the notebook's variables
        self.truncated: list[str] = []

    def install(self) -> None:
        """Patch the class."""
        mine = self

        def iterate(loader: Any) -> Any:
            return mine._iterate(loader)

        def length(loader: Any) -> int:
            known = mine._length(loader)
            return min(known, 1) if mine._is_other(loader) and mine._library(here()) else known

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
        DataLoader.__len__ = length  # type: ignore[method-assign]

    def _is_other(self, loader: Any) -> bool:
        """Not the loop that failed: it gets one batch."""
        return self._plan is not None and data_key(loader) != self._plan.key.partition(" @ ")[0]

    def _library(self, frame: FrameType | None) -> bool:
        """A trainer asks, which counts its batches: it must expect no more than will come."""
        for f in stack(frame):
            module = str(f.f_globals.get("__name__", ""))
            if not module.startswith(("torch.utils.data", "nb_assertdoc.")):
                return not self._cells.is_user_frame(f)
        return False

    def _iterate(self, loader: Any) -> Any:
        key = loader_key(loader, self._cells, here())
        ahead = _reads_ahead(here())
        with _single_process(loader):
            plan = self._plan
            chosen = plan is not None and not self._used and key == plan.key
            if plan is not None and chosen and plan.workers == 0:
                _set_rng(self._rng)
            iterator = _dataloader._SingleProcessDataLoaderIter(loader)
        if chosen:
            self._used = True
            return self._failing(loader, iterator, ahead)
        return self._watched(loader, iterator, ahead, limit=None if self.whole else 1)

    def _watched(self, loader: Any, iterator: Any, ahead: int, limit: int | None) -> Iterator[Any]:
        """Another loop over a loader."""
        try:
            total = self._length(loader)
        except TypeError:
            total = None
        window = self.window
        window.loader, window.ahead, asked = loader, ahead, _note_indices(iterator)
        for i, batch in enumerate(iterator):
            window.recent.append(Given(i, asked[-1] if asked else None, batch))
            window.given, window.active = i + 1, True
            yield batch
            if limit is not None and i + 1 >= limit:
                if total is None or total > limit:
                    self.truncated.append(type(loader.dataset).__name__)
                break
        window.end()

    def learn(self, usage: Usage) -> None:
        """A checked call: where its values are a field of the batch, that field is remembered.

        Later batches that no model has seen are searched by what the first ones taught.
        """
        if self._learning and usage.kind == "index" and usage.bound is not None:
            path = path_to(self.window.recent[-1].batch, usage.tensor)
            if path is not None:
                self._fields[path] = usage.bound

    def _failing(self, loader: Any, iterator: Any, ahead: int) -> Iterator[Any]:
        plan = self._plan
        assert plan is not None
        window = self.window
        window.loader, window.active, window.given, window.ahead = loader, True, 0, ahead
        next(iterator._sampler_iter, None)  # a sampler draws its seed at its first index
        workers = _Workers(plan) if plan.workers else None
        self.in_order |= loader._dataset_kind != _dataloader._DatasetKind.Map

        def get(indices: Any) -> Any:
            if self.in_order:
                return iterator._dataset_fetcher.fetch(indices)
            before = [_mark(g) for g in (*_GLOBAL, *self.generators)]
            batch = iterator._dataset_fetcher.fetch(indices)
            self.in_order = before != [_mark(g) for g in (*_GLOBAL, *self.generators)]
            return batch

        def fetch(i: int) -> Given:
            ordinal, indices = plan.first + i, self._lists[i]
            if workers is not None:
                return Given(ordinal, indices, workers.fetch(ordinal, lambda: get(indices)))
            return Given(ordinal, indices, get(indices))

        i, last, operators = 0, plan.count - 1, self._operators()
        given: Given | None = None
        while i <= last:
            try:
                given = given or fetch(i)
                window.recent.append(given)
                window.given += 1
                self._learning = window.given <= _TEACHERS
                began = time.monotonic()
                yield given.batch
                given = None
                i += 1
                if window.given <= _TEACHERS:
                    a_step = (self._operators() - operators) // window.given
                    seconds = time.monotonic() - began
                    i, given = self._ahead(i, last, seconds, a_step, fetch)
            except StopIteration:  # an iterable data set is at its end
                break
        window.end()
        if not plan.finished:
            self._finished()

    def _ahead(
        self, i: int, last: int, seconds: float, operators: int, fetch: Callable[[int], Given]
    ) -> tuple[int, Given | None]:
        """The next batch to replay, after one or two told what a step does and costs.

        All that are left, where that takes no time worth saving. Else the first one that holds a
        bad value in a field that is known, found without running the model; else, after two, those
        that the GPU's queue can have held.
        """
        if (last - i + 1) * seconds <= _FREE_SECONDS:
            return i, None
        taught = self.window.given == _TEACHERS
        queued = -(-QUEUE // max(1, operators)) + 2
        first, stop = max(i, last + 1 - _SEARCHED * queued), last
        if self.in_order:  # each batch is made once
            if not taught:
                return i, None
            first, stop = i, last - queued
        end = time.monotonic() + self._seconds
        for j in range(first, stop + 1):
            if not self._fields or time.monotonic() > end:
                break
            given = fetch(j)
            if self._holds_bad(given.batch):
                self._skip(i, j - 1)
                return j, given
        start = max(i, last - queued + 1) if taught else i
        self._skip(i, start - 1)
        return start, None

    def _skip(self, first: int, last: int) -> None:
        if last >= first:
            self.window.skipped.append(f"batches {first}..{last} were not run through the model")

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


def _reads_ahead(frame: FrameType | None) -> int:
    """How many batches who asks holds back: accelerate's loaders fetch the next one first."""
    asking = [str(f.f_globals.get("__name__")) for f in stack(frame)[:4]]
    return int(any(name.startswith("accelerate.") for name in asking))


def _note_indices(iterator: Any) -> deque[Any]:
    """The index lists that an iterator asks its sampler for."""
    asked: deque[Any] = deque(maxlen=1)
    ask = iterator._next_index

    def noted() -> Any:
        asked.append(ask())
        return asked[-1]

    iterator._next_index = noted
    return asked


class _single_process:
    """The loader with no workers: its error then comes in this process, and nothing is forked."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __enter__(self) -> None:
        d = self._loader.__dict__
        self._kept = {k: d[k] for k in ("num_workers", "prefetch_factor", "pin_memory") if k in d}
        self._kept["_DataLoader__multiprocessing_context"] = d.get(
            "_DataLoader__multiprocessing_context"
        )
        d.update(num_workers=0, prefetch_factor=None, pin_memory=False)

    def __exit__(self, *exc: object) -> None:
        self._loader.__dict__.update(self._kept)


class _Workers:
    """The random states of the host's worker processes, so that augmentations come out alike.

    Worker w of W is seeded with `base_seed + w` and makes batches w, w + W, ... (torch's
    `_utils/worker.py`).
    """

    def __init__(self, plan: LoaderPlan) -> None:
        self._count = plan.workers
        self._base_seed = plan.base_seed or 0
        self._states: dict[int, Any] = {}

    def fetch(self, ordinal: int, get: Callable[[], Any]) -> Any:
        """Batch `ordinal`, as its worker would have made it."""
        mine = _get_rng()
        worker = ordinal % self._count
        try:
            if worker in self._states:
                _set_rng(self._states[worker])
            else:
                self._seed(worker)
            return get()
        finally:
            self._states[worker] = _get_rng()
            _set_rng(mine)

    def _seed(self, worker: int) -> None:
        seed = self._base_seed + worker
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        generate = getattr(torch.utils.data._utils.worker, "_generate_state", None)
        if generate is not None:
            np.random.seed(generate(self._base_seed, worker))


def set_generator(generator: Any, state: Any) -> None:
    """Put a variable's random generator back to where it was as the cell began."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, (np.random.RandomState, torch.Generator)):
        generator.set_state(state)


_GLOBAL = (random, np.random, torch.default_generator)


def _mark(generator: Any) -> Any:
    """Equal as long as no random number was drawn of it."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):  # the module has an attribute of that name
        return repr(generator.bit_generator.state)
    state = generator.get_state()
    return bytes(state.numpy()) if isinstance(state, torch.Tensor) else (bytes(state[1]), state[2])


def _get_rng() -> Any:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_rng(state: Any) -> None:
    if state is None:
        return
    python, numpy, torch_state = state
    if python is not None:
        random.setstate(python)
    if numpy is not None:
        np.random.set_state(numpy)
    if torch_state is not None:
        torch.default_generator.set_state(torch_state)
