"""Puts back what the dead cell had changed in place: see `mutations`, which noted it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..mutations import Patch, resolve
from .sources import set_generator, set_rng


def read(file: Path) -> tuple[Any, Any]:
    """What the host wrote: the states of the global random generators, and the rest."""
    states, *rest = pickle.loads(file.read_bytes())
    return states, rest


def begin_earlier(folder: Path, execution_count: int | None) -> None:
    """Set the global random generators as they were when this earlier cell began, if known.

    A model whose weights were drawn there gets the same ones again.
    """
    file = folder / "random.pickle"
    if file.is_file():
        set_rng(pickle.loads(file.read_bytes()).get(execution_count))


def put_back(namespace: Mapping[str, Any], rest: Any, found: list[Any]) -> tuple[str, ...]:
    """Put back random generators of variables, added to `found`, and values changed in place.

    The names of variables where that failed.
    """
    generators, patches = rest
    known = [
        ((name,) if key is None else (name, ("attr", key)), "rng", state)
        for (name, key), state in generators.items()
    ]

    def back(generator: Any, state: Any) -> None:
        set_generator(generator, state)
        found.append(generator)

    return rewind(namespace, (*known, *patches), back)


def rewind(
    namespace: Mapping[str, Any], patches: Iterable[Patch], put_back: Any
) -> tuple[str, ...]:
    """Apply the patches; the names of variables where that failed.

    `put_back(generator, state)` is for random generators.
    """
    failed: dict[str, None] = {}
    for path, kind, old in patches:
        if path[0] not in namespace:  # the cell does not need it
            continue
        try:
            value = resolve(namespace, path)
            if kind == "rng":
                put_back(value, old)
            else:
                _APPLY[kind](value, old)
        except Exception:  # a lost value, or a class that was made anew in another form
            failed[str(path[0])] = None
    return tuple(failed)


def _items(value: Any, old: Any) -> None:
    value.clear()
    value.extend(old)


def _shorten(value: Any, length: int) -> None:
    while len(value) > length:
        value.pop()


def _members(value: Any, old: Any) -> None:
    value.clear()
    value.update(old)


def _keys(value: Any, old: Any) -> None:
    changed, new = old
    for key in new:
        value.pop(key, None)
    value.update(changed)


def _attributes(value: Any, old: Any) -> None:
    if not isinstance(value, type):
        _keys(vars(value), old)
        return
    changed, new = old
    for key in new:
        with contextlib.suppress(AttributeError):
            delattr(value, key)
    for key, held in changed.items():
        setattr(value, key, held)


def _cells(value: Any, old: Any) -> None:
    for index, held in old[0].items():
        value.__closure__[index].cell_contents = held


_APPLY = {
    "items": _items,
    "shorten": _shorten,
    "members": _members,
    "keys": _keys,
    "attributes": _attributes,
    "cells": _cells,
}
