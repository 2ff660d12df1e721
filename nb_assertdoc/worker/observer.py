"""Turns a faulty call into an `Observed`: the finding, and what the cause rules need around it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from .. import devices, frames, indexing
from ..frames import Cells
from ..indexing import Bad, Usage
from ..model import (
    Finding,
    Observed,
    Place,
    RealError,
    Round,
    Step,
    Tokenizer,
    Values,
    Variable,
)
from . import names
from .batches import Path, bad_rows, field, path_to
from .checks import Checker, Seen, seen_key
from .examples import examples
from .hooks import is_ghost, mapped
from .loaders import Loaders
from .loops import LoopCounter
from .rounds import Under, library_loop, under_way
from .sources import Given

SCAN_SECONDS = 0.5
SCAN_ROWS = 100_000
_REAL_ERROR_ELEMENTS = 1 << 26  # most elements of the tensors that are made to ask the CPU
_CONFIG = (
    "num_labels vocab_size max_position_embeddings n_positions type_vocab_size pad_token_id "
    "problem_type num_embeddings model_type max_2d_position_embeddings max_target_positions"
).split()


class Observer:
    """Looks around a fault. Everything it reads is the worker's own."""

    def __init__(
        self,
        cells: Cells,
        namespace: dict[str, Any],
        checker: Checker,
        loops: LoopCounter,
        loaders: Loaders,
        sources: tuple[str, ...],
    ) -> None:
        self._cells = cells
        self._namespace = namespace
        self._checker = checker
        self._loops = loops
        self._loaders = loaders
        self._sources = sources

    def observe(
        self, usage: Usage, bad: Bad, func: Any, args: Any, kwargs: Any, unknown: tuple[str, ...]
    ) -> Observed | None:
        """The fault with all facts but the scan of the data; None outside user code."""
        stack = frames.stack(frames.here())
        users = [f for f in reversed(stack) if self._cells.is_user_frame(f)]
        if not users:
            return None
        location = users[-1]
        module, module_type = names.module_path(stack, users)
        op = indexing.public_name(usage.op, [f.f_code.co_name for f in stack[:60]])
        under, of_data = under_way(users, self._loops, self._loaders.window)
        places = tuple(self._place(f, under, of_data) for f in users)
        direct = names.only_torch_between(stack, location, self._cells)
        seen = self._checker.seen.get(seen_key(usage))
        step, batch_size = self._step(users, under, of_data, usage, bad)
        dataset = getattr(self._loader_of(usage.tensor), "dataset", None)
        known = {**self._namespace, **location.f_locals}
        listed = next((a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)), ())
        call = places[-1].expression
        index, table = names.expressions(usage, op, call, direct, listed, known)
        finding = Finding(
            op=op,
            aten_op=str(func),
            argument=usage.argument,
            bad_values=tuple(bad.values),
            distinct_bad=bad.distinct,
            bad_count=bad.count,
            total=bad.total,
            positions=tuple(tuple(p) for p in bad.positions),
            bound=usage.bound,
            margin=bad.margin,
            location=places[-1],
            user_frames=places,
            module=module,
            module_type=module_type,
            table=usage.table,
            step=step,
            examples=examples(
                usage, bad, step, batch_size, dataset, known, f"{index} {table} {module}"
            ),
        )
        whole = Seen()
        whole.add(usage.tensor)
        return Observed(
            finding=finding,
            dtype=str(usage.tensor.dtype).removeprefix("torch."),
            shape=tuple(usage.tensor.shape),
            values=_with_bad(whole.values(), bad.count),
            input_shape=tuple(usage.size_of.shape) if usage.size_of is not None else (),
            data=_joined(seen, whole) if seen is not None else None,
            index_expression=index,
            table_expression=table,
            config=self._config(stack),
            tokenizers=tuple(self._tokenizers(bad)),
            variables=tuple(self._variables(location)),
            sources=self._sources,
            first_nan=names.first_nan(users) if "nan" in bad.values else None,
            unknown=unknown,
            late=usage.op in self._checker.passed_over,
            real_error=real_error(func, args, kwargs),
        )

    def scanned(self, observed: Observed, usage: Usage) -> Observed:
        """The same with the values of that field over the data set, as far as time allows."""
        window = self._loaders.window
        loader = self._loader_of(usage.tensor)
        if loader is None or not window.active or observed.finding.bound is None:
            return observed
        paths = (path_to(given.batch, usage.tensor) for given in reversed(self._loaders.recent))
        path = next((p for p in paths if p is not None), None)
        dataset = getattr(loader, "dataset", None)
        if path is None or dataset is None or not hasattr(dataset, "__getitem__"):
            return observed
        values = _scan(loader, dataset, path, usage)
        if values is None:
            return observed
        users = frames.user_frames(frames.here(), self._cells)
        return msgspec.structs.replace(
            observed, data=values, data_name=names.name_of(dataset, users)
        )

    def site(self, op: str) -> tuple[str, str | None]:
        """The public name of the operator that runs, and its module."""
        called = [f.f_code.co_name for f in frames.stack(frames.here())[:60]]
        return indexing.public_name(op, called), self.module()

    def module(self) -> str | None:
        """The qualified name of the module that runs."""
        stack = frames.stack(frames.here())
        users = [f for f in reversed(stack) if self._cells.is_user_frame(f)]
        return names.module_path(stack, users)[0]

    # ---- the parts

    def _place(self, frame: FrameType, under: Sequence[Under], of_data: int | None) -> Place:
        place = frames.place(frame, self._cells)
        mine = [i for i, u in enumerate(under) if u.frame is frame]
        if self._loaders.skipped:  # a counter that runs with the loader is not the user's
            mine = mine[:-1] if of_data is None else [i for i in mine if i != of_data]
        targets = [t for i in mine if (loop := under[i].loop) is not None for t in loop.targets]
        extra = [
            v for v in frames.loop_variables(frame, targets) if v not in (place.function or "")
        ]
        if not extra:
            return place
        shown = ", ".join(extra)
        function = f"{place.function} with {shown}" if place.function else f"loop with {shown}"
        return msgspec.structs.replace(place, function=function)

    def _step(
        self,
        users: list[FrameType],
        under: Sequence[Under],
        of_data: int | None,
        usage: Usage,
        bad: Bad,
    ) -> tuple[Step | None, int]:
        """The step, and the size of the batch where the faulty tensor keeps its order, else 0."""
        window = self._loaders.window
        if not under and not window.active:
            return None, 0
        behind = window.given - 1 - under[of_data].count if of_data is not None else -1
        if behind not in (0, 1):
            # Of loops that do not go over the loader, only what holds the values counts.
            behind = window.ahead if of_data is not None or not under else len(window.mine)
        given, ordinal = self._given(usage.tensor, behind)
        rounds = [Round(loop=u.source, iteration=u.count) for u in under]
        if not rounds:
            of_data, rounds = 0, [Round(loop=library_loop(window), iteration=0)]
        if of_data is not None and ordinal is not None:
            rounds[of_data] = Round(loop=rounds[of_data].loop, iteration=ordinal)
        # Of the loops around that over the loader, the replay has left rounds out.
        first = of_data or 0
        if of_data is None and self._loaders.shortened:
            first = len(rounds) - 1
        rows: tuple[int, ...] = ()
        indices: tuple[int, ...] | None = None
        split, size = None, 0
        if window.active and window.loader is not None:
            chosen = given.indices if given is not None else None
            if given is not None and isinstance(chosen, list | tuple):
                rows = bad_rows(given.batch, len(chosen), usage, bad)
                size = len(chosen) if rows else 0
                if rows and all(type(i) is int for i in chosen):
                    indices = tuple(chosen[r] for r in rows)
            if given is not None or of_data is not None:
                loader = self._loader_of(usage.tensor)
                split = names.split_of(
                    names.name_of(loader, users),
                    names.name_of(getattr(loader, "dataset", None), users),
                )
        step = Step(
            loop=rounds[-1].loop,
            iteration=rounds[-1].iteration,
            batch_rows=rows,
            dataset_indices=indices,
            split=split,
            around=tuple(rounds[first:-1]),
            left_out=tuple(self._loaders.left_out) if of_data is not None else (),
        )
        return step, size

    def _loader_of(self, tensor: Tensor) -> Any:
        """The loader that the tensor's values are from, else the innermost loop's."""
        recent = reversed(self._loaders.recent)
        given = next((g for g in recent if path_to(g.batch, tensor) is not None), None)
        return given.loader if given is not None else self._loaders.window.loader

    def _given(self, tensor: Tensor, behind: int) -> tuple[Given | None, int | None]:
        """The batch that the faulty call works on, and the ordinal of the innermost loop's.

        It is the one that holds the tensor's values, else the newest but `behind`: who reads a
        loader may fetch the next batch first.
        """
        window = self._loaders.window
        mine = list(window.mine)
        newest = mine[-1 - behind] if behind < len(mine) else None
        holding = (
            g for g in reversed(self._loaders.recent) if path_to(g.batch, tensor) is not None
        )
        given = next(holding, newest)
        of_loop = given if any(given is g for g in mine) else newest
        return given, of_loop.ordinal if of_loop is not None else None

    def _config(self, stack: list[FrameType]) -> dict[str, int | str | None]:
        for module in names.modules_of(stack):
            config = getattr(module, "config", None)
            found = {k: v for k in _CONFIG if isinstance(v := getattr(config, k, None), int | str)}
            if found:
                return dict(found)
        return {}

    def _tokenizers(self, bad: Bad) -> Iterator[Tokenizer]:
        seen: list[Any] = []
        for name, thing in names.held(self._namespace):
            if not hasattr(type(thing), "convert_ids_to_tokens") or any(thing is s for s in seen):
                continue
            seen.append(thing)
            try:
                tokens = {
                    str(v): str(thing.convert_ids_to_tokens(int(v)))
                    for v in bad.values[:8]
                    if not isinstance(v, str) and 0 <= v < len(thing)
                }
                longest = getattr(thing, "model_max_length", None)
                yield Tokenizer(
                    name=name,
                    size=len(thing),
                    vocab_size=int(thing.vocab_size),
                    model_max_length=longest if isinstance(longest, int) else None,
                    tokens=tokens,
                )
            except Exception:
                # A user's or a library's tokenizer may lack any of these; it is then no evidence.
                continue

    def _variables(self, location: FrameType) -> Iterator[Variable]:
        code = "\n".join(self._sources)
        scopes = [location.f_locals, self._namespace]
        names_seen = set()
        for scope in scopes:
            for name, value in list(scope.items()):
                if name.startswith("_") or name in names_seen or name not in code:
                    continue
                if type(value) is int:
                    text = str(value)
                elif isinstance(value, dict | list | tuple | set) and len(value) <= 1_000_000:
                    text = f"{type(value).__name__} of {len(value)}"
                    if isinstance(value, dict) and len(value) <= 8:
                        pairs = [
                            f"{k!r}: {v}"
                            for k, v in value.items()
                            if type(k) in (str, int) and type(v) is int
                        ]
                        text += f" {{{', '.join(pairs)}}}" if pairs else ""
                else:
                    continue
                names_seen.add(name)
                yield Variable(name=name, value=text)
                if len(names_seen) >= 60:
                    return


def _with_bad(values: Values, count: int) -> Values:
    return msgspec.structs.replace(values, bad_count=count)


def _joined(seen: Seen, call: Seen) -> Values:
    both = Seen(
        count=seen.count + call.count,
        minimum=_least(seen.minimum, call.minimum, min),
        maximum=_least(seen.maximum, call.maximum, max),
        distinct=seen.distinct | call.distinct,
    )
    return both.values()


def _least(a: float | None, b: float | None, pick: Any) -> float | None:
    return b if a is None else a if b is None else pick(a, b)


def real_error(func: Any, args: Any, kwargs: Any) -> RealError | None:
    """What the CPU says to the very call, with tables of zeros for what has no values."""

    def solid(t: Tensor) -> Tensor:
        if not is_ghost(t):
            return t
        if t.numel() > _REAL_ERROR_ELEMENTS:
            raise MemoryError
        return torch.zeros(t.shape, dtype=t.dtype)

    if isinstance(func, str):  # a public function, seen before any operator
        func = getattr(torch._C._nn, func, None)
        if func is None:
            return None
    try:
        with devices.raw():
            args = tuple(mapped(solid, a) for a in args)
            kwargs = {k: mapped(solid, v) for k, v in kwargs.items()}
            args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    except Exception:
        return None
    try:
        with devices.raw():
            func(*args, **kwargs)
    except Exception as error:
        lines = traceback.format_exception_only(type(error), error)
        return RealError(
            type=type(error).__name__,
            message=str(error),
            traceback=tuple(line.rstrip("\n") for line in lines),
        )
    return None


# ---- the data set


def _scan(loader: Any, dataset: Any, path: Path, usage: Usage) -> Values | None:
    seen, bad_count = Seen(), 0
    end = time.monotonic() + SCAN_SECONDS
    size = loader.batch_size or 1
    complete = False
    try:
        rows = min(len(dataset), SCAN_ROWS)  # a stream has no length
        complete = rows == len(dataset)
        if type(dataset) is TensorDataset and loader.collate_fn is default_collate:
            leaf = field(dataset.tensors, path)  # all rows at once
            seen.add(leaf)
            bad_count, complete, rows = int(usage.rule(leaf).sum()), True, 0
        for start in range(0, rows, size):
            if time.monotonic() > end:
                complete = False
                break
            items = [dataset[i] for i in range(start, min(start + size, rows))]
            batch = loader.collate_fn(items)
            leaf = field(batch, path)
            seen.add(leaf)
            bad_count += int(usage.rule(leaf).sum())
    except Exception:
        # The data set is the user's code: what was read until now still counts.
        complete = False
    if not seen.count:
        return None
    values = seen.values()
    return msgspec.structs.replace(
        values, bad_count=bad_count, complete=values.complete and complete
    )
