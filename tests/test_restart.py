"""Restart adapters: which one is chosen, and a real restart under a real Jupyter Server."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import websocket

from nb_assertdoc.errors import UsageError
from nb_assertdoc.restart import Adapter, adapter

LAB = ("/usr/bin/python3", "/usr/local/bin/jupyter-lab", "--no-browser")
SCRIPT = ("python", "train_all.py")


def choose(
    allow_stdin: bool = True,
    environ: dict[str, str] | None = None,
    modules: dict[str, Any] | None = None,
    parent: tuple[str, ...] = LAB,
    **names: str,
) -> Adapter:
    """The adapter for a kernel with these marks."""
    shell = SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=allow_stdin), user_ns=names)
    return adapter(shell, environ or {}, modules or {}, parent)


@pytest.mark.parametrize(
    ("marks", "name", "how", "can_restart"),
    [
        ({}, "Jupyter", "Kernel > Restart Kernel", True),
        ({"environ": {"JPY_SESSION_NAME": "/a.ipynb"}, "parent": ()}, "Jupyter", "0 0", True),
        ({"parent": ("python", "-m", "jupyter_server")}, "Jupyter", "Kernel >", True),
        ({"parent": ("/opt/jupyterhub-singleuser",)}, "Jupyter", "Kernel >", True),
        ({"environ": {"COLAB_RELEASE_TAG": "r"}}, "Colab", "Runtime > Restart session", True),
        ({"modules": {"google.colab": None}}, "Colab", "Ctrl+M .", True),
        (
            {"environ": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "r"}},
            "Kaggle",
            "Restart & clear",
            True,
        ),
        (
            {"environ": {"VSCODE_PID": "7"}, "parent": ("/usr/share/code/code",)},
            "VS Code",
            "Restart button",
            False,
        ),
        ({"__vsc_ipynb_file__": "/a.ipynb"}, "VS Code", "Restart button", True),
        ({"environ": {"VSCODE_PID": "7"}}, "Jupyter", "Kernel >", True),
        ({"parent": ("python", "-m", "jupyter_console")}, "Jupyter kernel", "Restart", False),
    ],
)
def test_front_ends(marks: dict[str, Any], name: str, how: str, can_restart: bool) -> None:
    chosen = choose(**marks)
    assert (chosen.name, chosen.can_restart, chosen.headless) == (name, can_restart, False)
    assert how in chosen.how
    assert bool(chosen.forewarn) == can_restart  # the front end reports a death that is none


@pytest.mark.parametrize(
    "marks",
    [
        {"parent": ("/usr/bin/python3", "/opt/bin/papermill", "a.ipynb", "b.ipynb")},
        {"parent": ("python", "-m", "nbconvert", "--execute")},
        {"parent": SCRIPT},
        # Started from a cell: the notebook's own environment is inherited.
        {"parent": SCRIPT, "environ": {"JPY_SESSION_NAME": "/a.ipynb"}},
        {"parent": ("python", "papermill"), "environ": {"COLAB_RELEASE_TAG": "r"}},
        {"parent": ()},
        {"parent": LAB, "environ": {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}},
    ],
)
def test_headless_runs_are_recognised_and_never_restarted(marks: dict[str, Any]) -> None:
    chosen = choose(allow_stdin=False, **marks)
    assert chosen.headless
    assert not chosen.can_restart
    with pytest.raises(UsageError, match="a new run of the notebook"):
        chosen.restart()


@pytest.mark.parametrize(
    "marks",
    [
        {"allow_stdin": True, "parent": SCRIPT},  # an interactive driver over jupyter_client
        {"allow_stdin": True, "parent": ()},
        {"allow_stdin": False, "parent": LAB},  # a front end's request without input
        {"allow_stdin": False, "parent": ("code",), "__vsc_ipynb_file__": "/a.ipynb"},
        {"allow_stdin": False, "parent": SCRIPT, "modules": {"google.colab": None}},
        {"allow_stdin": True, "environ": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}},
    ],
)
def test_interactive_kernels_are_not_taken_for_headless(marks: dict[str, Any]) -> None:
    assert not choose(**marks).headless


def test_terminal() -> None:
    chosen = adapter(SimpleNamespace(user_ns={}), {}, {})
    assert (chosen.name, chosen.headless, chosen.can_restart) == ("terminal", False, False)
    with pytest.raises(UsageError, match="exit and start ipython again"):
        chosen.restart()


class Server:
    """A Jupyter Server on the loopback, and one kernel of it as a front end sees it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.token = uuid.uuid4().hex
        environ = {
            **{k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "IPYTHONDIR": str(folder / "ipython"),
        }
        arguments = f"--ip=127.0.0.1 --port={self.port} --no-browser --allow-root".split()
        arguments += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={folder}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", *arguments],
            env=environ,
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        log = self.process.stderr
        assert log is not None
        assert any("is running at" in line for line in log), "the server does not start"
        threading.Thread(target=collections.deque, args=(log, 0), daemon=True).start()
        self.wait_for_port()
        notebook = {"path": "a.ipynb", "name": "", "type": "notebook"}
        session = self.api("sessions", {**notebook, "kernel": {"name": "python3"}})
        self.kernel = session["kernel"]["id"]
        self.connect()

    def wait_for_port(self) -> None:
        """The server logs its address a moment before it listens, and says nothing after."""
        pause = threading.Event()
        while self.process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            pause.wait(0.02)
        raise AssertionError(f"the server ended with {self.process.returncode}")

    def api(self, path: str, content: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{path}",
            json.dumps(content).encode(),
            {"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def connect(self) -> None:
        """Open the channels; the server answers once the kernel does."""
        self.channels = websocket.create_connection(
            f"ws://127.0.0.1:{self.port}/api/kernels/{self.kernel}/channels?token={self.token}",
            timeout=60,
        )

    def execute(self, code: str) -> tuple[str, str]:
        """Run a cell: the reply's status, what was printed."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
        header |= {"username": "", "session": uuid.uuid4().hex, "date": ""}
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": True}
        content |= {"user_expressions": {}, "stop_on_error": True}
        message = {"channel": "shell", "header": header, "content": content}
        self.channels.send(json.dumps({**message, "parent_header": {}, "metadata": {}}))
        printed, status = "", None
        idle = False
        while status is None or not idle:
            answer = json.loads(self.channels.recv())
            if answer["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            kind, content = answer["msg_type"], answer["content"]
            if kind == "execute_reply":
                status = content["status"]
            elif kind == "stream":
                printed += content["text"]
            elif kind == "error":
                printed += f"{content['ename']}: {content['evalue']}"
            idle = idle or (kind == "status" and content["execution_state"] == "idle")
        return status, printed.strip()

    def wait_for_restart(self) -> None:
        """Return once the server has seen the kernel end and has started it again."""
        while True:
            answer = json.loads(self.channels.recv())
            state = answer["content"].get("execution_state")
            if answer["msg_type"] == "status" and state in {"restarting", "autorestarting"}:
                break
        self.channels.close()
        self.connect()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"))
    yield running
    with contextlib.suppress(OSError):
        running.channels.close()
    running.process.terminate()
    running.process.wait(60)


SHOW = """
from nb_assertdoc.restart import adapter
import os, threading
print(adapter().name, adapter().headless, adapter().can_restart)
"""
FROM_A_CELL = "adapter().restart(); print('asked')"
COLAB_FROM_A_THREAD = """
colab = adapter(environ={'COLAB_RELEASE_TAG': 'release'})
thread = threading.Thread(target=colab.restart)
thread.start(); thread.join(); print('asked')
"""


@pytest.mark.parametrize("code", [FROM_A_CELL, COLAB_FROM_A_THREAD])
def test_kernel_comes_back_empty_and_runs_a_cell(server: Server, code: str) -> None:
    assert server.execute(SHOW) == ("ok", "Jupyter False True")
    _, old = server.execute("data = 1; print(os.getpid())")
    assert server.execute(code) == ("ok", "asked")  # the cell's own reply still comes
    server.wait_for_restart()
    status, printed = server.execute("import os; print(os.getpid(), 'data' in globals())")
    new, kept = printed.split()
    assert (status, kept) == ("ok", "False")
    assert new != old
