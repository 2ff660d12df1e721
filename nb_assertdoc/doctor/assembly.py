"""From the evidence of the replays to the report."""

from __future__ import annotations

from typing import Any

import msgspec

from .. import diagnosis, salvage
from ..model import Cause, Environment, Evidence, Finding, Fix, Kept, Lost, Observed, Replay, Report
from ..naming import Call, Names
from .attempts import name_of
from .case import Case, environment_now
from .ladder import allowed_operators, chosen, own_error
from .steps import next_steps


def assemble(
    case: Case,
    tries: list[Evidence],
    kept: tuple[Kept, ...] = (),
    lost: tuple[Lost, ...] = (),
    notes: tuple[str, ...] = (),
) -> Report:
    """The report of what the tries found."""
    allowed = allowed_operators(case)
    best = chosen(tries, allowed)
    replays = tuple(
        Replay(
            engine=t.engine,
            outcome=t.outcome,
            seconds=round(t.seconds, 3),
            peak_rss_bytes=t.peak_rss_bytes,
            steps=t.steps,
            checks=t.checks,
            differences=(*t.differences, *_doubts(case, t)),
        )
        for t in tries
    )
    environment = case.environment or environment_now()
    if best is None:
        return _without_finding(case, tries, replays, kept, lost, notes, environment)
    cause, fixes = diagnosis.diagnose(best, case.crash)
    fixes = tuple(_placed(case, best, fix) for fix in fixes)
    warnings = tuple(w for t in tries for w in t.warnings)
    cause = _with_evidence(case, cause, best, warnings)
    doubts = [*best.unknown, *case.doubts]
    contradiction = diagnosis.contradiction(best.finding.op, allowed)
    if contradiction is not None:
        doubts.append(contradiction)
    if doubts:  # they belong to the replay that found the fault
        at = next(i for i, t in enumerate(tries) if best in t.observed)
        named = tuple(dict.fromkeys((*doubts, *replays[at].differences)))
        replays = (
            *replays[:at],
            msgspec.structs.replace(replays[at], differences=named),
            *replays[at + 1 :],
        )
    others = tuple(  # another replay may have met the same one at another step
        o.finding
        for t in tries
        for o in t.observed
        if o is not best and (best in t.observed or _site(o.finding) != _site(best.finding))
    )
    return Report(
        confidence="likely" if doubts else "certain",
        headline=diagnosis.headline(best, cause),
        environment=environment,
        crash=case.crash,
        finding=_named(case, best),
        other_findings=others[:8],
        cause=cause,
        fixes=fixes,
        real_error=best.real_error,
        replays=replays,
        lost=lost,
        kept=kept,
        next_steps=next_steps(case, best.finding, fixes),
    )


def _named(case: Case, best: Observed) -> Finding:
    """The finding; what the replay's variables do not say of the values, the notebook's may."""
    finding = best.finding
    if case.namespace is None or all(e.meaning for e in finding.examples):
        return finding
    about = f"{best.index_expression} {best.table_expression} {finding.module}"
    call = Call(about, finding.argument == "target", finding.bound)
    try:
        with salvage.refusing_cuda():  # tables are asked, which are objects of the user's
            names = Names(case.namespace, call)
            examples = tuple(
                e if e.meaning else msgspec.structs.replace(e, meaning=names.of(e.value))
                for e in finding.examples
            )
    except BaseException:  # the finding counts, whatever an object answers; also an interrupt
        return finding
    return msgspec.structs.replace(finding, examples=examples)


def _site(finding: Finding) -> tuple[Any, ...]:
    place = finding.location
    return place.execution_count, place.file, place.line, finding.argument


def _placed(case: Case, observed: Observed, fix: Fix) -> Fix:
    """A fix that changes another line than the failing one says where that stands."""
    edit = fix.edit
    if edit is None or edit.old == observed.finding.location.source.strip():
        return fix
    for cell in reversed(case.sources):
        lines = [line.strip() for line in cell.source.splitlines()]
        if edit.old in lines:
            where = f"{name_of(cell)}, line {lines.index(edit.old) + 1 + cell.above}"
            said = f"{fix.explanation} The line to change is {where}."
            return msgspec.structs.replace(fix, explanation=said)
    return fix


def _with_evidence(case: Case, cause: Cause, chosen: Observed, warnings: tuple[str, ...]) -> Cause:
    """A cause with what lies outside the faulty call: swallowing, warnings."""
    because = list(cause.because)
    crash = case.crash
    if crash is not None and not crash.exception:
        because.append(f"{crash.message} try/except cannot help: the GPU state stays dead.")
    longer = [w for w in warnings if "longer than" in w]
    if longer and chosen.finding.op.startswith("embedding"):
        because.append(f"A warning said so: {longer[0][:160]}")
    return msgspec.structs.replace(cause, because=tuple(because))


def _doubts(case: Case, evidence: Evidence) -> tuple[str, ...]:
    found = []
    if evidence.error is not None and own_error(case, evidence) is None:  # the headline says it
        found.append(f"the replay ended with {evidence.error.type}: {evidence.error.message[:200]}")
    found += [f"needed but lost: {m}" for m in evidence.missing]
    if evidence.ghost_operators:
        names = ", ".join(evidence.ghost_operators)
        found.append(f"not checked, their values were not computed: {names}")
    if case.crash is None:
        found.append("the replay's output is not shown")
    return tuple(found)


def _without_finding(
    case: Case,
    tries: list[Evidence],
    replays: tuple[Replay, ...],
    kept: tuple[Kept, ...],
    lost: tuple[Lost, ...],
    notes: tuple[str, ...],
    environment: Environment,
) -> Report:
    clean = case.crash is None and any(t.outcome == "clean" for t in tries)
    own = own_error(case, tries[-1]) if tries and not clean else None
    cause = None
    tried = [t.engine for t in tries]
    steps = (*notes, *next_steps(case, None, conclusive=clean, tried=tried, own_error=bool(own)))
    if clean:
        passed = [t for t in tries if t.outcome == "clean"]
        checks = [t.checks for t in passed]
        unknown = set.intersection(*(set(t.ghost_operators) for t in passed))
        nearest = [t for c in checks for t in c.tightest]
        calls = max(c.calls for c in checks)
        headline = f"No fault: {calls:,} call{'' if calls == 1 else 's'} checked on the CPU"
        if nearest:
            headline += f", tightest margin {min(t.margin for t in nearest):g}"
        if unknown:
            headline += f"; not checked, their values are not known: {', '.join(sorted(unknown))}"
        headline += "."
    elif own is not None:
        said = " ".join(f"{own.type}: {own.message}".split())[:160].rstrip(".: ")
        headline = f"Your cell raised {said} on the CPU, before any index was out of range."
    else:
        ended = next((t.error for t in reversed(tries) if t.error is not None), None)
        headline = "The fault did not show on the CPU."
        if ended is not None:
            headline += f" The replay ended with {ended.type}: {ended.message[:160]}"
        elif notes:
            headline += f" {notes[0][:160]}"
        if case.crash is not None:
            key = "not_reproduced_on_cpu"
            title, _, words = (diagnosis.explain_cause(key) or "").partition("\n\n")
            cause = Cause(key=key, title=title, explanation=words)
    return Report(
        confidence="clean" if clean else "not_found",
        headline=headline,
        environment=environment,
        crash=case.crash,
        cause=cause,
        real_error=own,
        replays=replays,
        lost=lost,
        kept=kept,
        next_steps=steps,
    )
