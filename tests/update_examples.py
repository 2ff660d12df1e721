"""Runs the example notebooks and saves them with what they show.

`python -m tests.update_examples [NAME ...]`: those of `example_notebooks`, or all of them.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from tests.kernels import ROOT, WIDGET, Kernel, Outcome

EXAMPLES = ROOT / "example_notebooks"
DRIVER = re.compile(r"^.*: block: \[.*\n", re.MULTILINE)
SHOWN = 2  # lines of the driver


class FrontEnd(Kernel):
    """A kernel to which a person seems to talk: what is said to a person is saved."""

    def _send(self, code: str, store_history: bool) -> str:
        return str(self.client.execute(code, store_history=store_history, allow_stdin=True))


def run(path: Path) -> Any:
    """The notebook with new outputs; its cells go on after the errors that it is about."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="nbx-") as folder:
        env = {"JPY_SESSION_NAME": path.name, "TMPDIR": folder}
        with FrontEnd(cwd=folder, env=env) as kernel:
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    outcome = kernel.run(cell.source)
                    cell.execution_count = outcome.reply["execution_count"]
                    cell.outputs = neutral(outputs(outcome), folder)
    return notebook


def outputs(outcome: Outcome) -> list[Any]:
    """What the messages of an execution leave in a notebook."""
    found: list[Any] = []
    displays: dict[str, Any] = {}
    for message in outcome.messages:
        kind, content = message["msg_type"], message["content"]
        name = content.get("transient", {}).get("display_id")
        if kind == "update_display_data":
            displays[name].data = content["data"]
        elif kind in ("stream", "error", "display_data", "execute_result"):
            output = nbformat.v4.output_from_msg(message)
            if kind == "stream" and found and found[-1].get("name") == output.name:
                found[-1].text += output.text
                continue
            found.append(output)
            displays[name] = output
    for output in found:
        output.get("data", {}).pop(WIDGET, None)  # the fall-back outlives the kernel
    return found


def neutral(found: list[Any], folder: str) -> list[Any]:
    """Without this machine's paths, and with the first of the driver's many lines."""
    for output in found:
        if output.output_type == "stream" and len(DRIVER.findall(output.text)) > SHOWN:
            lines = DRIVER.findall(output.text)
            rest = DRIVER.sub("", output.text)
            cut = f"... {len(lines) - SHOWN} more lines like these\n"
            output.text = "".join([*lines[:SHOWN], cut, rest])
    text = json.dumps(found)
    packages = sysconfig.get_paths()["purelib"]
    for there, name in ((packages, "site-packages"), (str(ROOT), "."), (folder, ".")):
        text = text.replace(there, name)
    text = re.sub(r"/tmp/ipykernel_\d+/\d+\.py", "cell.py", text)
    return [nbformat.from_dict(output) for output in json.loads(text)]


def main() -> None:
    names = sys.argv[1:] or sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
    for name in names:
        path = EXAMPLES / f"{name}.ipynb"
        notebook = run(path)
        nbformat.validate(notebook)
        nbformat.write(notebook, path)
        print(f"{name}: {path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
