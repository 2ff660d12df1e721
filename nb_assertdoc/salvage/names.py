"""Which of the notebook's names a cell reaches."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import re
import types
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

MOST_OBJECTS = 20_000  # of the walk; `write` finds by itself what lies deeper
MOST_ITEMS = 100  # of one container
_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"}
_RUNS_TEXT = {"get_ipython", "eval", "exec", "globals", "vars"}  # names hide in their strings
_SHELL = {"In", "Out", "exit", "quit", "get_ipython"}  # every kernel has its own
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), range, slice, types.ModuleType)


def reached(source: str | types.CodeType, namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that a cell loads, by itself or through what it loads, in the namespace's order.

    `source` is Python (after IPython's transform). Functions, classes and instances of the
    notebook are followed into their code; containers and attributes as far as a bounded walk goes.
    """
    found: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [_compile(source) if isinstance(source, str) else source]
    while todo and len(seen) < MOST_OBJECTS:
        value = todo.pop()
        if issubclass(type(value), _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), types.CodeType):
            new = {
                n for n in loads(value) if n in namespace and not hidden(n, namespace[n])
            } - found
            found |= new
            todo += [namespace[name] for name in new]
        else:
            try:
                todo += _parts(value)
            except KeyboardInterrupt:
                raise
            except BaseException:  # an object of the user's may answer anything
                continue
    return tuple(name for name in namespace if name in found)


def loads(code: types.CodeType) -> set[str]:
    """Every global name that this code, or code nested in it, reads."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in _LOADS}
    if not names.isdisjoint(_RUNS_TEXT):
        texts = (text for const in code.co_consts for text in _strings(const))
        names.update(word for text in texts for word in re.findall(r"[^\W\d]\w*", text))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= loads(const)
    return names


def hidden(name: str, value: Any) -> bool:
    """True for names that the shell put there: the worker's shell has its own."""
    if name in _SHELL or name in {"_ih", "_oh", "_dh"} or re.fullmatch(r"__\w+__", name):
        return True
    return name == "open" and str(getattr(value, "__module__", "")).startswith("IPython")


def in_notebook(value: Any) -> bool:
    """True for a function or class that was defined in the notebook."""
    return getattr(value, "__module__", None) == "__main__"


def _compile(source: str) -> types.CodeType:
    try:
        return _code(source)
    except (SyntaxError, ValueError):  # not Python: take every word of it for a name
        return _code(f"eval({source!r})")


def _code(source: str) -> types.CodeType:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code: types.CodeType = compile(source, "<cell>", "exec", flags, dont_inherit=True)
    return code


def _strings(const: Any) -> Iterator[str]:
    if isinstance(const, str):
        yield const
    elif isinstance(const, tuple):
        for item in const:
            yield from _strings(item)


def _parts(value: Any) -> Iterator[Any]:
    """What may hold code that runs when `value` is used."""
    kind = type(value)
    if issubclass(kind, types.FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield cell.cell_contents
    elif issubclass(kind, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif issubclass(kind, property):
        yield from (value.fget, value.fset, value.fdel)
    elif issubclass(kind, (classmethod, staticmethod)):
        yield value.__func__
    elif issubclass(kind, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif issubclass(kind, type):
        if in_notebook(value):
            yield kind
            yield from value.__bases__
            yield from vars(value).values()
    elif issubclass(kind, dict):
        yield from islice(dict.values(value), MOST_ITEMS)
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        yield from islice(value, MOST_ITEMS)
    yield kind
    yield from attributes(value).values()


def attributes(value: Any) -> dict[str, Any]:
    """The attributes that an object stores, found without running code of its class."""
    if issubclass(type(value), type):
        return {}
    found: dict[str, Any] = {}
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            member = base.__dict__.get(slot)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    found[slot] = member.__get__(value)
    with contextlib.suppress(AttributeError, TypeError):
        found.update(object.__getattribute__(value, "__dict__"))
    return found


def path(name: str, root: Any, target: Any, most: int = 5_000) -> str:
    """How the user reaches `target` from variable `name`: "env.wind"; `name` if it is far."""
    todo: deque[tuple[str, Any]] = deque([(name, root)])
    seen: set[int] = set()
    while todo and len(seen) < most:
        words, value = todo.popleft()
        if value is target:
            return words
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), dict):
            todo += [
                (f"{words}[{key!r}]", v) for key, v in islice(value.items(), most) if _word(key)
            ]
        elif issubclass(type(value), (list, tuple, deque)):
            todo += [(f"{words}[{i}]", v) for i, v in enumerate(islice(value, most))]
        elif issubclass(type(value), types.FunctionType) and value.__closure__:
            for free, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
                with contextlib.suppress(ValueError):  # a cell that is not filled yet
                    todo.append((f"{free} of {words}", cell.cell_contents))
        todo += [(f"{words}.{key}", v) for key, v in attributes(value).items()]
    return name


def _word(key: Any) -> bool:
    return type(key) in (str, int)
