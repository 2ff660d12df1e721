"""JupyterLab on the loopback, and a page of it in headless Chromium.

with Lab(folder) as lab, browser() as chromium:
    notebook = lab.open(chromium, "labels.ipynb")
    notebook.run_all()
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SLOW = 120_000  # milliseconds: a busy machine replays slowly
USER_SETTINGS = {
    "apputils-extension/themes": {"adaptive-theme": True},  # light or dark as the browser asks
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page
    "docmanager-extension/plugin": {"autosave": False},
}


class Lab:
    """A JupyterLab server with settings of its own; `folder` is its root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        private = folder / ".private"
        for name, values in USER_SETTINGS.items():
            package, plugin = name.split("/")
            file = private / "settings" / "@jupyterlab" / package / f"{plugin}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        profile = private / "ipython" / "profile_default"
        profile.mkdir(parents=True)
        patient = {"AssertDoc": {"replay_seconds": 90.0, "salvage_seconds": 30.0}}
        (profile / "ipython_kernel_config.json").write_text(json.dumps(patient))
        token = uuid.uuid4().hex
        environ = {
            **{k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
            "IPYTHONDIR": str(private / "ipython"),
            "JUPYTERLAB_SETTINGS_DIR": str(private / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
            **{f"JUPYTER_{n}_DIR": str(private / n.lower()) for n in ("CONFIG", "DATA", "RUNTIME")},
        }
        arguments = f"""--ip=127.0.0.1 --port=0 --no-browser --allow-root --expose-app-in-browser
            --IdentityProvider.token={token} --ServerApp.root_dir={folder}""".split()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *arguments],
            env=environ,
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        log = self.process.stderr
        assert log is not None
        said = (line for line in log if f"/lab?token={token}" in line)
        address = next(said, None)
        assert address is not None, f"JupyterLab ended with {self.process.wait()}"
        self.address = address.split()[-1]
        threading.Thread(target=collections.deque, args=(log, 0), daemon=True).start()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # it ends its kernels
        self.process.wait(60)

    def open(self, page: Page, name: str) -> Notebook:
        """The notebook `name` of the folder, alone in the window, with a kernel that is ready."""
        page.goto(self.address.replace("/lab?", f"/lab/tree/{name}?reset&"))
        return Notebook(page)


class Notebook:
    """The open notebook of a page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.locator(".jp-NotebookPanel-notebook").wait_for(timeout=SLOW)
        page.wait_for_function(
            "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
            " === 'idle'",
            timeout=SLOW,
        )

    def command(self, name: str) -> None:
        """Run one of JupyterLab's commands, as its menus do; waits for its end."""
        self.page.evaluate("name => window.jupyterapp.commands.execute(name)", name)

    def start(self, name: str) -> None:
        """Run one of JupyterLab's commands without waiting for its end."""
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)

    def cell(self, index: int) -> Locator:
        """The cell number `index`, from 0."""
        return self.page.locator(".jp-Notebook-cell").nth(index)

    def outputs(self, index: int) -> Locator:
        """What stands below a cell."""
        return self.cell(index).locator(".jp-OutputArea-output")

    def run(self, index: int) -> None:
        """Select a cell and run it to its end."""
        self.page.evaluate(
            "index => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = index }",
            index,
        )
        self.command("notebook:run-cell")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


def contrast(page: Page, what: Any) -> float:
    raise NotImplementedError
