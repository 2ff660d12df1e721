"""Which variables hang on tensors whose values were on the GPU: they cannot be given back whole."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, islice
from typing import Any

from nb_assertdoc.salvage.limits import Clock, quiet
from nb_assertdoc.salvage.names import path

MOST_OBJECTS = 300_000  # of one variable; a value that lies deeper is a placeholder when it is read
_LEAVES = frozenset((str, bytes, bytearray, int, float, complex, bool, type(None), range))
_SIZED = frozenset((list, tuple, dict, set))
_WHOLE = 10_000  # elements of one container
_CLOSED = (types.ModuleType, types.FrameType, type)  # what everything hangs on


def on_gpu(
    namespace: Mapping[str, Any], names: Iterable[str], known: Collection[int], seconds: float
) -> dict[str, str]:
    """The names whose value reaches a CUDA tensor, with the tensor as the user would write it.

    After `seconds` the rest of the names comes with "": what they reach is not known.
    `known`: ids of tensors whose values are known all the same. Reads metadata alone.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return {}
    found: dict[str, str] = {}
    clean = {id(namespace), id(sys.modules), *map(_dictionary, list(sys.modules.values()))}
    dirty: set[int] = set()
    clock = Clock(seconds)
    with quiet(), torch._C.DisableTorchFunction():
        for name in names:
            value = namespace[name]
            seen, level, hit = {id(value)}, [value], None
            while level and hit is None and len(seen) < MOST_OBJECTS and not clock.over():
                hit = next((v for v in level if id(v) in dirty or _lost(v, torch, known)), None)
                level, above = [], [v for v in level if not _tensor(v, torch)]
                large = [v for v in above if type(v) in _SIZED and len(v) > _WHOLE]
                whole = (v for v in above if type(v) not in _SIZED or len(v) <= _WHOLE)
                for v in (*gc.get_referents(*whole), *chain.from_iterable(map(_first, large))):
                    if type(v) in _LEAVES or issubclass(type(v), _CLOSED):
                        continue
                    if id(v) not in seen and id(v) not in clean:
                        seen.add(id(v))
                        level.append(v)
            if hit is not None:
                dirty.add(id(value))
                found[name] = path(name, value, hit)
            elif not level:  # all of it was seen
                clean |= seen
            elif clock.over():
                found[name] = ""
    return found


def _first(container: Any) -> Iterable[Any]:
    """Of many elements the first ones speak for all: they are rows."""
    values = container.values() if type(container) is dict else container
    return islice(values, _WHOLE)


def _lost(value: Any, torch: Any, known: Collection[int]) -> bool:
    return (
        _tensor(value, torch)
        and value.device.type not in ("cpu", "meta")
        and id(value) not in known
    )


def _tensor(value: Any, torch: Any) -> bool:
    return issubclass(type(value), torch.Tensor)


def _dictionary(module: Any) -> int:
    """The id of a module's dictionary, which is the globals of its functions."""
    if not isinstance(module, types.ModuleType):
        return 0
    return id(types.ModuleType.__getattribute__(module, "__dict__"))
