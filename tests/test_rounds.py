"""Which step of which loop: the data's, those within it, and the batches that were left out."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import FrameType

import replays

from nb_assertdoc.model import (
    Bound,
    Environment,
    Finding,
    Place,
    Report,
    Round,
    Span,
    Step,
    batches,
)
from nb_assertdoc.report import words
from nb_assertdoc.worker.counters import branching
from nb_assertdoc.worker.names import split_of

START = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ids = torch.arange(40) % 4
ids[25] = 4
heads = nn.ModuleList(nn.Embedding(rows, 3) for rows in (9, 4, 9)).to("cuda")

def use(x):
    for head in heads:
        head(x.to("cuda"))

def again(loader):
    for batch in loader:
        yield batch

class Trainer:
    def fit(self, loader):
        for (x,) in loader:
            use(x)

val_loader2 = DataLoader(TensorDataset(ids), batch_size=8)
"""
HEAD = ("for head in heads:", 1)
LOOPS = {  # the data's loop with what is in it; the loops as they must be told, outermost first
    "for epoch in range(2):\n    for i in range(0, 40, 8):\n        use(ids[i : i + 8])": [
        ("for epoch in range(2):", 0),
        ("for i in range(0, 40, 8):", 3),
        HEAD,
    ],
    "for epoch in range(2):\n    for (x,) in val_loader2:\n        use(x)": [
        ("for (x,) in val_loader2:", 3),
        HEAD,
    ],
    "for epoch in range(2):\n    them = iter(val_loader2)\n    while True:\n"
    "        use(next(them)[0])": [("while True:", 3), HEAD],
    "for (x,) in val_loader2:\n    break\nfor i in range(25, 40):\n    use(ids[i : i + 1])": [
        ("for i in range(25, 40):", 0),
        HEAD,
    ],
    "for n, (x,) in enumerate(again(val_loader2)):\n    heads[1](x.to('cuda'))": [
        ("for n, (x,) in enumerate(again(val_loader2)):", 3)
    ],
    "for rate in (0.1, 0.2):\n    Trainer().fit(val_loader2)": [
        ("for (x,) in loader:", 3),
        HEAD,
    ],
}


def test_the_steps_of_the_data_and_within(tmp_path: Path) -> None:
    texts = {f"loops {i}": START.lstrip() + loops for i, loops in enumerate(LOOPS)}
    ran = replays.run_each(texts, tmp_path)
    for loops, snippet in zip(LOOPS, ran.values(), strict=True):
        step = snippet.observed[0].finding.step
        assert step is not None
        found = [(r.loop, r.iteration) for r in (*step.around, step)]
        assert found == LOOPS[loops]
        loader = "val_loader2" in loops and "break" not in loops
        assert step.dataset_indices == ((25,) if loader else None)
        assert step.split == ("validation" if loader else None)


def told(step: Step) -> str:
    place = Place(line=1, source="table(x)")
    finding = Finding(
        op="embedding",
        aten_op="aten.embedding.default",
        argument="input",
        bad_values=(4,),
        distinct_bad=1,
        bad_count=1,
        total=8,
        positions=((1,),),
        bound=Bound(low=0, high=4),
        margin=1,
        location=place,
        step=step,
    )
    environment = Environment(python="3.12", ipython="9", platform="Linux")
    report = Report(confidence="certain", headline="", environment=environment, finding=finding)
    return words.origin(report)


def test_they_are_told_in_one_sentence() -> None:
    around = (Round(loop="for x in loader:", iteration=9),)
    inner = Step(loop="for head in heads:", iteration=1, split="train", around=around)
    assert told(inner) == (
        "step 9 of `for x in loader`, in it step 1 of `for head in heads`, counted from 0; "
        "split `train`"
    )
    spans = (Span(first=0, last=4), Span(first=7, last=7))
    library = Step(
        loop="loop over a DataLoader", iteration=9, batch_rows=(2,), split="train", left_out=spans
    )
    assert told(library) == (
        "step 9 of the loop over a DataLoader (batches 0..4 and 7 not re-run); row 2 of split "
        "`train`"
    )
    assert batches((Span(first=3, last=3),)) == "batch 3"


SPLITS = {
    "va_dl": "validation",
    "val_loader2": "validation",
    "dl_te": "test",
    "testLoader": "test",
    "trainset": "train",
    "tr": "train",
    "dataloaders['valid']": "validation",
    "self.train_dataloader": "train",
    "dev_ds": "validation",
    "eval_dataloader": "evaluation",
    "interval_loader": None,
    "device_loader": None,
    "latest": None,
    "constraint_dl": None,
    "vase_loader": None,
}


def test_a_name_tells_the_split_by_whole_words() -> None:
    assert {name: split_of(name) for name in SPLITS} == SPLITS
    assert split_of(None, "loader", "test_data") == "test"


WAYS = {  # a loop's body, the failing line marked; the counter that decides where it goes
    "if step < 5:\n    a(x)\nelse:\n    b(x)  # here\nstep += 1": "step",
    "if len(losses) < 5:\n    a(x)  # here\nelse:\n    b(x)\nlosses.append(1)": "losses",
    "a(x) if step < 5 else b(x)  # here\nstep += 1": "step",
    "if step % 2 == 0:\n    b(x)  # here\nstep += 1": None,  # there is no other way
    "if x > 3:\n    a(x)\nelse:\n    b(x)  # here\nstep += 1": None,
    "if step < 5:\n    print(step)\nelse:\n    pass\nb(x)  # here\nstep += 1": None,
}


def decides(file: Path, text: str) -> str | None:
    """What is told of the line marked "here" as it runs for the first time."""
    file.write_text(text)
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "# here" in each)
    seen: list[str | None] = []

    def watch(frame: FrameType, event: str, arg: object) -> object:
        if frame.f_code.co_filename == str(file) and frame.f_lineno == line and not seen:
            seen.append(branching([frame]))
        return watch

    space = {"data": range(9), "a": lambda x: x, "b": lambda x: x}
    sys.settrace(watch)
    try:
        exec(compile(text, str(file), "exec"), space)
    finally:
        sys.settrace(None)
    return seen[0]


def test_what_counts_rounds_and_decides_where_the_code_goes(tmp_path: Path) -> None:
    loop = "step, losses = 0, []\nfor x in data:\n"
    found = {
        body: decides(tmp_path / f"way{n}.py", f"{loop}{textwrap.indent(body, '    ')}\n")
        for n, body in enumerate(WAYS)
    }
    assert found == WAYS
