"""Small changeable values near a namespace: counters, cursors, queues, as they were.

A replay starts from the variables as the dead cell left them. Plain values (numbers, texts, and
containers of them) are put back in the worker; of what is larger only the change is seen, and said.
"""

from __future__ import annotations

import gc
import io
import itertools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

Path = tuple[Any, ...]  # a name, then steps: ("attr", key), ("item", key), ("cell", index)
Patch = tuple[Path, str, Any]  # what `worker.rewind` puts back

_PLAIN = frozenset((int, float, str, bool, type(None), bytes, complex))
_MOST_OBJECTS = 200  # that are noted
_MOST_TOKENS = 2000  # elements and attributes that are looked at in all
_WHOLE = 256  # elements of one container that are kept
_ENDS = 16  # elements of a larger one
_DEPTH = 5
_SAMPLES = 64  # elements of an array that are compared
_ENVIRONMENTS = {"gym", "gymnasium", "types"}  # their instances hold what a cell goes on from
_STEPPING = {"builtins", "itertools", "_csv"}  # modules of iterators written in C


class _Other:
    """Stands for a value that is not kept: only which one it was."""

    __slots__ = ("id",)

    def __init__(self, value: Any) -> None:
        self.id = id(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Other) and other.id == self.id

    def __hash__(self) -> int:
        return self.id


class State:
    """What a namespace held. Keeps no object of the user's alive but plain values."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._noted: dict[Path, tuple[str, Any]] = {}
        self._tokens = 0
        seen: set[int] = set()
        below: deque[tuple[Path, Any]] = deque()
        for path, value in itertools.chain(_top(namespace), _drained(below)):
            if len(self._noted) >= _MOST_OBJECTS or self._tokens >= _MOST_TOKENS:
                break
            if type(value) in _PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            try:
                noted = self._note(path, value)
                parts = _parts(value) if len(path) < _DEPTH else ()
            except KeyboardInterrupt:
                raise
            except BaseException:  # an object of the user's may answer anything, also SystemExit
                continue
            if noted is not None:
                self._noted[path] = noted
            below += [((*path, step), part) for step, part in parts]

    def changes(self, namespace: Mapping[str, Any]) -> tuple[list[Patch], list[str]]:
        """What puts the old state back, and the names of variables that cannot be put back."""
        patches: list[Patch] = []
        lost: dict[str, None] = {}
        self._tokens = 0
        for path, (kind, old) in self._noted.items():
            try:
                value = resolve(namespace, path)
                now = self._note(path, value)
                if _same((kind, old), now):
                    continue
            except KeyboardInterrupt:
                raise
            except BaseException:  # it hung on what the cell has replaced, which is said there
                continue
            patch = _patch(kind, old, now)
            if patch is None:
                lost[str(path[0])] = None
            else:
                patches.append((path, *patch))
        return patches, list(lost)

    def _note(self, path: Path, value: Any) -> tuple[str, Any] | None:
        kind = type(value)
        if kind in (list, deque):
            if len(value) <= _WHOLE:
                return "items", self._tokens_of(value)
            ends = (*islice(value, _ENDS), *islice(reversed(value), _ENDS))
            return "ends", (len(value), *self._tokens_of(ends))
        if issubclass(kind, dict) and kind.__module__ in ("builtins", "collections"):
            if len(value) > _WHOLE:
                return None
            keys = [k for k in value if _is_plain(k)]
            return "keys", dict(zip(keys, self._tokens_of([value[k] for k in keys]), strict=True))
        if kind is set:
            return ("members", frozenset(map(_token, value))) if len(value) <= _WHOLE else None
        if _generator(value):
            return ("rng", rng_state(value)) if len(path) > 1 else None  # `bindings` has those
        if kind is types.FunctionType:
            cells = {i: _token(c) for i, c in _cells(value)}
            return ("cells", cells) if cells else None
        held = _attributes(value)
        if held is not None:
            return "attributes", dict(zip(held, self._tokens_of(held.values()), strict=True))
        digest = _digest(value)
        return None if digest is None else ("digest", digest)

    def _tokens_of(self, values: Iterable[Any]) -> tuple[Any, ...]:
        found = tuple([v if type(v) in _PLAIN else _token(v) for v in values])
        self._tokens += len(found)
        return found


def _top(namespace: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    shell = ("In", "Out")  # IPython's: a worker has its own
    found = list(namespace.items())
    return (((name,), value) for name, value in found if name[:1] != "_" and name not in shell)


def _drained(queue: deque[tuple[Path, Any]]) -> Iterator[tuple[Path, Any]]:
    while queue:
        yield queue.popleft()


def _token(value: Any) -> Any:
    return value if _is_plain(value) else _Other(value)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= _ENDS and all(map(_is_plain, value))
    return type(value) in _PLAIN


def stored(value: Any) -> dict[str, Any] | None:
    """An object's own attributes, past what its class makes of looking at them."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


def _attributes(value: Any) -> dict[str, Any] | None:
    """What an instance or class of the notebook stores, with no method among it."""
    if issubclass(type(value), type):
        if value.__module__ != "__main__":
            return None
        held: Mapping[str, Any] = vars(value)
    else:
        root = type(value).__module__.partition(".")[0]
        if root != "__main__" and root not in _ENVIRONMENTS:
            return None
        held = stored(value) or {}
    names = islice((k for k in held if type(k) is str and not k.startswith("__")), 64)
    found = {k: held[k] for k in names}
    plain = (types.FunctionType, classmethod, staticmethod, property, types.GetSetDescriptorType)
    return {k: v for k, v in found.items() if not isinstance(v, plain)}


def _cells(function: types.FunctionType) -> Iterator[tuple[int, Any]]:
    if function.__module__ != "__main__":
        return
    for i, cell in enumerate(function.__closure__ or ()):
        try:
            yield i, cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """What lies below a value, with the steps that lead there."""
    kind = type(value)
    if kind in (list, tuple, deque):
        return [(("item", i), v) for i, v in enumerate(islice(value, _ENDS))]
    if issubclass(kind, dict) and kind.__module__ in ("builtins", "collections"):
        return [(("item", k), v) for k, v in islice(value.items(), _ENDS) if _is_plain(k)]
    if kind is types.FunctionType:
        found: list[tuple[Any, Any]] = [(("cell", i), v) for i, v in _cells(value)]
        if value.__module__ == "__main__":
            found += [(("default", i), v) for i, v in enumerate(value.__defaults__ or ())]
            found += [(("attr", "__dict__"), vars(value))] if vars(value) else []
        return found
    if kind is types.MethodType:
        return [(("attr", "__self__"), value.__self__)]
    return [(("attr", k), v) for k, v in (_attributes(value) or {}).items()]


def resolve(namespace: Mapping[str, Any], path: Path) -> Any:
    """The object at a path. Raises whatever a missing step raises."""
    value = namespace[path[0]]
    for how, key in path[1:]:
        if how == "item":
            value = value[key]
        elif how == "cell":
            value = value.__closure__[key].cell_contents
        elif how == "default":
            value = value.__defaults__[key]
        elif key in ("__dict__", "__self__") or isinstance(value, type):
            value = getattr(value, key)
        else:
            value = vars(value)[key]
    return value


# ---- values that are only compared


def _digest(value: Any) -> Any:
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return None if value.is_cuda or value.is_inference() else (id(value), value._version)
    if root == "numpy" and hasattr(value, "flat"):
        return _sampled(value)
    if root == "pandas":
        manager = getattr(value, "_mgr", None)
        arrays = list(islice(getattr(manager, "arrays", ()), 8))
        sampled = [_sampled(a) for a in arrays if hasattr(a, "flat")]
        return value.shape, id(value.columns) if hasattr(value, "columns") else 0, sampled
    if issubclass(kind, io.IOBase):
        return value.tell() if not value.closed and value.readable() else None
    if hasattr(kind, "__next__") and kind.__module__ in _STEPPING:
        return _place(value)
    return None


def _sampled(array: Any) -> Any:
    if array.dtype.hasobject:
        return array.shape, tuple(map(id, array.flat[:: max(1, array.size // _SAMPLES)]))
    return array.shape, array.flat[:: max(1, array.size // _SAMPLES)].tobytes()


def _place(iterator: Any, depth: int = 3) -> Any:
    """Where an iterator written in C stands."""
    if isinstance(iterator, (itertools.count, itertools.repeat)):
        return repr(iterator)
    hint = getattr(iterator, "__length_hint__", None)
    if hint is not None:
        return hint()
    below = [r for r in gc.get_referents(iterator) if depth]
    below += [p for r in below if type(r) is tuple for p in r]
    stepping = [r for r in below if hasattr(type(r), "__next__")]
    return tuple(_place(r, depth - 1) for r in stepping), getattr(iterator, "line_num", None)


def _generator(value: Any) -> bool:
    return type(value).__name__ in ("Generator", "RandomState", "Random")  # numpy, torch, Python


def rng_state(value: Any) -> Any:
    """The state of a random generator, as `worker.sources.set_generator` takes it; else None."""
    if not _generator(value):
        return None
    try:
        if issubclass(type(value), random.Random):
            return value.getstate()
        if hasattr(value, "bit_generator"):  # numpy.random.Generator
            return value.bit_generator.state
        on_cpu = str(getattr(value, "device", "cpu")) == "cpu"  # else it would be a CUDA call
        return value.get_state() if on_cpu else None
    except Exception:
        return None  # a generator of the user's own by the same name


def _same(old: tuple[str, Any], now: tuple[str, Any] | None) -> bool:
    if old[0] == "rng":  # it may hold arrays
        return now is not None and pickle.dumps(old) == pickle.dumps(now)
    return bool(now == old)


# ---- what puts them back


def _patch(kind: str, old: Any, now: tuple[str, Any] | None) -> tuple[str, Any] | None:
    if kind == "items":
        if not any(isinstance(t, _Other) for t in old):
            return "items", old
        grown = now is not None and now[0] == "items" and now[1][: len(old)] == old
        return ("shorten", len(old)) if grown else None
    if kind in ("keys", "attributes", "cells"):
        new = now[1] if now is not None and now[0] == kind else {}
        changed = {k: v for k, v in old.items() if new.get(k, _Other) != v}
        if any(isinstance(v, _Other) for v in changed.values()) and kind == "keys":
            return None
        plain = {k: v for k, v in changed.items() if not isinstance(v, _Other)}
        return kind, (plain, tuple(k for k in new if k not in old))
    if kind == "members":
        return ("members", old) if all(map(_is_plain, old)) else None
    return (kind, old) if kind == "rng" and old is not None else None
