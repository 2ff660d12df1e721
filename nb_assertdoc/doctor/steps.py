"""What the report tells the user to do next: commands, in the order of use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from .. import restart, session
from ..model import Finding, Fix, Report
from ..recorder import Execution
from ..restart import Adapter
from ..session.stored import Stored, amount
from ..settings import settings
from .case import Case

_SAVE = "%assertdoc save report.json    this report as a file"
_SHOWN = 8  # names in one line
_ENGINES = {
    "cpu": "compute the float values, too",
    "history": "run the earlier cells again on the CPU",
}


def next_steps(
    case: Case,
    finding: Finding | None,
    fixes: Sequence[Fix] = (),
    conclusive: bool = True,
    tried: Sequence[str] = (),
    own_error: bool = False,
) -> tuple[str, ...]:
    """The steps after a report; `conclusive`: nothing else is to be tried but what `tried` names.

    `own_error`: the cell fails without a GPU.
    """
    if own_error:
        return ("mend that error first: it has nothing to do with the GPU",)
    if case.namespace is None:
        return _saved_notebook(case, conclusive)
    adapter = restart.adapter()
    steps = []
    scan = "%assertdoc scan    the whole data set for other such values"
    scans = finding is not None and finding.bound is not None and not finding.bound.high_inclusive
    if case.crash is None and finding is not None:
        steps += [scan] if scans else []
        steps.append("%%cpu_replay    above the mended cell: checks it again")
    if case.crash is not None:
        if finding is not None and not adapter.headless:
            fixed = any(fix.edit is not None for fix in fixes)
            what = "the suggested fix" if fixed else "the cell as you have changed it,"
            steps.append(f"%assertdoc verify    {what} on the batch that failed, on the CPU")
            steps += [scan] if scans else []
        steps.append(_restart(adapter))
    if not conclusive:
        magic = "%cpu_replay" if case.crash is not None else "%%cpu_replay"
        steps += [
            f"{magic} --engine {engine}    {words}"
            for engine, words in _ENGINES.items()
            if engine not in tried and (engine == "cpu" or case.earlier)
        ]
    if not conclusive and case.crash is not None:
        steps.append("restart, set CUDA_LAUNCH_BLOCKING=1 before CUDA starts, and run once more")
    return (*steps, _SAVE)


def _saved_notebook(case: Case, conclusive: bool) -> tuple[str, ...]:
    """There is no kernel whose state is dead, and none to be restarted."""
    steps = []
    if case.crash is not None and conclusive:
        steps.append("apply the fix in the notebook, and diagnose it again: the cell is then clean")
        steps.append("run the notebook from its top: a new kernel has a working GPU")
    if not conclusive:
        steps.append("run it with `nb-assertdoc run`: a live notebook tells more than a saved one")
    return tuple(steps)


def _restart(adapter: Adapter, rest: str = "this kernel's GPU state is dead") -> str:
    if adapter.can_restart:
        return f"%assertdoc restart    {rest}"
    if adapter.headless:
        return "apply the fix, then run the notebook again    a new run starts a new kernel"
    return f"restart ({adapter.how})    {rest}"


def verified_steps(*, passed: bool, same_kernel: bool) -> tuple[str, ...]:
    """The steps after `verify`. `same_kernel`: the one that crashed."""
    if not passed:
        return ("%%assertdoc verify    above an edited cell tries it on the same batch",)
    if not same_kernel:
        return ("run the notebook with the fix: this kernel's GPU state is fine",)
    return (
        _restart(restart.adapter(), "then run the notebook with the fix"),
        "%assertdoc restore    after it gives back the variables",
    )


def go_on(report: Report, untried: Sequence[Execution]) -> Report:
    """A report without a finding; the first of its steps names the cell to be tried next."""
    if not untried:
        return report
    step = f"%cpu_replay {untried[0].execution_count}    that cell may have killed the GPU before"
    return msgspec.structs.replace(report, next_steps=(step, *report.next_steps))


def with_stored(report: Report, stored: Stored, name: str) -> Report:
    """The report; its steps say what a restart loses and keeps, and where that lies."""
    adapter = restart.adapter()
    old = _restart(adapter)
    lost = _names([x.name for x in stored.lost if x.name not in {k.name for k in stored.kept}])
    kept = _names([k.name for k in stored.kept])
    rest = f"lost: {lost}. " if lost else ""
    rest += f"After it %assertdoc restore gives back {kept}" if kept else "nothing is kept"
    where = session.folder() / name
    days = settings().keep_days
    forget = (
        f"%assertdoc forget    deletes what is stored for that: {amount(session.size(where))} in "
        f"{_short(where)}, for your user alone, for {days:g} day{'' if days == 1 else 's'}"
    )
    told = [_restart(adapter, rest) if step == old else step for step in report.next_steps]
    return msgspec.structs.replace(
        report, next_steps=(*told[:-1], forget, *told[-1:]), lost=stored.lost, kept=stored.kept
    )


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _short(path: Path) -> str:
    return f"{path.parent}/{path.name[:12]}..." if len(path.name) > 16 else str(path)
