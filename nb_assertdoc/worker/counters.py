"""What counts the rounds of a user's loop, where a replay leaves some of them out.

`enumerate` goes on from the right number. Of `count += 1` and `range` it is said where the faulty
values depend on them.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ..frames import Cells, at_top, here

_plain = enumerate
_COUNTING = ("range", "count")
_BARS = ("tqdm", "trange", "track", "progress_bar")


def install(cells: Cells, passed: Callable[[], int]) -> None:
    """Let the user's `enumerate` count what was left out; `passed()` is how many that are so far.

    What is left out while it waits for its next item belongs to it.
    """

    class Enumerate(enumerate):  # type: ignore[type-arg]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if not cells.is_user_frame(here()):
                return _plain(*args, **kwargs)
            return super().__new__(cls, *args, **kwargs)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._left_out = 0

        def __next__(self) -> Any:
            before = passed()
            number, item = super().__next__()
            self._left_out += passed() - before
            return number + self._left_out, item

    Enumerate.__name__ = Enumerate.__qualname__ = "enumerate"
    builtins.enumerate = Enumerate  # type: ignore[misc]


def counted(users: list[FrameType]) -> str | None:
    """A counter of rounds on which the statements that run depend, by the text of the code."""
    counters: set[str] = set()
    wanted: set[str] = set()
    for scope, around, statement, _ in _running(users):
        for loop in around:
            if isinstance(loop, ast.For | ast.While):
                counters |= set(_counters(loop))
        wanted |= _sources(statement, scope) if statement is not None else set()
    return next(iter(sorted(counters & wanted)), None)


def branching(users: list[FrameType]) -> str | None:
    """What counts rounds and decides between two ways through the code, one of which runs."""
    for scope, around, statement, line in _running(users):
        tests = [n.test for n in around if isinstance(n, ast.If) and n.orelse and n.lineno < line]
        within = ast.walk(statement) if statement is not None else ()
        tests += [n.test for n in within if isinstance(n, ast.IfExp)]
        wanted = {name for test in tests for name in _names(test)}
        found = wanted & set(_changing(scope)) if wanted else set()
        if found:
            return min(found)
    return None


def _running(
    users: list[FrameType],
) -> Iterator[tuple[ast.AST, list[ast.stmt], ast.stmt | None, int]]:
    """Of each frame the function or cell, the statements around its line, the one that runs, and
    the line."""
    for frame in users:
        scope, line = _scope(frame), frame.f_lineno
        if scope is not None:
            inside = _inside(scope)
            around = [n for n in inside if n.lineno <= line <= (n.end_lineno or n.lineno)]
            simple = [n for n in around if not hasattr(n, "body")]
            yield scope, around, simple[-1] if simple else None, line


def _changing(scope: ast.AST) -> Iterator[str]:
    """Names of what each round changes: counters, lists that grow, a range beside other data."""
    for node in ast.walk(scope):
        if isinstance(node, ast.AugAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.For | ast.While):
            yield from _counters(node)
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("append", "add", "extend"):
            yield ast.unparse(called.value)
        if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            parts = node.iter.args if isinstance(node.iter, ast.Call) else []
            for target, part in zip(node.target.elts, parts, strict=False):
                own = isinstance(part, ast.Call) and ast.unparse(part.func).endswith(_COUNTING)
                if own and ast.unparse(node.iter).startswith("zip("):
                    yield from _names(target)


def _scope(frame: FrameType) -> ast.AST | None:
    """The function, or the cell, that a frame runs."""
    code = frame.f_code
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return None
    if at_top(code):
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _inside(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a scope, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.withitem):
            if isinstance(child, ast.stmt):
                yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _inside(child)


def _counters(loop: ast.For | ast.While) -> Iterator[str]:
    """Names that change by a constant in each round."""
    if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
        called = loop.iter.func if isinstance(loop.iter, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in ("range", "trange"):
            yield loop.target.id
    for node in _inside(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            added = isinstance(node.value.right, ast.Constant)
            name = ast.unparse(node.targets[0])
            if added and ast.unparse(node.value.left) == name:
                yield name


def _sources(statement: ast.stmt, scope: ast.AST) -> set[str]:
    """The names that a statement reads, and those that went into them."""
    wanted = _read(statement)
    assigned = [
        (set(_names(ast.Tuple([*targets]))), _read(value))
        for node in _inside(scope)
        for targets, value in _assignments(node)
    ]
    while True:
        more = {name for targets, read in assigned if targets & wanted for name in read}
        if more <= wanted:
            return wanted
        wanted |= more


def _assignments(node: ast.stmt) -> Iterator[tuple[list[ast.expr], ast.expr]]:
    if isinstance(node, ast.Assign):
        yield node.targets, node.value
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
        yield [node.target], node.value
    elif isinstance(node, ast.For):
        yield [node.target], node.iter


def _read(node: ast.AST) -> set[str]:
    return set(_names(node))


def _names(node: ast.AST) -> Iterator[str]:
    """Names, and dotted ones such as `self.step`, in a piece of code."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] in _BARS:
        node = ast.List(node.args[:1])  # what else it is given is only shown
    if isinstance(node, ast.Name | ast.Attribute):
        yield ast.unparse(node)
    if not isinstance(node, ast.Name):
        for child in ast.iter_child_nodes(node):
            yield from _names(child)
