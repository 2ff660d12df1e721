"""How long a user waits for the diagnosis, beside its lower limit and beside other ways.

    python -m benchmarks.performance [--only bert] [--output docs/performance.md]

Everything is measured one after the other in one run, and what counts are the ratios. Notebooks
fail on the simulated GPU; the clock runs from the error's arrival at the front end to the report's.
Needs what `pip install -e .[test]` installs; about ten minutes and 8 GB of memory.
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import papermill
import psutil

from benchmarks import hooks
from benchmarks.cases import CASES, LATE_STEPS, SEVEN_BILLION, Case, late
from benchmarks.late_step import Arrivals
from tests.kernels import ROOT, Kernel, Outcome

OUTPUT = ROOT / "docs" / "performance.md"
META = """
import torch.fx.experimental._config as known
known.meta_nonzero_assume_all_nonzero = True  # else a graph's masks stop it
torch.set_default_device("meta")
"""
FAKE = """
from torch._subclasses.fake_tensor import FakeTensorMode
fake = FakeTensorMode()
"""


@dataclass(frozen=True)
class Timing:
    """Seconds of one case."""

    name: str
    diagnosis: float
    floor: float
    fake: float | None  # None: it fails, where a shape hangs on values
    nbclient: float
    papermill: float
    until_step: float  # of the nbclient run, until the loop began
    step: float  # one step of that loop


# ---- the parts


def diagnosis(prepare: Sequence[str], cell: str, found: tuple[str, int, int | None]) -> float:
    """Seconds from the error to the report, which must hold what the case planted."""
    with Kernel(simulated_gpu=True, extension=True) as kernel:
        for text in prepare:
            check(kernel.run(text, timeout=600))
        arrivals = Arrivals()
        outcome = kernel.run(cell, timeout=600, on_message=arrivals)
    finding = outcome.report["finding"] or {}
    step = finding.get("step") or {}
    got = (finding.get("op"), (finding.get("bad_values") or [None])[0], step.get("iteration"))
    if got != found:
        raise SystemExit(f"wrong diagnosis: {got}, expected {found}\n{outcome.text}")
    return arrivals.seconds["report"] - arrivals.seconds["error"]


def bare(imports: str, build: str, step: str) -> float:
    """Seconds that a kernel's start, `import torch`, the imports and one step take."""
    started = time.perf_counter()
    with Kernel() as kernel:
        check(kernel.run(imports))
        seconds = time.perf_counter() - started
        check(kernel.run(build))
        started = time.perf_counter()
        check(kernel.run(step))
        return seconds + time.perf_counter() - started


def floor(case: Case) -> float:
    """What no replay in a fresh kernel can be faster than: one step on tensors without values."""
    build = META + case.model + "\n" + case.batch
    return bare(case.imports, build, case.step)


def fake_mode(case: Case) -> float | None:
    """The same with torch's FakeTensorMode, which would find nothing."""
    build = "fake.__enter__()\n" + case.model + "\n" + case.batch
    try:
        return bare(case.imports + FAKE, build, case.step)
    except SystemExit as error:
        if "DynamicOutputShape" in str(error) or "DataDependent" in str(error):
            return None
        raise


def rerun(case: Case, how: str) -> tuple[float, list[float]]:
    """Seconds of the notebook's run on the CPU until it fails, and when each step began."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text.strip()) for text in case.cells()],
        metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
    )
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "in.ipynb"), Path(folder, "out.ipynb")
        nbformat.write(notebook, path)
        started = time.perf_counter()
        try:
            if how == "papermill":
                papermill.execute_notebook(path, out, progress_bar=False, kernel_name="python3")
            else:
                nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
            raise SystemExit(f"{case.name}: the notebook did not fail on the CPU")
        except (nbclient.exceptions.CellExecutionError, papermill.PapermillExecutionError) as error:
            seconds = time.perf_counter() - started
            if "IndexError" not in str(error) and "out of" not in str(error):
                raise
        if how == "papermill":
            notebook = nbformat.read(out, as_version=4)
    outputs = [o for c in notebook.cells for o in c.get("outputs", [])]
    printed = "".join(o.get("text", "") for o in outputs if o.output_type == "stream")
    return seconds, [float(t) for t in re.findall(r"^step ([\d.]+)", printed, re.MULTILINE)]


def check(outcome: Outcome) -> None:
    """Stop the benchmark where a cell that should work fails."""
    if outcome.error:
        raise SystemExit(outcome.text)


# ---- the measurements


def measure(case: Case) -> Timing:
    """All columns of one case."""
    lowest = floor(case)
    *prepare, cell = case.cells()
    found = diagnosis(prepare, cell, case.found)
    fake = fake_mode(case)
    mine, begun = rerun(case, "nbclient")
    theirs, _ = rerun(case, "papermill")
    steps = [b - a for a, b in itertools.pairwise(begun)]
    step = statistics.median(steps) if steps else 0.0
    until_step = mine - (len(begun) - 1) * step
    timing = Timing(case.name, found, lowest, fake, mine, theirs, until_step, step)
    print(timing, flush=True)
    return timing


def seven_billion() -> tuple[float, int]:
    """Seconds and bytes of the replay of a cell that builds and calls a 7-billion model."""
    with Kernel(extension=True) as kernel:
        started = time.perf_counter()
        outcome = kernel.run("%%cpu_replay\n" + SEVEN_BILLION, timeout=300)
        seconds = time.perf_counter() - started
    finding = outcome.report["finding"] or {}
    if finding.get("bad_values") != [32000] or finding.get("op") != "embedding":
        raise SystemExit(f"wrong diagnosis:\n{outcome.text}")
    peak = outcome.report["replays"][-1]["peak_rss_bytes"]
    print("7 billion", seconds, peak, flush=True)
    return seconds, int(peak)


def growth(rounds: int) -> dict[int, float]:
    """Seconds to the diagnosis by the step that fails, medians of rounds that take turns."""
    found: dict[int, list[float]] = {step: [] for step in LATE_STEPS}
    for _ in range(rounds):
        for step in LATE_STEPS:
            prepare, cell = late(step)
            found[step].append(diagnosis([prepare], cell, ("cross_entropy", 10, step)))
            print("late", step, found[step], flush=True)
    return {step: statistics.median(seconds) for step, seconds in found.items()}


# ---- the page


def page(
    timings: Sequence[Timing],
    seven: tuple[float, int],
    late: dict[int, float],
    cost: hooks.Hooks,
) -> str:
    """docs/performance.md."""
    lines = [
        "# How long the diagnosis takes",
        "",
        "Written by `python -m benchmarks.performance`, which measured it all one after the other",
        "in one run. Only the ratios mean something on another machine; the seconds are for",
        f"orientation, on {machine()}.",
        "",
        "The notebooks fail on the simulated GPU. *Diagnosis* is the time from the error to the",
        "report. *Floor* is what no replay in a fresh kernel can be faster than: a kernel's start,",
        "`import torch`, the notebook's own imports, and one step on tensors without values.",
        "*FakeTensorMode* is the same with torch's own mode for such tensors, which finds nothing,",
        "and fails where a shape hangs on values.",
        "*nbclient* and *papermill* run the notebook on the CPU until it fails.",
        "",
        "| case | diagnosis | / floor | / FakeTensorMode | nbclient / diagnosis "
        "| papermill / diagnosis |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {t.name} | {t.diagnosis:.1f} s | **{t.diagnosis / t.floor:.2f}** ({t.floor:.1f} s) "
        f"| {f'{t.diagnosis / t.fake:.2f} ({t.fake:.1f} s)' if t.fake else 'it fails'} "
        f"| **{t.nbclient / t.diagnosis:.1f}** ({t.nbclient:.0f} s) "
        f"| {t.papermill / t.diagnosis:.1f} ({t.papermill:.0f} s) |"
        for t in timings
    ]
    if timings:
        t = timings[0]
        whole = t.until_step + 400 * t.step
        lines += [
            "",
            f"{t.name.split(',')[0]} failing at step 400: computed, not measured, from "
            f"{t.step:.1f} s for a step on this CPU and {t.until_step:.0f} s before the first, the "
            f"run on the CPU takes **{whole / t.diagnosis:.0f}** times as long as the diagnosis.",
        ]
    seconds, peak = seven
    first = late[min(late)]
    lines += [
        "",
        "## A model larger than the machine's memory",
        "",
        f"A cell with a forward pass of a 7-billion-parameter Llama (27 GB of weights) under "
        f"`%%cpu_replay`, in a kernel without a GPU: {seconds:.1f} s to the report, and at most "
        f"{peak / 1e9:.2f} GB of memory in the replay.",
        "",
        "## The step that fails",
        "",
        "A small model whose bad label comes late: the steps before it are not run again.",
        "",
        f"| failing step | {' | '.join(f'{step:,}' for step in late)} |",
        f"|---|{'---|' * len(late)}",
        f"| diagnosis | {' | '.join(f'{s:.1f} s' for s in late.values())} |",
        f"| / step {min(late)} | {' | '.join(f'{s / first:.2f}' for s in late.values())} |",
        "",
        "## Before anything goes wrong",
        "",
        "Two kernels take turns with the same cell, one without and one with the extension;",
        "medians of the time from the request to the kernel's answer.",
        "",
        hooks.table(cost),
        "",
    ]
    return "\n".join(lines)


def machine() -> str:
    """This machine in words."""
    memory = psutil.virtual_memory().total / 2**30
    names = ("torch", "transformers", "torch_geometric", "ipykernel")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"{os.cpu_count()} {platform.machine()} CPU cores with {memory:.0f} GiB of memory, no GPU, "
        f"Python {platform.python_version()}, {versions}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this; writes no page")
    parser.add_argument("--rounds", type=int, default=5, help="of the late steps (default: 5)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    given = parser.parse_args()
    compileall.compile_dir(ROOT / "nb_assertdoc", quiet=1)  # as pip does with a package
    timings: list[Any] = [measure(c) for c in CASES if given.only.lower() in c.name.lower()]
    if given.only:
        return
    page_of = page(timings, seven_billion(), growth(given.rounds), hooks.measure())
    given.output.write_text(page_of)
    print(given.output.read_text())


if __name__ == "__main__":
    main()
