"""`%assertdoc verify`: the failing batch once more on the CPU, with the code after the fix."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from .. import frames, history, replay, salvage, session
from ..errors import UsageError, WorkerError
from ..model import Evidence, Finding, LoaderPlan, Order, Report, Source, from_json, to_json
from ..session.stored import PYTHON
from ..settings import settings
from .assembly import assemble
from .attempts import Attempt, StoredReplay, above, alike, choose, name_of, of_fix, without_ours
from .case import Case, check_code, check_torch
from .keeping import REPLAY, AwaitedFix, KeptReplay
from .memory import free_memory
from .steps import verified_steps

_replaced = msgspec.structs.replace


def verify(
    name: str,
    report: Report | None,
    *,
    source: str | None = None,
    later: Sequence[Source] = (),
    reruns: Sequence[Source] = (),
    stopped: Sequence[Source] = (),
    same_kernel: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run the failing cell of the room `name` again, on its batch, with the code as it is now.

    Args:
        report: the crash's report, whose fixes are suggested.
        source: an edited cell; default: what `later` changed, else the first fix with an edit.
        later: executions since the crash that succeeded.
        reruns: executions since the crash; of the failing cell among them the newest form is taken.
        stopped: executions since the crash that failed because the GPU is dead: edits all the same.
        same_kernel: `later` ran in the kernel that crashed, whose state they went on from.
        progress: told what is verified, and how far it is.

    Raises `UsageError` where nothing is stored or there is nothing to verify, `NothingToReplay` for
    a source without code.
    """
    check_torch()
    kept = _kept(name)
    since = [without_ours(each) for each in (later, reruns, stopped)]
    attempt = choose(kept, report, source, *since, same_kernel=same_kernel)
    check_code(attempt.cell.source)
    progress(f"verifying {attempt.words}")
    wanted = report.finding.op if report is not None and report.finding is not None else None
    tries, notes = _run(kept, attempt, wanted, progress)
    case = Case(cell=attempt.cell, sources=kept.order.sources, cwd=kept.order.cwd)
    found = _told(assemble(case, tries), tries, attempt, kept, report, notes)
    steps = verified_steps(passed=found.confidence == "clean", same_kernel=same_kernel)
    found = _replaced(found, next_steps=steps)
    if found.confidence == "clean":
        _await(name, attempt)
    return found


def suggested(name: str, report: Report) -> str:
    """The cell to be verified, with the first suggested edit made, for the user to change.

    Raises `UsageError` where nothing is stored under the room's name.
    """
    kept = _kept(name)
    for attempt in filter(None, (of_fix(kept, fix) for fix in report.fixes)):
        return next(iter(attempt.edits.values()), attempt.cell.source)
    return kept.order.cell.source


def _kept(name: str) -> StoredReplay:
    folder = session.folder() / name / REPLAY
    try:
        about = from_json((folder / "kept.json").read_bytes(), KeptReplay)
        order = from_json((folder / "order.json").read_bytes(), Order)
        written = (folder / "kept.json").stat().st_mtime
    except (OSError, msgspec.MsgspecError):
        raise UsageError(
            "no failing replay is stored for this notebook: it is kept when the fault of a crash "
            "was found, until `%assertdoc forget` or AssertDoc.keep_days"
        ) from None
    if about.python != PYTHON:
        raise UsageError(
            f"stored by {about.python}, and this kernel runs {PYTHON}: choose that one"
        )
    return StoredReplay(folder, order, about.earlier, about.iteration, written)


# ---- running it


def _run(
    kept: StoredReplay, attempt: Attempt, wanted: str | None, progress: Callable[[str], None]
) -> tuple[list[Evidence], list[str]]:
    """The replays: on the recorded batches; where their loop is not met, from its start.

    Real floats are computed where the operator `wanted` could not be checked without them.
    """
    tries: list[Evidence] = []
    notes: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="nb_assertdoc-"))

    def run(order: Order) -> Evidence:
        memory = settings().worker_bytes or free_memory()
        return replay.run(order, folder, memory_bytes=memory, progress=progress)

    try:
        order = _order(kept, attempt, folder)
        tries.append(run(order))
        plan = order.loader
        if tries[-1].outcome == "clean" and plan is not None and not tries[-1].loop:
            order = _replaced(order, loader=None, other_loaders=())
            told = "the loop over the data is another one now: it was run from its start"
            tries[:] = [_differing(run(order), told)]
        elif tries[-1].loop == "anew":
            told = "the data set has another length now: the loop was run from its start"
            tries[-1] = _differing(tries[-1], told)
        if not order.real_floats and _unchecked(tries[-1], wanted):
            order = _replaced(order, engine="cpu", real_floats=True)
            tries.append(run(order))
    except KeyboardInterrupt:
        notes.append("the replay was interrupted")
        tries.append(replay.interrupted(folder, kept.order.engine))
    except WorkerError as error:
        notes.append(str(error))
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"the stored replay cannot be used: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tries, notes


def _differing(evidence: Evidence, told: str) -> Evidence:
    return _replaced(evidence, differences=(*evidence.differences, told))


def _unchecked(evidence: Evidence, wanted: str | None) -> bool:
    """A clean replay that did not see the values which the fault was about."""
    return evidence.outcome == "clean" and wanted in evidence.ghost_operators


def _order(kept: StoredReplay, attempt: Attempt, folder: Path) -> Order:
    """The kept order with the new code, in a folder that reads the kept files."""
    order = kept.order
    for name in ("rng.pickle", "random.pickle", "loader.pickle"):
        if (kept.folder / name).is_file():
            shutil.copy(kept.folder / name, folder / name)
    capsule, variables = kept.folder / "capsule", kept.folder.parent / "variables"
    past = [
        _replaced(s, source=attempt.edits[i], above=above(attempt.edits[i]))
        if i in attempt.edits
        else s
        for i, s in enumerate(kept.earlier)
    ]
    sequence = [*past, *attempt.later]
    changed = {*attempt.edits, *range(len(past), len(sequence))}
    rebound: set[str] = set()
    if not capsule.is_dir():  # all of it is made by running cells again
        chosen = {i for i, s in enumerate(kept.earlier) if s in order.history} | changed
    else:
        have = set(salvage.names_in(capsule))
        os.symlink(capsule, folder / "capsule")
        bound = history.bound_first(order.cell.source)
        chosen = history.with_dependents(sequence, changed, have - bound)
        touched = {n for i in chosen for n in _all_names(sequence[i])}
        asked = _new_names(order.cell, attempt.cell) - have
        with contextlib.suppress(OSError):
            stored = set(salvage.names_in(variables))
            if asked & stored or (changed and (touched & stored) - have):
                os.symlink(variables, folder / "variables")
                writes = history.names_of(order.cell.source).writes
                rebound = have & writes if changed else set(have)
                have |= stored
        for name in asked - have:
            makers = [i for i, s in enumerate(past) if name in history.names_of(s.source).writes]
            chosen |= set(makers[-1:])
        chosen = history.with_makers(sequence, chosen, have, len(past))
    run_again = tuple(sequence[i] for i in sorted(chosen))
    renamed = [(s, past[i].source) for i, s in enumerate(kept.earlier) if i in attempt.edits]
    renamed.append((order.cell, attempt.cell.source))
    bodies, plans = _moved(order, renamed, attempt.later)
    if plans and kept.iteration is not None:
        must = plans[0].first + plans[0].count - kept.iteration
        plans[0] = _replaced(plans[0], must_run=max(0, min(plans[0].count, must)))
    return _replaced(
        order,
        cell=attempt.cell,
        history=run_again,
        sources=(*order.sources, *bodies),
        loader=plans[0] if plans else None,
        other_loaders=tuple(plans[1:]),
        rebound=tuple(sorted(rebound)),
        max_steps=None,
        seconds=settings().asked_seconds,
    )


def _new_names(old: Source, new: Source) -> set[str]:
    """The names that an edited cell needs, and the cell before the edit did not."""
    reads = history.names_of(new.source).reads - history.bound_first(new.source)
    return reads - history.names_of(old.source).reads


def _all_names(source: Source) -> set[str]:
    names = history.names_of(source.source)
    return names.reads | names.writes | names.changes


def _moved(
    order: Order, edited: Sequence[tuple[Source, str]], later: Sequence[Source]
) -> tuple[list[Source], list[LoaderPlan]]:
    """The loader plans' loops at their lines in the new code; the new bodies of cell magics."""
    moves: dict[str, tuple[str, str]] = {}  # file name -> old text, new text
    bodies = []
    for old, text in edited:
        moves[old.filename] = old.source, text
        for part in order.sources:
            inside = part.source != old.source and part.source.strip() in old.source
            if inside and part.execution_count == old.execution_count and text.startswith("%%"):
                body = text.partition("\n")[2]
                moves[part.filename] = part.source, body
                bodies.append(_replaced(part, source=body))
    texts = {s.filename: s.source for s in order.sources}
    plans = [order.loader, *order.other_loaders] if order.loader is not None else []
    keys = [_moved_key(plan.key, moves, texts, later) for plan in plans]
    return bodies, [_replaced(p, key=k, edited=True) for p, k in zip(plans, keys, strict=True)]


def _moved_key(
    key: str,
    moves: Mapping[str, tuple[str, str]],
    texts: Mapping[str, str],
    later: Sequence[Source],
) -> str:
    """A loop's key (see `frames.loader_key`) with the lines of the new code.

    An edited cell keeps its file name. A loop within a function moves to the later execution that
    defines it anew.
    """
    data, _, site = key.partition(" @ ")
    steps = []
    for step in site.split(" < "):
        file, function, line = step.rsplit(":", 2)
        defining = [s for s in later if re.search(rf"\bdef {re.escape(function)}\b", s.source)]
        if file in moves:
            line = str(_line(*moves[file], int(line)))
        elif defining and file in texts:
            line = str(_line(texts[file], defining[-1].source, int(line)))
            file = defining[-1].filename
        steps.append(f"{file}:{function}:{line}")
    return f"{data} @ {' < '.join(steps)}"


def _line(old: str, new: str, number: int) -> int:
    """Where line `number` of `old` is in `new`; both count as IPython does."""
    before, after = (frames.unpadded(text)[0].splitlines() for text in (old, new))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for _, start, end, first, last in matcher.get_opcodes():
        if start <= number - 1 < end:
            return min(first + (number - 1 - start), max(last - 1, first)) + 1
    return number


# ---- the answer


def _told(
    found: Report,
    tries: Sequence[Evidence],
    attempt: Attempt,
    kept: StoredReplay,
    report: Report | None,
    notes: Sequence[str],
) -> Report:
    crash = report.finding if report is not None else None
    confidence, last = found.confidence, tries[-1] if tries else None
    if found.finding is not None:
        headline = f"{_compared(found.finding, crash)}: {found.headline}"
    elif last is None:
        confidence, headline = "not_found", f"Not verified: {' '.join(notes)}"
    elif why := _doubt(last, crash, notes):
        confidence, headline = "not_found", f"Not verified: {why}"
    else:
        headline = f"The fix holds: {_passes(last, kept)}"
    word = "Verified" if confidence == "clean" else "Tried"
    headline = f"{headline.rstrip('. ')}. {word}: {attempt.words}."
    return _replaced(found, confidence=confidence, headline=headline)


def _doubt(last: Evidence, crash: Finding | None, notes: Sequence[str]) -> str | None:
    """Why a replay without a finding is no proof; None: it is one."""
    if last.error is not None and last.outcome != "stopped":
        return f"the replay ended with {last.error.type}: {last.error.message[:160]}"
    if last.outcome != "clean":
        return next(iter((*notes, *last.differences)), "the replay was stopped")[:300]
    if last.loop == "left":
        return "the loop ended before the failing batch"
    if not last.checks.calls or _unchecked(last, crash.op if crash is not None else None):
        return "the cell ran, but the call that failed was not checked"
    return None


def _compared(finding: Finding, crash: Finding | None) -> str:
    """The fault after the fix beside that of the crash."""
    if crash is None:
        return "A fault"
    here, there = ((f.op, f.argument, f.module) for f in (finding, crash))
    if here != there:
        return "The next fault"
    same = finding.bad_values == crash.bad_values
    return "The fault is still there" if same else "Still out of range"


def _passes(last: Evidence, kept: StoredReplay) -> str:
    """ "the failing batch passes on the CPU, 12 calls checked"."""
    calls = f"{last.checks.calls:,} call{'' if last.checks.calls == 1 else 's'} checked"
    if kept.order.loader is None:
        return f"the failing cell passes on the CPU, {calls}"
    if last.loop != "recorded":
        return f"the loop passes from its start on the CPU, {last.steps or 0} batches, {calls}"
    return f"the failing batch passes on the CPU, {calls}"


def _await(name: str, attempt: Attempt) -> None:
    """Note what passed: its success on the GPU confirms the fix."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        path = session.folder() / name / session.FIX
        fix = from_json(path.read_bytes(), AwaitedFix)
        passed = tuple(dict.fromkeys((*fix.verified, attempt.cell.source)))
        session.write(path, to_json(_replaced(fix, verified=passed)))


def confirmation(name: str, execution: Source, settle: Callable[[], object]) -> str | None:
    """One line, once, where `execution` is the fixed cell: it has ended well on the GPU.

    `settle` waits for the GPU, and raises where a kernel of the cell failed after all.
    """
    path = session.folder() / name / session.FIX
    try:
        fix = from_json(path.read_bytes(), AwaitedFix)
    except (OSError, msgspec.MsgspecError):
        return None
    same = execution.cell_id is not None and execution.cell_id == fix.cell_id
    same = same and alike(fix.source, execution.source)
    sources = {s.strip() for s in (fix.source, *fix.verified)}
    if not same and execution.source.strip() not in sources:
        return None
    try:
        settle()
    except Exception:  # the next cell will tell
        return None
    path.unlink(missing_ok=True)
    return f'{name_of(execution)} finished on the GPU: the fix of "{fix.title}" holds.'
