"""What the report tells the user to do next: commands, in the order of use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from .. import restart, session
from ..model import Finding, Fix, Report
from ..recorder import Execution
from ..report import steps as written
from ..restart import Adapter
from ..session.stored import Stored, amount
from ..settings import settings
from .case import Case


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
    scans = finding is not None and finding.bound is not None and not finding.bound.high_inclusive
    if case.crash is None and finding is not None:
        steps += [written.SCAN] if scans else []
        steps.append(written.CHECK_AGAIN)
    if case.crash is not None:
        if finding is not None and not adapter.headless:
            steps.append(written.verify(fixed=any(fix.edit is not None for fix in fixes)))
            steps += [written.SCAN] if scans else []
        steps.append(_restart(adapter))
    if not conclusive:
        magic = "%cpu_replay" if case.crash is not None else "%%cpu_replay"
        steps += [
            written.replay(engine, magic)
            for engine in written.FURTHER_ENGINES
            if engine not in tried and (engine == "cpu" or case.earlier)
        ]
    if not conclusive and case.crash is not None:
        steps.append(written.BLOCKING)
    return (*steps, written.SAVE)


def _saved_notebook(case: Case, conclusive: bool) -> tuple[str, ...]:
    """There is no kernel whose state is dead, and none to be restarted."""
    steps = []
    if case.crash is not None and conclusive:
        steps.append("apply the fix in the notebook, and diagnose it again: the cell is then clean")
        steps.append("run the notebook from its top: a new kernel has a working GPU")
    if not conclusive:
        steps.append("run it with `nb-assertdoc run`: a live notebook tells more than a saved one")
    return tuple(steps)


def _restart(adapter: Adapter, *words: str) -> str:
    if adapter.headless:
        return written.RUN_AGAIN
    return written.restart(adapter.how, adapter.can_restart, *words)


def verified_steps(*, passed: bool, same_kernel: bool) -> tuple[str, ...]:
    """The steps after `verify`. `same_kernel`: the one that crashed."""
    if not passed:
        return (written.VERIFY_ANOTHER,)
    if not same_kernel:
        return ("run the notebook with the fix: this kernel's GPU state is fine",)
    return (
        _restart(restart.adapter(), "then run the notebook with the fix"),
        written.RESTORE,
    )


def go_on(report: Report, untried: Sequence[Execution]) -> Report:
    """A report without a finding; the first of its steps names the cell to be tried next."""
    if not untried:
        return report
    step = written.replay_of(untried[0].execution_count)
    return msgspec.structs.replace(report, next_steps=(step, *report.next_steps))


def with_stored(report: Report, stored: Stored, name: str) -> Report:
    """The report; its steps say what a restart loses and keeps, and where that lies."""
    kept = [k.name for k in stored.kept]
    lost = [x.name for x in stored.lost if x.name not in kept]
    new = _restart(restart.adapter(), written.foretold(lost, kept))
    told = [new if written.read(s).kind == "restart" else s for s in report.next_steps]
    where = session.folder() / name
    forget = written.forget(amount(session.size(where)), _short(where), settings().keep_days)
    return msgspec.structs.replace(
        report, next_steps=(*told[:-1], forget, *told[-1:]), lost=stored.lost, kept=stored.kept
    )


def _short(path: Path) -> str:
    return f"{path.parent}/{path.name[:12]}..." if len(path.name) > 16 else str(path)
