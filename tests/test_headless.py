"""Headless runs: no restart, the notebook's error stands, the report is in the saved notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from nb_assertdoc import model

CELLS = (
    """%load_ext nb_assertdoc.simulated_gpu
%load_ext nb_assertdoc
from nb_assertdoc.settings import settings
settings().replay_seconds = 120  # the machine may be busy""",
    """from nb_assertdoc.errors import UsageError
from nb_assertdoc.restart import adapter
try:
    adapter().restart()
except UsageError as refused:
    print(adapter().name, '|', refused)""",
    """import torch
from torch import nn
seats = nn.Embedding(40, 8).to('cuda')
booked = torch.tensor([12, 39, 40, 7])""",
    """chosen = seats(booked.to('cuda'))
print(chosen.mean().item())""",
    "open('reached', 'w')",
)


def with_nbclient(source: Path, target: Path) -> None:
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": target.parent}})
    with pytest.raises(CellExecutionError, match="device-side assert triggered"):
        client.execute()
    nbformat.write(notebook, target)


def with_papermill(source: Path, target: Path) -> None:
    done = _program(target, "papermill", "-k", "python3", str(source), str(target))
    assert done.returncode == 1
    assert "device-side assert triggered" in done.stderr


def with_this_command(source: Path, target: Path) -> None:
    report, page = target.with_suffix(".json"), target.with_suffix(".html")
    options = ["--output", str(target), "--report", str(report), "--html", str(page)]
    done = _program(target, "nb_assertdoc", "run", str(source), *options)
    assert done.returncode == 3, done.stderr
    assert "embedding" in done.stdout
    written = model.from_json(report.read_bytes(), model.Report)
    assert written.finding is not None
    assert written.finding.bad_values == (40,)
    assert "embedding" in page.read_text(encoding="utf-8")


def _program(target: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=target.parent,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("execute", [with_nbclient, with_papermill, with_this_command])
def test_error_stands_and_the_report_is_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    execute: Callable[[Path, Path], None],
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    source, target = tmp_path / "source.ipynb", tmp_path / "saved.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(code) for code in CELLS]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), source)
    before = source.read_bytes()

    execute(source, target)

    assert source.read_bytes() == before
    saved = {cell.source: cell.get("outputs", []) for cell in nbformat.read(target, 4).cells}
    refused = saved[CELLS[1]][0].text
    assert refused.startswith("headless run | ")
    outputs = saved[CELLS[3]]
    errors = [output for output in outputs if output.output_type == "error"]
    assert [error.evalue.splitlines()[0] for error in errors] == [
        "CUDA error: device-side assert triggered"
    ]
    (report,) = _reports(outputs)
    assert report.finding is not None
    finding = report.finding
    assert (finding.op, finding.argument, finding.bad_values) == ("embedding", "input", (40,))
    assert finding.positions == ((2,),)
    assert report.confidence == "certain"
    assert not (tmp_path / "reached").exists()  # no later cell ran, in this kernel or a new one
    assert saved[CELLS[4]] == []


def _reports(outputs: list[Any]) -> list[model.Report]:
    found = []
    for output in outputs:
        data = output.get("data", {})
        if model.MIME in data:
            assert {"text/plain", "text/html"} < set(data)
            found.append(model.msgspec.convert(data[model.MIME], model.Report))
    return found
