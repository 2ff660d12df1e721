"""`%assertdoc verify`: the failing batch, with the code as it is after the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import replays
from kernels import Kernel, Outcome

from nb_assertdoc.doctor.attempts import StoredReplay, choose
from nb_assertdoc.errors import UsageError
from nb_assertdoc.history import acts, bound_first, with_dependents, with_makers
from nb_assertdoc.model import Edit, Environment, Fix, Order, Report, Source

FRONT_END = "__vsc_ipynb_file__ = '/home/me/study.ipynb'"  # a headless run keeps nothing
IMPORTS = """\
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset"""
DATA = "frame = pd.DataFrame({'label': sorted(1 + i % 3 for i in range(60))})"
LOADER = """\
class Rows(Dataset):
    def __init__(self, frame):
        self.frame = frame
    def __len__(self):
        return len(self.frame)
    def __getitem__(self, i):
        return torch.tensor([float(i)]), int(self.frame.label.iloc[i])
loader = DataLoader(Rows(frame), 6)"""
STEP = """\
net = nn.Linear(1, 3).cuda()
def loss_of(inputs, labels):
    scores = net(inputs.cuda())
    labels = labels.cuda()
    return nn.functional.cross_entropy(scores, labels)"""
LOOP = """\
count = 0
for inputs, labels in loader:
    value = loss_of(inputs, labels)
    count += 1
print(value.item())"""
FAILING_STEP = 6  # 40 rows of 6 hold no label 3


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(extension=True, simulated_gpu=True, setup=FRONT_END) as kernel:
        for cell in (IMPORTS, DATA, LOADER, STEP):
            assert kernel.run(cell).error is None
        crash = kernel.run(LOOP)
        assert crash.report["finding"]["step"]["iteration"] == FAILING_STEP
        assert crash.report["next_steps"][0].startswith("%assertdoc verify")
        yield kernel


def passes(outcome: Outcome, verified: str) -> None:
    report = outcome.report
    assert outcome.error is None
    assert report["confidence"] == "clean", report["headline"]
    assert report["crash"] is None
    assert re.match(
        r"The fix holds: the failing batch passes on the CPU, \d+ calls? checked\.",
        report["headline"],
    )
    assert report["headline"].endswith(f" Verified: {verified}.")
    assert report["replays"][0]["checks"]["calls"] > 0
    assert f"verifying {verified}" in outcome.stdout


def test_the_suggested_fix_where_the_user_has_changed_nothing(kernel: Kernel) -> None:
    kernel.run("frame.label.unique()")  # to look is not to change
    passes(kernel.run("%assertdoc verify"), "the suggested fix in In [4]")


def test_it_is_the_failing_batch_that_runs(kernel: Kernel) -> None:
    half = LOOP.replace(
        "    value", f"    labels = labels - int(count < {FAILING_STEP})\n    value"
    )
    report = kernel.run(f"%%assertdoc verify\n{half}").report
    assert report["headline"].startswith("The fault is still there: ")
    assert report["headline"].endswith(" Tried: the edited In [5].")
    step = report["finding"]["step"]
    assert step["iteration"] == FAILING_STEP
    assert step["dataset_indices"] == [40, 41]
    assert report["finding"]["bad_values"] == [3]


def test_another_fault_is_told(kernel: Kernel) -> None:
    edited = LOOP.replace("(inputs, labels)", "(inputs, labels - 3)")
    report = kernel.run(f"%%assertdoc verify\n{edited}").report
    assert report["headline"].startswith("Still out of range: ")
    assert report["finding"]["bad_values"][0] == -2
    index = "    net.weight[inputs.new_tensor([3]).long().cuda()]\n    value"
    elsewhere = LOOP.replace("    value", index)
    report = kernel.run(f"%%assertdoc verify\n{elsewhere}").report
    assert report["headline"].startswith("The next fault: ")
    assert report["finding"]["bad_values"] == [3]


def test_another_length_of_the_data_runs_the_loop_from_its_start(kernel: Kernel) -> None:
    edited = f"{DATA}\nframe = frame[frame.label < 3]"
    report = kernel.run(f"%%assertdoc verify\n{edited}").report
    assert report["confidence"] == "clean"
    assert report["headline"].startswith(
        "The fix holds: the loop passes from its start on the CPU, 7 batches, "
    )
    assert report["headline"].endswith(" Verified: the edited In [2].")
    assert not any("another length" in step for step in report["next_steps"])
    assert any("another length" in told for told in report["replays"][-1]["differences"])


def test_a_fault_of_the_edit_is_no_success(kernel: Kernel) -> None:
    edited = LOOP.replace("loss_of(", "lost_of(")
    report = kernel.run(f"%%assertdoc verify\n{edited}").report
    assert report["confidence"] == "not_found"
    assert report["headline"] == (
        "Not verified: the replay ended with NameError: name 'lost_of' is not defined. "
        "Tried: the edited In [5]."
    )
    early = kernel.run("%%assertdoc verify\n" + LOOP.replace("+= 1", "+= 1\n    break")).report
    assert early["confidence"] == "not_found"
    assert early["headline"].startswith("Not verified: the loop ended before the failing batch")


def test_an_edit_may_need_what_the_cell_did_not(kernel: Kernel) -> None:
    """The kept replay holds what the failing cell needs; the rest comes from the variables."""
    edited = LOOP.replace(
        "in loader", "in DataLoader(Rows(frame.assign(label=frame.label - 1)), 4)"
    )
    passes(kernel.run(f"%%assertdoc verify\n{edited}"), "the edited In [5]")
    same = LOOP.replace("in loader", "in DataLoader(Rows(frame), 4)")
    report = kernel.run(f"%%assertdoc verify\n{same}").report
    assert report["headline"].startswith("The fault is still there: ")


def test_cells_that_were_run_since_and_the_newest_form_of_the_failing_one(kernel: Kernel) -> None:
    assert kernel.value("int(frame.label.max())") == 3  # nothing of the above has reached it
    fix = kernel.run("frame['label'] -= 1")
    count = fix.reply["execution_count"]
    calls = "__import__('nb_assertdoc').simulated_gpu.calls_after_death()"
    assert kernel.value(calls) == 0
    kernel.run(LOOP.replace("print(", "print('done', "))  # the user's own calls fail
    before = kernel.value(calls)
    passes(kernel.run("%assertdoc verify"), f"the edited In [5] and In [5] after In [{count}]")
    assert kernel.value(calls) == before


def test_what_the_dead_gpu_stopped_is_an_edit_all_the_same() -> None:
    with Kernel(extension=True, simulated_gpu=True, setup=FRONT_END) as kernel:
        kernel.run("import torch\nids = torch.tensor([1, 4])")
        kernel.run("rows = 4")
        kernel.run("table = torch.nn.Embedding(rows, 2).cuda()\nprint('made')")
        assert kernel.run("out = table(ids.cuda())\nout.sum().item()").report["finding"]
        failed = kernel.run("table = torch.nn.Embedding(rows + 1, 2).cuda()\nprint('made')")
        assert failed.error is not None
        kernel.run("1 / 0")  # fails by itself, and is no edit
        outcome = kernel.run("%assertdoc verify")
        assert "verifying In [4] after the edited In [3]" in outcome.stdout
        assert outcome.report["confidence"] == "clean", outcome.report["headline"]


def test_refusals(kernel: Kernel) -> None:
    said = kernel.run("%%assertdoc verify\nx = = 1").stdout
    assert "the cell is not valid Python" in said
    assert "for `verify` and `ranges` alone" in kernel.run("%%assertdoc report\n1").stdout


def test_after_the_restart_and_when_nothing_is_stored(kernel: Kernel) -> None:
    kernel.restart()
    kernel.run(FRONT_END, store_history=False)
    kernel.run("%load_ext nb_assertdoc")
    kernel.run(f"{IMPORTS}\nlooked = 1")
    edited = DATA.replace("1 + i", "i")
    changed = kernel.run(edited).reply["execution_count"]
    outcome = kernel.run("%assertdoc verify")
    assert outcome.report["headline"].endswith(f"In [{changed}].")
    assert "the failing batch passes on the CPU, " in outcome.report["headline"]

    kernel.run("%assertdoc forget")
    assert "no failing replay is stored" in kernel.run("%assertdoc verify").stdout


def test_cells_between_the_fault_and_its_error_are_no_fix_and_a_module_may_be() -> None:
    """The error of In [3] came in In [4], which looks like an edited form of it."""
    with Kernel(extension=True, simulated_gpu=True, setup=FRONT_END) as kernel:
        module = kernel.cwd / "helper.py"
        module.write_text("def known(ids):\n    return ids\n")
        kernel.run("import helper, torch\ntable = torch.nn.Embedding(4, 2).cuda()")
        kernel.run("limit = 4")
        kernel.run("ids = torch.tensor([1, 4]).cuda()\nout = table(helper.known(ids))")
        crash = kernel.run("ids = torch.tensor([1, 2]).cuda()\nout = table(helper.known(ids))")
        finding = crash.report["finding"]
        assert finding["bad_values"] == [4]
        assert finding["location"]["execution_count"] == 3

        outcome = kernel.run("%assertdoc verify")
        assert "the edited" not in outcome.text
        assert not outcome.reports or "suggested fix" in outcome.report["headline"]

        module.write_text("def known(ids):\n    return ids.clamp(max=3)\n")
        report = kernel.run("%assertdoc verify").report
        assert report["confidence"] == "clean", report["headline"]
        assert report["headline"].endswith("Verified: In [3] with helper.py as it is now.")

        store = session_of(kernel) / "replay"
        about = store / "kept.json"
        about.write_text(about.read_text().replace("cpython-", "cpython-9"))
        assert "stored by cpython-9" in kernel.run("%assertdoc verify").stdout
        about.write_text(about.read_text().replace("cpython-9", "cpython-"))
        (store / "capsule" / "buffers.bin").unlink()
        outcome = kernel.run("%assertdoc verify")
        assert outcome.error is None
        assert "clean" not in [report["confidence"] for report in outcome.reports]


def session_of(kernel: Kernel) -> Path:
    room = "__import__('nb_assertdoc').session"
    return Path(kernel.value(f"str({room}.folder() / {room}.key(get_ipython()))"))


def test_a_fault_that_cannot_be_described_is_no_pass(tmp_path: Path) -> None:
    evidence = replays.run(
        """
        import torch
        class Model(torch.nn.Module):
            @property
            def config(self):
                raise RuntimeError("not now")
            def forward(self, x):
                return torch.nn.functional.embedding(x, torch.zeros(2, 2).cuda())
        Model()(torch.tensor([5]).cuda())
        """,
        tmp_path / "order",
    )
    assert evidence.outcome != "clean"
    assert "a fault was met and could not be described" in "".join(evidence.differences)


# ---- which code is tried


def cell(count: int, source: str, cell_id: str | None = None) -> Source:
    return Source(filename=f"<{count}>", source=source, execution_count=count, cell_id=cell_id)


LABELS, DATASET, LOOP_2 = "labels = load()", "data = list(labels)", "for y in data:\n    loss(y)"
PAST = (cell(1, LABELS, "a"), cell(2, DATASET, "b"))
KEPT = StoredReplay(
    folder=None,  # type: ignore[arg-type]  # not read here
    order=Order(engine="ghost", real_floats=False, cell=cell(3, LOOP_2, "c"), sources=PAST),
    earlier=PAST,
    iteration=None,
)


def report_with(edit: Edit | None) -> Report:
    environment = Environment(python="3", ipython="9", platform="Linux")
    fix = Fix(title="", explanation="", edit=edit)
    return Report(confidence="certain", headline="", environment=environment, fixes=(fix,))


def test_the_suggested_edit_is_made_where_its_line_stands() -> None:
    report = report_with(Edit(cell_id=None, old="loss(y)", new="y -= 1\nloss(y)"))
    attempt = choose(KEPT, report, None, [], [], same_kernel=True)
    assert attempt.cell.source == "for y in data:\n    y -= 1\n    loss(y)"
    report = report_with(Edit(cell_id="a", old="labels = load()", new="labels = load() - 1"))
    assert choose(KEPT, report, None, [], [], same_kernel=True).edits == {0: "labels = load() - 1"}


def test_of_the_stopped_cells_edits_of_earlier_ones_count() -> None:
    stopped = [
        cell(4, "labels = load(0)", "a"),
        cell(5, "labels = load(1)", "a"),  # the newest form
        cell(6, DATASET, "b"),  # unchanged
        cell(7, "data = list(labels + 1)", "new"),  # a copy of an earlier cell, edited
        cell(8, "print(torch.cuda.memory_summary())", "look"),
    ]
    attempt = choose(KEPT, None, None, [], stopped, stopped, same_kernel=True)
    assert attempt.edits == {0: "labels = load(1)", 1: "data = list(labels + 1)"}
    assert attempt.words == "In [3] after the edited In [1], the edited In [2]"
    with pytest.raises(UsageError, match="nothing to verify"):
        choose(KEPT, None, None, [], stopped[2:3], stopped[2:3], same_kernel=True)


def test_nothing_to_verify_names_what_to_do() -> None:
    edits = (None, Edit(cell_id=None, old="is nowhere", new=""))
    for report in (None, *map(report_with, edits)):
        with pytest.raises(UsageError, match="%%assertdoc verify"):
            choose(KEPT, report, None, [], [], same_kernel=True)


def test_after_a_restart_unchanged_cells_are_no_fix() -> None:
    again = [cell(1, LABELS, "a"), cell(2, "data = list(labels - 1)", "b"), cell(3, "n = 2", "d")]
    attempt = choose(KEPT, None, None, again, again, same_kernel=False)
    assert attempt.edits == {1: "data = list(labels - 1)"}
    assert [s.source for s in attempt.later] == ["n = 2"]


def test_without_ids_an_edit_is_known_by_its_text() -> None:
    nameless = [msgspec.structs.replace(s, cell_id=None) for s in (*PAST, KEPT.order.cell)]
    kept = replace(
        KEPT,
        order=msgspec.structs.replace(KEPT.order, cell=nameless[2]),
        earlier=tuple(nameless[:2]),
    )
    attempt = choose(kept, None, "labels = load(1)", [], [], same_kernel=True)
    assert attempt.edits == {0: "labels = load(1)"}
    assert choose(kept, None, LOOP_2 + "  # more", [], [], same_kernel=True).edits == {}
    other = [cell(4, "y = fetch()")]
    attempt = choose(kept, None, None, other, other, same_kernel=False)
    assert (attempt.edits, attempt.later) == ({}, tuple(other))


def test_what_hangs_on_an_edited_cell_runs_again() -> None:
    sources = [
        cell(1, "labels = load()"),
        cell(2, "other = 1"),
        cell(3, "data = wrap(labels)"),
        cell(4, "for y in data:\n    loss = f(y)\n    loss.backward()"),
        cell(5, "shown = len(data)"),
    ]
    assert with_dependents(sources, {0}, {"data", "loss"}) == {0, 2}


def test_what_a_cell_needs_is_made_again_where_it_is_not_at_hand() -> None:
    sources = [
        cell(1, "import torch\ntorch.manual_seed(0)"),
        cell(2, "raw = read()"),
        cell(3, "labels = raw.label"),
        cell(4, "labels -= 1"),
    ]
    assert with_makers(sources, {2}, {"labels"}, past=4) == {0, 1, 2}
    assert with_makers(sources, {2}, {"labels", "raw"}, past=4) == {0, 2}
    # A cell that changes its own input begins from its maker; a later one from what is at hand.
    assert with_makers(sources, {3}, {"labels", "raw"}, past=4) == {0, 2, 3}
    assert with_makers(sources, {3}, {"labels", "raw"}, past=3) == {3}


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("frame.head()", False),
        ("print(labels.min())", False),
        ("import os", False),
        ("labels", False),
        ("%matplotlib inline", False),
        ("labels -= 1", True),
        ("labels.sub_(1)", True),
        ("frame.drop(columns='a', inplace=True)", True),
        ("rows.append(1)", True),
        ("repair(frame)", True),
        ("frame['label'] = 0", True),
        ("def f(): pass", True),
    ],
)
def test_to_look_is_not_to_change(source: str, changes: bool) -> None:
    assert acts(source) == changes


def test_names_bound_before_they_are_read() -> None:
    source = "for x, y in loader:\n    z = x + y\n    total = total + z\ndef f():\n    return late"
    assert bound_first(source) == {"x", "y", "z", "f"}
