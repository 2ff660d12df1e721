"""The order in which the engines are tried, and when to stop."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from .. import catalogue, diagnosis, history, replay
from ..errors import WorkerError
from ..model import Evidence, LoaderPlan, Observed, Order, Source
from ..settings import settings
from .case import Case, devices_now

ENGINES = ("ghost", "cpu", "history")
Engine = Literal["ghost", "cpu", "history"]
Progress = Callable[[str], None]


class Rung(NamedTuple):
    """One way to replay: where the state comes from, and whether floats are computed."""

    engine: Engine
    real: bool


GHOST = Rung("ghost", False)
CPU = Rung("cpu", True)
HISTORY = Rung("history", False)
REAL_HISTORY = Rung("history", True)
MOST_TRIES = 3
_TRAINING = 4  # weights, gradients and an optimizer's two states, in multiples of the weights


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
    return [evidence for _, evidence in tries]


def _first(case: Case, engine: str | None) -> Rung:
    if engine is None:
        return HISTORY if case.namespace is None else GHOST
    return {"ghost": GHOST, "cpu": CPU, "history": HISTORY}[engine]


def _try(case: Case, folder: Path, rung: Rung, seconds: float, progress: Progress) -> Evidence:
    started = time.monotonic()
    try:
        order = _order(case, folder, rung, seconds)
        memory = settings().worker_bytes or _free_memory()
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
        return None
    if evidence.outcome == "unavailable" or len(tries) >= MOST_TRIES:
        return None
    if engine is not None:  # `history` is asked for without a word on floats: cheap ones first
        return REAL_HISTORY if last == HISTORY else None
    needs_floats = bool(evidence.ghost_operators) and (
        allowed is None or not allowed.isdisjoint(evidence.ghost_operators)
    )
    lacks_state = bool(evidence.missing) or (
        evidence.error is not None and evidence.error.type == "NameError"
    )
    if evidence.outcome == "clean" and not (needs_floats or lacks_state):
        innocent = case.others_follow and not evidence.decisions
        if case.crash is None or innocent:
            return None
    candidates: list[Rung] = []
    if case.earlier and (lacks_state or last.engine == "history"):
        candidates += [REAL_HISTORY] if needs_floats else [HISTORY, REAL_HISTORY]
    if case.namespace is not None and not lacks_state:
        candidates.append(CPU)
    if case.earlier:
        candidates.append(REAL_HISTORY)
    done = {rung for rung, _ in tries}
    for rung in candidates:
        if rung in done:
            continue
        if rung.real and (bytes_needed := _training_bytes(case)) > (_free_memory() or bytes_needed):
            notes.append(
                f"no replay with real floats: it would need about {bytes_needed / 1e9:.0f} GB"
            )
            return None
        return rung
    return None


def _training_bytes(case: Case) -> int:
    """What the models of the notebook need in a real replay, from their shapes alone."""
    torch = sys.modules.get("torch")
    if torch is None or case.namespace is None:
        return 0
    models = [v for v in case.namespace.values() if isinstance(v, torch.nn.Module)]
    weights: dict[int, int] = {
        id(p): p.numel() * p.element_size() for m in models for p in m.parameters()
    }
    return _TRAINING * sum(weights.values())


def _order(case: Case, folder: Path, rung: Rung, seconds: float) -> Order:
    earlier: tuple[Source, ...] = ()
    if rung.engine == "history":
        earlier = history.needed(case.earlier, case.cell)
        shutil.rmtree(folder / "capsule", ignore_errors=True)
        (folder / "rng.pickle").unlink(missing_ok=True)
    plan = None
    loop = case.loop
    if loop is not None and not rung.real:
        lists = loop.yielded()
        with contextlib.suppress(Exception):  # a sampler may hand out what cannot be pickled
            (folder / "loader.pickle").write_bytes(pickle.dumps((lists, loop.rng)))
            iterator = loop.iterator() if loop.iterator is not None else None
            plan = LoaderPlan(
                key=loop.key,
                first=loop.first,
                count=len(lists),
                workers=getattr(iterator, "_num_workers", 0),
                base_seed=getattr(iterator, "_base_seed", None),
                finished=loop.finished,
            )
    return Order(
        engine=rung.engine,
        real_floats=rung.real,
        cell=case.cell,
        sources=case.sources,
        history=earlier,
        cwd=case.cwd or ".",
        sys_path=tuple(p for p in sys.path if isinstance(p, str)),
        loader=plan,
        max_steps=case.max_steps,
        seconds=seconds,
        **devices_now(),
    )


def _free_memory() -> int | None:
    """What a replay may hold: four fifths of what the machine, or its container, has free."""
    import psutil

    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, max(limit - used, 0))
    return free * 4 // 5


def allowed_operators(case: Case) -> frozenset[str] | None:
    """The operators that the driver's lines speak of; None where they say nothing."""
    return catalogue.operators_of(case.crash.assert_lines) if case.crash is not None else None


def contradicts(observed: Observed, allowed: frozenset[str] | None) -> bool:
    """The driver's lines speak of another kind of operator than the finding."""
    return diagnosis.contradiction(observed.finding.op, allowed) is not None


def chosen(tries: list[Evidence], allowed: frozenset[str] | None) -> Observed | None:
    """The finding that the driver's lines do not contradict, else the first one."""
    found = [o for t in tries for o in t.observed]
    return next((o for o in found if not contradicts(o, allowed)), found[0] if found else None)
