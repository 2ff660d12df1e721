"""What a notebook's names were bound to before a cell, and what the cell has changed since."""

from __future__ import annotations

import ast
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..lazy import Lazy
from ..mutations import Patch, State

if TYPE_CHECKING:
    from .. import frames, salvage
else:
    frames, salvage = Lazy("frames"), Lazy("salvage")

_GENERATORS = {"Generator", "RandomState", "Random"}  # of numpy, torch and Python
_CONTAINERS = (list, dict, set, deque)
_PLAIN = frozenset(  # types whose values neither change nor hold a generator
    (int, float, str, bool, bytes, complex, tuple, type(None), ModuleType, FunctionType)
)
_ATTRIBUTES = 32  # of one object that are looked at
_DRAWS = {"sample", "choice", "choices", "shuffle", "pop", "popleft", "popitem", "next", "iter"}
_SEEDING = {"seed", "manual_seed", "manual_seed_all", "default_rng", "Random", "RandomState"}
_MOMENT = {"time", "time_ns", "now", "utcnow", "perf_counter", "getpid", "monotonic"}
_ARRAYS = {"numpy", "pandas", "torch", "polars"}


KEPT_BYTES = 256 << 20  # of CPU tensors, before each of the few cells whose bindings are kept


class Bindings:
    """A shallow copy of a namespace that keeps no GPU memory alive.

    A strong reference would keep `del model` from freeing it: an out-of-memory that we made. So
    modules, frames and CUDA tensors are held weakly, and CPU tensors too beyond `KEPT_BYTES`. Of
    the objects themselves, only the states of random generators, the versions of CPU tensors and
    the sizes of containers are noted.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        torch = sys.modules.get("torch")
        tensor = getattr(torch, "Tensor", ())
        heavy = (tensor, torch.nn.Module) if torch is not None and tensor else ()
        self._strong = dict(namespace)
        self._weak: dict[str, weakref.ref[Any]] = {}
        self._versions: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self.generators: dict[tuple[str, str | None], Any] = {}
        self._state = State(namespace)
        left = KEPT_BYTES
        for name, value in list(namespace.items()):  # before each cell: at most 1 us for a name
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind in _CONTAINERS:
                self._sizes[name] = len(value)
            elif kind is FrameType:
                del self._strong[name]
            elif heavy and isinstance(value, heavy):
                self._weak[name] = weakref.ref(value)
                on_cpu = isinstance(value, tensor) and not value.is_cuda
                left -= _bytes(value) if on_cpu else 0
                if not on_cpu or left < 0:  # `ids = ids.cuda()` must not lose the only copy
                    del self._strong[name]
                if on_cpu and not value.is_inference():
                    self._versions[name] = value._version
            else:
                if isinstance(value, _CONTAINERS):
                    self._sizes[name] = len(value)
                if not name.startswith("_"):
                    self.generators.update(_generators(name, value))

    def namespace(self, now: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The bindings as they were, and the names whose value is gone since."""
        found = dict(self._strong)
        gone = []
        for name, reference in self._weak.items():
            if name in found:
                continue
            value = reference()
            if value is not None:
                found[name] = value
            elif name in now:
                found[name] = now[name]
            else:
                gone.append(name)
        return found, tuple(gone)

    def patches(self, namespace: Mapping[str, Any]) -> list[Patch]:
        """What puts back plain values that were changed in place; `namespace` is that of here."""
        return self._state.changes(namespace)[0]

    def doubts(self, cell: str) -> tuple[str, ...]:
        """What the cell changed in place before it died: a replay starts from the changed form."""
        found = []
        for name, version in self._versions.items():
            reference = self._weak[name]()
            if reference is not None and reference._version != version:
                found.append(name)
        namespace = self.namespace({})[0]
        lost = self._state.changes(namespace)[1]
        if lost:
            found += set(lost) & set(salvage.reached(frames.body(cell), namespace))
        tree = _parsed(cell)
        if tree is not None:
            found += [
                n
                for n in _changed_arrays(tree)
                if type(self._strong.get(n)).__module__.split(".")[0] in _ARRAYS
            ]
            drawn = _drawn_from(tree)
            for name, size in self._sizes.items():
                if name in drawn and len(self._strong[name]) != size:
                    found.append(name)
        seeds = () if tree is None else _seeds_of_the_moment(tree)
        return (
            *(
                f"`{n}` was changed by the cell before it died; the replay began with the changed "
                "form"
                for n in dict.fromkeys(found)
            ),
            *(f"`{s}` is another seed in the replay" for s in seeds),
        )


def _generators(name: str, value: Any) -> Iterator[tuple[tuple[str, str | None], Any]]:
    """States of the random generators that a variable is or holds."""
    state = _state(value)
    if state is not None:
        yield (name, None), state
        return
    held = getattr(value, "__dict__", None)
    if type(held) is dict and not isinstance(value, type):
        for attribute, part in list(held.items())[:_ATTRIBUTES]:
            state = _state(part)
            if state is not None:
                yield (name, attribute), state


def _state(value: Any) -> Any:
    if type(value).__name__ not in _GENERATORS:
        return None
    try:
        if isinstance(value, random.Random):
            return value.getstate()
        if hasattr(value, "bit_generator"):  # numpy.random.Generator
            return value.bit_generator.state
        return value.get_state() if _on_cpu(value) else None
    except Exception:
        return None  # a generator of the user's own by the same name


def _on_cpu(generator: Any) -> bool:
    return str(getattr(generator, "device", "cpu")) == "cpu"  # a CUDA generator's state: CUDA calls


def _parsed(cell: str) -> ast.AST | None:
    try:
        return ast.parse(frames.body(cell))
    except (SyntaxError, ValueError):
        return None


def _changed_arrays(tree: ast.AST) -> Iterator[str]:
    """Names in `x -= 1`, `x[...] = y`, `x.column = y`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            target: ast.expr = node.target
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            target = node
        else:
            continue
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id


def _drawn_from(tree: ast.AST) -> set[str]:
    """Names that a call such as `random.sample(x, 3)`, `x.pop()` or `next(x)` draws from."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        func = node.func
        if _called(node) in _DRAWS:
            found |= {a.id for a in node.args if isinstance(a, ast.Name)}
            if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
                found.add(func.value.id)
    return found


def _seeds_of_the_moment(tree: ast.AST) -> Iterator[str]:
    """Calls such as `random.seed(time.time())`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in _SEEDING:
            below = [n for a in node.args for n in ast.walk(a) if isinstance(n, ast.Call)]
            if any(_called(n) in _MOMENT for n in below):
                yield ast.unparse(node)


def _called(node: ast.Call) -> str:
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def _bytes(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())  # a view keeps all of it
    except Exception:
        return int(tensor.numel() * tensor.element_size())  # sparse
