"""`%assertdoc`, `%cpu_replay` and `%%cpu_replay`: what they answer, and to what."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from kernels import Kernel

from nb_assertdoc import model

DATA = """
import torch
from torch import nn
shelves = nn.Embedding(4, 2)
ids = torch.tensor([1, 3])
seen = []
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A notebook without a GPU in which no cell has failed."""
    with Kernel(extension=True) as kernel:
        kernel.run(DATA)
        yield kernel


REFUSED = {
    "%assertdoc frobnicate": "invalid choice: 'frobnicate'",
    "%assertdoc report extra": "unrecognized arguments: extra",
    "%assertdoc save": "arguments are required: file",
    "%assertdoc save 'r.json": "no closing quotation",
    "%cpu_replay": "no cell has failed so far; name one: %cpu_replay N",
    "%cpu_replay 9999": "there is no In [9999]",
    "%cpu_replay one": "invalid int value: 'one'",
    "%cpu_replay 'one": "no closing quotation",
    "%cpu_replay --engine fast": "invalid choice: 'fast' (choose from",
    "%%cpu_replay --frobnicate\nn = 1": "unrecognized arguments: --frobnicate",
    "%%cpu_replay 3\nn = 1": "takes the cell below it, not a number",
    "%%cpu_replay --max-steps 0\nn = 1": "0 is not a whole number of 1 or more",
    "%%cpu_replay --max-steps 1.5\nn = 1": "1.5 is not a whole number of 1 or more",
    "%%cpu_replay --timeout -1\nn = 1": "-1 is not a number of seconds above 0",
    "%%cpu_replay --timeout inf\nn = 1": "inf is not a number of seconds above 0",
    "%%cpu_replay --timeout soon\nn = 1": "soon is not a number of seconds above 0",
    "%%cpu_replay --report no/such/folder/r.json\nn = 1": "there is no folder",
    "%%cpu_replay\nn = = 1": "the cell is not valid Python: invalid syntax",
    "%%cpu_replay\n%precision 3\n# nothing": "only magics or comments",
}


@pytest.mark.parametrize("cell", REFUSED)
def test_bad_input_is_answered_with_what_is_wrong(kernel, cell):
    outcome = kernel.run(cell, store_history=False)

    assert outcome.error is None, outcome.text
    assert outcome.reports == []
    assert REFUSED[cell].lower() in outcome.stdout.lower()


def test_choices_are_listed(kernel):
    typo = kernel.run("%assertdoc frobnicate", store_history=False).stdout
    listed = kernel.run("%assertdoc help", store_history=False).stdout

    for command in ("status", "report", "explain", "restart", "save", "settings", "help"):
        assert f"'{command}'" in typo
        assert f"\n    {command} " in listed
    assert listed.startswith("usage: %assertdoc ")
    assert "%%assertdoc" not in listed + typo
    assert "--max-steps N" in kernel.run("%cpu_replay --help", store_history=False).stdout


def test_settings_lists_each_with_value_and_meaning(kernel):
    kernel.run("%config AssertDoc.line_seconds = 0.25", store_history=False)
    shown = kernel.run("%assertdoc settings", store_history=False).stdout

    assert "AssertDoc.line_seconds = 0.25 " in shown
    assert "Wait for the driver's lines" in shown


def test_before_anything_has_happened(start_kernel):
    kernel = start_kernel(extension=True)

    assert "No assert so far" in kernel.run("%assertdoc").stdout
    assert "there is no report yet" in kernel.run("%assertdoc report").stdout
    assert "there is no report yet" in kernel.run("%assertdoc save r.json").stdout
    nothing = kernel.run("%assertdoc explain").stdout
    assert "one of these topics" in nothing
    quoted = kernel.run("%assertdoc explain don't --know \"this").stdout
    assert "Nothing is known about" in quoted
    line = (
        "Loss.cu:250: nll_loss: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes"
    )
    assert "label" in kernel.run(f"%assertdoc explain {line}` failed.").stdout.lower()


def test_a_clean_cell_a_faulty_one_and_the_files(kernel):
    names = "sorted(n for n in get_ipython().user_ns if not n.startswith('_'))"
    before = kernel.value(names)
    clean = kernel.run("%%cpu_replay\nout = shelves(ids)\nseen.append(out)\nids += 1")

    report = clean.report
    assert clean.error is None
    assert report["confidence"] == "clean"
    assert report["headline"] == "No fault: 1 call checked on the CPU, tightest margin 0."
    assert "no fault: 1 call checked, tightest margin 0" in clean.text
    assert report["crash"] is None
    assert kernel.value(names) == before
    assert kernel.value("(seen, ids.tolist())") == ([], [1, 3])

    faulty = kernel.run("%%cpu_replay --report r.json\n\nmore = ids + 1\nout = shelves(more)")
    report = faulty.report
    assert report["confidence"] == "certain"
    assert report["finding"]["bad_values"] == [4]
    assert report["finding"]["location"]["line"] == 4
    assert report["finding"]["location"]["source"] == "out = shelves(more)"
    written = kernel.cwd / "r.json"
    assert json.loads(written.read_text()) == report
    assert model.from_json(written.read_bytes(), model.Report).confidence == "certain"
    assert kernel.value(names) == before

    again = kernel.run("%assertdoc report")
    assert again.report == report
    for name in ("saved.json", "saved.html", "saved.txt"):
        assert kernel.run(f"%assertdoc save {name}").stdout == f"saved {name}\n"
    assert json.loads((kernel.cwd / "saved.json").read_text()) == report
    assert "<div" in (kernel.cwd / "saved.html").read_text()
    assert "Index 4 does not exist" in (kernel.cwd / "saved.txt").read_text()
    refused = kernel.run("%assertdoc save saved.pdf").stdout
    assert "saved.pdf: the file must end in .json, .html, .txt" in refused
    assert not (kernel.cwd / "saved.pdf").exists()
    assert "there is no folder" in kernel.run("%assertdoc save no/folder/r.json").stdout
    void = kernel.cwd / "void.txt"
    void.symlink_to("/dev/null")
    assert kernel.run("%assertdoc save void.txt").stdout == "saved void.txt\n"
    assert void.is_symlink()
    status = kernel.run("%assertdoc").stdout
    assert "A replay found (certain): Index 4 does not exist" in status
    assert [step.split("    ")[0] for step in report["next_steps"]] == [
        "%assertdoc scan",
        "%%cpu_replay",
        "%assertdoc save report.json",
    ]
    cause = kernel.run("%assertdoc explain").stdout
    assert cause.startswith(report["cause"]["title"])


def test_an_error_of_the_cell_itself_is_said_at_once(kernel):
    said = kernel.run("%%cpu_replay\nprint(undefined_name)")
    report = said.report
    assert [r["engine"] for r in report["replays"]] == ["ghost"]
    assert report["headline"] == (
        "Your cell raised NameError: name 'undefined_name' is not defined on the CPU, before any "
        "index was out of range."
    )
    assert said.text.count("undefined_name") == 1
    assert report["next_steps"] == ["mend that error first: it has nothing to do with the GPU"]


def test_steps_are_those_that_ran_and_output_is_said_to_be_missing(kernel):
    kernel.run(
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(torch.arange(6) % 3, batch_size=1)"
    )
    for loop in ("for part in loader:", "for part in ids.repeat(3) % 3:"):
        clean = kernel.run(f"%%cpu_replay --max-steps 2\n{loop}\n    print(shelves(part))")
        (replay,) = clean.report["replays"]
        assert (replay["outcome"], replay["steps"]) == ("clean", 2), loop
        assert replay["checks"]["calls"] == 2
        assert "the replay's output is not shown" in replay["differences"]
        assert "the replay's output is not shown" in clean.text


def test_a_failed_cell_without_a_gpu(kernel):
    failed = kernel.run("late = ids + 1\nshelves(late)")
    number = failed.reply["execution_count"]
    assert failed.error["ename"] == "IndexError"
    assert failed.displays == []

    asked = kernel.run("%cpu_replay --engine ghost")
    report = asked.report
    assert report["finding"]["bad_values"] == [4]
    assert report["finding"]["location"]["execution_count"] == number
    assert report["confidence"] == "certain"

    kernel.run("x = = 1")
    assert "the cell is not valid Python" in kernel.run("%cpu_replay").stdout


def test_integers_on_a_gpu_that_lives(start_kernel):
    """Small ones are copied. One that is too large is made again; until then nothing is claimed."""
    kernel = start_kernel(simulated_gpu=True, extension=True)
    kernel.run(
        "import torch\ntable = torch.nn.Embedding(5, 2).cuda()\n"
        "ids = torch.tensor([1, 9]).cuda()\n"
        "many = torch.ones(2**20, dtype=torch.long).cuda()\nmany[7] = 9"
    )
    small = kernel.run("%%cpu_replay\ntable(ids)").report
    known = kernel.run("%%cpu_replay --engine cpu\ntable(many); table(ids * 0)").report
    large = kernel.run("%%cpu_replay\ntable(many)").report

    assert small["finding"]["bad_values"] == [9]
    assert small["finding"]["positions"] == [[1]]
    assert known["confidence"] == "clean"
    assert known["headline"].endswith("; not checked, their values are not known: embedding.")
    assert large["finding"]["bad_values"] == [9]
    assert large["finding"]["positions"] == [[7]]
    assert (large["replays"][-1]["engine"], large["confidence"]) == ("history", "likely")
