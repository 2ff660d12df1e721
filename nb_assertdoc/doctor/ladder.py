"""The order in which the engines are tried, and when to stop."""

from __future__ import annotations

import pickle
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .. import catalogue, diagnosis, history, recorder, replay
from ..errors import WorkerError
from ..model import Engine, Evidence, LoaderPlan, Observed, Order, RealError, Source, to_json
from ..settings import settings
from .case import Case, defaults_now, devices_now
from .memory import free_memory, training_bytes

Progress = Callable[[str], None]


class Rung(NamedTuple):
    """One way to replay: where the state comes from, whether floats are computed, and whether
    every batch is run, as far as the time allows."""

    engine: Engine
    real: bool = False
    whole: bool = False


GHOST = Rung("ghost")
WHOLE = Rung("ghost", whole=True)
CPU = Rung("cpu", real=True, whole=True)
HISTORY = Rung("history")
REAL_HISTORY = Rung("history", real=True, whole=True)
MOST_TRIES = 3
SOON = 3.0  # seconds: earlier cells that took no longer are run again rather than made up for
# Errors that a stand-in, the limit of memory or the closed-off file system may raise.
_NOT_THE_CELL = {"NotImplementedError", "MemoryError", "OSError", "PermissionError"}


def climb(
    case: Case,
    folder: Path,
    engine: str | None,
    budget: float,
    progress: Progress,
    notes: list[str],
) -> list[Evidence]:
    """The replays, each only where those before were not conclusive.

    `budget` is in seconds. What could not be tried, and why, goes to `notes`.
    """
    tries: list[tuple[Rung, Evidence]] = []
    left = budget
    rung: Rung | None = _first(case, engine)
    while rung is not None and left > 0.5:
        try:
            evidence = _try(case, folder, rung, left, progress)
        except KeyboardInterrupt:
            notes.append("the replay was interrupted")
            tries.append((rung, replay.interrupted(folder, rung.engine)))
            break
        if evidence.outcome == "unavailable":
            notes.extend(evidence.differences)
        tries.append((rung, evidence))
        left -= evidence.cell_seconds  # a kernel and its imports are the floor of every replay
        rung = _next(case, tries, engine, notes)
    found = [evidence for _, evidence in tries]
    best = chosen(found, allowed_operators(case))
    at = next((r for r, e in tries if best is not None and best in e.observed), None)
    if at is not None and at != tries[-1][0]:  # `verify` repeats the one that found the fault
        (folder / "order.json").write_bytes(to_json(_order(case, folder, at, budget)))
    return found


def _first(case: Case, engine: str | None) -> Rung:
    if engine is None:
        return HISTORY if case.namespace is None else GHOST
    return {"ghost": GHOST, "cpu": CPU, "history": HISTORY}[engine]


def _try(case: Case, folder: Path, rung: Rung, seconds: float, progress: Progress) -> Evidence:
    started = time.monotonic()
    try:
        order = _order(case, folder, rung, seconds)
        memory = settings().worker_bytes or free_memory()
        return replay.run(order, folder, memory_bytes=memory, progress=progress)
    except WorkerError as error:
        return Evidence(
            engine=rung.engine,
            outcome="unavailable",
            seconds=time.monotonic() - started,
            differences=(str(error)[:500],),
        )


def _next(
    case: Case, tries: list[tuple[Rung, Evidence]], engine: str | None, notes: list[str]
) -> Rung | None:
    """The next rung, or None where the last try was conclusive or nothing else can help."""
    last, evidence = tries[-1]
    allowed = allowed_operators(case)
    found = chosen([e for _, e in tries], allowed)
    if found is not None and not contradicts(found, allowed):
        earlier = found.late and engine is None and HISTORY not in dict(tries)
        return HISTORY if earlier and _repeatable(case) else None
    if own_error(case, evidence) is not None:
        return None
    if evidence.outcome == "unavailable" or len(tries) >= MOST_TRIES:
        return None
    if engine is not None:  # `history` is asked for without a word on floats: cheap ones first
        return REAL_HISTORY if last == HISTORY and case.batches is None else None
    needs_floats = bool(evidence.ghost_operators) and (
        allowed is None or not allowed.isdisjoint(evidence.ghost_operators)
    )
    lacks_state = bool(evidence.missing) or (
        evidence.error is not None and evidence.error.type == "NameError"
    )
    if evidence.outcome == "clean" and not (needs_floats or lacks_state):
        # Without copies of the GPU's integers from the cell's start, an index may be made up.
        unknown = {op for _, e in tries for op in e.ghost_operators}
        made_up = case.rng is None and bool(unknown)
        # Nor is what the driver names, where its values hang on weights that were drawn again.
        redrawn = evidence.floats_lost and not unknown.isdisjoint(allowed or unknown)
        innocent = not (evidence.decisions or evidence.shortened or made_up or redrawn)
        if case.crash is None or (case.others_follow and innocent):
            return None
    candidates: list[Rung] = []
    if case.earlier and (lacks_state or last.engine == "history"):
        candidates += [REAL_HISTORY] if needs_floats else [HISTORY, REAL_HISTORY]
    if needs_floats and evidence.floats_lost and _repeatable(case):
        candidates.append(REAL_HISTORY)
    if case.namespace is not None and not lacks_state:
        candidates += [WHOLE, CPU] if evidence.shortened and not needs_floats else [CPU]
    if case.earlier:
        candidates.append(REAL_HISTORY)
    done = {rung for rung, _ in tries}
    for rung in candidates:
        if rung in done:
            continue
        allowed_bytes = settings().worker_bytes or free_memory()
        if rung.real and (needed := training_bytes(case.namespace)) > allowed_bytes:
            notes.append(
                f"no replay with real floats: it would need about {needed / 1e9:.1f} GB of memory, "
                f"and may use {allowed_bytes / 1e9:.1f} GB"
            )
            return None
        return rung
    return None


def _repeatable(case: Case) -> bool:
    """The cells that made the weights can soon be run again, with the same random numbers."""
    makers = [s.execution_count for s in history.needed(case.earlier, case.cell, training=True)]
    soon = sum(case.seconds.get(count, SOON) for count in makers) < SOON
    return bool(makers) and soon and all(count in case.random for count in makers)


def own_error(case: Case, evidence: Evidence) -> RealError | None:
    """What ended the replay, where that is the cell's own error and no other engine helps.

    Not where the machine or a made-up value may be at fault, or an earlier cell makes the name.
    """
    error = evidence.error
    if case.crash is not None or error is None or evidence.outcome != "other_error":
        return None
    if error.type in _NOT_THE_CELL or evidence.decisions or evidence.missing:
        return None
    if error.type == "NameError" and evidence.engine != "history":
        name = re.search(r"name '(\w+)'", error.message)
        if name and any(name[1] in history.names_of(s.source).writes for s in case.earlier):
            return None
    return error


def _order(case: Case, folder: Path, rung: Rung, seconds: float) -> Order:
    earlier: tuple[Source, ...] = ()
    if rung.engine == "history":
        earlier = history.needed(case.earlier, case.cell, training=rung.real)
        _rename(folder / "capsule", folder / "aside")  # all of it is made anew
    else:
        _rename(folder / "aside", folder / "capsule")
    leader, *others = _plans(case, folder) or (None,)
    return Order(
        engine=rung.engine,
        real_floats=rung.real,
        cell=case.cell,
        sources=case.sources,
        history=earlier,
        cwd=case.cwd or ".",
        sys_path=tuple(p for p in sys.path if isinstance(p, str)),
        loader=leader,
        other_loaders=tuple(filter(None, others)),
        whole=rung.whole,
        max_steps=case.max_steps,
        batches=case.batches,
        seconds=seconds,
        **devices_now(),
        **defaults_now(),
    )


def _rename(old: Path, new: Path) -> None:
    if old.is_dir():
        old.rename(new)


def _plans(case: Case, folder: Path) -> tuple[LoaderPlan, ...]:
    """The cell's loops over loaders, the one that leads first; their lists are put in a file."""
    plans: list[LoaderPlan] = []
    records: list[bytes] = []
    loops = case.loops or ((case.loop,) if case.loop is not None else ())
    for loop, part, late in recorder.parts(case.loop, loops) if case.loop is not None else ():
        lists = loop.yielded()
        try:
            records.append(pickle.dumps((lists, loop.rng, loop.before)))
        except Exception:  # a sampler may hand out what cannot be pickled
            if part == "leads":
                return ()
            continue
        plan = LoaderPlan(
            key=loop.key,
            first=loop.first,
            count=len(lists),
            workers=loop.workers,
            base_seed=loop.base_seed,
            finished=loop.finished,
            part=part,
            late=late,
            round=loop.round,
            alone=loop.alone(loops),
        )
        plans.append(plan)
    (folder / "loader.pickle").write_bytes(pickle.dumps(records))
    return tuple(plans)


def allowed_operators(case: Case) -> frozenset[str] | None:
    """The operators that the driver's lines speak of; None where they say nothing."""
    return catalogue.operators_of(case.crash.assert_lines) if case.crash is not None else None


def contradicts(observed: Observed, allowed: frozenset[str] | None) -> bool:
    """The driver's lines speak of another kind of operator than the finding."""
    return diagnosis.contradiction(observed.finding.op, allowed) is not None


def chosen(tries: list[Evidence], allowed: frozenset[str] | None) -> Observed | None:
    """The finding that the driver's lines do not contradict, and with none before; or the first."""
    found = [o for t in tries for o in t.observed]
    return min(found, key=lambda o: (contradicts(o, allowed), o.late), default=None)
