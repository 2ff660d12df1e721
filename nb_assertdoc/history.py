"""Which earlier executions must run again to make what a cell needs."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass, field

from .frames import body
from .model import Source

_SEEDS = {"manual_seed", "seed", "seed_everything", "set_seed", "manual_seed_all"}


@dataclass
class _Names:
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)  # objects that a method or an item is used of
    seeds: bool = False


def needed(earlier: Sequence[Source], cell: Source) -> tuple[Source, ...]:
    """The least set of `earlier` (in order) that makes every name which `cell` reads.

    An execution counts when it binds a needed name, changes the object behind one (`x.append(...)`,
    `x[0] = ...`, `model.to(...)`), or seeds a random generator. Names are those of the text: what
    `exec` or a star import binds is not seen.
    """
    wanted = set(names_of(cell.source).reads)
    chosen: list[Source] = []
    for source in reversed(earlier):
        names = names_of(source.source)
        if names.writes & wanted or names.changes & wanted or names.seeds:
            chosen.append(source)
            wanted = (wanted - (names.writes - names.reads - names.changes)) | names.reads
    return tuple(reversed(chosen))


def names_of(cell: str) -> _Names:
    """Names that a cell reads, binds and changes; a cell that is not Python has none."""
    found = _Names()
    try:
        tree = ast.parse(body(cell))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            target = found.writes if isinstance(node.ctx, ast.Store) else found.reads
            target.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.writes.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.writes |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.writes.add(node.name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.seeds |= node.func.attr in _SEEDS
            found.changes |= _owner(node.func)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.seeds |= node.func.id in _SEEDS
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.changes |= _owner(node)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.reads.add(node.target.id)
    found.reads -= set(vars(builtins))
    found.changes -= _imported(tree)
    return found


def _owner(node: ast.expr) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _imported(tree: ast.AST) -> set[str]:
    return {
        (a.asname or a.name).split(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    }
