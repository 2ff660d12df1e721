"""Real kernels for the tests: start one, run cells as a front end does, see all that came back.

with Kernel(simulated_gpu=True, extension=True) as kernel:
    outcome = kernel.run("import torch; torch.ones(3, device='cuda')[[5]].cpu()")
    assert outcome.error["ename"] == "AcceleratorError"
    assert outcome.reports[-1]["finding"]["bad_values"] == [5]
"""

from __future__ import annotations

import ast
import json
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

MIME = "application/vnd.nb-assertdoc.report.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
ROOT = Path(__file__).resolve().parent.parent
PATIENT = {"replay_seconds": 90.0, "salvage_seconds": 30.0}  # what is slow here is the machine
Message = dict[str, Any]


class KernelDied(Exception):
    """The kernel's process ended while a cell ran. `outcome` holds what had arrived by then."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"the kernel died; it had said: {outcome.text!r}")
        self.outcome = outcome


@dataclass
class Outcome:
    """Everything that one execution sent."""

    reply: dict[str, Any] = field(default_factory=dict)  # content of the execute_reply
    error: dict[str, Any] | None = None  # ename, evalue, traceback of the `error` message
    streams: dict[str, str] = field(default_factory=dict)  # stdout, stderr
    displays: list[dict[str, Any]] = field(default_factory=list)  # MIME bundles in their last form
    reports: list[dict[str, Any]] = field(default_factory=list)  # in order of arrival, updates too
    messages: list[Message] = field(default_factory=list)  # iopub, in order
    _shown: dict[str, int] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`ok`, `error` or `aborted`."""
        return str(self.reply.get("status"))

    @property
    def stdout(self) -> str:
        return self.streams.get("stdout", "")

    @property
    def stderr(self) -> str:
        return self.streams.get("stderr", "")

    @property
    def text(self) -> str:
        """What a person reads, in plain text: streams, displays, the traceback."""
        shown = [str(bundle.get("text/plain", "")) for bundle in self.displays]
        traceback = self.error["traceback"] if self.error else []
        return "\n".join([*self.streams.values(), *shown, *traceback])

    @property
    def html(self) -> str:
        return "\n".join(str(bundle.get("text/html", "")) for bundle in self.displays)

    @property
    def report(self) -> dict[str, Any]:
        """The last report, or an assertion that shows what came in its place."""
        assert self.reports, f"no report in:\n{self.text}"
        return self.reports[-1]

    def add(self, message: Message) -> None:
        self.messages.append(message)
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            name = content["name"]
            self.streams[name] = self.streams.get(name, "") + content["text"]
        elif kind == "error":
            self.error = content
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self._display(content["data"], content.get("transient", {}).get("display_id"))

    def _display(self, data: dict[str, Any], display_id: str | None) -> None:
        if MIME in data:
            self.reports.append(data[MIME])
        if display_id in self._shown:
            self.displays[self._shown[display_id]] = data
            return
        if display_id is not None:
            self._shown[display_id] = len(self.displays)
        self.displays.append(data)


class _Manager(KernelManager):
    """Starts ipykernel in one given interpreter, whatever kernelspecs are installed."""

    python = sys.executable

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python (tests)", language="python")


class Kernel:
    """One kernel, in a private folder that is its working directory unless `cwd` is given.

    `settings` are those of `AssertDoc`, read from a config file as a user's would be.
    `simulated_gpu` and `extension` load the two extensions, in the order in which a notebook does;
    `setup` is code that runs before them. All of that runs without history, as front ends' own
    code does, so the first `run` is `In [1]`.
    """

    def __init__(
        self,
        *,
        extension: bool = False,
        simulated_gpu: bool = False,
        setup: str = "",
        cwd: str | Path | None = None,
        settings: Mapping[str, Any] = PATIENT,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        start_timeout: float = 120,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nbk-"))  # sockets' paths must be short
        self.cwd = Path(cwd) if cwd is not None else self.folder / "work"
        self.cwd.mkdir(exist_ok=True)
        self.manager = _Manager(
            transport="ipc",
            ip=str(self.folder / "k"),
            connection_file=str(self.folder / f"{self.folder.name}.json"),  # the kernel's id
        )
        self.manager.python = python
        self.client: Any = None
        profile = self.folder / "ipython" / "profile_default"  # histories of parallel kernels fight
        profile.mkdir(parents=True)
        config = json.dumps({"AssertDoc": dict(settings)})
        (profile / "ipython_kernel_config.json").write_text(config)
        # pytest's mark in the environment stops ipykernel from capturing fd 2.
        inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        private = {"IPYTHONDIR": str(profile.parent)}
        try:
            self.manager.start_kernel(
                cwd=str(self.cwd), env={**inherited, **private, **(env or {})}
            )
            self._connect(start_timeout)
            self._prepare(setup)
            self._prepare("%load_ext nb_assertdoc.simulated_gpu" if simulated_gpu else "")
            self._prepare("%load_ext nb_assertdoc" if extension else "")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, timeout: float) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=timeout)

    def _prepare(self, code: str) -> None:
        if code:
            outcome = self.run(code, store_history=False)
            if outcome.error:
                raise RuntimeError(f"{code!r} failed:\n{outcome.text}")

    @property
    def alive(self) -> bool:
        return bool(self.manager.is_alive())

    def run(
        self,
        code: str,
        *,
        timeout: float = 120,
        store_history: bool = True,
        on_message: Callable[[Message], object] | None = None,
    ) -> Outcome:
        """Run one cell to its end.

        `on_message` sees each iopub message as it arrives, so that a test can interrupt at a known
        moment. Raises `KernelDied`, and `TimeoutError` after an interrupt when `timeout` seconds
        have passed.
        """
        end = time.monotonic() + timeout
        while True:
            (outcome,) = self._collect([self._send(code, store_history)], timeout, on_message)
            # ipykernel 6 still aborts what comes within moments of an error's reply.
            if outcome.status != "aborted" or time.monotonic() > end:
                return outcome

    def run_all(self, codes: Iterable[str], *, timeout: float = 240) -> list[Outcome]:
        """Queue all cells at once, as "Run all" does; cells after an error may be `aborted`."""
        return self._collect([self._send(code, True) for code in codes], timeout, None)

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def restart(self, *, timeout: float = 120) -> None:
        """Restart as the front end's menu does: same connection file, nothing loaded."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self._connect(timeout)

    def value(self, expression: str) -> Any:
        """The value of an expression whose repr is a Python literal."""
        outcome = self.run(f"print(repr({expression}))", store_history=False)
        assert outcome.error is None, outcome.text
        return ast.literal_eval(outcome.stdout.strip())

    def close(self) -> None:
        if self.client is not None:
            self.client.stop_channels()
        if self.manager.has_kernel:
            measured = "COVERAGE_PROCESS_CONFIG" in os.environ  # a killed process writes no figures
            self.manager.shutdown_kernel(now=not measured)
        self.manager.cleanup_resources()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, code: str, store_history: bool) -> str:
        return str(
            self.client.execute(
                code, store_history=store_history, allow_stdin=False, stop_on_error=True
            )
        )

    def _collect(
        self, ids: list[str], timeout: float, on_message: Callable[[Message], object] | None
    ) -> list[Outcome]:
        outcomes = {message_id: Outcome() for message_id in ids}
        waiting = set(ids)
        end = time.monotonic() + timeout
        while waiting:
            message = self._next(self.client.get_iopub_msg, outcomes, end)
            parent = message["parent_header"].get("msg_id")
            if parent not in outcomes:
                continue
            outcomes[parent].add(message)
            if on_message is not None:
                on_message(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                waiting.discard(parent)
        while not all(outcome.reply for outcome in outcomes.values()):
            message = self._next(self.client.get_shell_msg, outcomes, end)
            parent = message["parent_header"].get("msg_id")
            if parent in outcomes:
                outcomes[parent].reply = message["content"]
        return list(outcomes.values())

    def _next(
        self, get: Callable[..., Message], outcomes: dict[str, Outcome], end: float
    ) -> Message:
        last = list(outcomes.values())[-1]
        while True:
            try:
                return get(timeout=1)
            except queue.Empty:
                if not self.alive:
                    raise KernelDied(last) from None
                if time.monotonic() >= end:
                    self.interrupt()
                    raise TimeoutError(f"still running; it had said: {last.text!r}") from None
