"""Where the user's code says how many rows a table has, and the edit that gives it more."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nb_assertdoc.model import Edit

from .facts import Facts

_MAKERS = ("Embedding", "EmbeddingBag")
VOCABULARIES = r"vocab|[si]to[si]|w(ord)?2i|2id|token2|to_i(d|n?dx|ndex)"  # word2idx, stoi, itos


def rows_needed(facts: Facts, pattern: str) -> int:
    """Rows for every index that is known: of the smallest of the user's containers with a matching
    name that numbers the bad ones too, else up to the largest bad one."""
    least = int(max(facts.bad)) + 1
    return min((size for _, size in facts.containers(pattern) if size >= least), default=least)


def edit_size(facts: Facts, need: int) -> Edit | None:
    """The edit of the one place that gives the failing table its size: a number, or `len(x) - 2`.

    It is looked for from `nn.Embedding(n, ...)` to what `n` is: an argument of the class around it,
    or a variable. None where that does not lead to one place.
    """
    search = _Search(facts, need)
    calls = [found for found in search.calls(_MAKERS) if found.size is not None]
    own = (facts.observed.finding.module or "").rsplit(".", 1)[-1]
    calls = [c for c in calls if c.target == own] or calls
    edits = {edit for call in calls for edit in search.edits(call.size, call, 0)}
    if len(edits) != 1:
        return None
    ((old, new),) = edits
    return Edit(cell_id=None, old=old, new=new)


@dataclass(frozen=True)
class _Found:
    """A call, with the text and the function that it stands in."""

    call: ast.Call
    text: str
    function: ast.FunctionDef | None
    owner: ast.ClassDef | None
    target: str  # the name or attribute that it is bound to

    @property
    def size(self) -> ast.expr | None:
        """The argument of `Embedding` that is the number of rows."""
        named = [k.value for k in self.call.keywords if k.arg == "num_embeddings"]
        plain = [a for a in self.call.args[:1] if not isinstance(a, ast.Starred)]
        return next(iter([*plain, *named]), None)


class _Search:
    def __init__(self, facts: Facts, need: int) -> None:
        self._rows, self._need = facts.high, need
        self._sizes = dict(facts.containers(""))
        self._numbers = {
            v.name: int(v.value) for v in facts.observed.variables if v.value.isdecimal()
        }
        self._trees: list[tuple[str, ast.Module]] = []
        for text in dict.fromkeys(facts.observed.sources):
            plain = re.sub(r"^([ \t]*)[%!].*$", r"\1pass", text, flags=re.MULTILINE)
            try:
                self._trees.append((plain, ast.parse(plain)))
            except (SyntaxError, ValueError):
                continue

    def calls(self, names: tuple[str, ...]) -> list[_Found]:
        """Calls of functions or classes with these names."""
        return [
            found
            for text, tree in self._trees
            for found in _calls(tree, text, None, None, "")
            if _last(found.call.func) in names
        ]

    def edits(self, expr: ast.expr | None, at: _Found, depth: int) -> Iterator[tuple[str, str]]:
        """Lines before and after, for every place that gives `expr` the size of the table."""
        if expr is None or depth > 3:
            return
        if isinstance(expr, ast.Name):
            parameters = [a.arg for a in at.function.args.args] if at.function else []
            if expr.id in parameters:
                yield from self._arguments(expr.id, parameters, at, depth)
                return
            for text, tree in self._trees:
                for node in ast.walk(tree):
                    if isinstance(node, ast.Assign) and expr.id in map(_last, node.targets):
                        there = _Found(at.call, text, None, None, "")
                        yield from self.edits(node.value, there, depth + 1)
            return
        new = self._larger(expr) if self._value(expr) == self._rows else None
        if new is not None and expr.lineno == expr.end_lineno:
            line = at.text.splitlines()[expr.lineno - 1].encode()
            old, end = line.decode().strip(), expr.end_col_offset or 0
            changed = line[: expr.col_offset] + new.encode() + line[end:]
            yield old, changed.decode().strip()

    def _arguments(
        self, name: str, parameters: list[str], at: _Found, depth: int
    ) -> Iterator[tuple[str, str]]:
        """What callers give for a parameter; of a method `__init__`: who makes the class."""
        called = at.owner.name if at.owner is not None else at.function.name if at.function else ""
        position = parameters.index(name) - (at.owner is not None)
        for found in self.calls((called,)):
            named = [k.value for k in found.call.keywords if k.arg == name]
            plain = found.call.args[position : position + 1]
            for value in named or plain:
                yield from self.edits(value, found, depth + 1)

    def _value(self, expr: ast.expr) -> int | None:
        """The number that an expression gives, where that is known."""
        if isinstance(expr, ast.Constant):
            return expr.value if type(expr.value) is int else None
        if isinstance(expr, ast.Name):
            return self._numbers.get(expr.id)
        if isinstance(expr, ast.Call) and _last(expr.func) == "len" and len(expr.args) == 1:
            return self._sizes.get(ast.unparse(expr.args[0]))
        if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add | ast.Sub):
            left, right = self._value(expr.left), self._value(expr.right)
            if left is not None and right is not None:
                return left + right if isinstance(expr.op, ast.Add) else left - right
        return None

    def _larger(self, expr: ast.expr) -> str | None:
        """The code of a size that is large enough, in the user's own words where these are."""
        if isinstance(expr, ast.Constant):
            return str(self._need)
        if isinstance(expr, ast.BinOp) and (self._value(expr.left) or 0) >= self._need:
            return ast.unparse(expr.left)
        return None


def _calls(
    node: ast.AST,
    text: str,
    function: ast.FunctionDef | None,
    owner: ast.ClassDef | None,
    target: str,
) -> Iterator[_Found]:
    if isinstance(node, ast.Call):
        yield _Found(node, text, function, owner, target)
    if isinstance(node, ast.ClassDef):
        function, owner = None, node
    elif isinstance(node, ast.FunctionDef):
        owner = owner if node.name == "__init__" else None
        function = node
    elif isinstance(node, ast.Assign):
        target = _last(node.targets[0])
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, text, function, owner, target)


def _last(node: ast.AST) -> str:
    """`Embedding` of `nn.Embedding`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
