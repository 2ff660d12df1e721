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
from ..naming import Call, Names, shortened
from ..salvage import Missing

MOST = 20
_FILE = re.compile(r"[^\n]*\.\w{1,5}")


def examples(
    usage: Usage,
    bad: Bad,
    step: Step | None,
    batch_size: int,
    dataset: Any,
    namespace: Mapping[str, Any],
    about: str = "",
) -> tuple[Example, ...]:
    """The first bad values, in the order of their positions.

    `batch_size`: rows of the batch whose order the faulty tensor keeps; 0 where that is unknown.
    `about`: the user's names for the index and what it goes into: which table they speak of.
    """
    try:
        return tuple(_each(usage, bad, step, batch_size, dataset, namespace, about))
    except Exception:
        return ()  # the finding is worth more than its illustration


def _each(
    usage: Usage,
    bad: Bad,
    step: Step | None,
    batch_size: int,
    dataset: Any,
    namespace: Mapping[str, Any],
    about: str,
) -> Iterator[Example]:
    known = dict(zip(step.batch_rows, step.dataset_indices or (), strict=False)) if step else {}
    variables = {k: v for k, v in namespace.items() if not isinstance(v, Missing)}
    names = Names(
        {**variables, **_parts(dataset)}, Call(about, usage.argument == "target", usage.bound)
    )
    meanings: dict[Number, str | None] = {}
    for position in bad.positions[:MOST]:
        value = _number(usage.tensor, position)
        if value not in meanings:
            meanings[value] = names.of(value)
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


def _parts(dataset: Any) -> dict[str, Any]:
    """The parts of a data set, as "dataset.classes"; of what is below a `Subset`."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return {f"dataset.{name}": part for name, part in getattr(dataset, "__dict__", {}).items()}


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
                return shortened(PurePath(first).name)
    except Exception:
        return None  # the data set is the user's code
    return None
