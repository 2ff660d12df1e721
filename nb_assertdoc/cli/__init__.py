"""The command `nb-assertdoc`: diagnose notebooks from a terminal.

Imports wait for the command that needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nb_assertdoc import __version__
from nb_assertdoc.errors import (
    AssertdocError,
    NotebookError,
    NothingToReplay,
    UsageError,
    did_you_mean,
)

from . import outputs

if TYPE_CHECKING:
    from nb_assertdoc.model import Report

OK, FAILED, USAGE, DIAGNOSED, NOT_FOUND = 0, 1, 2, 3, 4
EXIT_CODES = (
    "Exit codes: 0 no assert; 3 an assert, diagnosed; 4 an assert whose cause was not found; "
    "1 the notebook failed otherwise; 2 a wrong argument or input. "
    "demo: 0 the diagnosis is the right one; 1 it is not. "
    "check: 0 nothing suspicious was found; 1 something was."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. `argv` defaults to the process's arguments."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # "?" for what the terminal cannot show
            stream.reconfigure(errors="replace")
    try:
        options = _parser().parse_args(argv)
        code: int = options.command(options)
        return code
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (UsageError, NotebookError, NothingToReplay) as error:
        return _say(f"error: {error}", USAGE)
    except AssertdocError as error:
        return _say(f"error: {error}", FAILED)


def _say(message: str, code: int) -> int:
    print("nb-assertdoc:", " ".join(message.split()), file=sys.stderr)
    return code


# ---- commands


def _run(options: argparse.Namespace) -> int:
    from . import notebooks

    notebook = notebooks.read(options.notebook)
    folder = _folder(options)
    if options.cell is not None:
        notebooks.check_cell(notebook, options.cell)
    outputs.check(options)

    from .execution import execute

    result = execute(
        notebook,
        folder,
        kernel=options.kernel,
        simulated_gpu=options.simulated_gpu,
        launch_blocking=options.launch_blocking,
        last=options.cell,
        engine=options.engine,
        seconds=options.timeout,
        progress=_progress(),
    )
    _write_notebook(notebook, options)
    if result.report is not None:
        return _deliver(result.report, options)
    if result.problem is None:
        print("No device-side assert: every cell ran.")
        return OK

    from nb_assertdoc.detector import recognise_text

    if recognise_text(result.problem) is not None:
        return _say(f"a device-side assert without a report: {result.problem}", NOT_FOUND)
    from nb_assertdoc.catalogue import CPU_ERROR

    hint = ""
    if CPU_ERROR.search(result.problem):
        more = "" if options.simulated_gpu else "`nb-assertdoc run --simulated-gpu`, or "
        hint = f"; {more}`%cpu_replay` in the notebook, names the value, its place and the cause"
    return _say(f"the notebook failed: {result.problem}{hint}", FAILED)


def _progress() -> Callable[[str], None]:
    """Shows one line on standard error while a command works, where a person looks at it."""

    def show(line: str) -> None:
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else lambda line: None


def _demo(options: argparse.Namespace) -> int:
    outputs.check(options)

    from . import demo
    from .execution import execute

    with tempfile.TemporaryDirectory(prefix="nb-assertdoc-demo-") as folder:
        result = execute(demo.notebook(), Path(folder), simulated_gpu=True, progress=_progress())
    if result.report is None:
        return _say(f"the demo made no report: {result.problem or 'no cell failed'}", FAILED)
    if options.report is None:
        options.report = Path(tempfile.mkdtemp(prefix="nb-assertdoc-")) / "report.json"
    if options.html is None:
        options.html = options.report.with_suffix(".html")
    _deliver(result.report, options)
    print(f"\nSaved: {options.report} and {options.html}")
    if demo.is_right(result.report):
        return OK
    return _say("the demo's diagnosis is not the right one", FAILED)


def _diagnose(options: argparse.Namespace) -> int:
    from . import notebooks

    notebook = notebooks.read(options.notebook)
    folder = _folder(options)
    if options.cell is None:
        failing, others = notebooks.failing_cell(notebook)
        if failing is None:
            none = f"no device-side assert in the saved outputs of {options.notebook}"
            hint = "--cell N replays cell N all the same"
            if others:
                return _say(f"{none}, other errors: {'; '.join(others)}; {hint}", FAILED)
            print(f"{none.capitalize()}, no error at all; {hint}.")
            return OK
        index = failing
    else:
        index = options.cell
        notebooks.check_cell(notebook, index, code=True)
    outputs.check(options)

    from nb_assertdoc import doctor
    from nb_assertdoc.report import bundle

    report = doctor.diagnose_saved(
        notebook_path=options.notebook,
        notebook=notebook,
        index=index,
        cwd=folder,
        engine=options.engine,
        seconds=options.timeout,
    )
    notebooks.add_display(notebook, index, bundle(report, live=False))
    _write_notebook(notebook, options)
    return _deliver(report, options)


def _explain(options: argparse.Namespace) -> int:
    from nb_assertdoc.diagnosis import explain

    text = sys.stdin.read() if options.text == ["-"] else " ".join(options.text)
    print(explain(text))
    return OK


def _autoload(options: argparse.Namespace) -> int:
    from . import autoload

    option = f"--{'profile' if options.profile is not None else options.where}"
    path = autoload.place(option, options.profile).path
    again = "" if option == "--sys-prefix" else f" {option}"
    again += f" {options.profile}" if options.profile is not None else ""
    if options.on:
        changed = autoload.enable(path)
        print(f"{'On' if changed else 'On already'}: new kernels that read {path} load the")
        print(f"extension by themselves. `nb-assertdoc disable{again}` takes it back.")
        print("Kernels that run now stay as they are.")
        if autoload.is_switched_off(path):
            print("But AssertDoc.enabled is false in that file: nothing will be watched.")
    elif autoload.disable(path):
        print(f"Off: {path} no longer loads the extension. Kernels that run now stay as they are.")
    else:
        print(f"Off already: {path} does not load the extension.")
    for place in autoload.places() if not options.on else []:
        with contextlib.suppress(UsageError):
            if autoload.is_on(place.path):
                print(f"Still on by {place.path}.")
    return OK


def _check(options: argparse.Namespace) -> int:
    from . import check

    items = check.check()
    print(check.text(items))
    return FAILED if check.suspicious(items) else OK


# ---- arguments


class _Parser(argparse.ArgumentParser):
    """Answers a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{did_you_mean(message)} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nb-assertdoc",
        description="Find the line, the value and the cause behind a CUDA device-side assert.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = _command(commands, "demo", _demo, "Diagnose a small built-in notebook, without a GPU.")
    _add_outputs(demo)

    run = _command(commands, "run", _run, "Execute a notebook; diagnose the assert that stops it.")
    _add_notebook(run)
    run.add_argument("-k", "--kernel", metavar="NAME", help="kernel name (default: this Python)")
    run.add_argument(
        "--simulated-gpu", action="store_true", help="pretend that this machine has a GPU"
    )
    run.add_argument(
        "--launch-blocking",
        action="store_true",
        help="run CUDA synchronously: slow, and the traceback names the true line",
    )
    run.add_argument("--cell", type=int, metavar="N", help="stop after cell N (0-based)")
    _add_replay(run, "most seconds for one cell, its diagnosis included")
    _add_outputs(run)

    diagnose = _command(
        commands, "diagnose", _diagnose, "Diagnose a saved notebook that holds the error."
    )
    _add_notebook(diagnose)
    diagnose.add_argument(
        "--simulated-gpu",
        action="store_true",
        help="as in run; changes nothing here, since a replay always simulates the GPU",
    )
    diagnose.add_argument(
        "--cell", type=int, metavar="N", help="the failing cell (0-based; default: the saved error)"
    )
    _add_replay(diagnose, "most seconds for the replay")
    _add_outputs(diagnose)

    explain = _command(
        commands, "explain", _explain, "Explain an error text, an assert line or a cause in words."
    )
    explain.add_argument("text", nargs="*", metavar="TEXT", help="the text; -: standard input")

    _add_autoload(commands, "enable", "Load the extension in every new kernel by itself.")
    _add_autoload(commands, "disable", "Take back what enable did, to the byte.")

    check = _command(
        commands,
        "check",
        _check,
        "Is it the hardware? Versions, driver, Xid and ECC errors, hooks.",
    )
    check.epilog = "Exit codes: 0 nothing suspicious was found; 1 something was, marked (!)."
    return parser


def _command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(command=function, notebook=None, output=None, inplace=False)
    return parser


def _add_autoload(commands: Any, name: str, summary: str) -> None:
    parser = _command(commands, name, _autoload, summary)
    parser.set_defaults(on=name == "enable", where="sys-prefix")
    where = parser.add_mutually_exclusive_group()
    for option, words in (
        ("sys-prefix", "kernels of this Python environment (the default)"),
        ("user", "your kernels, of every environment: IPython's default profile"),
        ("system", "kernels of every user of this machine"),
    ):
        where.add_argument(
            f"--{option}", dest="where", action="store_const", const=option, help=words
        )
    where.add_argument("--profile", metavar="NAME", help="kernels with this IPython profile")
    parser.epilog = "Exit codes: 0 done, or done already; 2 a wrong option, or a file in the way."


def _add_notebook(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXIT_CODES
    parser.add_argument("notebook", type=Path, metavar="NB.ipynb", help="the notebook")
    parser.add_argument(
        "--cwd", type=Path, metavar="DIR", help="working directory (default: the notebook's folder)"
    )
    written = parser.add_mutually_exclusive_group()
    written.add_argument(
        "--output", type=Path, metavar="OUT.ipynb", help="write the notebook with its outputs here"
    )
    written.add_argument(
        "--inplace", action="store_true", help="write the outputs into the notebook itself"
    )


def _add_replay(parser: argparse.ArgumentParser, timeout: str) -> None:
    from nb_assertdoc.model import ENGINES

    parser.add_argument("--engine", choices=ENGINES, help="how to replay (default: as needed)")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help=timeout)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", type=Path, metavar="R.json", help="write the report as JSON")
    parser.add_argument("--html", type=Path, metavar="R.html", help="write the report as HTML")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _folder(options: argparse.Namespace) -> Path:
    folder: Path = options.notebook.parent if options.cwd is None else options.cwd
    if not folder.is_dir():
        raise UsageError(f"--cwd {folder}: there is no such folder")
    return folder.resolve()


# ---- what is written


def _write_notebook(notebook: Any, options: argparse.Namespace) -> None:
    path = options.notebook if options.inplace else options.output
    if path is not None:
        from . import notebooks

        outputs.write(path, notebooks.to_text(notebook))


def _deliver(report: Report, options: argparse.Namespace) -> int:
    """Print the report, write the files that were asked for; returns the exit code."""
    from nb_assertdoc import model
    from nb_assertdoc.report import html, text

    if options.report is not None:
        outputs.write(options.report, model.to_json(report).decode() + "\n")
    if options.html is not None:
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>nb-assertdoc</title>'
        outputs.write(options.html, f"{head}<body>{html(report, live=False)}</body></html>\n")
    print(text(report, live=False), flush=True)
    codes = {"clean": OK, "not_found": NOT_FOUND if report.crash is not None else FAILED}
    return codes.get(report.confidence, DIAGNOSED)
