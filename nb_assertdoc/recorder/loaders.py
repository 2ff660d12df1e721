"""Keeps the index lists that DataLoaders hand out: they alone replay the user's batches.

`_BaseDataLoaderIter._next_index` is called once a batch by every map-style loader, whatever the
sampler, the workers or the trainer; keeping a reference to what it returns costs 0.04 us.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import Lazy
from .executions import random_states

if TYPE_CHECKING:
    from .. import frames
else:
    frames = Lazy("frames")

KEPT_LISTS = 1024
KEPT_INDICES = 1_000_000


class Loop:
    """One `for` over one DataLoader."""

    def __init__(self, key: str, execution: int, rng: Any) -> None:
        self.key = key
        self.execution = execution  # number of the execution that began it
        self.rng = rng
        self.lists: deque[Any] = deque(maxlen=KEPT_LISTS)
        self.asked = 0  # lists handed out in all
        self.indices = 0
        self.exhausted = False  # the sampler has no more lists
        self.iterator: weakref.ref[Any] | None = None

    def note(self, indices: Any) -> None:
        """One more list was handed out."""
        self.asked += 1
        if len(self.lists) == KEPT_LISTS:
            self.indices -= _size(self.lists[0])
        self.lists.append(indices)
        self.indices += _size(indices)
        while self.indices > KEPT_INDICES and len(self.lists) > 1:
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


def _size(indices: Any) -> int:
    return len(indices) if isinstance(indices, list | tuple) else 1


class LoaderWatch:
    """Patches torch's DataLoader while the extension is loaded."""

    def __init__(self, cells: Callable[[], frames.Cells], number: Callable[[], int]) -> None:
        self._cells = cells
        self._number = number
        self._undo: list[tuple[Any, str, Any]] = []
        self._starting = threading.local()
        self.latest: Loop | None = None  # the loop that was asked for a batch last

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
                loop.note(indices)
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

    def _begin(self, loader: Any, frame: Any) -> Loop | None:
        try:
            key = frames.loader_key(loader, self._cells(), frame)
            return Loop(key, self._number(), random_states())
        except Exception:
            return None  # the user's data set may do anything in `len`; their loop goes on

    def _adopt(self, iterator: Any, loop: Loop) -> None:
        try:
            iterator._nb_loop = loop
            loop.iterator = weakref.ref(iterator)
        except (AttributeError, TypeError):
            return  # not torch's own iterator


__all__ = ["KEPT_LISTS", "LoaderWatch", "Loop"]
