"""What runs at each operator of a replay: the checks, then the operator, on real floats or ghosts.

The rules of ghosts are those of docs/architecture.md, section "Worker": a parameter is a
ghost (a tensor on `meta`) from birth, what depends on a ghost is unknown, and an unknown value is
never reported as a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import devices, indexing
from ..indexing import is_meta
from . import health, metas
from .checks import Checker
from .ranges import note_range
from .standins import LOST

aten = torch.ops.aten
_CPU = torch.device("cpu")
SOLID = 4 << 20  # most elements of a float tensor that keeps its values on its way to the device
_EMULATED = 1 << 26  # most random numbers that are drawn for ghosts, to keep in step with the host
_CHUNK = 1 << 20
_MASKS = (torch.bool, torch.uint8)
_RANDOM = torch.Tag.nondeterministic_seeded


def is_ghost(tensor: Tensor) -> bool:
    """True for a tensor without values."""
    return bool(is_meta(tensor))


def tensors_of(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among an operator's arguments (lists are one level deep)."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [v for v in value if isinstance(v, Tensor)]
    return found


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`change` applied to a tensor, or to the tensors of a list or tuple."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(change(v) if isinstance(v, Tensor) else v for v in value)
    return value


class ReplayHooks(devices.Hooks):
    """Real floats: every operator runs on the CPU after its arguments were checked."""

    checker: Checker

    def __init__(self) -> None:
        self.operators = 0
        self.emulated_skipped = False
        self.lost_read = False  # a number that is not known went to Python
        self._made_on_device = False

    def make(self, name: str, device: torch.device) -> None:
        """A factory for the pretended device is the next operator."""
        self._made_on_device = True

    def unknown(self, tensor: Tensor) -> str | None:
        """Why the values of `tensor` are made up, or None.

        Here only what comes of integers that are lost, and are zeros: weights are merely soft.
        """
        return tensor.__dict__.get("_nb_why")

    def soft(self, tensor: Tensor) -> str | None:
        """What makes the values of `tensor` differ from the host's, or None."""
        return tensor.__dict__.get("_nb_soft")

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """One operator."""
        kwargs = kwargs or {}
        self.operators += 1
        try:
            usages = indexing.usages(func, args, kwargs)
        except indexing.Unread as unread:
            out = self.compute(func, args, kwargs)  # raises where the call is malformed
            self.checker.unread(unread)
            return out
        if usages:
            args, kwargs = self.checker.check(usages, func, args, kwargs)
        return self.compute(func, args, kwargs)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a checked operator."""
        tensors = tensors_of(args, kwargs)
        if func is aten._local_scalar_dense.default and any(map(self.unknown, tensors)):
            self.lost_read = True  # on ghosts it is a decision, or leaks
        return self.run(func, args, kwargs, tensors)

    def run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an operator on real values; mark what hangs on the GPU's random numbers."""
        on_device, self._made_on_device = self._made_on_device, False
        out = func(*args, **kwargs)
        soft = next((s for t in tensors if (s := t.__dict__.get("_nb_soft"))), None)
        if _RANDOM in func.tags and (
            on_device or any(devices.tag_of(t) not in (None, _CPU) for t in tensors)
        ):
            soft = "random numbers of the GPU, which the CPU cannot repeat"
        elif _RANDOM in func.tags and self.emulated_skipped:
            soft = "random numbers that come after those of a large initialisation"
        if soft is not None:
            _mark(out, "_nb_soft", soft)
        why = next((w for t in tensors if (w := self.unknown(t))), None)
        if why is not None:
            _mark(out, "_nb_why", why)
        return out


def _integers(out: Any) -> bool:
    return isinstance(out, Tensor) and not out.dtype.is_floating_point


def _mark(out: Any, name: str, value: Any) -> None:
    for t in (out,) if isinstance(out, Tensor) else out if isinstance(out, list | tuple) else ():
        if isinstance(t, Tensor):
            setattr(t, name, value)


def _at_cpu(out: Any) -> None:
    """A ghost that is nowhere else is on the CPU: the user never sees `meta`."""
    for t in (out,) if isinstance(out, Tensor) else out if isinstance(out, list | tuple) else ():
        if isinstance(t, Tensor) and is_meta(t) and devices.tag_of(t) is None:
            devices.tag(t, _CPU)


class GhostHooks(ReplayHooks):
    """Floats on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self._spoiled: dict[int, Any] = {}  # storages of solids that a ghost was written into
        self.no_meta: set[str] = set()
        self._drawn = 0  # random numbers for ghosts

    # ---- moves

    def move(self, tensor: Tensor, device: torch.device) -> Tensor | None:
        """To the device: parameters and large floats go without values."""
        if is_ghost(tensor):
            if tensor.requires_grad and torch.is_grad_enabled():
                return None  # its gradient must come back to where it is
            return devices.tag(_alias(tensor), device)
        if tensor.is_floating_point() and tensor.numel() > SOLID:
            return devices.tag(_to_meta(tensor), device)
        return None

    def leave(self, tensor: Tensor) -> Tensor | None:
        """To the CPU: a ghost stays a ghost."""
        if not is_ghost(tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
            return None
        return devices.tag(_alias(tensor), _CPU)

    # ---- values

    def unknown(self, tensor: Tensor) -> str | None:
        """Ghosts, solids that a ghost was written into, and what came of these."""
        if "_nb_why" in tensor.__dict__:
            return str(tensor.__dict__["_nb_why"])
        if is_ghost(tensor):
            return "a value that was not computed"
        if self._spoiled and tensor.layout == torch.strided:
            spoiled = self._spoiled.get(tensor.untyped_storage()._cdata)
            return str(spoiled[1]) if spoiled is not None else None
        return None

    def _spoil(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # kept: a freed storage's address would come again
        self._spoiled[storage._cdata] = (storage, "a value that was not computed")

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a checked operator, on ghosts where one of its arguments is a ghost."""
        tensors = tensors_of(args, kwargs)
        size = any("_nb_size" in t.__dict__ for t in tensors)
        if not any(is_meta(t) for t in tensors):
            out = self.run(func, args, kwargs, tensors)
        else:
            on_device, self._made_on_device = self._made_on_device, False
            out = self._run_ghost(func, args, kwargs, tensors)
            tags = [devices.tag_of(t) for t in tensors]
            if not on_device and all(t in (None, _CPU) for t in tags):
                _at_cpu(out)
            size = size or func._schema.name in _MADE_UP_SIZE or self._by_unknown_mask(func, args)
            note_range(func._schema.name, args, kwargs, tensors, out)
            if func._schema.name in _TALLIES and tensors[0].dtype == torch.bool:
                _mark(out, "_nb_tally", True)  # how many were right: nobody's index
            soft = next((s for t in tensors if (s := t.__dict__.get("_nb_soft"))), None)
            if soft is not None:
                _mark(out, "_nb_soft", soft)
            if any(t.__dict__.get("_nb_why") == LOST for t in tensors) and _integers(out):
                _mark(out, "_nb_why", LOST)
        if size:
            _mark(out, "_nb_size", True)
        return out

    def _run_ghost(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        name = func._schema.name
        first = tensors[0]
        if func is aten._local_scalar_dense.default:
            truth = first.__dict__.get("_nb_truth")
            return truth if truth is not None else made_up(first.dtype)
        if func is aten.equal.default:
            return False
        if func is aten.nonzero.default:
            rows = 0 if first.__dict__.get("_nb_truth") is False else first.numel()
            return torch.empty((rows, first.dim()), dtype=torch.long, device="meta")
        if _RANDOM in func.tags:
            self._draw(func, args, kwargs, first)
        written = _written(func, args, kwargs)
        try:
            out = self._on_meta(func, args, kwargs)
        except NotImplementedError:
            out = self._on_ones(func, args, kwargs, written)
        except RuntimeError as error:
            text = str(error).lower()
            if "dtype" in text:
                out = self._same_float(func, args, kwargs)
            elif any(word in text for word in _NO_META):
                out = self._on_ones(func, args, kwargs, written)
            else:
                raise
        for tensor in written:
            if not is_meta(tensor):
                self._spoil(tensor)
        out = _give_back(func, args, kwargs, out)
        truth = None
        if isinstance(out, Tensor) and is_ghost(out):
            truth = health.truth(name, args, tensors, out)
        if truth is None and name in health.ABSORBS:
            truth = self._absorbed(health.ABSORBS[name], tensors)
        if truth is not None:
            out._nb_truth = truth
        return out

    def _absorbed(self, by: bool, tensors: list[Tensor]) -> bool | None:
        """True wins in an `or`, False in an `and`, whatever the rest: generation ends so."""
        for t in tensors:
            known: bool | None = t.__dict__.get("_nb_truth")
            if known is None and t.dtype == torch.bool and t.numel() and self.unknown(t) is None:
                known = bool(t.all()) if by else bool(t.any())
            if known is by:
                return by
        return None

    def _on_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _NEEDS_VALUES:
            raise NotImplementedError(str(func))
        if func in _TAKES_MASK:
            indices = [self._mask_as_index(i) for i in args[1]]
            if any(isinstance(i, Tensor) and i.dtype in _MASKS for i in indices):
                raise NotImplementedError("a mask without values")
            args = (args[0], _flat(indices), *args[2:])
        args = tuple(mapped(_to_meta, a) for a in args)
        kwargs = {k: mapped(_to_meta, v) for k, v in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return metas.run(func, args, kwargs)

    def _by_unknown_mask(self, func: Any, args: Any) -> bool:
        """`x[mask]`, where how many hits the mask has was not computed."""
        return func is aten.index.Tensor and any(
            i is not None and i.dtype in _MASKS and self.unknown(i) is not None for i in args[1]
        )

    def _mask_as_index(self, index: Any) -> Any:
        """A solid mask has a known number of hits: its positions."""
        if isinstance(index, Tensor) and index.dtype in _MASKS and self.unknown(index) is None:
            return list(index.nonzero(as_tuple=True))
        return index

    def _on_ones(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """No meta kernel: the CPU kernel on ones (masks true, integers 0), its result a ghost."""
        self.no_meta.add(str(func))
        if any(is_meta(t) for t in written):
            return next(t for t in written if is_meta(t))
        args = tuple(mapped(_ones, a) for a in args)
        kwargs = {k: mapped(_ones, v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        if func is aten._pack_padded_sequence.default:  # batch_sizes hang on the lengths alone
            return _to_meta(out[0]), out[1]
        return mapped(_to_meta, out)

    def _same_float(self, func: Any, args: Any, kwargs: Any) -> Any:
        """There is no autocast on meta: what it would have cast meets in float32."""

        def widen(t: Tensor) -> Tensor:
            t = _to_meta(t)
            return t.to(torch.float32) if t.is_floating_point() else t

        args = tuple(mapped(widen, a) for a in args)
        return func(*args, **{k: mapped(widen, v) for k, v in kwargs.items()})

    def _draw(self, func: Any, args: Any, kwargs: Any, first: Tensor) -> None:
        """On the CPU it consumes random numbers, on the host as here: as many, then forgotten."""
        if devices.tag_of(first) not in (None, _CPU) or kwargs.get("generator") is not None:
            return
        self._drawn += first.numel()
        if self._drawn > _EMULATED:
            self.emulated_skipped = True
            return
        count = first.numel()
        if func in _FILLS and count > _CHUNK:  # the same numbers as in one piece
            scratch = torch.empty(_CHUNK, dtype=first.dtype)
            while count >= 2 * _CHUNK:
                func(scratch, *args[1:], **kwargs)
                count -= _CHUNK
            func(torch.empty(count, dtype=first.dtype), *args[1:], **kwargs)
            return
        try:
            func(
                *(mapped(_ones, a) for a in args),
                **{k: mapped(_ones, v) for k, v in kwargs.items()},
            )
        except (RuntimeError, NotImplementedError):  # its arguments fit no CPU kernel
            self.emulated_skipped = True


_NO_META = ("meta", "data-dependent", "datadependent", "no fake impl")  # of what errors speak
_FILLS = {aten.uniform_.default, aten.normal_.default}
_NEEDS_VALUES = {aten._pack_padded_sequence.default}
_TAKES_MASK = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_TALLIES = {"aten::sum", "aten::count_nonzero"}
_MADE_UP_SIZE = {
    f"aten::{n}"
    for n in (
        "nonzero masked_select _unique _unique2 unique_dim unique_consecutive bincount "
        "repeat_interleave"
    ).split()
}


def made_up(dtype: torch.dtype) -> float | int | bool | complex:
    """What an unknown value is in Python: 1.0, 0 (in range of nearly every table) or False."""
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else 0


def _alias(tensor: Tensor) -> Tensor:
    alias = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
    if "_nb_below" in tensor.__dict__:
        alias._nb_below = tensor.__dict__["_nb_below"]  # type: ignore[attr-defined]
    return alias


def _to_meta(t: Tensor) -> Tensor:
    if is_meta(t) or t.layout != torch.strided or t.is_nested:
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _ones(t: Tensor) -> Tensor:
    if not is_meta(t):
        return t
    fill = torch.ones if t.dtype == torch.bool or t.is_floating_point() else torch.zeros
    return fill(t.shape, dtype=t.dtype)


def _flat(indices: list[Any]) -> list[Any]:
    flat: list[Any] = []
    for index in indices:
        flat += index if isinstance(index, list) else [index]
    return flat


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes into, by its schema."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tensors_of((value,), {})
    return found


def _give_back(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """An operator that returns the argument it wrote into returns that very tensor."""
    returns = func._schema.returns
    if not isinstance(out, Tensor) or len(returns) != 1 or returns[0].alias_info is None:
        return out
    if not returns[0].alias_info.is_write:
        return out
    written = _written(func, args, kwargs)
    return written[0] if written else out
