"""The whole flow, from the error to the restored variables, in words with times.

    python -m benchmarks.recording            in a kernel of this environment
    python -m benchmarks.recording --lab      in JupyterLab in headless Chromium (extra `browser`)

Prints Markdown; docs/recording.md holds one recording of each.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import nbformat

from benchmarks.late_step import Arrivals
from tests.kernels import ROOT, Kernel

EXAMPLE = ROOT / "example_notebooks" / "labels_from_one.ipynb"
FAILING = 4  # the cell of the example that fails
FRONT_END = "__vsc_ipynb_file__ = 'labels_from_one.ipynb'"  # a headless run keeps nothing


class Recording:
    """Rows of a table: what was done, what was seen, when."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def row(self, what: str, seen: str, seconds: float | None = None) -> None:
        """`seconds`: since the error; default: since the recording began."""
        at = time.perf_counter() - self._began if seconds is None else seconds
        print(f"| {at:.1f} s | {what} | {seen.replace('|', ' ')} |", flush=True)

    def start(self) -> None:
        """From here on time is counted."""
        self._began = time.perf_counter()


def heading(where: str) -> None:
    names = ("torch", "ipython", "ipykernel", "ipywidgets")
    print(f"## {where}\n")
    print("Python", sys.version.split()[0], *(f"· {name} {version(name)}" for name in names), "\n")
    print("| since the cell began | done | seen |\n|---|---|---|")


def in_kernel() -> None:
    """The magics, as a person types them."""
    heading("In a kernel")
    notebook = nbformat.read(EXAMPLE, 4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    failing = next(s for s in sources if s == notebook.cells[FAILING].source)
    with Kernel(simulated_gpu=True, extension=True, setup=FRONT_END, settings={}) as kernel:
        for source in sources[: sources.index(failing)]:
            kernel.run(source)
        made = Recording()
        arrivals = Arrivals()
        outcome = kernel.run(failing, on_message=arrivals)
        at = arrivals.seconds
        made.row("run the cell", f"the error: {outcome.error['ename']}", at["error"])
        made.row("", "the card: the data is out of range, restart the kernel", at["card"])
        made.row("", f"the report: {outcome.report['headline']}", at["report"])
        made.row("", "the cell ends; the variables are kept")
        for command in ("%assertdoc verify", "%assertdoc scan"):
            outcome = kernel.run(command)
            made.row(f"`{command}`", _first(outcome.text))
        kernel.restart()
        made.row("restart", "the kernel is back")
        kernel.run(FRONT_END, store_history=False)
        kernel.run("%load_ext nb_assertdoc.simulated_gpu", store_history=False)
        for command in ("%load_ext nb_assertdoc", "%assertdoc restore"):
            made.row(f"`{command}`", _first(kernel.run(command).text))


def _first(text: str) -> str:
    """The first lines that are an answer, as one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [x for x in lines if " verifying " not in x and not x.startswith("CPU replay")]
    return " ".join(said[:2])[:200]


def in_lab() -> None:
    """The page and its controls, by the steps of the browser test."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "browser")]
    import test_jupyterlab as steps
    from lab import PATIENCE, Lab, browser

    heading("In JupyterLab")
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        folder = Path(name)
        shutil.copy(EXAMPLE, folder / "labels.ipynb")
        with Lab(folder) as lab:
            page = chromium.new_page(viewport={"width": 1000, "height": 1700}, color_scheme="light")
            page.set_default_timeout(PATIENCE)
            notebook = lab.open(page, "labels.ipynb")
            notebook.command("application:toggle-left-area")
            made = Recording()
            notebook.start("notebook:run-all-cells")
            cell = notebook.cell(FAILING)
            cell.locator(".jp-RenderedText", has_text="device-side assert").first.wait_for()
            made.row("run all cells", "the traceback of the failing cell")
            acts: tuple[tuple[str, str, Callable[[], None]], ...] = (
                ("", "the card", lambda: steps.sees_the_card(cell)),
                ("", "the report in its place", lambda: steps.sees_the_report(cell)),
                (
                    "scan, then verify a wrong fix and the right one, by the buttons",
                    "64 of 320 labels; still out of range; the failing batch passes",
                    lambda: steps.scans_and_verifies(cell),
                ),
                (
                    "restart by the button",
                    "what is lost and kept, then the kernel is back",
                    lambda: steps.restarts(notebook, cell),
                ),
                (
                    "`%load_ext`, `%assertdoc report`, `%assertdoc restore`",
                    "variables wait; the report again; they are back",
                    lambda: steps.gets_the_variables_back(notebook),
                ),
            )
            for what, seen, act in acts:
                act()
                made.row(what, seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lab", action="store_true", help="in JupyterLab, in a browser")
    in_lab() if parser.parse_args().lab else in_kernel()


if __name__ == "__main__":
    main()
