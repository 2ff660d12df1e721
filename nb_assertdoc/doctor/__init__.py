"""Runs the stages in order: crash, salvage, replays, diagnosis, report. Nothing else does.

A stage that fails makes a poorer report, never a second crash.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from .. import detector, frames, salvage
from ..errors import TorchMissing, UsageError, WorkerError
from ..model import ENGINES, REBUILT, Environment, Evidence, Kept, Lost, Report, Source
from ..report import SIMULATED
from ..settings import settings
from .assembly import assemble
from .case import (
    Case,
    check_code,
    check_torch,
    crash_of,
    environment_now,
    of_earlier,
    replayable,
    stale,
    swallowed,
)
from .keeping import keep_replay, keep_variables, still_good
from .ladder import Progress, climb
from .restoring import describe, restore
from .start import reached_line, start_of
from .steps import go_on, with_stored
from .verification import confirmation, suggested, verify

__all__ = [
    "ENGINES",
    "Case",
    "check_code",
    "check_torch",
    "confirmation",
    "crash_of",
    "describe",
    "diagnose",
    "diagnose_saved",
    "environment_now",
    "go_on",
    "keep_variables",
    "last_report",
    "measure",
    "of_earlier",
    "reached_line",
    "replayable",
    "restore",
    "stale",
    "start_of",
    "suggested",
    "swallowed",
    "verify",
    "with_stored",
]

log = logging.getLogger("nb_assertdoc")
_last: Report | None = None


def last_report() -> Report | None:
    """The last report of this process."""
    return _last


def diagnose(
    case: Case,
    *,
    engine: str | None = None,
    seconds: float | None = None,
    progress: Progress = lambda text: None,
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
        check_torch()
        (folder / "random.pickle").write_bytes(pickle.dumps(dict(case.random)))
        if case.namespace is not None and engine != "history":
            saved = _salvage(case, folder, progress)
            kept, lost = saved.kept, [*lost, *saved.lost]
        tries = climb(case, folder, engine, budget, progress, notes)
    except KeyboardInterrupt:
        notes.append("the replay was interrupted")
    except (WorkerError, TorchMissing) as error:
        notes.append(str(error))
    except OSError as error:
        notes.append(
            f"the replay cannot use its temporary folder ({error}); set TMPDIR to another one"
        )
    except BaseException as error:  # a fault of ours must not become the user's second crash
        log.exception("nb_assertdoc: the replay failed")
        notes.append(f"the replay failed: {type(error).__name__}: {error}")
    try:
        if case.keep_as is not None:
            kept = ()  # the variables are saved next, and the report then says which
        elif case.namespace is not None:
            kept = still_good(kept, case.namespace, case.integers)
        _last = assemble(case, tries, kept, tuple(lost), tuple(notes))
        if folder is not None and case.keep_as is not None:
            keep_replay(case, folder, _last, case.keep_as)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return _last


def measure(
    case: Case, batches: int, *, seconds: float, progress: Progress = lambda text: None
) -> Evidence:
    """What range each operator's indices have in the first `batches` batches of the cell's loops.

    A fault does not end it. Raises `AssertdocError` where the cell cannot be replayed.
    """
    check_code(case.cell.source)
    check_torch()
    case.batches, case.loop = batches, None  # from the first batch on
    notes: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="nb_assertdoc-"))
    try:
        _salvage(case, folder, progress)
        (found,) = climb(case, folder, "ghost", seconds, progress, notes)
        lacks = found.missing or (found.error is not None and found.error.type == "NameError")
        if case.earlier and lacks:
            (found,) = climb(case, folder, "history", seconds, progress, notes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if found.outcome == "unavailable":
        raise WorkerError("; ".join(notes))
    return found


def _salvage(case: Case, folder: Path, progress: Progress) -> salvage.Salvaged:
    namespace = case.namespace or {}
    names = salvage.reached(frames.body(case.cell.source), namespace)
    with contextlib.suppress(Exception):  # of a module or dictionary of the user's own making
        names = salvage.with_copies(namespace, names)
    if names:
        progress(f"saving {len(names)} variable{'s' if len(names) > 1 else ''}")
    saved = salvage.write(
        folder / "capsule",
        namespace,
        names,
        integer_copies=case.integers,
        seconds=settings().salvage_seconds,
        max_bytes=settings().salvage_bytes,
    )
    if case.rng is not None:
        (folder / "rng.pickle").write_bytes(
            pickle.dumps((case.rng, dict(case.generators), case.patches))
        )
    return saved


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
        crash = crash_of(sighting, this, None, frames.Cells(sources))
    earlier = tuple(s for s in sources if s.cell is not None and s.cell < index)
    case = Case(
        cell=this,
        sources=sources,
        earlier=earlier,
        crash=crash,
        cwd=str(cwd),
        doubts=(REBUILT,) if earlier else ("a saved notebook does not hold the cell's variables",),
        environment=_environment(notebook),
    )
    return diagnose(
        case,
        engine=engine,
        seconds=seconds if seconds is not None else settings().asked_seconds,
    )


def _environment(notebook: Any) -> Environment:
    """This process's; the device is the simulated one where the notebook shows that it was."""
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    simulated = any(
        "load_ext nb_assertdoc.simulated_gpu" in c.source or SIMULATED in str(c.get("outputs"))
        for c in cells
    )
    here = environment_now()
    return msgspec.structs.replace(here, devices=(SIMULATED,)) if simulated else here
