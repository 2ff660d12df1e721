"""Read a capsule in the worker."""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar

import msgspec

from nb_assertdoc import model
from nb_assertdoc.errors import LostValueError
from nb_assertdoc.salvage import placeholders as p
from nb_assertdoc.salvage.writer import BUFFERS, INDEX, STREAM, Index

Make = Callable[[p.StandIn], Any]


def read(folder: Path, namespace: dict[str, Any], make: Make = p.zeros) -> tuple[model.Lost, ...]:
    """Fill `namespace` with a capsule's variables; it becomes the globals of their functions.

    `make` builds a tensor for each stand-in. Gives what the capsule lacks and what failed to load;
    in place of both stand `Missing` values. Raises `OSError` when there is no capsule.
    """
    values, lost = load(folder, namespace, make)
    namespace.update({x.name: p.Missing(x.what, x.why) for x in lost if x.name not in values})
    namespace.update(values)
    return lost


def load(
    folder: Path,
    scope: dict[str, Any],
    make: Make = p.zeros,
    instead: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> tuple[dict[str, Any], tuple[model.Lost, ...]]:
    """A capsule's variables, and what it lacks or failed to load; as `read`, but nothing is set.

    `scope` becomes the globals of the variables' functions. `instead`: functions for some of those
    in `placeholders`, by name. Raises `OSError` or `msgspec.MsgspecError` for a damaged capsule.
    """
    index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    names = {"NAMESPACE": scope, "STAND_IN": lambda *fields: make(p.StandIn(*fields)), **instead}
    lost = list(index.lost)
    values: dict[str, Any] = {}
    with open(folder / STREAM, "rb") as stream:
        try:
            _load(_Quick(stream, names, _buffers(folder, index)), index, values)
        except Exception:  # read again, slowly: each object that fails becomes a placeholder
            values.clear()
            stream.seek(0)
            _load_what_loads(_Careful(stream, names, _buffers(folder, index), lost), index, values)
    p.forget_touched()  # rebuilding may have met placeholders
    return values, tuple(lost)


def names_in(folder: Path) -> tuple[str, ...]:
    """The names of a capsule's variables. Raises `OSError` when there is no capsule."""
    return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index).names


def _load(unpickler: Any, index: Index, values: dict[str, Any]) -> None:
    for name in index.names:
        unpickler.name = name
        unpickler.load()  # the name again, with which the writer marks the start
        values[name] = unpickler.load()


def _load_what_loads(careful: _Careful, index: Index, values: dict[str, Any]) -> None:
    try:
        _load(careful, index, values)
    except Exception as error:  # the stream itself is broken
        why = f"{type(error).__name__}: {error}"
        rest = [name for name in index.names if name not in values]
        careful.lost.extend(model.Lost(name=name, what=name, why=why) for name in rest)


def _buffers(folder: Path, index: Index) -> list[memoryview]:
    """The buffers, mapped privately: writable, and the file stays as it is."""
    with open(folder / BUFFERS, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        if any(end > size for _, end in index.spans):  # torch would fill in what lies behind
            raise OSError(f"{file.name} is cut short")
        if not size:
            return [memoryview(bytearray()) for _ in index.spans]
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return [mapped[start:end] for start, end in index.spans]


class _Quick(pickle.Unpickler):
    def __init__(self, file: BinaryIO, names: dict[str, Any], buffers: list[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self.names = names
        self.name = ""

    def find_class(self, module: str, name: str) -> Any:
        if module == p.__name__ and name in self.names:
            return self.names[name]
        return super().find_class(module, name)


_Python: Any = pickle._Unpickler


class _Careful(_Python):  # type: ignore[misc]
    """Python's own unpickler; an object that cannot be built becomes a placeholder."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Python.dispatch)

    def __init__(
        self,
        file: BinaryIO,
        names: dict[str, Any],
        buffers: list[memoryview],
        lost: list[model.Lost],
    ) -> None:
        super().__init__(file, buffers=buffers)
        self.names, self.lost = names, lost
        self.name = ""

    def find_class(self, module: str, name: str) -> Any:
        if module == p.__name__ and name in self.names:
            return self.names[name]
        try:
            return super().find_class(module, name)
        except Exception as error:
            return _Failing(self._missing(name, error))

    def _missing(self, name: str, error: Exception) -> p.Missing:
        what, why = f"{self.name} ({name})", f"{type(error).__name__}: {error}"
        if isinstance(error, LostValueError):  # a consequence of another loss, which is listed
            return p.Missing(what, str(error))
        self.lost.append(model.Lost(name=self.name, what=what, why=why))
        return p.Missing(what, why)

    def load_reduce(self) -> None:
        function, args = self.stack[-2:]
        self._build(lambda: function(*args), function, 2)

    def load_newobj(self) -> None:
        kind, args = self.stack[-2:]
        self._build(lambda: kind.__new__(kind, *args), kind, 2)

    def load_newobj_ex(self) -> None:
        kind, args, keywords = self.stack[-3:]
        self._build(lambda: kind.__new__(kind, *args, **keywords), kind, 3)

    def _build(self, build: Callable[[], Any], maker: Any, operands: int) -> None:
        try:
            made = maker.missing if isinstance(maker, _Failing) else build()
        except Exception as error:
            made = self._missing(getattr(maker, "__name__", "object"), error)
        self.stack[-operands:] = [made]

    def load_build(self) -> None:
        try:
            super().load_build()
        except Exception as error:
            if not isinstance(self.stack[-1], p.Missing):
                self._missing(type(self.stack[-1]).__name__, error)

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build


class _Failing:
    """A global that could not be imported: whatever it should build is missing."""

    def __init__(self, missing: p.Missing) -> None:
        self.missing = missing

    def __call__(self, *args: Any, **kwargs: Any) -> p.Missing:
        return self.missing
