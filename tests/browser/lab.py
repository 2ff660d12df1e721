"""JupyterLab on the loopback, and its pages in headless Chromium.

with Lab(folder) as lab, browser() as chromium:
    notebook = lab.open(chromium.new_page(), "labels.ipynb")
    notebook.run(0)
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

from playwright.sync_api import Browser, Locator, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60_000  # milliseconds: on a busy machine a replay is slow
USER_SETTINGS = {
    "apputils-extension/themes": {"adaptive-theme": True},  # light or dark as the browser asks
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page
    "docmanager-extension/plugin": {"autosave": False},
}
# The least contrast of a text with what lies behind it (WCAG's ratio), below an element.
CONTRAST = """root => {
    const parse = text => {
        const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
        return [r, g, b, a];
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
    const light = rgb => rgb
        .map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = node => {
        if (!node) return [255, 255, 255];
        return over(parse(getComputedStyle(node).backgroundColor), behind(node.parentElement));
    };
    let least = 21;
    for (const node of root.querySelectorAll('*')) {
        const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
        if (!own) continue;
        const back = behind(node);
        const text = over(parse(getComputedStyle(node).color), back);
        const [dim, bright] = [light(back), light(text)].sort((a, b) => a - b);
        least = Math.min(least, (bright + 0.05) / (dim + 0.05));
    }
    return least;
}"""


class Lab:
    """A JupyterLab server with settings of its own; `folder` is its root."""

    def __init__(self, folder: Path) -> None:
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
        self._token = uuid.uuid4().hex
        environ = {
            **{k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
            "IPYTHONDIR": str(private / "ipython"),
            "JUPYTERLAB_SETTINGS_DIR": str(private / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
            **{f"JUPYTER_{n}_DIR": str(private / n.lower()) for n in ("CONFIG", "DATA", "RUNTIME")},
        }
        arguments = f"""--ip=127.0.0.1 --port=0 --no-browser --allow-root --expose-app-in-browser
            --LabApp.extension_manager=readonly --IdentityProvider.token={self._token}
            --ServerApp.root_dir={folder}""".split()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *arguments],
            env=environ,
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        log = self.process.stderr
        assert log is not None
        said = next((line for line in log if "/lab?token=" in line), None)
        assert said is not None, f"JupyterLab ended with {self.process.wait()}"
        self._address = said.split()[-1].partition("/lab?")[0]
        threading.Thread(target=collections.deque, args=(log, 0), daemon=True).start()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # it ends its kernels
        self.process.wait(60)

    def open(self, page: Page, name: str) -> Notebook:
        """The notebook `name` of the folder, alone in the window, with a kernel that is ready."""
        page.goto(f"{self._address}/lab/tree/{name}?reset&token={self._token}")
        return Notebook(page)


class Notebook:
    """The notebook that a page has opened."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.locator(".jp-NotebookPanel-notebook").wait_for(timeout=PATIENCE)
        self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        """Return once the kernel is ready for a cell."""
        self.page.wait_for_function(
            "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
            " === 'idle'",
            timeout=PATIENCE,
        )

    def command(self, name: str) -> None:
        """Give one of JupyterLab's commands, as its menus do, and wait for its end."""
        self.page.evaluate("name => window.jupyterapp.commands.execute(name)", name)

    def start(self, name: str) -> None:
        """Give one of JupyterLab's commands without waiting for its end."""
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)

    def cell(self, index: int) -> Locator:
        """The cell number `index`, from 0; -1 is the last."""
        return self.page.locator(".jp-Notebook-cell").nth(index)

    def append(self, source: str) -> Locator:
        """Add a cell at the end and run it to its end; the cell."""
        self.page.evaluate(
            """source => {
                const {content, model} = window.jupyterapp.shell.currentWidget;
                model.sharedModel.addCell({cell_type: 'code', source});
                content.activeCellIndex = content.widgets.length - 1;
            }""",
            source,
        )
        self.command("notebook:run-cell")
        return self.cell(-1)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()
