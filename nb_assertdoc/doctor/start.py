"""What the notebook's variables were as a cell began, and what of that is not known."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

from .. import frames, history, salvage
from ..recorder import Execution

log = logging.getLogger("nb_assertdoc")
_NOT_OWN = "-packages"  # of an installed library
_LOAD = "%load_ext nb_assertdoc\n"


@dataclass
class Start:
    """The variables, what puts back what was changed in place, and what lowers the confidence."""

    namespace: Mapping[str, Any]
    gone: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    patches: tuple[Any, ...] = ()
    integers: Mapping[int, Any] = field(default_factory=dict)  # values of CUDA tensors, by `id`


def start_of(
    execution: Execution,
    now: Mapping[str, Any],
    earlier: Sequence[Execution],
    later: Sequence[Execution],
) -> Start:
    """The start of `execution`; `now` is the namespace of this moment, after the `later` ones."""
    bindings = execution.bindings
    if bindings is None:
        return Start(
            now, doubts=("the cell's start was not recorded: variables are as they are now",)
        )
    namespace, gone, newer = bindings.namespace(now, execution.integers)
    bound = set().union(*(history.names_of(e.source).writes for e in (execution, *later)))
    renewed = bound.intersection(newer)  # the old value is lost
    doubts = _renewed(renewed, execution.source, namespace)
    patches: tuple[Any, ...] = ()
    try:
        old = {name: value for name, value in namespace.items() if name not in renewed}
        doubts += bindings.doubts(execution.source, old, execution.reached)
        patches = tuple(bindings.patches(old))
    except Exception:  # objects of the user's are compared
        log.exception("nb_assertdoc: could not compare the variables")
        doubts += ("what the cell changed in place is not known",)
    doubts += _set_in_modules(execution, earlier, namespace)
    if execution.joined and _acts_before_the_load(execution.source):
        doubts += ("the cell loaded the extension: variables are as they were then",)
    integers = {k: copy for k, (tensor, copy) in execution.integers.items() if tensor() is not None}
    gone = tuple(g for g in gone if g in execution.source)
    return Start(namespace, gone, doubts, patches, integers)


def reached_line(execution: Execution, tb: TracebackType | None, cells: frames.Cells) -> int | None:
    """The line of the cell at which a traceback enters the user's code; None where it does not."""
    for entry in frames.user_traceback(tb, cells):
        if entry.tb_frame.f_code.co_filename == execution.filename:
            return entry.tb_lineno
    return None


def _renewed(names: set[str], cell: str, namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Of these names, with a newer value than the cell began with, those that the replay needs."""
    suspects = names - history.bound_first(cell)
    if suspects:
        suspects &= set(salvage.reached(frames.body(cell), namespace))
    return tuple(
        f"`{name}` was bound anew, and its old value is lost: the replay began with the new one"
        for name in sorted(suspects)
    )


def _set_in_modules(
    execution: Execution, earlier: Sequence[Execution], namespace: Mapping[str, Any]
) -> tuple[str, ...]:
    """Attributes that cells have set in modules of the user's own: a worker imports the file."""
    own = {n for n, value in namespace.items() if type(value) is ModuleType and _is_own(value)}
    if not own:
        return ()
    own &= set(salvage.reached(frames.body(execution.source), namespace))
    found = {
        ast.unparse(node)
        for each in earlier
        for node in ast.walk(frames.parsed(each.source) or ast.Module([], []))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in own
    }
    return tuple(f"`{name}` was set by a cell, and is as in its file" for name in sorted(found))


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    return (
        bool(file) and not file.startswith((sys.prefix, sys.base_prefix)) and _NOT_OWN not in file
    )


def _acts_before_the_load(source: str) -> bool:
    """The cell did more than import before its `%load_ext nb_assertdoc`."""
    return history.acts(source.partition(_LOAD)[0] + "pass")
