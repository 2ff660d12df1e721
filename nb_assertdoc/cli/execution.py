"""Execute a notebook in a kernel that has the extension loaded, up to its first failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from nb_assertdoc import model
from nb_assertdoc.errors import UsageError, WorkerError

from .notebooks import name_of

LAUNCH_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}  # before CUDA starts, or it has no effect
# Who runs this command asks for the replay. One expression: it leaves no name in the notebook.
USE_ASKED_BUDGET = (
    "(lambda settings: setattr(settings, 'replay_seconds', settings.asked_seconds))"
    "(__import__('nb_assertdoc.settings', fromlist=['settings']).settings())"
)


@dataclass(frozen=True)
class Result:
    """What stopped the notebook: a crash's report, the failure in words; both None: nothing."""

    report: model.Report | None = None
    problem: str | None = None


def execute(
    notebook: Any,
    folder: Path,
    *,
    kernel: str | None = None,
    simulated_gpu: bool = False,
    launch_blocking: bool = False,
    last: int | None = None,
    engine: str | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """Run the cells of `notebook` in `folder`, and put their outputs into it.

    Args:
        notebook: nbformat's node.
        folder: working directory.
        kernel: name of a kernel, default: this interpreter.
        simulated_gpu: load the simulated GPU first.
        launch_blocking: run CUDA synchronously, so that the traceback names the true line.
        last: index of the last cell to run, default: all.
        engine: replay a crash with this engine too, after the automatic replay.
        seconds: limit for one cell, replays included.
        progress: told one line about what is done now; "" at the end.

    Raises `UsageError` if the kernel is unknown or cannot load the extension, `WorkerError` if it
    does not start or has a version of this package that does not fit.
    """

    async def run(manager: Any, log: IO[bytes]) -> Result:
        from nbclient import NotebookClient

        # `timeout` takes whole seconds only.
        client = NotebookClient(notebook, km=manager, timeout_func=lambda cell: seconds)
        environment = {**os.environ, **(LAUNCH_BLOCKING if launch_blocking else {})}
        async with _started(client, manager, folder, environment, log):
            progress("starting a kernel ...")
            await _load_extensions(client, kernel, simulated_gpu)
            for index, cell in enumerate(notebook.cells[: None if last is None else last + 1]):
                saved = cell.get("outputs")
                progress(f"cell {index} (0 to {len(notebook.cells) - 1}) ...")
                problem = await _execute_cell(client, cell, index)
                if problem is None and cell.get("outputs") is saved:
                    continue  # not executed: not code, empty, or tagged to be skipped
                problem = problem or _error_in(cell, index)
                # A crash that the user's code swallowed leaves a report without an error.
                report = _report_in(cell)
                if report is not None and engine is not None:
                    progress(f"replaying with the engine {engine} ...")
                    report = await _replay_with(client, engine, seconds) or report
                if report is not None or problem is not None:
                    return Result(report, problem)
        return Result()

    with _kernel_manager(kernel) as manager, tempfile.TemporaryFile() as log:
        try:
            return asyncio.run(run(manager, log))
        finally:
            progress("")


@contextlib.asynccontextmanager
async def _started(
    client: Any, manager: Any, folder: Path, environment: dict[str, str], log: IO[bytes]
) -> AsyncIterator[None]:
    """`client`'s kernel, started, and shut down at the end.

    A kernel sends what cells write, and copies what libraries write to its own standard output and
    error, too: that copy goes to `log`.
    """
    setup = client.async_setup_kernel(
        cleanup_kc=True, cwd=str(folder), env=environment, stdout=log, stderr=log
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(setup)
        except (OSError, RuntimeError, TimeoutError) as error:
            client.km = client.km or manager  # nbclient's exit handler fails without one
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
            raise WorkerError(
                f"the kernel does not start: {error}; its last line was: {said[-1]}"
            ) from error
        yield


async def _load_extensions(client: Any, kernel: str | None, simulated_gpu: bool) -> None:
    from nbclient.exceptions import CellExecutionError

    try:
        if simulated_gpu:
            await _execute_aside(client, "%load_ext nb_assertdoc.simulated_gpu")
        await _execute_aside(client, "%load_ext nb_assertdoc")
        await _execute_aside(client, USE_ASKED_BUDGET)
    except CellExecutionError as error:
        raise UsageError(
            f"kernel {kernel or sys.executable} cannot load nb_assertdoc: "
            f"{error.ename}: {error.evalue}"
        ) from error


async def _execute_cell(client: Any, cell: Any, index: int) -> str | None:
    """Execute one cell; returns its failure in words."""
    from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError

    if cell.cell_type != "code":
        return None
    try:
        await client.async_execute_cell(cell, index)
    except CellExecutionError as error:
        return f"{name_of(cell, index)}: {error.ename}: {error.evalue}"
    except DeadKernelError:
        return f"{name_of(cell, index)}: the kernel died"
    except CellControlSignal as error:  # a timeout
        return f"{name_of(cell, index)}: {str(error).splitlines()[0]}"
    return None


async def _execute_aside(client: Any, code: str) -> Any:
    """Execute `code` in the kernel, outside the notebook's history, cells and time limit."""
    from nbformat.v4 import new_code_cell, new_notebook

    cell = new_code_cell(code)
    before = client.nb, client.timeout_func
    client.nb, client.timeout_func = new_notebook(cells=[cell]), None
    try:
        return await client.async_execute_cell(cell, 0, store_history=False)
    finally:
        client.nb, client.timeout_func = before


async def _replay_with(client: Any, engine: str, seconds: float | None) -> model.Report | None:
    """What the engine that was asked for finds; None if it made no report."""
    from nbclient.exceptions import CellControlSignal

    limit = "" if seconds is None else f" --timeout {seconds}"
    with contextlib.suppress(CellControlSignal):
        return _report_in(await _execute_aside(client, f"%cpu_replay --engine {engine}{limit}"))
    return None


def _error_in(cell: Any, index: int) -> str | None:
    """An error that the reply left out, as IPython 7 does with those of %%time, %run and reprs."""
    if "raises-exception" in cell.metadata.get("tags", []):
        return None
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if not errors:
        return None
    return f"{name_of(cell, index)}: {errors[0].ename}: {errors[0].evalue}"


def _report_in(cell: Any) -> model.Report | None:
    """The last report of a crash among a cell's outputs."""
    for output in reversed(cell.get("outputs", [])):
        data = output.get("data", {})
        if model.MIME in data:
            try:
                report = model.from_json(json.dumps(data[model.MIME]), model.Report)
            except msgspec.ValidationError as error:
                raise WorkerError(
                    f"this version cannot read the report of the kernel's nb_assertdoc: {error}"
                ) from error
            if report.crash is not None:
                return report
    return None


@contextlib.contextmanager
def _kernel_manager(name: str | None) -> Iterator[Any]:
    """A manager of kernel `name`, or of this interpreter; its sockets are in a private folder."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name="this interpreter", language="python")

    specs = ThisInterpreter() if name is None else KernelSpecManager()
    if name is not None:
        known = sorted(specs.find_kernel_specs())
        if name not in known:
            raise UsageError(
                f"--kernel {name}: no such kernel; known: {', '.join(known) or 'none'}"
            )
        language = specs.get_kernel_spec(name).language
        if language.lower() != "python":
            raise UsageError(f"--kernel {name}: a kernel of {language}; only Python is understood")
    with tempfile.TemporaryDirectory(prefix="nb-assertdoc-") as folder:
        # An absolute path, since the kernel's working directory is another one; and a short one,
        # since the system allows about 100 bytes.
        ipc = os.name == "posix" and len(os.fsencode(folder)) < 80
        yield AsyncKernelManager(
            kernel_name=name or "python3",
            kernel_spec_manager=specs,
            connection_file=f"{folder}/kernel-{uuid.uuid4()}.json",
            **({"transport": "ipc", "ip": f"{folder}/socket"} if ipc else {}),
        )
