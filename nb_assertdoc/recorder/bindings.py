"""What a notebook's names were bound to before a cell, and what the cell has changed since."""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from ..lazy import Lazy
from ..mutations import Patch, State, rng_state, stored

if TYPE_CHECKING:
    from .. import frames, salvage
else:
    frames, salvage = Lazy("frames"), Lazy("salvage")

_CONTAINERS = (list, dict, set, deque)
_PLAIN_CONTAINERS = frozenset((*_CONTAINERS, tuple))
_PLAIN = frozenset(  # types whose values neither change nor hold a generator
    (int, float, str, bool, bytes, complex, type(None), ModuleType, FunctionType)
)
_ATTRIBUTES = 32  # of one object that are looked at
_DRAWS = {"sample", "choice", "choices", "shuffle", "pop", "popleft", "popitem", "next", "iter"}
_SEEDING = {"seed", "manual_seed", "manual_seed_all", "default_rng", "Random", "RandomState"}
_MOMENT = {"time", "time_ns", "now", "utcnow", "perf_counter", "getpid", "monotonic"}
_ARRAYS = {"numpy", "pandas", "torch", "polars"}


KEPT_BYTES = 256 << 20  # of CPU arrays, before each of the few cells whose bindings are kept
_LOOKS = 1000  # objects of one namespace that are looked at for CUDA tensors: a third of a ms
_LOOKS_AT_ONE = 40  # of them for one variable
_BELOW = 32  # elements or attributes of one object
_LEVELS = 3


class Bindings:
    """A shallow copy of a namespace that keeps no GPU memory alive.

    A strong reference would keep `del model` from freeing it: an out-of-memory that we made. So
    frames, CUDA tensors, modules, optimizers and what holds these are held weakly, or known by
    their `id` alone; and CPU arrays too beyond `KEPT_BYTES`. Of the objects themselves, only the
    states of random generators, the versions of CPU tensors and the sizes of containers are noted.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        torch: Any = sys.modules.get("torch")
        whole = hasattr(torch, "Tensor") and hasattr(torch, "nn")  # it may be half imported
        self._tensor: Any = torch.Tensor if whole else ()
        self._owners: Any = (torch.nn.Module, torch.optim.Optimizer) if whole else ()
        self._sorts: dict[type, str] = {}  # of the types that were met
        self._looks = _LOOKS if whole and torch.cuda.is_initialized() else 0
        self._bytes = KEPT_BYTES
        self._strong = dict(namespace)
        self._ids: dict[str, int] = {}  # of what is not among `_strong`
        self._weak: dict[str, weakref.ref[Any]] = {}
        self._about: dict[str, tuple[Any, ...]] = {}  # CUDA tensors: what `salvage.Freed` takes
        self._versions: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self.generators: dict[tuple[str, str | None], Any] = {}
        self._state = State(namespace)
        for name, value in list(namespace.items()):  # before each cell: about 1 us for a name
            if type(value) not in _PLAIN:
                try:
                    self._note(name, value)
                except KeyboardInterrupt:
                    raise
                except BaseException:  # an object of the user's may answer anything
                    continue

    def _sort(self, kind: type) -> str:
        found = self._sorts.get(kind)
        if found is None:
            root = kind.__module__.partition(".")[0]
            if issubclass(kind, ModuleType):  # one that loads lazily is not looked at
                found = "module"
            elif issubclass(kind, self._tensor):
                found = "tensor"
            elif issubclass(kind, self._owners):
                found = "owner"
            elif issubclass(kind, (*_CONTAINERS, tuple)):
                found = "container"
            else:
                found = root if root in ("numpy", "pandas") else "object"
            self._sorts[kind] = found
        return found

    def _note(self, name: str, value: Any) -> None:
        kind = type(value)
        sort = self._sort(kind)
        if sort == "tensor":
            self._note_tensor(name, value)
        elif sort == "owner":
            self._let_go(name, value)
        elif kind is FrameType:
            del self._strong[name]
        elif sort == "module":
            pass
        elif sort == "container":
            if self._looks > 0 and self._holds_gpu(value):
                self._let_go(name, value)
            if kind is not tuple:
                self._sizes[name] = len(value)
            if kind not in _PLAIN_CONTAINERS and name[:1] != "_":
                self.generators.update(_generators(name, value))
        else:
            size = _array_bytes(value, sort)
            self._bytes -= size
            if (size and self._bytes < 0) or (self._looks > 0 and self._holds_gpu(value)):
                self._let_go(name, value)
            if name[:1] != "_":
                self.generators.update(_generators(name, value))

    def _note_tensor(self, name: str, tensor: Any) -> None:
        on_cpu = tensor.device.type in ("cpu", "meta")
        self._bytes -= _bytes(tensor) if on_cpu else 0
        self._weak[name] = weakref.ref(tensor)
        if not on_cpu:
            self._about[name] = salvage.metadata(tensor)
        elif not tensor.is_inference():
            self._versions[name] = tensor._version
        if not on_cpu or self._bytes < 0:  # `ids = ids.cuda()` must not lose the only copy
            self._let_go(name, tensor)

    def _let_go(self, name: str, value: Any) -> None:
        del self._strong[name]
        self._ids[name] = id(value)
        with contextlib.suppress(TypeError):  # of lists and dictionaries there are no references
            self._weak[name] = weakref.ref(value)

    def _holds_gpu(self, value: Any) -> bool:
        return self._reaches_gpu(value, _LEVELS, self._looks - _LOOKS_AT_ONE)

    def _reaches_gpu(self, value: Any, levels: int, least: int) -> bool:
        for part in _below(value):
            kind = type(part)
            if kind in _PLAIN:
                continue
            self._looks -= 1
            if self._looks < max(0, least):
                return False
            sort = self._sort(kind)
            if sort == "owner" or (sort == "tensor" and part.is_cuda):
                return True
            deeper = sort in ("container", "object") and levels > 1
            if deeper and self._reaches_gpu(part, levels - 1, least):
                return True
        return False

    def namespace(
        self, now: Mapping[str, Any], copies: Mapping[int, tuple[Any, Any]] = MappingProxyType({})
    ) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
        """The bindings as they were; names whose value is gone; names whose value may be newer.

        `now`: the namespace of this moment. `copies`: values of CUDA tensors, see `IntegerCopies`:
        a tensor that the cell freed comes as `salvage.Freed`.
        """
        found = dict(self._strong)
        gone, newer = [], []
        for name, number in self._ids.items():
            value = self._weak[name]() if name in self._weak else None
            if value is not None:
                found[name] = value
            elif name in self._about:
                copy = copies[number][1] if number in copies else None
                found[name] = salvage.Freed(*self._about[name], name, copy)
            elif name in now:
                found[name] = now[name]
                newer.append(name)
            else:
                gone.append(name)
        return found, tuple(gone), tuple(newer)

    def patches(self, namespace: Mapping[str, Any]) -> list[Patch]:
        """What puts back plain values that were changed in place; `namespace` is that of here."""
        return self._state.changes(namespace)[0]

    def doubts(
        self, cell: str, namespace: Mapping[str, Any], reached: int | None = None
    ) -> tuple[str, ...]:
        """What the cell changed in place before it died: a replay starts from the changed form.

        `reached`: the line that it came to, from 1.
        """
        found = []
        for name, version in self._versions.items():
            reference = self._weak[name]()
            if reference is not None and reference._version != version:
                found.append(name)
        lost = self._state.changes(namespace)[1]
        if lost:
            found += set(lost) & set(salvage.reached(frames.body(cell), namespace))
        tree = frames.parsed(cell)
        if tree is not None:
            found += [
                n
                for n in _changed_arrays(tree, reached)
                if n not in self._about  # integers on the GPU are those of the start, floats none
                and type(namespace.get(n)).__module__.split(".")[0] in _ARRAYS
            ]
            drawn = _drawn_from(tree)
            for name, size in self._sizes.items():
                if name in drawn and name in namespace and len(namespace[name]) != size:
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
    state = rng_state(value)
    if state is not None:
        yield (name, None), state
        return
    held = stored(value)
    if held and not issubclass(type(value), type):
        for attribute, part in list(held.items())[:_ATTRIBUTES]:
            state = rng_state(part)
            if state is not None:
                yield (name, attribute), state


def _below(value: Any) -> Iterable[Any]:
    """Some of what an object holds."""
    kind = type(value)
    if issubclass(kind, dict):
        return islice(value.values(), _BELOW)
    if issubclass(kind, (list, tuple, set, deque)):
        return islice(value, _BELOW)
    if kind is MethodType:
        return (value.__self__,)
    if kind is functools.partial:
        return (value.func, *value.args[:_BELOW])
    held = stored(value)
    return islice(held.values(), _BELOW) if held else ()


def _array_bytes(value: Any, library: str) -> int:
    if library == "numpy":
        return int(getattr(value, "nbytes", 0))
    return 8 * int(getattr(value, "size", 0)) if library == "pandas" else 0


def _ran(node: ast.AST, tree: ast.AST, reached: int | None) -> bool:
    """Whether a node above or below the line that was reached may have run, also in a round before.

    What stands on that line itself was on its way: `df["p"] = predict(df)` has stored nothing yet.
    """
    line = getattr(node, "lineno", 0)
    for block in ast.walk(tree):  # an error of `__exit__` is told of the line with `with`
        if isinstance(block, ast.With | ast.AsyncWith) and block.lineno == reached:
            reached = _end(block) + 1
    if reached is None or line < reached:
        return True
    loops = (n for n in ast.walk(tree) if isinstance(n, ast.For | ast.AsyncFor | ast.While))
    if any(n.lineno <= min(line, reached) <= max(line, reached) <= _end(n) for n in loops):
        return True
    begun = (n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno == reached)
    return line == reached and len(list(begun)) > 1  # `y -= 1; step(y)`


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _changed_arrays(tree: ast.AST, reached: int | None) -> Iterator[str]:
    """Names in `x -= 1`, `x[...] = y`, `x.column = y`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign | ast.Subscript | ast.Attribute) and not _ran(
            node, tree, reached
        ):
            continue
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
