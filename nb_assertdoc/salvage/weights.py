"""Copies of a model's weights on the CPU: after the crash its own ones, on the GPU, are lost."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any

MOST_PARTS = 64  # of a variable, in which modules and state dicts are looked for


def state_dicts(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The state dicts among the variables and one level within: `best`, `checkpoint['model']`."""
    torch: Any = sys.modules.get("torch")
    for name, value in list(namespace.items()) if torch is not None else ():
        if name.startswith("_") or not issubclass(type(value), dict):
            continue
        parts = [(name, value)]
        parts += [
            (f"{name}[{key!r}]", part)
            for key, part in islice(value.items(), MOST_PARTS)
            if isinstance(part, dict)
        ]
        for words, part in parts:
            if part and all(isinstance(key, str) for key in part):
                first = next(iter(part.values()))
                if isinstance(first, torch.Tensor):
                    yield words, part


def modules(value: Any) -> list[Any]:
    """A variable's module, else the modules among its attributes (`trainer.model`)."""
    module: Any = sys.modules["torch"].nn.Module
    if issubclass(type(value), module):
        return [value]
    held: Any = None
    with contextlib.suppress(AttributeError):  # what its class makes of looking at it is not asked
        held = object.__getattribute__(value, "__dict__")
    parts = islice(held.values(), MOST_PARTS) if type(held) is dict else ()
    return [part for part in parts if issubclass(type(part), module)]


def fits(state: Mapping[str, Any], module: Any, on_cpu: Any) -> bool:
    """`state` holds every parameter of `module`, under its name and with its shape.

    `on_cpu(tensor)` tells whether the tensor has values on the CPU.
    """
    own = {plain(n): p.shape for n, p in _parameters(module)}
    held = {plain(key): value for key, value in state.items()}
    torch: Any = sys.modules["torch"]
    return bool(own) and all(
        isinstance(held.get(name), torch.Tensor)
        and held[name].shape == shape
        and on_cpu(held[name])
        for name, shape in own.items()
    )


def plain(key: str) -> str:
    """A parameter's name without what `DataParallel` and `torch.compile` put before it."""
    return key.replace("module.", "").replace("_orig_mod.", "")


def with_copies(namespace: Mapping[str, Any], names: Collection[str]) -> tuple[str, ...]:
    """`names` and the variables that hold weights, on the CPU, of a module among them."""
    states = list(state_dicts(namespace))
    if not states:
        return tuple(names)
    held = [m for name in names for m in modules(namespace[name]) if _lost(m)]
    found = [
        words.partition("[")[0]
        for words, state in states
        if any(fits(state, module, lambda t: t.device.type == "cpu") for module in held)
    ]
    return tuple(dict.fromkeys((*names, *found)))


def _lost(module: Any) -> bool:
    return any(p.device.type not in ("cpu", "meta") for _, p in _parameters(module))


def _parameters(module: Any) -> Any:
    """The base class's own listing: a subclass's may run other code of the user's."""
    torch: Any = sys.modules["torch"]
    return torch.nn.Module.named_parameters(module)
