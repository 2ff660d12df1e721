"""`%assertdoc ranges`: what operators are given in the first batches, beside what is valid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kernels import Kernel
from replays import run

from nb_assertdoc import report
from nb_assertdoc.model import Evidence

SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
ids = torch.arange(40).reshape(20, 2)  # of batch b: 8b..8b+7
labels = torch.arange(20) // 4  # of batch b: b
labels[7] = -100
words, classes = nn.Embedding(100, 4), nn.Linear(8, 10)
loader = DataLoader(TensorDataset(ids, labels), batch_size=4)
"""
LOOP = """
for epoch in range(50):
    for x, y in loader:
        scores = classes(words(x).flatten(1))
        loss = nn.functional.cross_entropy(scores, y)
    for x, y in DataLoader(TensorDataset(ids, labels), batch_size=10):
        seen = words(x + 50)
"""


def met(evidence: Evidence) -> dict[tuple[str, str | None], tuple[Any, ...]]:
    """Calls, values, ignored ones, bad ones, least and greatest, by operator and module."""
    return {
        (m.op, m.module): (m.calls, m.count, m.ignored, m.bad, m.minimum, m.maximum)
        for m in evidence.measured
    }


def test_the_first_batches_of_each_loop_are_measured(tmp_path):
    evidence = run(SETUP + LOOP, tmp_path, batches=3)

    assert evidence.outcome == "clean"
    # 3 batches of 4 rows, then 2 of 10 rows with 50 more
    assert met(evidence) == {
        ("embedding", "words"): (5, 64, 0, 0, 0, 89),
        ("cross_entropy", None): (3, 12, 1, 0, 0, 2),
    }


BAD = (
    SETUP
    + """
labels[9], labels[14] = 10, -1
def train():
    for x, y in loader:
        loss = nn.functional.cross_entropy(classes(words(x).flatten(1)), y)
train()
"""
)


def test_a_fault_does_not_end_it(tmp_path):
    evidence = run(BAD, tmp_path, batches=4)

    assert met(evidence) == {
        ("embedding", "words"): (4, 32, 0, 0, 0, 31),
        ("cross_entropy", None): (4, 16, 1, 2, -1, 10),
    }
    text = report.ranges_bundle(evidence, 5, 4)["text/plain"]
    assert text.startswith("In [5], first 4 batches: OUT OF RANGE: cross_entropy `target`.")
    row = next(line for line in text.splitlines() if line.startswith("  cross_entropy"))
    shown = "cross_entropy target num_classes=10 -1 10 0 <= index < 10, or -100 (ignored) -1 BAD 4"
    assert row.split() == shown.split()
    assert "Bad: 2 of 16 values of cross_entropy" in text


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A notebook without a GPU, in which a loop has run."""
    with Kernel(extension=True) as kernel:
        assert "no cell has run a loop" in kernel.run("%assertdoc ranges").stdout
        kernel.run(SETUP)
        kernel.run("for start in range(0, 20, 4):\n    seen = words(ids[start : start + 4])")
        yield kernel


def test_the_last_loop_is_replayed_beside_the_notebook(kernel):
    kernel.run("after = words.weight.sum()")
    outcome = kernel.run("%assertdoc ranges 2")

    assert outcome.error is None
    assert outcome.text.startswith("In [3], first 2 batches: all values are in range.")
    assert "the newest cell with a loop" in outcome.text
    assert "`%assertdoc ranges 2 CELL` takes In [CELL]" in outcome.text
    (row,) = [line for line in outcome.text.splitlines() if line.startswith("  embedding")]
    assert row.split() == "embedding input words 0 15 0 <= index < 100 84 2".split()
    assert "<td" in outcome.html and "84" in outcome.html
    assert kernel.value("start") == 16


def test_another_cell_and_what_is_refused(kernel):
    outcome = kernel.run("%assertdoc ranges 2 2")
    assert "In [2], first 2 batches: no operator" in outcome.text

    assert "there is no In [99]" in kernel.run("%assertdoc ranges 5 99").stdout
    assert "0 is not a whole number of 1 or more" in kernel.run("%assertdoc ranges 0").stdout
    assert "only magics or comments" in kernel.run("%assertdoc ranges 2 1").stdout


def test_the_newest_loop_over_a_loader_that_checks_anything_is_taken(start_kernel):
    kernel = start_kernel(extension=True)
    kernel.run(SETUP)
    kernel.run("def train():\n    for x, y in loader:\n        words(x)")
    kernel.run("train()")
    kernel.run("for x, y in loader:\n    break")  # checks nothing
    kernel.run("for word in 'a b'.split():\n    word")  # is newer, and loops over no loader
    kernel.run("def unused():\n    for x in loader:\n        pass")

    text = kernel.run("%assertdoc ranges 2").text
    assert text.startswith("In [3], first 2 batches: all values are in range.")
    assert "the newest cell that looped over a DataLoader" in text


def test_the_cell_below_and_that_of_a_cell_magic(kernel):
    below = kernel.run("%%assertdoc ranges 2\nfor x, y in loader:\n    words(x + 90)")
    number = below.reply["execution_count"]
    assert below.text.startswith(f"In [{number}], first 2 batches: OUT OF RANGE: embedding `input`")
    kernel.run("%%cpu_replay --max-steps 1\n\nfor x, y in loader:\n    words(x)")

    for name in (number, number + 1):
        again = kernel.run(f"%assertdoc ranges 3 {name}").text
        (row,) = [line for line in again.splitlines() if line.startswith("  embedding")]
        assert row.split()[-1] == "3", again
    assert "takes the cell below it" in kernel.run("%%assertdoc ranges 2 2\nwords(ids)").stdout
    assert "`verify` and `ranges` alone" in kernel.run("%%assertdoc scan\nids").stdout
