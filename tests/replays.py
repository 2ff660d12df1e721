"""Replays without a host notebook: an order for a worker kernel, and what came of it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nb_assertdoc import replay
from nb_assertdoc.model import Evidence, Observed, Order, Source, from_json

PATIENT = 90.0  # seconds: what is slow here is the machine


def order(cell: str, **options: Any) -> Order:
    """An order to replay one cell; `history` holds the text of earlier cells."""
    earlier = tuple(
        Source(filename=f"<earlier {n}>", source=textwrap.dedent(text), execution_count=n)
        for n, text in enumerate(options.pop("history", ()), 1)
    )
    source = Source(
        filename="<the cell>", source=textwrap.dedent(cell), execution_count=len(earlier) + 1
    )
    given = {"engine": "ghost", "real_floats": False, "seconds": PATIENT, **options}
    return Order(cell=source, history=earlier, **given)


def run(cell: str, folder: Path, *, memory_bytes: int | None = None, **options: Any) -> Evidence:
    """Replay one cell in a fresh worker; `options` are those of `order`."""
    folder.mkdir(exist_ok=True)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    wanted = order(cell, cwd=str(home), **options)
    return replay.run(wanted, folder, memory_bytes=memory_bytes)


@dataclass(frozen=True)
class Snippet:
    """What one of many snippets did in a shared worker."""

    error: str  # the traceback of what it raised
    observed: tuple[Observed, ...]
    decisions: tuple[str, ...]  # places where a made-up value decided a branch
    said: Any  # what it left in the variable `said`
    differences: tuple[str, ...]
    unchecked: tuple[str, ...]  # operators whose index was not computed

    @property
    def faults(self) -> list[tuple[str, tuple[Any, ...], int]]:
        """Operator, bad values and line of each fault."""
        found = [o.finding for o in self.observed]
        return [(f.op, f.bad_values, f.location.line) for f in found]


# Runs in the worker: a fault would end it, so each snippet's evidence is taken and forgotten.
_EACH = """
import json, traceback
from nb_assertdoc.model import to_json
from nb_assertdoc.worker import entry

results = {}

class Left(BaseException):
    pass

def leave(*args):
    raise Left

entry._run._leave = leave  # after a fault's loop: the end of a snippet, not of the worker

def one(name, text):
    run = entry._run
    space, error = {"__name__": "__main__"}, ""
    try:
        exec(compile(text, f"<snippet {name}>", "exec"), space)
    except Left:
        run.loops.start()  # what a trace function raises ends the tracing
    except Exception:
        error = traceback.format_exc()
    run.write("clean")
    evidence = json.loads((run.folder / "evidence.json").read_bytes())
    results[name] = {"raised": error, "said": space.get("said"), **evidence}
    run.observed.clear()
    run.differences.clear()
    run._fault_at = run._fault_step = run.chance = None
    if run.decisions is not None:
        run.decisions.places.clear()
        run.decisions.leak = None
    run.checker.reset()

# a comprehension: it is no loop of the cell
[one(name, text) for name, text in json.loads(open(SNIPPETS).read()).items()]
del entry._run._leave
with open(RESULTS, "w") as file:
    json.dump(results, file)
"""


def run_each(snippets: Mapping[str, str], folder: Path, **options: Any) -> dict[str, Snippet]:
    """Run snippets one after the other in one worker, each in a namespace of its own."""
    folder.mkdir(exist_ok=True)
    texts = {name: textwrap.dedent(text) for name, text in snippets.items()}
    asked, answered = folder / "snippets.json", folder / "results.json"
    asked.write_text(json.dumps(texts))
    cell = f"SNIPPETS, RESULTS = {str(asked)!r}, {str(answered)!r}\n{_EACH}"
    sources = tuple(Source(filename=f"<snippet {n}>", source=t) for n, t in texts.items())
    evidence = run(cell, folder, sources=sources, **options)
    assert evidence.outcome == "clean", evidence
    found = {}
    for name, result in json.loads(answered.read_text()).items():
        part = from_json(json.dumps(result), Evidence)
        found[name] = Snippet(
            error=result["raised"],
            observed=part.observed,
            decisions=part.decisions,
            said=result["said"],
            differences=part.differences,
            unchecked=part.ghost_operators,
        )
    return found
