"""CPU copies of small integer CUDA tensors, taken before a cell: after a crash they are lost."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ..mutations import stored

MOST_VISITED = 1500  # objects looked at before a cell: about half a millisecond
_DEPTH = 4
_ITEMS = 64
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type)


class IntegerCopies:
    """Finds integer CUDA tensors among a namespace's values and copies those that changed."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        # By `id`: a weak reference to the tensor, its version, the copy.
        self._known: dict[int, tuple[Any, tuple[int, int] | None, Any]] = {}
        self._buffers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def take(
        self, namespace: Mapping[str, Any]
    ) -> tuple[dict[int, tuple[Any, Any]], BaseException | None]:
        """By `id` of each tensor a weak reference to it and a copy of its values; and the error
        that a copy met: the context is dead then.

        A tensor made later may have the `id` of one that is gone, and other values.
        """
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "Tensor"):
            return {}, None
        cuda = getattr(torch, "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return {}, None
        spent, seen = 0, set()
        for tensor in self._tensors(torch, namespace):
            known = self._known.get(id(tensor))
            spent += tensor.numel() * tensor.element_size()
            if spent > self._most:
                break
            seen.add(id(tensor))
            version = _version(tensor)
            same = known is not None and known[0]() is tensor and known[1] == version
            if same and version is not None:
                continue
            try:
                with torch.no_grad():
                    copy = tensor.detach().cpu()
            except Exception as error:
                return {}, error
            self._known[id(tensor)] = (weakref.ref(tensor), version, copy)
        self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
        still = {*seen, *self.current()}  # what was not looked at may have been written to
        return {k: (v[0], v[2]) for k, v in self._known.items() if k in still}, None

    def current(self) -> dict[int, Any]:
        """Copies by `id` that still hold: the tensor lives, and was not written to since."""
        found = {}
        for key, (reference, version, copy) in self._known.items():
            tensor = reference()
            if tensor is not None and version is not None and _version(tensor) == version:
                found[key] = copy
        return found

    def _tensors(self, torch: Any, namespace: Mapping[str, Any]) -> Iterator[Any]:
        """Integer CUDA tensors near the namespace: in containers, attributes, modules' buffers."""
        seen: set[int] = set()
        todo: list[tuple[Any, int]] = [
            (v, 0) for k, v in list(namespace.items()) if not k.startswith("_")
        ]
        visited = 0
        while todo and visited < MOST_VISITED:
            value, depth = todo.pop()
            if issubclass(type(value), _PLAIN) or id(value) in seen:
                continue
            visited += 1
            seen.add(id(value))
            kind = type(value)
            if issubclass(kind, torch.Tensor):
                if value.is_cuda and not value.is_floating_point() and not value.is_complex():
                    yield value
            elif issubclass(kind, torch.nn.Module):
                todo += [(b, _DEPTH) for b in self._integers_of(value)]
            elif depth < _DEPTH:
                try:
                    todo += [(part, depth + 1) for part in _parts(value)]
                except KeyboardInterrupt:
                    raise
                except BaseException:  # an object of the user's may answer anything
                    continue

    def _integers_of(self, module: Any) -> list[Any]:
        """A module's integer buffers on the GPU. All its parts are only looked at when it moved."""
        place = next((p.device for p in module.parameters()), None)
        known = self._buffers.get(module)
        if known is None or known[0] != place:
            buffers = [b for part in module.modules() for b in part._buffers.values()]
            found = [
                weakref.ref(b)
                for b in buffers
                if b is not None and b.is_cuda and not b.is_floating_point()
            ]
            self._buffers[module] = known = (place, found)
        return [b for reference in known[1] if (b := reference()) is not None]


def _version(tensor: Any) -> tuple[int, int] | None:
    """How often it was written to, and where it lies (`x.data = y` counts as no write).

    None for a tensor of `inference_mode`, which does not count.
    """
    if tensor.is_inference():
        return None
    strided = str(tensor.layout) == "torch.strided"  # another has no one place
    return int(tensor._version), int(tensor.data_ptr()) if strided else 0


def _parts(value: Any) -> list[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        return list(islice(value.values(), _ITEMS))
    if issubclass(kind, list | tuple):
        return list(islice(iter(value), _ITEMS)) if kind.__iter__ in _ITERS else []
    if kind.__module__.split(".")[0] in _LIBRARIES:
        return []
    held = stored(value)
    return list(islice(held.values(), _ITEMS)) if held else []


_ITERS = (list.__iter__, tuple.__iter__)
_LIBRARIES = {
    "builtins", "numpy", "pandas", "matplotlib", "sklearn", "collections", "functools", "types",
    "IPython", "tokenizers", "re", "random", "pathlib", "logging", "threading", "tqdm",
}  # fmt: skip
