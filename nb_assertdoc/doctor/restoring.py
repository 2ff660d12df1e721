"""`%assertdoc restore`: the variables of the crashed kernel, in the next one."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .. import salvage, session
from ..errors import UsageError
from ..model import Lost
from ..session.stored import PYTHON, Stored, amount, plural, read


def _never(what: str, why: str) -> Callable[..., Any]:
    return lambda *args: salvage.Missing(what, why)


_INSTEAD = {  # what serves a replay, and would deceive in a notebook
    "sink": _never("an open file", "it was open for writing"),
    "Silent": _never("an experiment logger", "it was connected"),
    "Again": _never("an iterator over a loader", "where it stood is lost"),
    "cuda_generator": _never("a generator", "its state was on the GPU"),
}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def restore(
    name: str, namespace: dict[str, Any], wanted: Sequence[str] = (), overwrite: bool = False
) -> str:
    """Set the variables of the room `name` in `namespace`; what was done, in words.

    `wanted`: only these. A name that has another value already is left alone, unless `overwrite`.
    A model whose weights are lost is not given back, only its configuration.

    Raises `UsageError` where nothing is stored, or not what was asked for.
    """
    stored = read(name)
    if stored is None:
        raise UsageError(
            "nothing is stored for this notebook: variables are kept after a crash, until "
            "`%assertdoc forget` or AssertDoc.keep_days"
        )
    if stored.python != PYTHON:  # bytecode of another version can end the process
        raise UsageError(
            f"stored by {stored.python}, and this kernel runs {PYTHON}: choose that one"
        )
    names = _asked(stored, wanted)
    where = session.folder() / name / "variables"
    try:
        values, lost = salvage.load(where, namespace, _tensor, _INSTEAD)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"what was stored is damaged: {error}") from error
    given, left, failed = [], [], []
    for each in (*stored.imports, *names):
        if each not in values or isinstance(values[each], salvage.Missing):
            failed.append(each)
            if isinstance(values.get(each), salvage.Missing):
                lost += (Lost(name=each, what=each, why=values[each].why),)
        elif each in namespace and not _same(namespace[each], values[each]) and not overwrite:
            if each not in stored.imports:
                left.append(each)
        else:
            namespace[each] = values[each]
            given.append(each)
    configurations = []
    for model in stored.models:
        if (not wanted or model.name in wanted) and model.config in values:
            target = model.config.replace(".", "_")
            if target not in namespace or overwrite:
                namespace[target] = values[model.config]
                configurations.append(model.name)
    return _answer(stored, wanted, given, left, failed, configurations, lost)


def _asked(stored: Stored, wanted: Sequence[str]) -> list[str]:
    kept = [k.name for k in stored.kept]
    known = {*kept, *(x.name for x in stored.lost)}
    unknown = [w for w in wanted if w not in known]
    if unknown:
        raise UsageError(
            f"not stored: {', '.join(unknown)}; stored are {', '.join(kept) or 'none'}"
        )
    return [k for k in kept if not wanted or k in wanted]


def _tensor(stand_in: salvage.StandIn) -> Any:
    """A tensor of the dead GPU: its integers where they are known, else a value that says so."""
    if stand_in.integers is not None:
        return stand_in.integers.clone()
    return salvage.Missing(stand_in.owner, "its values were on the GPU")


def _same(here: Any, there: Any) -> bool:
    """The two need no choice: one object, equal plain values, functions of the same code."""
    if here is there:
        return True
    if type(here) is not type(there):
        return False
    if isinstance(here, types.FunctionType):
        return bool(here.__code__ == there.__code__)
    return type(here) in _PLAIN and bool(here == there)


def _answer(
    stored: Stored,
    wanted: Sequence[str],
    given: Sequence[str],
    left: Sequence[str],
    failed: Sequence[str],
    configurations: Sequence[str],
    lost: Sequence[Any],
) -> str:
    variables = [g for g in given if g not in stored.imports]
    imports = [g for g in given if g in stored.imports]
    size = sum(k.bytes for k in stored.kept if k.name in variables)
    lines = [f"From {stored.origin()}:"]
    if variables:
        lines.append(f"  given back    {', '.join(variables)} ({amount(size)})")
    if imports:
        lines.append(f"  imported      {', '.join(imports)}")
    moved = [n for n in stored.on_gpu if n in variables]
    if moved:
        lines.append(f"  on the CPU    {', '.join(moved)}: on the GPU before, from copies")
    if left:
        lines.append(
            f"  not touched   {', '.join(left)}: another value is here; --overwrite takes it"
        )
    why = {x.name: x.why for x in reversed(lost)} | {x.name: x.why for x in stored.lost}
    models = {m.name: m for m in stored.models}
    lines += [f"  not loaded    {n}: {why.get(n, 'it cannot be read')}" for n in failed]
    for x in stored.lost:
        if wanted and x.name not in wanted:
            continue
        if x.name not in models:
            word = "without" if x.name in variables else "lost"
            lines.append(f"  {word:<13} {x.what}: {x.why}")
    for model in models.values():
        if wanted and model.name not in wanted:
            continue
        words = f"  lost          {model.name} ({model.type}): its weights were on the GPU"
        if model.built is not None:
            words += f"; In [{model.built}] made it"
        lines.append(words)
        if model.name in configurations and model.config:
            target = model.config.replace(".", "_")
            lines.append(f"                its configuration is given back as `{target}`")
    return "\n".join(lines)


def describe(name: str) -> str:
    """Lines about what the room `name` holds; "" for nothing."""
    stored = read(name)
    where = session.folder() / name
    replay = (where / "replay" / "kept.json").is_file()
    if stored is None and not replay:
        return ""
    held = []
    if stored is not None:
        held.append(f"{plural(len(stored.kept))} from {stored.origin()}: %assertdoc restore")
    if replay:
        held.append("the failing replay: %assertdoc verify")
    held.append(f"{amount(session.size(where))} in {where}: %assertdoc forget deletes it")
    return "Stored  " + "\n        ".join(held)
