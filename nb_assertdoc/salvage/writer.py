"""Write a capsule."""

from __future__ import annotations

import copyreg
import ctypes
import os
import pickle
import re
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import msgspec

from nb_assertdoc import model
from nb_assertdoc.salvage import placeholders as p
from nb_assertdoc.salvage import rules
from nb_assertdoc.salvage.limits import TIME_UP, Clock, OutOfTime, Unsaveable, quiet
from nb_assertdoc.salvage.names import hidden, loads, path

STREAM, BUFFERS, INDEX = "variables.pickle", "buffers.bin", "capsule.json"
ALIGNMENT = 64  # of every buffer in the file
MOST_LOSSES = 20  # of one variable that are listed one by one
_WORDS = {"TextIOWrapper": "open file", "lock": "lock", "module": "module", "socket": "socket"}


class Salvaged(msgspec.Struct, frozen=True, kw_only=True):
    """What `write` kept and what it could not; a variable that lost a part is in both."""

    kept: tuple[model.Kept, ...] = ()
    lost: tuple[model.Lost, ...] = ()


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """`capsule.json`: the variables in the order of the stream, and the ends of the buffers."""

    names: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]  # start and end of each buffer in the buffers' file
    lost: tuple[model.Lost, ...]


class _Full(Exception):
    """The capsule's bytes are used up."""


def write(
    folder: Path,
    namespace: Mapping[str, Any],
    names: Iterable[str],
    *,
    integer_copies: Mapping[int, Any] | None = None,
    seconds: float,
    max_bytes: int,
) -> Salvaged:
    """Save `names` of `namespace`, and the globals that their functions use, into `folder`.

    `integer_copies` maps the id of a CUDA tensor to a CPU tensor with its values. `seconds` and
    `max_bytes` limit the whole capsule; what they leave out is in `lost`, with the reason.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with _create(folder / STREAM) as stream, _create(folder / BUFFERS) as buffers, quiet():
        writer = _Writer(stream, buffers, namespace, integer_copies or {}, seconds, max_bytes)
        with writer.clock.ticking():
            writer.save(names)
    index = Index(names=tuple(writer.done), spans=tuple(writer.spans), lost=tuple(writer.lost))
    with _create(folder / INDEX) as file:
        file.write(msgspec.json.encode(index))
    return Salvaged(kept=tuple(writer.kept), lost=index.lost)


def _create(path: Path) -> BinaryIO:
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))


class _Shared:
    """The bytes of one CPU storage: one object a storage, so that views share it in the reader."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage  # keeps the memory alive

    def __reduce_ex__(self, protocol: Any) -> Any:
        size = self.storage.nbytes()
        view = (ctypes.c_char * size).from_address(self.storage.data_ptr()) if size else b""
        return p.storage, (sys.modules["torch"], pickle.PickleBuffer(view))


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    """One pickler for all variables."""

    def __init__(
        self,
        stream: BinaryIO,
        buffers: BinaryIO,
        namespace: Mapping[str, Any],
        integer_copies: Mapping[int, Any],
        seconds: float,
        max_bytes: int,
    ) -> None:
        self.stream, self.buffers = stream, buffers
        self.namespace, self.integer_copies = namespace, integer_copies
        self.max_bytes = max_bytes
        self.clock = Clock(seconds)
        self.done: list[str] = []
        self.spans: list[tuple[int, int]] = []
        self.kept: list[model.Kept] = []
        self.lost: list[model.Lost] = []
        self.missing: dict[int, p.Missing] = {}
        self._wanted: dict[str, None] = {}
        self._rules: dict[type, rules.Rule | None] = {}
        self._owners: dict[int, str] = {}
        self._storages: dict[int, _Shared] = {}
        self._name, self._losses = "", 0  # the variable, and how many losses came before it
        self.memo: dict[int, tuple[int, Any]]
        super().__init__(self, protocol=5, buffer_callback=self._buffer)

    # -- variable after variable

    def save(self, names: Iterable[str]) -> None:
        """Write `names` in this order, then the globals that functions among them use."""
        self._wanted = {name: None for name in names if name in self.namespace}
        tried: set[str] = set()
        while todo := [name for name in self._wanted if name not in tried]:
            for name in todo:
                tried.add(name)
                self._save(name, self.namespace[name])

    def _save(self, name: str, value: Any) -> None:
        if self.clock.over():
            self._lose(name, value, TIME_UP)
            return
        before, spans, losses = self._bytes(), len(self.spans), len(self.lost)
        offset, end = self.stream.tell(), self.buffers.tell()
        mark = [name]
        self._name, self._losses = name, losses
        self._owners[id(value)] = name
        self.dump(mark)
        self.clock.armed = True
        try:
            self.dump(p.NAMESPACE if value is self.namespace else value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's, or the clock's
            self.clock.armed = False
            self._roll_back(mark, offset, end, spans, losses)
            self._lose(name, value, _why(error))
            return
        self.clock.armed = False
        self.done.append(name)
        missing = self.missing.get(id(value))
        if missing is None:
            size = self._bytes() - before
            self.kept.append(model.Kept(name=name, type=type(value).__name__, bytes=size))
        elif len(self.lost) == losses:  # lost already under another name
            self._lose(name, value, missing.why)

    def _lose(self, name: str, value: Any, why: str) -> None:
        self.lost.append(model.Lost(name=name, what=f"{name} ({_kind(value)})", why=why))

    def _roll_back(self, mark: list[str], offset: int, end: int, spans: int, losses: int) -> None:
        """Forget everything since `mark`, also in the memo, which numbers objects as they come."""
        memo = self.memo.copy()
        first = memo[id(mark)][0]
        self.memo = {key: entry for key, entry in memo.items() if entry[0] < first}
        for file, size in ((self.stream, offset), (self.buffers, end)):
            file.seek(size)
            file.truncate()
        del self.spans[spans:], self.lost[losses:]

    # -- bytes

    def _bytes(self) -> int:
        return self.stream.tell() + self.buffers.tell()

    def room(self) -> int:
        return self.max_bytes - self._bytes()

    def write(self, data: Any) -> None:
        """Called by the pickler with each frame."""
        self.clock.check()
        if len(data) > self.room():
            raise _Full("more than the capsule may still take")
        self.stream.write(data)

    def _buffer(self, buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > self.room():
            raise _Full(f"{view.nbytes / 1e6:,.0f} MB are more than the capsule may still take")
        self.buffers.write(bytes(-self.buffers.tell() % ALIGNMENT))
        start = self.buffers.tell()
        self.buffers.write(view)
        self.spans.append((start, start + view.nbytes))
        return False

    # -- object after object

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        try:
            if issubclass(kind, (type, types.FunctionType)):
                return super().reducer_override(value)
            if kind not in self._rules:
                self._rules[kind] = rules.rule_for(kind)
            rule = self._rules[kind]
            return self.default(value) if rule is None else rule(self, value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's, or the clock's
            if isinstance(error, OutOfTime) and self.clock.over():
                raise
            return self._placeholder(value, error)

    def default(self, value: Any) -> Any:
        """What the object's own reducer gives, called under the clock and looked through."""
        reduce = self.dispatch_table.get(type(value))
        self.clock.begin_call()
        try:
            result = reduce(value) if reduce else value.__reduce_ex__(5)
        except (pickle.PicklingError, TypeError, NotImplementedError):
            if reduce or not _refuses_by_itself(type(value)):
                raise
            result = copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]
        finally:
            self.clock.end_call()
        if isinstance(result, str):
            return self._global(value, result)
        if not isinstance(result, tuple) or not 2 <= len(result) <= 6 or not callable(result[0]):
            raise Unsaveable(f"its __reduce__ gave {type(result).__name__}")
        return result

    def _global(self, value: Any, name: str) -> str:
        found: Any = sys.modules.get(pickle.whichmodule(value, name))  # type: ignore[attr-defined]
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not value:
            raise Unsaveable(f"{name!r} is not found in its module")
        return name

    def _placeholder(self, value: Any, error: BaseException) -> Any:
        listed = len(self.lost) - self._losses < MOST_LOSSES
        where = path(self._name, self.namespace[self._name], value) if listed else self._name
        made = p.Missing(f"{where} ({_kind(value)})", _why(error))
        if listed:
            self.lost.append(model.Lost(name=self._name, what=made.what, why=made.why))
        self.missing[id(value)] = made
        return made.__reduce__()

    def _dynamic_function_reduce(self, function: types.FunctionType) -> Any:
        compiled = function.__dict__.get("_torchdynamo_orig_callable")
        if compiled is not None:
            return p.itself, (compiled,)
        scope = self._scope(function)
        if scope is None:
            return super()._dynamic_function_reduce(function)
        args = function.__code__, scope, function.__name__, function.__closure__
        fields = {name: getattr(function, name, None) for name in _FUNCTION}
        return p.make_function, args, (dict(function.__dict__), fields), None, None, p.set_function

    def _scope(self, function: types.FunctionType) -> Any:
        """The globals: the reader's namespace, a module's, or None (a private dictionary)."""
        scope = function.__globals__
        if scope is self.namespace or scope.get("__name__") == "__main__":
            used = (n for n in loads(function.__code__) if n in self.namespace)
            self._wanted.update((n, None) for n in used if not hidden(n, self.namespace[n]))
            return p.NAMESPACE
        name = scope.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        return _Scope(module.__name__) if module is not None and vars(module) is scope else None

    # -- what rules ask

    def owner(self, value: Any) -> str:
        return self._owners.get(id(value), self._name)

    def adopt(self, parent: Any, children: dict[str, Any]) -> None:
        prefix = self.owner(parent)
        for name, child in children.items():
            self._owners.setdefault(id(child), f"{prefix}.{name}")

    def shared_storage(self, value: Any) -> _Shared:
        if value.nbytes() > self.room():
            raise Unsaveable(
                f"{value.nbytes() / 1e6:,.0f} MB are more than the capsule may still take"
            )
        return self._storages.setdefault(value._cdata, _Shared(value))


_FUNCTION = (
    "__qualname__",
    "__module__",
    "__defaults__",
    "__kwdefaults__",
    "__annotations__",
    "__doc__",
)


class _Scope:
    """The globals of an importable module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return p.module_globals, (self.name,)


def _refuses_by_itself(kind: Any) -> bool:
    """Python code of its own forbids pickling what has plain attributes (accelerate's models)."""
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return plain and isinstance(getattr(kind, "__getstate__", None), types.FunctionType)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "DataLoader iterator" if name.endswith("DataLoaderIter") else _WORDS.get(name, name)


def _why(error: BaseException) -> str:
    if isinstance(error, (Unsaveable, _Full, OutOfTime)):
        return str(error)
    if isinstance(error, TypeError) and (
        match := re.match(r"cannot pickle '([\w.]+)'", str(error))
    ):
        return f"a {match[1]} cannot be saved"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) < 300 else text[:297] + "..."
