"""Which data to scan, and against which range."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from ..errors import UsageError
from ..model import Bound, Number, Report
from ..salvage import Unsaveable
from .advice import advised, span
from .readers import STREAM_ROWS, Columnar, Rows, Source
from .reading import is_tensor
from .sources import sources
from .tally import Progress, Scan, harmless, holders, scan

_CONFIRMED = 16  # rows of the failing batch that are looked at to find its field
_MOST_VALUES = 20_000_000  # of a variable that is searched unasked
_MOST_NAMED = 12
_OF_THE_MODEL = (  # operators whose range is that of a layer or a loss, whatever the batch
    "embedding embedding_bag cross_entropy nll_loss one_hot ctc_loss multi_margin_loss "
    "multilabel_margin_loss binary_cross_entropy bernoulli"
).split()


@dataclass(frozen=True)
class Range:
    """What is valid, and what a finding says of the data."""

    bound: Bound
    why: str
    bad: tuple[Number, ...] = ()  # values of the finding
    rows: tuple[int, ...] = ()  # of the data set, in the failing batch
    fixed: bool = True  # whatever the batch
    each: bool = False  # the faulty call took one value of each row
    lengths: bool = False  # the bound is one of positions: of the number of values in a row
    loop: str = ""  # the source of the failing loop's header


@dataclass(frozen=True)
class FailedLoop:
    """The loop over a DataLoader that failed; None: gone by now."""

    loader: Any = None
    dataset: Any = None


def range_of(report: Report | None) -> Range:
    """The range of the report's finding. Raises `UsageError` where there is none."""
    finding = report.finding if report is not None else None
    if finding is None or finding.bound is None:
        what = "there is no report yet" if report is None else "the last report has no range"
        raise UsageError(f"{what}: say what is valid, such as --range 0:10 (0 <= value < 10)")
    step = finding.step
    firsts = [p[0] for p in finding.positions if len(p) == 1]
    cause = report.cause.key if report is not None and report.cause is not None else ""
    if cause == "node_index_ge_num_nodes":
        raise UsageError(
            "each graph has a range of its own, its number of nodes: [i for i, g in "
            "enumerate(graphs) if g.edge_index.max() >= g.num_nodes] lists the bad ones"
        )
    if cause == "position_ge_max":
        return Range(
            bound=Bound(low=0, high=finding.bound.high + 1),
            why=f"at most {finding.bound.high} values in a row: one for each position",
            lengths=True,
            loop=step.of_data.loop if step is not None else "",
        )
    return Range(
        bound=finding.bound,
        why=f"{finding.op}, argument `{finding.argument}`",
        bad=finding.bad_values,
        rows=(step.dataset_indices or ()) if step is not None else (),
        fixed=finding.op in _OF_THE_MODEL,
        each=step is not None and firsts == list(step.batch_rows),
        loop=step.of_data.loop if step is not None else "",
    )


def evaluated(expression: str, namespace: Mapping[str, Any], dead: bool) -> tuple[str, Any]:
    """The code and the value of an expression of the user's; `dead` keeps it from the GPU.

    Raises `UsageError` where it fails.
    """
    try:
        node = ast.parse(expression.strip(), mode="eval").body
        with harmless(dead):
            value = eval(compile(expression.strip(), "<scan>", "eval"), dict(namespace))
    except Unsaveable as error:
        raise UsageError(f"{expression}: {error}") from error
    except Exception as error:
        raise UsageError(f"{expression}: {type(error).__name__}: {error}") from error
    whole = isinstance(
        node, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Dict | ast.List
    )
    return expression.strip() if whole else f"({expression.strip()})", value


def scan_chosen(
    valid: Range,
    namespace: Mapping[str, Any],
    *,
    named: tuple[str, Any] | None = None,
    loop: FailedLoop | None = None,
    dead: bool = False,
    most: int = STREAM_ROWS,
    progress: Progress = lambda done, total: None,
) -> Scan:
    """Scan what the user names (code and value), else the data of the failing loop, else variables.

    Variables are those that hold all bad values of the finding. Raises `UsageError` where nothing
    can be chosen; it lists what there is.
    """
    if named is None and loop is not None:
        named = _of_loop(loop, namespace)
    named = named or _of_header(valid.loop, namespace)
    if named is None:
        return _scan_variables(valid, namespace, dead, progress)
    name, thing = named
    parts = sources(thing, name, most=most)
    for part in parts:
        if isinstance(part, Columnar) and (own := _variable(part.column, namespace)) is not None:
            part.name = own
    fields: dict[str, int | None] = {}
    notes: list[str] = []
    if valid.rows:
        fields = holders(parts, valid.rows[:_CONFIRMED], valid.bad, dead=dead, each=valid.each)
        if not fields and any(part.total is not None for part in parts):
            notes.append(
                f"No field holds the finding's values in row {valid.rows[0]}: the code computes "
                "them from the data, and what is out of range here may be right there."
            )
    for part in parts if valid.lengths else ():
        if isinstance(part, Rows) and part.collate is not None:
            part.size = 1  # batches pad their rows
    found = scan(
        parts,
        valid.bound,
        name=name,
        dead=dead,
        fields=fields,
        lengths=valid.lengths,
        progress=progress,
    )
    if not valid.fixed and found.bad:
        notes.append(
            "The range is the size that the failing call met: where it changes from batch to "
            "batch, values that are out of range here may be right."
        )
    notes += _notes(found, parts)
    return advised(replace(found, notes=tuple(notes), why=valid.why))


def _notes(found: Scan, parts: Sequence[Source]) -> list[str]:
    notes = []
    streams = [p for p in parts if isinstance(p, Rows) and p.total is None]
    if any(found.rows >= p.most for p in streams):
        notes.append(f"The first {found.rows:,} rows of a stream; --rows N looks at more.")
    if not found.columns and not found.unread and found.rows:
        notes.append(f"{found.name} holds no integers; name the field: %assertdoc scan EXPR")
    if not found.rows and not found.unread and not found.failed and not found.stopped:
        notes.append(f"{found.name} is empty.")
    return notes


def _of_loop(loop: FailedLoop, namespace: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The code and value of the loader of the failing loop, or of its data set."""
    for thing in (loop.loader, loop.dataset):
        name = _name_of(thing, namespace) if thing is not None else None
        if name is not None:
            return name, thing
    dataset = loop.dataset if loop.dataset is not None else getattr(loop.loader, "dataset", None)
    return None if dataset is None else ("dataset", dataset)


def _of_header(header: str, namespace: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The loader, or else the data set, that the header of the failing loop names."""
    try:
        loop = ast.parse(f"{header.strip().rstrip(':')}: pass").body[0]
    except (SyntaxError, IndexError):
        return None
    if not isinstance(loop, ast.For):
        return None
    names = [n.id for n in ast.walk(loop.iter) if isinstance(n, ast.Name)]
    held = [(name, namespace[name]) for name in names if hasattr(namespace.get(name), "dataset")]
    return held[0] if held else None


def _name_of(thing: Any, namespace: Mapping[str, Any]) -> str | None:
    """The variable that holds `thing`, or an attribute of one: `trainer.train_dataset`."""
    own = _variable(thing, namespace)
    if own is not None:
        return own
    for name, value in list(namespace.items()):
        for key, part in list(getattr(value, "__dict__", {}).items()):
            if part is thing and not key.startswith("_") and not name.startswith("_"):
                return f"{name}.{key}"
    return None


def _variable(thing: Any, namespace: Mapping[str, Any]) -> str | None:
    held = (n for n, v in list(namespace.items()) if v is thing and not n.startswith("_"))
    return next(held, None)


def _scan_variables(
    valid: Range, namespace: Mapping[str, Any], dead: bool, progress: Progress
) -> Scan:
    """The variables of the notebook that hold every bad value of the finding."""
    found: Scan | None = None
    wanted = set(valid.bad)
    for name, thing in _candidates(namespace, slow=False) if wanted or valid.lengths else ():
        one = scan(
            sources(thing, name),
            valid.bound,
            name=name,
            dead=dead,
            lengths=valid.lengths,
            progress=progress,
        )
        held = tuple(c for c in one.columns if c.bad and wanted <= set(c.values))
        if held and found is None:
            found = replace(one, columns=held)
        elif held and found is not None:
            rows = found.rows + one.rows
            both = f"{found.name}, {name}"
            found = replace(found, name=both, columns=found.columns + held, rows=rows, total=rows)
        if one.stopped:
            break
    if found is not None:
        note = "The data set of the failing loop is not known: variables that hold the bad values."
        return advised(replace(found, notes=(note,), why=valid.why))
    names = [name for name, _ in _candidates(namespace, slow=True)]
    listed = ", ".join(names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    what = f"no variable holds {_some(valid.bad)}" if wanted else "say what to scan"
    there = f"there are: {listed}{more}" if names else "there is no data set among the variables"
    raise UsageError(f"{what}; %assertdoc scan EXPR scans what EXPR gives ({there})")


def _some(values: tuple[Number, ...]) -> str:
    return ", ".join(str(v) for v in values[:4]) + (", ..." if len(values) > 4 else "")


def _candidates(namespace: Mapping[str, Any], *, slow: bool) -> Iterator[tuple[str, Any]]:
    """Variables that can be scanned; without `slow` only those that run no code of the user."""
    seen: set[int] = set()
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in ("In", "Out") or id(value) in seen:
            continue
        if isinstance(value, ModuleType | type | str | bytes) or callable(value):
            continue
        try:
            parts = sources(value, name)
        except Exception:  # no data, or an object whose attributes raise
            continue
        plain = all(not isinstance(p, Rows) or isinstance(p.things, list | tuple) for p in parts)
        if parts and (slow or (plain and _size(value, parts) <= _MOST_VALUES)):
            seen.add(id(value))
            yield name, value


def _size(value: Any, parts: Sequence[Source]) -> int:
    if is_tensor(value):
        return int(value.numel())
    return max(int(getattr(value, "size", 0)), sum((p.total or 0) * _cost(p) for p in parts))


def _cost(part: Source) -> int:
    """How much longer one row takes than a value of an array."""
    return 1 if not isinstance(part, Rows) else 10 if part.one == "v" else 100


__all__ = ["FailedLoop", "Range", "range_of", "scan_chosen", "span"]
