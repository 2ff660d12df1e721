"""Runs the stages in order: crash, salvage, replays, diagnosis, report. Nothing else does.

A stage that fails makes a poorer report, never a second crash.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from . import catalogue, diagnosis, frames, history, replay, salvage
from .detector import Sighting
from .errors import NothingToReplay, UsageError, WorkerError
from .model import (
    Cause,
    Crash,
    Environment,
    Evidence,
    FirstFailed,
    Kept,
    LoaderPlan,
    Lost,
    Observed,
    Order,
    Place,
    Replay,
    Report,
    Source,
)
from .recorder import Execution, Loop
from .settings import settings

log = logging.getLogger("nb_assertdoc")
ENGINES = ("ghost", "cpu", "history")
Engine = Literal["ghost", "cpu", "history"]
Progress = Callable[[str], None]

_last: Report | None = None


def last_report() -> Report | None:
    """The last report of this process."""
    return _last


@dataclass
class Case:
    """One cell to be replayed, with all that the host knows about it."""

    cell: Source
    sources: tuple[Source, ...] = ()
    earlier: tuple[Source, ...] = ()  # executions that may be run again, in order
    namespace: Mapping[str, Any] | None = None  # None: there is no state (a saved notebook)
    now: Mapping[str, Any] = field(default_factory=dict)  # the namespace as it is now
    gone: tuple[str, ...] = ()
    crash: Crash | None = None
    rng: Any = None
    integers: Mapping[int, Any] = field(default_factory=dict)
    loop: Loop | None = None
    cwd: str = ""
    max_steps: int | None = None
    doubts: tuple[str, ...] = ()  # what lowers the confidence from the start
    environment: Environment | None = None


def check_code(cell: str) -> None:
    """Refuse a cell that has no Python to replay.

    Raises `NothingToReplay` for an empty cell, one with only magics, or a syntax error.
    """
    code = frames.body(cell)
    try:
        compiled = compile(code, "<cell>", "exec", flags=0x2000, dont_inherit=True)  # await allowed
    except (SyntaxError, ValueError) as error:
        raise NothingToReplay(f"the cell is not valid Python: {error}") from error
    lines = [line.strip() for line in cell.splitlines()]
    useful = [x for x in lines if x and not x.startswith(("%", "!", "#"))]
    if not useful or not compiled.co_code:
        raise NothingToReplay("the cell holds no Python code to replay, only magics or comments")


def crash_of(
    sighting: Sighting,
    execution_count: int | None,
    tb: TracebackType | None,
    cells: frames.Cells,
) -> Crash:
    """The record of what the host saw."""
    entries = frames.user_traceback(tb, cells)
    surface = frames.place(entries[-1], cells) if entries else Place(line=0, source="")
    return Crash(
        exception=sighting.exception,
        message=sighting.message,
        error_code=sighting.error_code,
        messenger=sighting.messenger,
        assert_lines=sighting.assert_lines,
        surface=surface,
        execution_count=execution_count,
        rank=sighting.rank,
    )


def swallowed(crash: Crash, source: str, execution_count: int | None) -> Crash:
    """A crash that no traceback showed: user code caught it. The surface is the `except` line."""
    lines = source.splitlines()
    number = next((i for i, x in enumerate(lines, 1) if x.strip().startswith("except")), 0)
    where = Place(
        line=number,
        source=lines[number - 1] if number else "",
        execution_count=execution_count,
    )
    caught = f"`{where.source.strip()}` in line {number}" if number else "an except in called code"
    return msgspec.structs.replace(
        crash,
        exception="",
        message=f"The error was swallowed by {caught} of In [{execution_count}].",
        surface=where,
    )


def diagnose(
    case: Case, *, engine: str | None = None, seconds: float | None = None, progress: Progress = print
) -> Report:
    """Salvage, replay and explain one cell.

    `engine` names the one engine to use; without it the ladder decides. `seconds` is the budget of
    all replays, from the moment a cell begins. A KeyboardInterrupt stops the replay: the report
    then says what is known. Raises `UsageError` for an unknown engine.
    """
    global _last
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}; allowed: {', '.join(ENGINES)}")
    budget = seconds if seconds is not None else settings().replay_seconds
    kept: tuple[Kept, ...] = ()
    lost: list[Lost] = [Lost(name=n, what="variable", why="deleted by the cell") for n in case.gone]
    tries: list[Evidence] = []
    notes: list[str] = []
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="nb_assertdoc-"))
        if case.namespace is not None and engine != "history":
            saved = _salvage(case, folder, progress)
            kept, lost = saved.kept, [*lost, *saved.lost]
        tries = _climb(case, folder, engine, budget, bool(lost), progress, notes)
    except KeyboardInterrupt:
        notes.append("the replay was interrupted")
    except (WorkerError, OSError) as error:
        notes.append(str(error))
    except Exception as error:  # a fault of ours must not become the user's second crash
        log.exception("nb_assertdoc: the replay failed")
        notes.append(f"the replay failed: {type(error).__name__}: {error}")
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    _last = assemble(case, tries, kept, tuple(lost), tuple(notes))
    return _last


def _salvage(case: Case, folder: Path, progress: Progress) -> salvage.Salvaged:
    namespace = case.namespace or {}
    names = salvage.reached(frames.body(case.cell.source), namespace)
    progress(f"saving {len(names)} variables")
    saved = salvage.write(
        folder / "capsule",
        namespace,
        names,
        integer_copies=case.integers,
        seconds=settings().salvage_seconds,
        max_bytes=settings().salvage_bytes,
    )
    if case.rng is not None:
        (folder / "rng.pickle").write_bytes(pickle.dumps(case.rng))
    return saved


# ---- the ladder


def _climb(
    case: Case,
    folder: Path,
    engine: str | None,
    budget: float,
    losses: bool,
    progress: Progress,
    notes: list[str],
) -> list[Evidence]:
    """The replays, each only where the ones before were not conclusive."""
    tries: list[Evidence] = []
    left = budget
    step: tuple[Engine, bool] | None
    if engine is not None:
        step = (engine, engine == "cpu")  # type: ignore[assignment]
    else:
        step = ("history", False) if case.namespace is None else ("ghost", False)
    while step is not None and left > 0.5:
        order = _order(case, folder, step[0], step[1], left)
        started = time.monotonic()
        memory = settings().worker_bytes or _free_memory()
        try:
            evidence = replay.run(order, folder, memory_bytes=memory, progress=progress)
        except WorkerError as error:
            evidence = Evidence(
                engine=step[0],
                outcome="unavailable",
                seconds=time.monotonic() - started,
                differences=(str(error)[:500],),
            )
            notes.append(str(error)[:500])
        tries.append(evidence)
        left -= evidence.seconds
        step = _next_step(case, tries, step, engine)
    return tries


def _next_step(
    case: Case, tries: list[Evidence], last: tuple[Engine, bool], asked: str | None
) -> tuple[Engine, bool] | None:
    """The next rung, or None where the last try was conclusive or nothing else can help."""
    evidence = tries[-1]
    allowed = _allowed(case)
    if evidence.outcome == "fault" and _chosen(tries, allowed) is not None:
        found = _chosen(tries, allowed)
        if found is None or not _contradicts(found, allowed):
            return None
    done = {(t.engine, r) for t, r in zip(tries, _real(tries, last), strict=True)}
    if asked == "history" and last == ("history", False):
        return ("history", True)
    if asked is not None or len(tries) >= 3 or evidence.outcome == "unavailable":
        return None
    floats = bool(evidence.ghost_operators) and (
        allowed is None or not allowed.isdisjoint(evidence.ghost_operators)
    )
    rebuilt = last[0] == "history"
    lacking = bool(evidence.missing) or (
        evidence.error is not None and evidence.error.type == "NameError"
    )
    candidates: list[tuple[Engine, bool]] = []
    if (lacking or rebuilt) and case.earlier:
        candidates.append(("history", floats or last == ("history", False)))
    candidates.append(("cpu", True) if case.namespace is not None else ("history", True))
    if case.earlier:
        candidates.append(("history", True))
    return next((c for c in candidates if c not in done and c != last), None)


def _real(tries: list[Evidence], last: tuple[Engine, bool]) -> list[bool]:
    real = [t.engine == "cpu" for t in tries]
    real[-1] = last[1]
    return real


def _order(case: Case, folder: Path, engine: Engine, real: bool, seconds: float) -> Order:
    earlier = history.needed(case.earlier, case.cell) if engine == "history" else ()
    if engine == "history":
        shutil.rmtree(folder / "capsule", ignore_errors=True)
        (folder / "rng.pickle").unlink(missing_ok=True)
    plan = None
    loop = case.loop
    if loop is not None and not real:
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
    devices = _devices()
    return Order(
        engine=engine,
        real_floats=real,
        cell=case.cell,
        sources=case.sources,
        history=earlier,
        cwd=case.cwd or ".",
        sys_path=tuple(p for p in sys.path if isinstance(p, str)),
        loader=plan,
        max_steps=case.max_steps,
        seconds=seconds,
        **devices,
    )


def _devices() -> dict[str, Any]:
    """The user's devices, from figures that torch has cached: no CUDA call is made."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return {}
        properties = torch.cuda.get_device_properties(0)
        return {
            "device_count": int(torch.cuda.device_count()),
            "device_name": str(properties.name),
            "capability": (int(properties.major), int(properties.minor)),
            "device_memory": int(properties.total_memory),
        }
    except Exception:
        return {}  # the defaults of `Order`: one device


def _free_memory() -> int | None:
    """What a replay may hold: four fifths of what the machine, or its container, has free."""
    import psutil

    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, max(limit - used, 0))
    return free * 4 // 5


# ---- from evidence to report


def _allowed(case: Case) -> frozenset[str] | None:
    return catalogue.operators_of(case.crash.assert_lines) if case.crash is not None else None


def _contradicts(observed: Observed, allowed: frozenset[str] | None) -> bool:
    return diagnosis.contradiction(observed.finding.op, allowed) is not None


def _chosen(tries: list[Evidence], allowed: frozenset[str] | None) -> Observed | None:
    """The finding that the driver's lines do not contradict, else the first one."""
    found = [o for t in tries for o in t.observed]
    return next((o for o in found if not _contradicts(o, allowed)), found[0] if found else None)


def assemble(
    case: Case,
    tries: list[Evidence],
    kept: tuple[Kept, ...] = (),
    lost: tuple[Lost, ...] = (),
    notes: tuple[str, ...] = (),
) -> Report:
    """The report of what the tries found."""
    allowed = _allowed(case)
    chosen = _chosen(tries, allowed)
    replays = tuple(
        Replay(
            engine=t.engine,
            outcome=t.outcome,
            seconds=round(t.seconds, 3),
            peak_rss_bytes=t.peak_rss_bytes,
            steps=t.steps,
            checks=t.checks,
            differences=(*t.differences, *_doubts(t)),
        )
        for t in tries
    )
    environment = case.environment or environment_now()
    if chosen is None:
        return _without_finding(case, tries, replays, kept, lost, notes, environment)
    cause, fixes = diagnosis.diagnose(chosen, case.crash)
    warnings = tuple(w for t in tries for w in t.warnings)
    cause = _with_evidence(case, cause, chosen, warnings)
    doubts = [*chosen.unknown, *case.doubts]
    contradiction = diagnosis.contradiction(chosen.finding.op, allowed)
    if contradiction is not None:
        doubts.append(contradiction)
    if doubts:  # they belong to the replay that found the fault
        at = next(i for i, t in enumerate(tries) if chosen in t.observed)
        named = (*dict.fromkeys(doubts), *replays[at].differences)
        replays = (
            *replays[:at],
            msgspec.structs.replace(replays[at], differences=named),
            *replays[at + 1 :],
        )
    others = tuple(
        o.finding for t in tries for o in t.observed if o is not chosen and o.finding != chosen.finding
    )
    return Report(
        confidence="likely" if doubts else "certain",
        headline=diagnosis.headline(chosen, cause),
        environment=environment,
        crash=case.crash,
        finding=chosen.finding,
        other_findings=others[:8],
        cause=cause,
        fixes=fixes,
        real_error=chosen.real_error,
        replays=replays,
        lost=lost,
        kept=kept,
        next_steps=_next_steps(case, True),
    )


def _with_evidence(
    case: Case, cause: Any, chosen: Observed, warnings: tuple[str, ...]
) -> Any:
    """A cause with what lies outside the faulty call: messenger, swallowing, warnings."""
    because = list(cause.because)
    crash = case.crash
    if crash is not None and crash.messenger:
        because.append(
            f"The {crash.messenger} error was only the messenger: the first library call after the "
            "assert reports it."
        )
    if crash is not None and not crash.exception:
        because.append(f"{crash.message} try/except cannot help: the GPU state stays dead.")
    longer = [w for w in warnings if "longer than" in w]
    if longer and chosen.finding.op.startswith("embedding"):
        because.append(f"A warning said so: {longer[0][:160]}")
    return msgspec.structs.replace(cause, because=tuple(because))


def _doubts(evidence: Evidence) -> tuple[str, ...]:
    found = []
    if evidence.error is not None:
        found.append(f"the replay ended with {evidence.error.type}: {evidence.error.message[:200]}")
    found += [f"needed but lost: {m}" for m in evidence.missing]
    if evidence.ghost_operators:
        names = ", ".join(evidence.ghost_operators)
        found.append(f"not checked, their values were not computed: {names}")
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
    calls = sum(t.checks.calls for t in tries)
    clean = case.crash is None and any(t.outcome == "clean" for t in tries)
    cause = None
    steps = (*notes, *_next_steps(case, False))
    if clean:
        headline = f"No fault: {calls:,} calls checked on the CPU."
    else:
        ended = next((t.error for t in reversed(tries) if t.error is not None), None)
        headline = "The fault did not show on the CPU."
        if ended is not None:
            headline += f" The replay ended with {ended.type}: {ended.message[:160]}"
        elif notes:
            headline += f" {notes[0][:160]}"
        if case.crash is not None:
            cause = Cause(
                key="not_reproduced_on_cpu",
                title="Not reproduced on the CPU",
                explanation=diagnosis.explain_cause("not_reproduced_on_cpu") or "",
            )
    return Report(
        confidence="clean" if clean else "not_found",
        headline=headline,
        environment=environment,
        crash=case.crash,
        cause=cause,
        replays=replays,
        lost=lost,
        kept=kept,
        next_steps=steps,
    )


def _next_steps(case: Case, found: bool) -> tuple[str, ...]:
    """Commands, in the order of use."""
    steps = []
    if case.crash is not None:
        steps.append("%assertdoc restart    restart this kernel: its GPU state is dead")
    if not found:
        steps.append("%cpu_replay --engine history    run the earlier cells again on the CPU")
        steps.append("restart, set CUDA_LAUNCH_BLOCKING=1 before CUDA starts, and run once more")
    steps.append("%assertdoc save report.json    this report as a file")
    return tuple(steps)


def environment_now() -> Environment:
    """Versions of this process; no CUDA call is made."""
    import platform

    import IPython

    torch = sys.modules.get("torch")
    devices = _devices()
    return Environment(
        python=platform.python_version(),
        ipython=IPython.__version__,
        platform=platform.platform(),
        torch=str(torch.__version__) if torch is not None else None,
        devices=(devices["device_name"],) * devices["device_count"] if devices else (),
    )


def stale(report: Report, sighting: Sighting, execution: Execution, first: Execution, surface: Place) -> Report:
    """The first failure's report, told of a later failure of the same dead context."""
    crash = Crash(
        exception=sighting.exception,
        message=sighting.message,
        error_code=sighting.error_code,
        messenger=sighting.messenger,
        assert_lines=report.crash.assert_lines if report.crash is not None else (),
        surface=surface,
        execution_count=execution.execution_count,
        stale=True,
        first_failed=FirstFailed(execution_count=first.execution_count, source=first.source),
    )
    return msgspec.structs.replace(report, crash=crash)


def diagnose_saved(
    *,
    notebook_path: Path,
    notebook: Any,
    index: int,
    cwd: Path,
    engine: str | None = None,
    seconds: float | None = None,
) -> Report:
    """Diagnose cell `index` (0-based) of a saved notebook by running what it needs on the CPU."""
    from . import detector

    cell = notebook.cells[index]
    sources = tuple(
        Source(
            filename=f"<{notebook_path.name} cell {i}>",
            source=str(c.source),
            execution_count=c.get("execution_count"),
            cell_id=c.get("id"),
            cell=i,
        )
        for i, c in enumerate(notebook.cells)
        if c.cell_type == "code"
    )
    check_code(str(cell.source))
    this = next(s for s in sources if s.cell == index)
    texts = [
        "\n".join([f"{o.get('ename')}: {o.get('evalue')}", *o.get("traceback", [])])
        if o.output_type == "error"
        else str(o.get("text", ""))
        for o in cell.get("outputs", [])
    ]
    sighting = detector.recognise_text("\n".join(texts))
    crash = None
    if sighting is not None:
        crash = crash_of(sighting, this.execution_count, None, frames.Cells(sources))
    earlier = tuple(s for s in sources if s.cell is not None and s.cell < index)
    case = Case(
        cell=this,
        sources=sources,
        earlier=earlier,
        crash=crash,
        cwd=str(cwd),
        doubts=("the notebook's state was rebuilt by running its cells again",),
    )
    return diagnose(
        case,
        engine=engine,
        seconds=seconds if seconds is not None else settings().asked_seconds,
        progress=lambda text: None,
    )
