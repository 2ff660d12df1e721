"""Makes the batches of a user's loop over a DataLoader again, sample for sample.

The recorded index lists give the samples. Random numbers that a data set draws come out alike
where the state is known in which they were drawn: that of the process as the loop began, or that
of each worker process, which depends on its number and on all batches that it has made.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader as _dataloader

from ..model import LoaderPlan

_worker = torch.utils.data._utils.worker
_INTERLEAVED = "random numbers were drawn between the batches, and could not be repeated"


@dataclass(frozen=True)
class Given:
    """One batch, as it left the loader."""

    ordinal: int  # in its epoch, on the host
    indices: Any
    batch: Any
    doubt: str | None = None  # why it may differ from the user's
    loader: Any = None


class Window:
    """One loop that runs, and the batches that a replay has handed out in it."""

    def __init__(self, loader: Any = None, ahead: int = 0) -> None:
        self.loader = loader
        self.mine: deque[Given] = deque(maxlen=4)  # newest last
        self.given = 0
        self.active = loader is not None  # inside the loop
        self.ahead = ahead  # batches that who asks for them holds back (accelerate: one)
        self.follows = False  # another loop leads
        # Where the user's code was, outermost first, when it asked for the loader's iterator.
        self.sites: tuple[tuple[CodeType, int], ...] = ()
        self.by_library = False  # who asked is no code of the user's

    def end(self) -> None:
        """The loader has no more batches; one that was held back is still to be worked on."""
        self.active, self.ahead = self.ahead > 0, 0


@dataclass(frozen=True)
class Recorded:
    """What the host wrote down of one loop."""

    plan: LoaderPlan
    lists: Sequence[Any]
    rng: Any
    before: Sequence[Sequence[Any]] | None  # earlier epochs of the same workers; None: not known


class Batches:
    """The batches of one recorded loop. `make` goes forward only.

    `iterator` is one of this process over the loader; where the host had none but this loop's own,
    the global random generators must be as they were when that one was made. `generators` are
    those among the notebook's variables. `seconds` is what may be spent on earlier epochs.
    """

    def __init__(
        self,
        loader: Any,
        iterator: Any,
        recorded: Recorded,
        generators: Sequence[Any],
        seconds: float,
    ) -> None:
        self.plan = recorded.plan
        self._lists = recorded.lists
        self._generators = generators
        self._stream = loader._dataset_kind != _dataloader._DatasetKind.Map
        self._draws = False  # making a batch takes random numbers
        self._doubt: str | None = None
        self._first = self._next = 0 if self._stream else self.plan.first
        self._fetch = iterator._dataset_fetcher.fetch
        self._workers: _Workers | None = None
        if self.plan.workers:
            self._workers = _Workers(loader, self.plan.workers, self.plan.base_seed or 0)
            self._repeat(recorded.before, seconds)
        else:
            next(iterator._sampler_iter, None)  # a sampler draws its seed at its first index

    @property
    def last(self) -> int:
        """Ordinal of the last batch that the user's loop received."""
        return self.plan.first + self.plan.count - 1

    @property
    def in_order(self) -> bool:
        """A batch hangs on those before it."""
        return self._stream or self._draws

    def rounds_left_out(self) -> None:
        """The body of the loop was not run each time, and it draws random numbers, too."""
        if self._draws and self._workers is None:
            self._doubt = _INTERLEAVED

    def make(self, ordinal: int) -> Given:
        """Raises StopIteration at the end of a stream."""
        if ordinal > self._next == self._first:  # does making one take random numbers?
            self._one(self._first)
            self._next += 1
        if self.in_order:
            for earlier in range(self._next, ordinal):
                self._one(earlier)
        batch = self._one(ordinal)
        self._next = ordinal + 1
        return Given(ordinal, self._indices(ordinal), batch, self._doubt)

    def _indices(self, ordinal: int) -> Any:
        return self._lists[max(ordinal - self.plan.first, 0)]

    def _one(self, ordinal: int) -> Any:
        indices = self._indices(ordinal)
        if self._workers is not None:
            batch, drew = self._workers.fetch(ordinal, indices)
        else:
            before = marks(self._generators) if not self._draws else None
            batch = self._fetch(indices)
            drew = before is not None and before != marks(self._generators)
        if drew and not self._draws:
            self._draws = True
            if ordinal or (self._workers is not None and self._workers.doubt):
                self._doubt = "random numbers of the data set could not be repeated"
            elif not self.plan.alone and self._workers is None:
                self._doubt = _INTERLEAVED
        return batch

    def _repeat(self, before: Sequence[Sequence[Any]] | None, seconds: float) -> None:
        """Let the workers make the batches of earlier epochs, for the random numbers in them."""
        workers, end = self._workers, time.monotonic() + seconds
        assert workers is not None
        if before is None:
            workers.doubt = True
            return
        for epoch in before:
            for ordinal, indices in enumerate(epoch):
                late = time.monotonic() > end
                try:
                    drew = not late and workers.fetch(ordinal, indices)[1]
                except StopIteration:
                    break
                if not drew:
                    workers.doubt = late
                    workers.begin(anew=not late)
                    return
            workers.begin(anew=False)


class _Workers:
    """The worker processes of the host's loader, one after the other in this process.

    Worker w of W is seeded with `base_seed + w` and makes batches w, w + W, ... (torch's
    `_utils/worker.py`). A stream ends for each worker by itself.
    """

    def __init__(self, loader: Any, count: int, base_seed: int) -> None:
        self._loader = loader
        self._count = count
        self._base_seed = base_seed
        self.doubt = False  # the states of the random generators are not known
        self.begin(anew=True)

    def begin(self, anew: bool) -> None:
        """Start the workers, or let those that run begin an epoch."""
        if anew:
            self._states: dict[int, Any] = {}
            self._infos: dict[int, Any] = {}
        self._fetchers: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._turns = _round_robin(self._count, self._ended)

    def fetch(self, ordinal: int, indices: Any) -> tuple[Any, bool]:
        """The batch as its worker would have made it, and whether it drew random numbers."""
        while True:
            # All have ended: StopIteration.
            worker = next(self._turns) if self._stream else ordinal % self._count
            try:
                with self._as(worker):
                    fetcher = self._fetcher(worker)
                    before = marks(())
                    batch = fetcher.fetch(indices)
                    return batch, before != marks(())
            except StopIteration:
                self._ended.add(worker)

    @property
    def _stream(self) -> bool:
        return bool(self._loader._dataset_kind != _dataloader._DatasetKind.Map)

    @contextlib.contextmanager
    def _as(self, worker: int) -> Iterator[None]:
        mine, info = get_rng(), _worker._worker_info
        try:
            if worker in self._states:
                set_rng(self._states[worker])
            else:
                self._start(worker)
            _worker._worker_info = self._infos[worker]
            yield
        finally:
            self._states[worker] = get_rng()
            _worker._worker_info = info
            set_rng(mine)

    def _start(self, worker: int) -> None:
        seed = self._base_seed + worker
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        generate = getattr(_worker, "_generate_state", None)
        if generate is not None:
            np.random.seed(generate(self._base_seed, worker))
        dataset = self._loader.dataset
        if self._stream:  # each process has its own copy
            with contextlib.suppress(Exception):
                dataset = copy.deepcopy(dataset)
        self._infos[worker] = _worker.WorkerInfo(
            id=worker, num_workers=self._count, seed=seed, dataset=dataset
        )
        _worker._worker_info = self._infos[worker]
        if self._loader.worker_init_fn is not None:
            self._loader.worker_init_fn(worker)

    def _fetcher(self, worker: int) -> Any:
        if worker not in self._fetchers:
            loader = self._loader
            self._fetchers[worker] = _dataloader._DatasetKind.create_fetcher(
                loader._dataset_kind,
                self._infos[worker].dataset,
                loader._auto_collation,
                loader.collate_fn,
                loader.drop_last,
            )
        return self._fetchers[worker]


def _round_robin(count: int, ended: set[int]) -> Iterator[int]:
    while len(ended) < count:
        for worker in range(count):
            if worker not in ended:
                yield worker


def note_indices(iterator: Any) -> deque[Any]:
    """The index lists that an iterator asks its sampler for."""
    asked: deque[Any] = deque(maxlen=1)
    ask = iterator._next_index

    def noted() -> Any:
        asked.append(ask())
        return asked[-1]

    iterator._next_index = noted
    return asked


def one_process(loader: Any) -> Any:
    with _single_process(loader):
        return _dataloader._SingleProcessDataLoaderIter(loader)


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


# ---- random generators


def set_generator(generator: Any, state: Any) -> None:
    """Put a variable's random generator back to where it was as the cell began."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, (np.random.RandomState, torch.Generator)):
        generator.set_state(state)


_GLOBAL = (random, np.random, torch.default_generator)


def marks(generators: Sequence[Any]) -> list[Any]:
    """Equal as long as no random number was drawn, of the global generators and of these."""
    return [_mark(g) for g in (*_GLOBAL, *generators)]


def _mark(generator: Any) -> Any:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):  # the module has an attribute of that name
        return repr(generator.bit_generator.state)
    state = generator.get_state()
    return bytes(state.numpy()) if isinstance(state, torch.Tensor) else (bytes(state[1]), state[2])


def get_rng() -> Any:
    """States of the global generators."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def set_rng(state: Any) -> None:
    """Put them back; parts that are None stay as they are."""
    if state is None:
        return
    python, numpy, torch_state = state
    if python is not None:
        random.setstate(python)
    if numpy is not None:
        np.random.set_state(numpy)
    if torch_state is not None:
        torch.default_generator.set_state(torch_state)
