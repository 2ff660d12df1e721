"""What things are called in the user's code: modules, tables, index expressions, data sets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import torch

from .. import devices
from ..frames import Cells
from ..indexing import Usage

_INDEX_POSITION = {  # of the index argument: as a function's, as a method's or module's argument
    "cross_entropy": (1, 1),
    "nll_loss": (1, 1),
    "multi_margin_loss": (1, 1),
    "multilabel_margin_loss": (1, 1),
    "ctc_loss": (1, 1),
    "embedding": (0, 0),
    "embedding_bag": (0, 0),
    "one_hot": (0, 0),
    "multinomial": (0, 0),
    "binary_cross_entropy": (0, 0),
    "bernoulli": (0, 0),
    "gather": (2, 1),
    "take": (1, 0),
    "take_along_dim": (1, 0),
    "index_select": (2, 1),
}


def modules_of(stack: list[FrameType]) -> list[torch.nn.Module]:
    """The modules whose methods are running, innermost first, each once."""
    found: list[torch.nn.Module] = []
    for frame in stack:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and not any(owner is m for m in found):
            found.append(owner)
    return found


def module_path(stack: list[FrameType], users: list[FrameType]) -> tuple[str | None, str | None]:
    """The qualified name of the innermost module that the user can reach, and its type."""
    running = modules_of(stack)
    for module in running:
        for root in reversed(running):
            path = _path_in(root, module)
            if path is None:
                continue
            if root is module and (whole := _inside(module, users)) is not None:
                return whole, type(module).__name__  # better than a loop variable's name
            name = _name_of_root(root, users)
            if name is None and root is module:
                continue
            whole = ".".join(p for p in (name or type(root).__name__, path) if p)
            return whole, type(module).__name__
        for name, root in _named_modules(users):  # called by itself: `model.embedding()(ids)`
            path = _path_in(root, module)
            if path is not None and name != "self":
                return ".".join(p for p in (name, path) if p), type(module).__name__
    return None, None


def _name_of_root(root: torch.nn.Module, users: list[FrameType]) -> str | None:
    """`model.module` for a replica of it, which no variable of the notebook holds."""
    if not getattr(root, "_is_replica", False):
        return name_of(root, users)
    copied = [
        f"{name}.module"
        for name, held in _named_modules(users)
        if isinstance(held, torch.nn.DataParallel) and type(held.module) is type(root)
    ]
    return copied[0] if len(set(copied)) == 1 else None


def first_nan(users: list[FrameType]) -> str | None:
    """The first parameter or buffer, in the order of the modules, that holds NaN or infinity."""
    for name, root in _named_modules(users):
        for part, tensor in (*root.named_parameters(), *root.named_buffers()):
            with devices.raw(), torch.no_grad():
                if tensor.is_meta or not tensor.is_floating_point():
                    continue
                if not bool(torch.isfinite(tensor).all()):
                    return f"{name}.{part}"
    return None


def _path_in(root: torch.nn.Module, module: torch.nn.Module) -> str | None:
    return next((n for n, m in root.named_modules() if m is module), None)


def _named_modules(users: list[FrameType]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that are variables of the user's frames, or parts of one."""
    for scope in _scopes(users):
        for name, value in list(scope.items()):
            if name.startswith("_"):
                continue
            for path, part in (("", value), *_parts(value)):
                if isinstance(part, torch.nn.Module):
                    yield f"{name}{path}", part


def _inside(module: torch.nn.Module, users: list[FrameType]) -> str | None:
    """The module's name within a larger one that a variable of the user's holds."""
    for scope in [users[0].f_globals, *(f.f_locals for f in users)] if users else []:
        for name, value in list(scope.items()):
            if not isinstance(value, torch.nn.Module) or value is module or name.startswith("_"):
                continue
            for path, part in value.named_modules():
                if part is module:
                    return f"{name}.{path}"
    return None


def name_of(thing: Any, users: list[FrameType]) -> str | None:
    """A name under which the user's code reaches an object: a variable, or an attribute of one."""
    scopes = _scopes(users)
    for scope in scopes:
        for name, value in list(scope.items()):
            if value is thing and name != "self" and not name.startswith("_"):
                return name
    for scope in scopes:
        for name, value in list(scope.items()):
            if name.startswith("_"):
                continue
            for path, part in _parts(value):
                if part is thing:
                    return f"{name}{path}"
    return None


def _scopes(users: list[FrameType]) -> list[Mapping[str, Any]]:
    """Outermost first: `train_loader` is a better name than a parameter `loader`."""
    return [f.f_globals for f in users[:1]] + [f.f_locals for f in users]


def held(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables and, after them, what they hold: `trainer.data_collator.tokenizer`."""
    level = [(n, v) for n, v in list(namespace.items()) if not n.startswith("_")]
    for _ in range(3):
        yield from level
        level = [
            (name + path, part)
            for name, value in level
            if not isinstance(value, dict | list | tuple | torch.Tensor | torch.nn.Module)
            for path, part in _parts(value)
        ][:2000]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in list(value.items())[:64]:
            yield f"[{key!r}]", part
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value[:64]):
            yield f"[{i}]", part
    elif not isinstance(value, type) and type(value).__module__ not in ("builtins", "numpy"):
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            for key, part in list(held.items())[:64]:
                yield f".{key}", part


def expressions(
    usage: Usage,
    op: str,
    call: str | None,
    direct: bool,
    indices: Sequence[Any],
    known: Mapping[str, Any],
) -> tuple[str | None, str | None]:
    """Source of the faulty argument and of what is indexed, from the user's own call.

    `direct` tells that only torch lies between the call and the operator: else the arguments are
    another function's. `indices`: of an operator that takes a list, with None for a dimension
    that is not indexed. `known`: the variables that the call may name.
    """
    argument = usage.argument
    if call is None or not direct:
        return None, None
    try:
        node = ast.parse(call.strip(), mode="eval").body
    except SyntaxError:
        return None, None
    if isinstance(node, ast.Subscript):
        return ast.unparse(_faulty(node.slice, usage, indices, known)), ast.unparse(node.value)
    if not isinstance(node, ast.Call):
        return None, None
    by_name = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
    base = op.rstrip("_")
    function = isinstance(node.func, ast.Name | ast.Attribute) and _is_function(node.func, base)
    if base.startswith(("scatter", "index_add", "index_copy", "index_fill", "index_reduce")):
        position = 2 if function else 1
    else:
        position = _INDEX_POSITION.get(base, (0, 0))[0 if function else 1]
        position += base == "binary_cross_entropy" and argument == "target"
    arguments = [ast.unparse(a) for a in node.args]
    index = by_name.get(argument)
    method = isinstance(node.func, ast.Attribute) and node.func.attr == base and not function
    if method and base in _METHODS and argument == "input":
        return ast.unparse(cast(ast.Attribute, node.func).value), None
    if index is None and position < len(arguments):
        index = arguments[position]
    if base in ("cross_entropy", "nll_loss"):
        table = by_name.get("input") or (arguments[0] if arguments else None)
    elif isinstance(node.func, ast.Attribute) and not function and base not in _INDEX_MODULES:
        table = ast.unparse(node.func.value)
    elif base in _INDEX_MODULES:
        table = ast.unparse(node.func)
    else:
        table = arguments[0] if arguments and position else None
    return index, table


def _faulty(
    subscript: ast.expr, usage: Usage, indices: Sequence[Any], known: Mapping[str, Any]
) -> ast.expr:
    """Of `x[i, :, j]` the faulty one of `i` and `j`; the whole where it cannot be told."""
    place = usage.slot[1]
    if not isinstance(subscript, ast.Tuple) or place is None:
        return subscript
    may_be = [e for e in subscript.elts if not _is_no_tensor(e, known)]
    tensors = [i for i, index in enumerate(indices) if index is not None]
    if len(may_be) != len(tensors) or place not in tensors:
        return subscript
    return may_be[tensors.index(place)]


def _is_no_tensor(element: ast.expr, known: Mapping[str, Any]) -> bool:
    """A slice, None, an ellipsis or a number: torch narrows the tensor before it indexes."""
    if isinstance(element, ast.Name):
        return isinstance(known.get(element.id), int | slice | None)
    number = element.operand if isinstance(element, ast.UnaryOp) else element
    return isinstance(number, ast.Slice | ast.Constant)


_INDEX_MODULES = {"embedding", "embedding_bag"}
_METHODS = {"multinomial", "bernoulli"}  # probs.multinomial(1)


def _is_function(func: ast.Name | ast.Attribute, op: str) -> bool:
    """`F.cross_entropy(...)`, `torch.gather(...)`: the operator's own name behind a module's."""
    if isinstance(func, ast.Name):
        return func.id == op
    return (
        func.attr.rstrip("_") == op
        and isinstance(func.value, ast.Name | ast.Attribute)
        and ast.unparse(func.value) in ("F", "torch", "nn.functional", "torch.nn.functional")
    )


_OF_DATA = r"(data)?(loader|set|dl|ds|iter|gen|batches|data)?"
_SPLITS = {  # as a whole word of a name, alone or grown together with what holds the data
    "validation": rf"(va|vl|vld|val|valid|validation|dev){_OF_DATA}s?",
    "test": rf"(te|tst|test|testing){_OF_DATA}s?",
    "evaluation": rf"(ev|eval|evaluation){_OF_DATA}s?",
    "train": rf"(tr|trn|train|training){_OF_DATA}s?",
}


def split_of(*names: str | None) -> str | None:
    """Which part of the data a loader's or data set's name speaks of: "va_dl", "testLoader2"."""
    for name in names:
        words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name or "")]
        for split, pattern in _SPLITS.items():
            if any(re.fullmatch(pattern, word) for word in words):
                return split
    return None


def only_torch_between(stack: list[FrameType], location: FrameType, cells: Cells) -> bool:
    """True where no library but torch stands between the user's line and the operator."""
    for frame in stack:
        if frame is location:
            return True
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torch.", "nb_assertdoc", "contextlib")) and module != "torch":
            return False
    return False
