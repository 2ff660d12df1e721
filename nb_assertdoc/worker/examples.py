"""The first bad values one by one: where each stands, and what it stands for in the user's data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from .. import devices
from ..indexing import Bad, Usage
from ..model import Example, Number, Step
from ..salvage import Missing

MOST = 20
LONGEST = 40  # characters of a token, a category or a file's name
_NAMES = re.compile(r"class|label|categor|vocab|itos|names|tokens|symbols", re.IGNORECASE)
_FILE = re.compile(r"[^\n]*\.\w{1,5}")


def examples(
    usage: Usage,
    bad: Bad,
    step: Step | None,
    batch_size: int,
    dataset: Any,
    namespace: Mapping[str, Any],
) -> tuple[Example, ...]:
    """The first bad values, in the order of their positions.

    `batch_size`: rows of the batch whose order the faulty tensor keeps; 0 where that is unknown.
    """
    try:
        return tuple(_each(usage, bad, step, batch_size, dataset, namespace))
    except Exception:
        return ()  # the finding is worth more than its illustration


def _each(
    usage: Usage,
    bad: Bad,
    step: Step | None,
    batch_size: int,
    dataset: Any,
    namespace: Mapping[str, Any],
) -> Iterator[Example]:
    known = dict(zip(step.batch_rows, step.dataset_indices or (), strict=False)) if step else {}
    meanings: dict[Number, str | None] = {}
    tables = {**namespace, **_tables(dataset)}
    for position in bad.positions[:MOST]:
        value = _number(usage.tensor, position)
        if value not in meanings:
            meanings[value] = next(_meanings(value, tables), None)
        row: int | None = None
        if step is not None and batch_size and position:
            at = position[0] * batch_size // usage.tensor.shape[0]
            row = at if at in step.batch_rows else None
        index = known.get(row) if row is not None else None
        yield Example(
            value=value,
            position=tuple(position),
            batch_row=row,
            dataset_index=index,
            meaning=meanings[value],
            file=_file(dataset, index) if index is not None else None,
        )


def _number(tensor: Any, position: Sequence[int]) -> Number:
    with devices.raw():
        value = tensor[tuple(position)].item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return int(value)  # a bool's too


def _tables(dataset: Any) -> dict[str, Any]:
    """The parts of a data set, as "dataset.classes"; of what is below a `Subset`."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return {f"dataset.{name}": part for name, part in getattr(dataset, "__dict__", {}).items()}


def _meanings(value: Number, tables: Mapping[str, Any]) -> Iterator[str]:
    """What the user's own tables say of a value: "word2id['zebra']", "tok: token '<ent>'"."""
    if not isinstance(value, int) or value < 0:
        return
    for name, thing in tables.items():
        if name.startswith("_") or isinstance(thing, type | Missing):
            continue
        try:
            yield from _said(value, name, thing)
        except Exception:
            continue  # a user's or a library's object may answer with anything


def _said(value: int, name: str, thing: Any) -> Iterator[str]:
    if hasattr(thing, "convert_ids_to_tokens"):
        if value < len(thing):
            yield f"{name}: token {_short(thing.convert_ids_to_tokens(value))!r}"
    elif isinstance(thing, dict):
        if _numbers(thing):
            yield from (f"{name}[{_short(k)!r}]" for k, v in thing.items() if v == value)
    elif isinstance(thing, list | tuple):
        if _NAMES.search(name) and value < len(thing) and isinstance(thing[value], str):
            yield f"{name}[{value}] = {_short(thing[value])!r}"
    elif (classes := getattr(thing, "classes_", None)) is not None and value < len(classes):
        yield f"{name}.classes_[{value}] = {_short(classes[value])!r}"


def _numbers(table: dict[Any, Any]) -> bool:
    """The table numbers names from 0 or 1 on, without a gap."""
    if not 2 <= len(table) <= 1_000_000:
        return False
    values = table.values()
    if not all(type(k) is str and type(v) is int for k, v in table.items()):
        return False
    return min(values) in (0, 1) and len(set(values)) == max(values) - min(values) + 1


def _file(dataset: Any, index: int) -> str | None:
    """The name of the file that a row of a data set is read from, if a list of its own says so."""
    try:
        while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # a Subset
            index, dataset = int(dataset.indices[index]), dataset.dataset
        size = len(dataset)
        for held in vars(dataset).values():
            if not isinstance(held, list | tuple) or len(held) != size:
                continue
            first = held[index][0] if isinstance(held[index], list | tuple) else held[index]
            if isinstance(first, str | PurePath) and _FILE.fullmatch(str(first)):
                return _short(PurePath(first).name)
    except Exception:
        return None  # the data set is the user's code
    return None


def _short(text: Any) -> str:
    line = str(text)
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
