"""Keeps the index lists that DataLoaders hand out: they alone replay the user's batches.

`_BaseDataLoaderIter._next_index` is called once a batch by every map-style loader, whatever the
sampler, the workers or the trainer; keeping a reference to what it returns costs 0.04 us.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from ..lazy import Lazy
from .executions import random_states

if TYPE_CHECKING:
    from .. import frames
else:
    frames = Lazy("frames")

Part = Literal["leads", "follows", "around", "before"]
KEPT_LISTS = 1024
KEPT_INDICES = 1_000_000
KEPT_LOOPS = 16  # of one execution
KEPT_OF_ENDED = 16  # lists of a loop that has ended, where all loops keep too many indices


class LoaderLoop:
    """One `for` over one DataLoader."""

    def __init__(self, key: str, loader: Any, execution: int, rng: Any, began: int) -> None:
        self.key = key
        self.loader = _weak(loader)  # the user's own variables keep them
        self.dataset = _weak(getattr(loader, "dataset", None))
        self.execution = execution  # number of the execution that began it
        self.round = 1  # how many loops with this key the execution has begun
        self.rng = rng
        self.lists: deque[Any] = deque(maxlen=KEPT_LISTS)
        self.asked = 0  # lists handed out in all
        self.indices = 0
        self.exhausted = False  # the sampler has no more lists
        self.iterator: weakref.ref[Any] | None = None
        self.workers = 0
        self.base_seed: int | None = None
        self.before: list[list[Any]] | None = []  # the workers' earlier epochs; None: too many
        self.made = 0  # indices in them
        self.began = began  # these are places in the order of all loops' requests
        self.requests: deque[int] = deque(maxlen=3)
        self.first_request = 0

    def note(self, indices: Any, request: int) -> None:
        """One more list was handed out."""
        self.asked += 1
        self.first_request = self.first_request or request
        self.requests.append(request)
        if len(self.lists) == KEPT_LISTS:
            self.indices -= _size(self.lists[0])
        self.lists.append(indices)
        self.indices += _size(indices)
        while self.indices > KEPT_INDICES and len(self.lists) > 1:
            self.indices -= _size(self.lists.popleft())

    def adopt(self, iterator: Any) -> None:
        """The loop's iterator is made, or began anew (persistent workers)."""
        self.iterator = weakref.ref(iterator)
        self.workers = getattr(iterator, "_num_workers", 0)
        self.base_seed = getattr(iterator, "_base_seed", None)

    def follows(self, earlier: LoaderLoop) -> None:
        """The same worker processes go on after an earlier epoch."""
        self.made = earlier.made + earlier.indices
        earlier.iterator = None  # it counts this loop's batches now
        whole = earlier.before is not None and not earlier.first and self.made <= KEPT_INDICES
        self.before = [*(earlier.before or ()), list(earlier.lists)] if whole else None

    def shrink(self) -> None:
        """Keep the last lists only: the loop has ended, and others need the room."""
        while len(self.lists) > KEPT_OF_ENDED and not self.open:
            self.indices -= _size(self.lists.popleft())

    def yielded(self) -> list[Any]:
        """The lists of the batches that the user's loop has received (workers run ahead)."""
        kept, ahead = list(self.lists), self._ahead()
        return kept[: len(kept) - ahead] if 0 < ahead < len(kept) else kept

    @property
    def finished(self) -> bool:
        """The user's loop has used up the loader."""
        return self.exhausted and self._ahead() <= 0

    def _ahead(self) -> int:
        iterator = self.iterator() if self.iterator is not None else None
        return self.asked - iterator._num_yielded if iterator is not None else 0

    @property
    def first(self) -> int:
        """Ordinal, in its epoch, of the oldest list that is kept."""
        return self.asked - len(self.lists)

    def in_step_with(self, other: LoaderLoop) -> bool:
        """Each batch of one goes with one of the other, as under `zip`."""
        mine, others = list(self.requests)[-2:], list(other.requests)[-2:]
        turns = [request in mine for request in sorted([*mine, *others])]
        alternate = all(a != b for a, b in itertools.pairwise(turns))
        return len(mine) == len(others) > 0 and alternate

    @property
    def used(self) -> bool:
        """The user's loop has received a batch; tqdm makes an iterator that it never asks."""
        iterator = self.iterator() if self.iterator is not None else None
        return self.asked > 0 and (iterator is None or iterator._num_yielded > 0)

    @property
    def open(self) -> bool:
        """The loop may ask for more."""
        alive = self.iterator is not None and self.iterator() is not None
        return alive and not self.finished

    def alone(self, loops: Iterable[LoaderLoop]) -> bool:
        """No other loop over a loader ran in the meantime."""
        others = [o for o in loops if o is not self and o.requests]
        return not any(o.began < self.requests[-1] and o.requests[-1] > self.began for o in others)


def parts(failing: LoaderLoop, loops: Iterable[LoaderLoop]) -> list[tuple[LoaderLoop, Part, int]]:
    """What each loop of an execution did as it died; the one that leads comes first.

    "leads": asked first in each step. "follows": it was in step with that one, the number of steps
    behind. "around": the others ran inside of it. "before": it had ended.
    """
    others = [o for o in loops if o is not failing and o.requests]
    group = [failing, *(o for o in others if o.in_step_with(failing))]
    group.sort(key=lambda loop: loop.first_request)
    leader, *followers = group
    found: list[tuple[LoaderLoop, Part, int]] = [(leader, "leads", 0)]
    for loop in followers:
        late = sum(r > loop.requests[-1] for r in leader.requests)
        found.append((loop, "follows", 0 if loop.workers or leader.workers else late))
    for loop in others:
        if not any(loop is each for each in group):
            around = loop.open and loop.requests[-1] <= failing.began
            found.append((loop, "around" if around else "before", 0))
    return found


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        found: Callable[[], Any] = weakref.ref(thing)
        return found
    except TypeError:  # None, a list, a class without room for weak references
        return lambda: None


def _size(indices: Any) -> int:
    try:
        return len(indices)
    except Exception:  # one index, as a number or a tensor without a dimension; or the user's own
        return 1


class LoaderWatch:
    """Patches torch's DataLoader while the extension is loaded."""

    def __init__(self, cells: Callable[[], frames.Cells], number: Callable[[], int]) -> None:
        self._cells = cells
        self._number = number
        self._undo: list[tuple[Any, str, Any]] = []
        self._starting = threading.local()
        self.latest: LoaderLoop | None = None  # the loop that was asked for a batch last
        self.executions: deque[int] = deque(maxlen=KEPT_LOOPS)  # that looped, the newest last
        self.loops: dict[
            str, LoaderLoop
        ] = {}  # of the execution that began the newest, by their keys
        self._request = 0

    def install(self) -> bool:
        """Patch, where torch's loaders are imported; True once that is done."""
        module = sys.modules.get("torch.utils.data.dataloader")
        if self._undo or module is None or not hasattr(module, "DataLoader"):
            return bool(self._undo)
        loader, iterator = module.DataLoader, module._BaseDataLoaderIter
        plain_iter, plain_next = loader.__iter__, iterator._next_index
        watch = self

        def __iter__(self: Any) -> Any:
            loop = watch._begin(self, sys._getframe(1))
            watch._starting.loop = loop
            try:
                found = plain_iter(self)
            finally:
                watch._starting.loop = None
            if loop is not None:
                watch._adopt(found, loop)
            return found

        def _next_index(self: Any) -> Any:
            loop = getattr(watch._starting, "loop", None) or self.__dict__.get("_nb_loop")
            try:
                indices = plain_next(self)
            except StopIteration:
                if loop is not None:
                    loop.exhausted = True
                raise
            if loop is not None:
                watch._request += 1
                loop.note(indices, watch._request)
                watch.latest = loop
            return indices

        self._replace(loader, "__iter__", __iter__)
        self._replace(iterator, "_next_index", _next_index)
        return True

    def uninstall(self) -> None:
        """Put torch's own back."""
        for owner, name, plain in reversed(self._undo):
            setattr(owner, name, plain)
        self._undo.clear()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        plain = getattr(owner, name)
        new.__doc__, new.__wrapped__ = plain.__doc__, plain
        self._undo.append((owner, name, plain))
        setattr(owner, name, new)

    def _begin(self, loader: Any, frame: Any) -> LoaderLoop | None:
        try:
            key = frames.loader_key(loader, self._cells(), frame)
            loop = LoaderLoop(key, loader, self._number(), random_states(), self._request)
        except Exception:
            return None  # the user's data set may do anything in `len`; their loop goes on
        if loop.execution not in self.executions:
            self.executions.append(loop.execution)
        if any(known.execution != loop.execution for known in self.loops.values()):
            self.loops.clear()
        earlier = self.loops.get(key)
        if earlier is not None and earlier.open and earlier.loader() is not loader:
            loop.key = key = key.replace(" @ ", "#2 @ ", 1)  # two of a length on one line: `zip`
        earlier = self.loops.pop(key, None)
        if earlier is not None:
            loop.round = earlier.round + earlier.used
        elif len(self.loops) >= KEPT_LOOPS:
            self.loops.pop(next(iter(self.loops)))
        if sum(known.indices + known.made for known in self.loops.values()) > KEPT_INDICES:
            for known in self.loops.values():
                known.shrink()
        self.loops[key] = loop
        return loop

    def _adopt(self, iterator: Any, loop: LoaderLoop) -> None:
        try:
            earlier = iterator.__dict__.get("_nb_loop")
            if earlier is not None:
                loop.follows(earlier)
            iterator._nb_loop = loop
            loop.adopt(iterator)
        except (AttributeError, TypeError):
            return  # not torch's own iterator


__all__ = ["KEPT_LISTS", "LoaderLoop", "LoaderWatch", "parts"]
