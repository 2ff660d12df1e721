"""Reads the user's code: the calls in it, and what a name in it was made of."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

DEPTH = 4  # names from one to the next


@dataclass(frozen=True)
class Spot:
    """Where an expression stands: its text, and the function and class around it."""

    text: str
    function: ast.FunctionDef | None = None
    owner: ast.ClassDef | None = None
    target: str = ""  # the name or attribute that the statement binds

    def replaced(self, node: ast.expr, new: str, end_only: bool = False) -> tuple[str, str] | None:
        """The line before and after `node`, or its end only, becomes `new`; None if unsafe."""
        if node.lineno != node.end_lineno:
            return None
        lines = self.text.splitlines()
        old, end = lines[node.lineno - 1], node.end_col_offset or 0
        start = end - 1 if end_only else node.col_offset
        line = old.encode()
        lines[node.lineno - 1] = (line[:start] + new.encode() + line[end:]).decode()
        try:
            ast.parse("\n".join(lines))
        except SyntaxError:
            return None
        return old.strip(), lines[node.lineno - 1].strip()


class Reading:
    """All of the user's cells, parsed; what cannot be parsed is left out."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._trees: list[tuple[Spot, ast.Module]] = []
        for text in dict.fromkeys(texts):
            plain = re.sub(r"^([ \t]*)[%!].*$", r"\1pass", text, flags=re.MULTILINE)
            try:
                self._trees.append((Spot(plain), ast.parse(plain)))
            except (SyntaxError, ValueError):
                continue

    def calls(self, *names: str) -> list[tuple[ast.Call, Spot]]:
        """Calls of functions or classes with these names; without names: all."""
        return [
            (node, at)
            for spot, tree in self._trees
            for node, at in _walk(tree, spot)
            if isinstance(node, ast.Call) and (not names or last(node.func) in names)
        ]

    def origins(
        self, expr: ast.expr, at: Spot, known: Collection[str] = (), depth: int = 0
    ) -> Iterator[tuple[ast.expr, Spot]]:
        """What an expression stands for: the values that its name is given, at every place.

        A parameter stands for what callers give, or its default. Where nothing is known: `expr`;
        and where it is one of the variables `known`.
        """
        values: list[tuple[ast.expr, Spot]] = []
        if depth < DEPTH and isinstance(expr, ast.Name | ast.Attribute):
            values = self._given(expr, at)
            if not values and last(expr) not in known:
                values = self._bound(expr, at)
        if not values:
            yield expr, at
        for value, there in values:
            yield from self.origins(value, there, known, depth + 1)

    def _bound(self, name: ast.Name | ast.Attribute, at: Spot) -> list[tuple[ast.expr, Spot]]:
        """The values that assignments give the name: in the function around it, else outside."""
        found = []
        for spot, tree in self._trees:
            for node, there in _walk(tree, spot):
                if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                    continue
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found += [
                        (value, there)
                        for part, value in _pairs(target, node.value)
                        if last(part) == last(name) and _same(name, at, part, there)
                    ]
        inside = [(value, there) for value, there in found if there.function is at.function]
        return inside if isinstance(name, ast.Name) and inside else found

    def _given(self, name: ast.expr, at: Spot) -> list[tuple[ast.expr, Spot]]:
        """What callers give for a parameter; of a method `__init__`: who makes the class."""
        function, method = at.function, at.owner is not None
        if function is None or not isinstance(name, ast.Name):
            return []
        parameters = [a.arg for a in function.args.args]
        if name.id not in parameters:
            return []
        made = at.owner is not None and function.name == "__init__"
        position = parameters.index(name.id) - method
        defaults = dict(zip(parameters[::-1], function.args.defaults[::-1], strict=False))
        found = []
        for call, there in self.calls(at.owner.name if made and at.owner else function.name):
            named = [k.value for k in call.keywords if k.arg == name.id]
            plain = call.args[position : position + 1] if position >= 0 else []
            if named or plain:
                found += [(value, there) for value in named or plain]
            elif name.id in defaults and not any(k.arg is None for k in call.keywords):
                found.append((defaults[name.id], Spot(at.text)))
        return found


def _same(name: ast.expr, at: Spot, part: ast.expr, there: Spot) -> bool:
    """True if the assignment to `part` may be the one that `name` means."""
    if isinstance(name, ast.Name):  # a local variable of another function is another
        return isinstance(part, ast.Name) and there.function in (at.function, None)
    if isinstance(part, ast.Name):  # `class Args: rows = 5`
        return there.owner is not None and there.function is None
    own = isinstance(name, ast.Attribute) and last(name.value) == "self" and at.owner is not None
    return isinstance(part, ast.Attribute) and (there.owner is at.owner or not own)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The parts of `a, b = x, y`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        if len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        return
    yield target, value


def _walk(node: ast.AST, at: Spot) -> Iterator[tuple[ast.AST, Spot]]:
    yield node, at
    if isinstance(node, ast.ClassDef):
        at = Spot(at.text, None, node)
    elif isinstance(node, ast.FunctionDef):
        at = Spot(at.text, node, at.owner if at.function is None else None)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            for part, value in _pairs(target, node.value):
                yield from _walk(part, at)
                yield from _walk(value, Spot(at.text, at.function, at.owner, last(part)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, at)


def last(node: ast.AST) -> str:
    """`Embedding` of `nn.Embedding`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def bound(cell: str) -> set[str]:
    """The names that the code binds outside functions and classes."""
    plain = re.sub(r"^([ \t]*)[%!].*$", r"\1pass", cell, flags=re.MULTILINE)
    try:
        nodes: list[ast.AST] = list(ast.parse(plain).body)
    except (SyntaxError, ValueError):
        return set()
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        if not isinstance(node, ast.Lambda | ast.ListComp | ast.DictComp | ast.SetComp):
            nodes += ast.iter_child_nodes(node)
    return found
