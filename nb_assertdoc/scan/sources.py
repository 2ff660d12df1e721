"""What can be scanned, as rows of fields: data sets, loaders, tensors, arrays, lists, frames."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np

from ..errors import UsageError
from .readers import STREAM_ROWS, Arrow, Columnar, Rows, Source
from .reading import is_tensor

_MOST_COLUMNS = 2000
_BATCH = 32  # rows, where a sampler of batches decides


def sources(thing: Any, name: str, *, most: int = STREAM_ROWS) -> list[Source]:
    """The rows and fields of `thing`, which the user's code calls `name`.

    Raises `UsageError` where it is nothing that can be scanned.
    """
    found = _sources(thing, name, most)
    if found is None:
        raise UsageError(
            f"{name} is of type {type(thing).__name__}; allowed: a data set, a DataLoader, a "
            "tensor, an array, a list of rows, a dict of columns, a frame, a datasets.Dataset"
        )
    return found


def _sources(thing: Any, name: str, most: int, alone: bool = True) -> list[Source] | None:
    if thing is None or isinstance(thing, str | bytes | int | float | type):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.nn.Module):
        return None
    if is_tensor(thing) or isinstance(thing, np.ndarray):
        return _of_array(thing, name, alone)
    if hasattr(thing, "to_numpy") and isinstance(thing, Sized):
        return _of_frame(thing, name, alone)
    if _is_arrow(thing):
        return [Arrow(name, thing, len(thing))]
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(thing, data.DataLoader):
        return _of_loader(thing, name, most)
    if data is not None and type(thing) is data.TensorDataset:
        tensors = [(f"{name}.tensors[{i}]", t) for i, t in enumerate(thing.tensors)]
        kept = f"{name} = torch.utils.data.TensorDataset(*{name}[{_good_rows(name)}])"
        parts = _together(tensors, most, alone=len(tensors) == 1)
        return _kept(parts, kept if name.isidentifier() else "")
    if isinstance(thing, Mapping):
        columns = [(f"{name}[{key!r}]", value) for key, value in thing.items()]
        return _together(columns[:_MOST_COLUMNS], most, alone=len(columns) == 1)
    if isinstance(thing, tuple) and any(is_tensor(t) or isinstance(t, np.ndarray) for t in thing):
        return _together([(f"{name}[{i}]", t) for i, t in enumerate(thing)], most, alone=False)
    if isinstance(thing, list | tuple):
        return _of_list(thing, name, alone)
    if isinstance(thing, Iterator):
        raise UsageError(f"{name} is an iterator: a scan would use it up")
    total = _length(thing)
    if hasattr(thing, "__getitem__") and total is not None:
        loop = f"for row in range(len({name}))"
        return [Rows(name, thing, total, f"{name}[row]", loop, _subset(name))]
    if isinstance(thing, Iterable):
        return [Rows(name, thing, None, "row", f"for row in {name}", most=most)]
    return None


def _together(columns: list[tuple[str, Any]], most: int, alone: bool) -> list[Source]:
    """Several columns of the same rows, which are counted once; or several data sets."""
    found: list[Source] = []
    for name, value in columns:
        for part in _sources(value, name, most, alone) or []:
            same = any(part.total == f.total for f in found if not isinstance(f, Arrow))
            part.counted = part.counted and (isinstance(part, Arrow) or not same)
            found.append(part)
    return found


def _of_array(thing: Any, name: str, alone: bool) -> list[Source]:
    fields = getattr(getattr(thing, "dtype", None), "names", None)
    if fields:
        return _together([(f"{name}[{f!r}]", thing[f]) for f in fields], 0, len(fields) == 1)
    if isinstance(thing, np.ndarray) and thing.dtype.kind == "O":
        return _of_list(thing, name, alone)
    return [Columnar(name, thing, len(thing) if thing.ndim else 1, alone)]


def _of_frame(thing: Any, name: str, alone: bool) -> list[Source]:
    columns = getattr(thing, "columns", None)
    if columns is None:
        if str(thing.dtype).lower() != "object":
            return [Columnar(name, thing, len(thing), alone)]
        return _of_list(thing.tolist(), name, alone)
    once = len(set(columns)) == len(columns)
    named = [
        (f"{name}[{key!r}]", thing[key]) if once else (f"{name}.iloc[:, {i}]", thing.iloc[:, i])
        for i, key in enumerate(columns)
    ]
    columns_of_it = _together(named[:_MOST_COLUMNS], 0, alone=len(named) == 1)
    return _kept(columns_of_it, f"{name} = {name}[" + "{inside}]")


def _kept(parts: list[Source], keep: str) -> list[Source]:
    for part in parts:
        if isinstance(part, Columnar):
            part.keep = keep
    return parts


def _subset(name: str) -> str:
    """The line that leaves rows of a data set out; a loader's own cannot be set."""
    subset = f"{name} = torch.utils.data.Subset({name}, {_good_rows(name)})"
    return subset if name.isidentifier() else ""


def _good_rows(name: str) -> str:
    return f"[row for row in range(len({name})) if row not in bad_rows]"


def _of_list(things: Any, name: str, alone: bool) -> list[Source]:
    """A list of numbers is one column; else each thing is a row."""
    plain = isinstance(things, list) and _plain_numbers(things)
    one, loop = ("v", f"for v in {name}") if plain else ("row", f"for row in {name}")
    return [Rows(name, things, len(things), one, loop)]


def _plain_numbers(things: list[Any]) -> bool:
    return bool(things) and isinstance(things[0], int | float | np.generic)


def _of_loader(loader: Any, name: str, most: int) -> list[Source]:
    """Its data set; through a `collate_fn` of the user's, since that makes the fields."""
    collate, dataset = loader.collate_fn, loader.dataset
    owner = str(getattr(collate, "__module__", ""))
    if owner.startswith("torch.utils.data") or loader.batch_sampler is None:
        return sources(dataset, f"{name}.dataset", most=most)
    loop, size = f"for batch in {name}", loader.batch_size or _BATCH
    total = _length(dataset) if hasattr(dataset, "__getitem__") else None
    return [Rows(f"{name}.dataset", dataset, total, "", loop, "", collate, size, most)]


def _is_arrow(thing: Any) -> bool:
    library = type(thing).__module__.partition(".")[0]
    if library not in ("datasets", "pyarrow") or not hasattr(thing, "column_names"):
        return False
    custom = (getattr(thing, "format", None) or {}).get("type") == "custom"  # a transform of rows
    return isinstance(thing, Sized) and not isinstance(thing, Mapping) and not custom


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # the user's `__len__`, or none
        return None
