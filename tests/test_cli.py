"""The command line: bad input, plain notebooks, the demo, saved notebooks, explain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from nb_assertdoc import model
from nb_assertdoc.cli import main
from nb_assertdoc.errors import UsageError
from nb_assertdoc.files import check_writable

CODE = {"cell_type": "code", "source": "1", "outputs": [], "execution_count": None, "metadata": {}}


@pytest.fixture(autouse=True)
def _user_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)  # it changes how a kernel shows fd 2


def write(path: Path, *cells: Any, **fields: Any) -> Path:
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 4, "cells": cells, **fields}))
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a refused command says."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nb-assertdoc: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", ["run", "diagnose"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        ("", "not JSON"),
        ("import torch", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ("[1, 2]", "no `nbformat`"),
        ('{"nbformat": "4"}', "no `nbformat`"),
        ('{"nbformat": 4}', "no list of `cells`"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code"}]}', "cell 0 has no"),
        ('{"nbformat": 3, "worksheets": []}', "jupyter nbconvert --to notebook"),
        ('{"nbformat": 5, "cells": []}', "format 5 is not known"),
        ('{"nbformat": 4, "cells": []}', "no code"),
        ('{"nbformat": 4, "cells": [{"cell_type": "markdown", "source": "x"}]}', "no code"),
        (json.dumps({"nbformat": 4, "cells": [CODE | {"source": [" ", "\n"]}]}), "no code"),
        (json.dumps({"nbformat": 4, "cells": [CODE | {"outputs": [1]}]}), "damaged"),
        (
            json.dumps(
                {
                    "nbformat": 4,
                    "cells": [CODE],
                    "metadata": {"kernelspec": {"name": "ir", "language": "R"}},
                }
            ),
            "a notebook of r; only Python",
        ),
    ],
)
def test_bad_notebooks(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    content: str | bytes | None,
    says: str,
) -> None:
    path = tmp_path / "bad.ipynb"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    message = fails(capsys, command, path)
    assert str(path) in message
    assert says in message


@pytest.mark.parametrize("command", ["run", "diagnose"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], ["required: NB.ipynb"]),
        (["{folder}"], ["{folder}", "folder, not a notebook"]),
        (["{nb}", "--engine", "warp"], ["warp", "ghost", "cpu", "history"]),
        (["{nb}", "--timeout", "soon"], ["soon", "seconds above 0"]),
        (["{nb}", "--timeout", "-1"], ["'-1'", "seconds above 0"]),
        (["{nb}", "--timeout", "nan"], ["'nan'"]),
        (["{nb}", "--cell", "2"], ["--cell 2", "cells 0 to 1"]),
        (["{nb}", "--cell", "-1"], ["--cell -1", "cells 0 to 1"]),
        (["{nb}", "--cell", "x"], ["--cell", "'x'"]),
        (["{nb}", "--cwd", "{folder}/none"], ["{folder}/none", "no such folder"]),
        (["{nb}", "--cell", "0", "--report", "{folder}"], ["--report", "this is a folder"]),
        (
            ["{nb}", "--cell", "0", "--html", "{folder}/none/r.html"],
            ["--html", "no folder {folder}/none"],
        ),
        (["{nb}", "--cell", "0", "--output", "{nb}/o.ipynb"], ["--output", "no folder {nb}"]),
        (["{nb}", "--cell", "0", "--output", "{nb}"], ["is the input", "--inplace"]),
        (["{nb}", "--cell", "0", "--report", "{nb}"], ["is the input"]),
        (
            ["{nb}", "--cell", "0", "--report", "{folder}/r", "--html", "{folder}/r"],
            ["--html", "--report, too"],
        ),
        (["{nb}", "--output", "{folder}/o.ipynb", "--inplace"], ["not allowed with"]),
        (["{nb}", "--bogus"], ["--bogus"]),
    ],
)
def test_bad_options(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    options: list[str],
    says: list[str],
) -> None:
    notebook = write(tmp_path / "a.ipynb", CODE, CODE)
    before = notebook.read_bytes()
    names = {"nb": notebook, "folder": tmp_path}
    message = fails(capsys, command, *(option.format(**names) for option in options))
    for part in says:
        assert part.format(**names) in message
    assert notebook.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ipynb"]


def test_unwritable_file_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    notebook = write(tmp_path / "a.ipynb", CODE | {"source": f"open({str(ran)!r}, 'w')"})
    assert "cannot be written" in fails(capsys, "run", notebook, "--report", "/proc/report.json")
    assert not ran.exists()


def test_a_look_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "full").write_text("kept")
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a reader
    links = {
        "void": "/dev/null",
        "to empty": "empty",
        "dangling": "new",
        "circle": "circle",
        "to folder": "folder",
        "astray": "none/new",
    }
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    refused = {
        "folder": "this is a folder",
        "to folder": "this is a folder",
        "none/new": "there is no folder",
        "astray": "there is no folder",
        "full/new": "there is no folder",
        "circle": "cannot be written",
        "n" * 300: "cannot be written",
    }

    def state() -> list[tuple[Any, ...]]:
        stats = [(path, path.lstat()) for path in sorted(tmp_path.rglob("*"))]
        return [(path, s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns) for path, s in stats]

    before = state()
    for name in ("empty", "full", "pipe", "void", "to empty", "dangling", "new", "folder/new"):
        check_writable(tmp_path / name)
    for name, words in refused.items():
        with pytest.raises(UsageError, match=words) as error:
            check_writable(tmp_path / name, "--report")
        assert str(error.value).startswith(f"--report {tmp_path / name}: ")
    with pytest.raises(UsageError, match="cannot be written"):
        check_writable(Path("/proc/report.json"))
    assert state() == before


def test_unknown_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "run", write(tmp_path / "a.ipynb", CODE), "-k", "no-such-kernel")
    assert "no-such-kernel" in message
    assert "python3" in message  # one that is known


def test_kernel_of_another_language(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels" / "other"
    folder.mkdir(parents=True)
    spec = {"argv": ["false"], "display_name": "Other", "language": "R"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    message = fails(capsys, "run", write(tmp_path / "a.ipynb", CODE), "--kernel", "other")
    assert "a kernel of R" in message


def test_kernel_that_does_not_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels" / "broken"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-c", "raise SystemExit('no disk')", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Broken", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    assert main(["run", str(write(tmp_path / "a.ipynb", CODE)), "-k", "broken"]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("nb-assertdoc: error: the kernel does not start")
    assert last.endswith("its last line was: no disk")


def test_cell_without_code_is_not_diagnosed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = write(tmp_path / "a.ipynb", CODE, {"cell_type": "markdown", "source": "x"}, CODE)
    message = fails(capsys, "diagnose", notebook, "--cell", "1")
    assert "--cell 1" in message
    assert "cells with code: 0, 2" in message


def test_saved_notebook_without_an_assert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"output_type": "error", "ename": "KeyError", "evalue": "'x'", "traceback": ["..."]}
    failed = CODE | {"outputs": [error], "execution_count": 5}
    assert main(["diagnose", str(write(tmp_path / "a.ipynb", CODE, failed))]) == 1
    message = capsys.readouterr().err
    assert "other errors: cell 1 (counted from 0), In [5]: KeyError" in message
    assert "--cell N" in message
    assert main(["diagnose", str(write(tmp_path / "b.ipynb", CODE))]) == 0
    out, err = capsys.readouterr()
    assert "no device-side assert" in out.lower() and "no error at all" in out and err == ""


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["enabel"], ["explain", "--bogus"]])
def test_bad_commands(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert "--help" in fails(capsys, *arguments)


@pytest.mark.parametrize("command", [[], ["demo"], ["run"], ["diagnose"], ["explain"]])
def test_help(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "usage: " + " ".join(["nb-assertdoc", *command]) in out
    if not command:
        assert "demo: 0 the diagnosis is the right one; 1 it is not." in out
        assert "check: 0 nothing suspicious was found; 1 something was." in out


def test_as_a_module_without_heavy_imports() -> None:
    show = "import sys; from nb_assertdoc import cli; print(cli.main(['explain', 'why-late']))"
    heavy = "print([m for m in ('torch', 'IPython', 'nbclient', 'nbformat') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{show}; {heavy}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["0", "[]"]
    done = subprocess.run([sys.executable, "-m", "nb_assertdoc", "run"], capture_output=True)
    assert done.returncode == 2


def test_explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = "block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed."
    text = f"/pytorch/aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward: {line}"
    assert main(["explain", text]) == 0
    answer = capsys.readouterr().out
    assert "cross_entropy" in answer
    assert main(["explain", *text.split()]) == 0  # without quotes
    assert capsys.readouterr().out == answer

    class Stdin:
        def read(self) -> str:
            return text

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert main(["explain", "-"]) == 0
    assert capsys.readouterr().out == answer


def test_explain_cause_key_and_unknown_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "label_starts_at_1"]) == 0
    known = capsys.readouterr().out
    assert "1" in known
    assert main(["explain", "label_starts_at_7"]) == 0
    unknown = capsys.readouterr().out
    assert "label_starts_at_7" in unknown
    assert "why-late" in unknown  # the topics


def test_plain_notebook_runs_in_its_folder_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.txt").write_text("3 rows")
    notebook = write(
        tmp_path / "a.ipynb",
        {"cell_type": "markdown", "source": "x", "metadata": {}},
        CODE | {"source": ["rows = open('rows.txt').read()\n", "print(rows)"]},
        CODE | {"source": "In[1][:4], len(In)"},
        CODE | {"source": "", "outputs": [{"output_type": "error", "ename": "E", "evalue": ""}]},
        CODE | {"source": "raise KeyError('not reached')"},
    )
    before = notebook.read_bytes()
    output = tmp_path / "out.ipynb"
    assert main(["run", str(notebook), "--cell", "3", "--output", str(output)]) == 0
    assert "No device-side assert" in capsys.readouterr().out
    assert notebook.read_bytes() == before
    saved = nbformat.read(output, as_version=4)
    assert saved.cells[1].outputs[0].text == "3 rows\n"
    assert saved.cells[1].execution_count == 1  # loading the extension is not in the history
    assert saved.cells[2].outputs[0].data["text/plain"] == "('rows', 3)"
    assert saved.cells[4].execution_count is None


def test_other_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = write(
        tmp_path / "a.ipynb",
        CODE | {"source": "print('before')"},
        CODE | {"source": "{}['x']"},
        CODE | {"source": "open('reached', 'w')"},
    )
    report = tmp_path / "r.json"
    assert main(["run", str(notebook), "--inplace", "--report", str(report)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    where = "cell 1 (counted from 0), In [2]"
    assert err == f"nb-assertdoc: the notebook failed: {where}: KeyError: 'x'\n"
    saved = nbformat.read(notebook, as_version=4)
    assert saved.cells[0].outputs[0].text == "before\n"
    assert saved.cells[1].outputs[0].ename == "KeyError"
    assert not (tmp_path / "reached").exists()
    assert not report.exists()


@pytest.mark.parametrize(
    ("error", "hinted"),
    [
        ("IndexError('index out of range in self')", True),
        ("IndexError('Target 7 is out of bounds.')", True),
        ("IndexError('list index out of range')", False),
    ],
)
def test_an_index_error_of_torch_has_a_hint(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    hinted: bool,
) -> None:
    notebook = write(tmp_path / "a.ipynb", CODE | {"source": f"raise {error}"})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["run", str(notebook)]) == 1
    err = capsys.readouterr().err
    assert ("`nb-assertdoc run --simulated-gpu`" in err) is hinted
    assert ("`%cpu_replay`" in err) is hinted
    assert "cell 0 (0 to 0) ..." in err  # what a person sees while it runs


def test_launch_blocking_is_set_before_the_notebook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import os\nassert os.environ['CUDA_LAUNCH_BLOCKING'] == '1'"
    notebook = write(tmp_path / "a.ipynb", CODE | {"source": source})
    assert main(["run", str(notebook), "--launch-blocking"]) == 0
    assert main(["run", str(notebook)]) == 1
    assert "KeyError" in capsys.readouterr().err


def test_timeout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = write(
        tmp_path / "a.ipynb", CODE | {"source": "import threading; threading.Event().wait()"}
    )
    assert main(["run", str(notebook), "--timeout", "0.5"]) == 1
    err = capsys.readouterr().err
    assert "cell 0" in err
    assert "timed out" in err


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    assert main(["demo", "--report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "%assertdoc" not in out and "save what you need" not in out and "is dead" not in out
    assert "JSON: --report R.json, HTML: --html R.html" in out
    report = model.from_json(path.read_bytes(), model.Report)
    assert report.finding is not None
    assert report.finding.bad_values == (3,)
    assert report.cause is not None
    assert report.cause.key == "label_starts_at_1"
    assert report.headline.split(":")[0] in out
    assert "criterion(model(grains), target)" in out
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "criterion(model(grains), target)" in page


def test_saved_notebook_is_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook saved on a machine with a GPU, diagnosed on one without."""
    error = new_output(
        "error",
        ename="RuntimeError",
        evalue="CUDA error: device-side assert triggered",
        traceback=["...", "RuntimeError: CUDA error: device-side assert triggered"],
    )
    cells = [
        new_markdown_cell("# Shelves"),
        new_code_cell("import torch\nfrom torch import nn\nids = torch.tensor([3, 11, 8])"),
        new_code_cell("%load_ext nb_assertdoc.simulated_gpu"),
        new_code_cell("shelves = nn.Embedding(10, 4).cuda()"),
        new_code_cell("found = shelves(ids.cuda())\nprint(found.sum().item())", outputs=[error]),
    ]
    notebook = tmp_path / "saved.ipynb"
    nbformat.write(new_notebook(cells=cells), notebook)
    before = notebook.read_bytes()
    report_file, output = tmp_path / "r.json", tmp_path / "out.ipynb"
    arguments = ["--report", str(report_file), "--output", str(output)]
    assert main(["diagnose", str(notebook), *arguments]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "embedding" in out and "The GPU is simulated; the data is out of range." in out
    assert "is dead" not in out and "%assertdoc" not in out
    assert out.lower().count("cells were run again") == 1
    report = model.from_json(report_file.read_bytes(), model.Report)
    finding = report.finding
    assert finding is not None
    assert (finding.op, finding.argument, finding.bad_values) == ("embedding", "input", (11,))
    assert (finding.bound.low, finding.bound.high) == (0, 10) if finding.bound else False
    assert (finding.location.cell, finding.location.line) == (4, 1)
    assert notebook.read_bytes() == before
    saved = nbformat.read(output, as_version=4).cells[4].outputs
    assert [one.output_type for one in saved] == ["error", "display_data"]
    assert saved[1].data[model.MIME]["finding"]["bad_values"] == [11]
