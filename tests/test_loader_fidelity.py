"""The batch that a replay fails at is the user's, sample for sample; else the report says so.

Each loop runs twice in a notebook on the simulated GPU. The first time it only writes down the
batches that it is given; one far in is chosen, and the second time the loop fails at it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forks import HOST
from kernels import Kernel

from nb_assertdoc.doctor.memory import free_memory
from nb_assertdoc.model import Span, batches

SETUP = """
import builtins, itertools, random, types
import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SubsetRandomSampler,
    WeightedRandomSampler, get_worker_info,
)
from tqdm import tqdm
table = nn.Embedding(1000, 2).cuda()
BAD = []

class Rows(Dataset):
    def __init__(self, size=120, draw=int):
        self.size, self.draw = size, draw
    def __len__(self):
        return self.size
    def __getitem__(self, i):
        return i, torch.tensor([i, self.draw()])

class Stream(IterableDataset):
    def __init__(self, size=120, draw=int):
        self.size, self.draw = size, draw
    def __iter__(self):
        info = get_worker_info()
        first, each = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, self.size, each):
            yield i, torch.tensor([i, self.draw()])

def augment():
    return random.randrange(300) + int(np.random.randint(300)) + int(torch.randint(300, ()))

def step(batch):
    rows, x = batch
    ids = x + 5000 * (rows.tolist() == BAD)
    keep(rows, ids)
    return table(ids.cuda()).sum()

def seed(n=0):
    random.seed(n), np.random.seed(n), torch.manual_seed(n)
"""
HELP = """
given = types.SimpleNamespace(rows=[], ids=[])
def _keep(rows, ids):
    given.rows.append(rows.tolist()), given.ids.append(ids.tolist())
builtins.keep = _keep  # a replay has one that keeps nothing
_flow = get_ipython()._nb_assertdoc.flow
def again(replay):
    import nb_assertdoc.simulated_gpu as gpu
    from nb_assertdoc.settings import settings
    settings().replay = replay
    gpu._context.__init__()
    _flow.first = _flow.crash = _flow.found = None
    _flow.recorder.context_dead = False
    _flow.recorder.executions.clear()
    given.__init__(rows=[], ids=[])
"""


@dataclass(frozen=True)
class Kind:
    cell: str
    setup: str = ""  # an earlier cell
    at: int = 26  # the batch that fails, counted over the whole cell
    iteration: int | None = None  # in its loop; as `at` where not given
    likely: str = ""  # a reason that must be named; else the report must be certain


LOOP = "seed()\nfor batch in {}:\n    step(batch)\ntorch.ones(1).cuda().item()"
KINDS = {
    "shuffle": Kind(LOOP.format("DataLoader(Rows(), 4, shuffle=True)")),
    "own sampler": Kind(
        LOOP.format("DataLoader(Rows(), 4, sampler=Backwards())"),
        "class Backwards(Sampler):\n"
        "    def __len__(self): return 120\n"
        "    def __iter__(self): return iter(sorted(range(120), key=lambda i: random.random()))",
    ),
    "batch sampler": Kind(
        LOOP.format("DataLoader(Rows(), batch_sampler=Growing())"),
        "class Growing:\n"
        "    def __len__(self): return 30\n"
        "    def __iter__(self):\n"
        "        for k in range(30): yield np.random.permutation(120)[: 1 + k % 5].tolist()",
    ),
    "workers": Kind(LOOP.format("DataLoader(Rows(), 4, shuffle=True, num_workers=2)")),
    "generator": Kind(
        LOOP.format("DataLoader(Rows(), 4, shuffle=True, generator=torch.Generator())")
    ),
    "weighted": Kind(
        LOOP.format("DataLoader(Rows(), 4, sampler=WeightedRandomSampler(torch.rand(120), 120))")
    ),
    "subset": Kind(
        LOOP.format("DataLoader(Rows(), 4, sampler=SubsetRandomSampler(range(5, 120)))"), at=25
    ),
    "stream": Kind(LOOP.format("DataLoader(Stream(), 4)")),
    "stream with workers": Kind(LOOP.format("DataLoader(Stream(), 4, num_workers=2)")),
    "augmented": Kind(LOOP.format("DataLoader(Rows(draw=augment), 4, shuffle=True)")),
    "augmented by workers": Kind(
        LOOP.format("DataLoader(Rows(draw=augment), 4, shuffle=True, num_workers=2)")
    ),
    "augmented stream with workers": Kind(
        LOOP.format("DataLoader(Stream(draw=augment), 4, num_workers=2)")
    ),
    "persistent workers, third epoch": Kind(
        """
        seed()
        loader = DataLoader(Rows(), 4, shuffle=True, num_workers=2, persistent_workers=True)
        for epoch in range(3):
            for batch in loader:
                step(batch)
        torch.ones(1).cuda().item()
        """,
        at=75,
        iteration=15,
    ),
    "augmented by persistent workers, third epoch": Kind(
        """
        seed()
        loader = DataLoader(
            Rows(draw=augment), 4, shuffle=True, num_workers=2, persistent_workers=True
        )
        for epoch in range(3):
            for batch in loader:
                step(batch)
        torch.ones(1).cuda().item()
        """,
        at=75,
        iteration=15,
    ),
    "persistent workers in two loops": Kind(
        """
        seed()
        loader = DataLoader(
            Rows(draw=augment), 4, shuffle=True, num_workers=2, persistent_workers=True
        )
        for batch in loader:
            step(batch)
        for batch in loader:
            step(batch)
        torch.ones(1).cuda().item()
        """,
        at=50,
        iteration=20,
    ),
    "augmented, third epoch": Kind(
        """
        seed()
        loader = DataLoader(Rows(draw=augment), 4, shuffle=True)
        for epoch in range(3):
            for batch in loader:
                step(batch)
        torch.ones(1).cuda().item()
        """,
        at=75,
        iteration=15,
    ),
    "validation": Kind(
        """
        seed()
        for batch in DataLoader(Rows(), 4, shuffle=True):
            step(batch)
        for batch in DataLoader(Rows(90, augment), 4, shuffle=True):
            step(batch)
        torch.ones(1).cuda().item()
        """,
        at=50,
        iteration=20,
    ),
    "the last batch before the validation": Kind(
        """
        seed()
        for batch in DataLoader(Rows(), 4, shuffle=True):
            step(batch)
        for batch in DataLoader(Rows(90), 4, shuffle=True):
            step(batch)
        torch.ones(1).cuda().item()
        """,
        at=29,
    ),
    "validation now and then": Kind(
        """
        seed()
        train = DataLoader(Rows(), 4, shuffle=True)
        valid = DataLoader(Rows(90), 4, shuffle=True)
        for i, batch in enumerate(train):
            step(batch)
            if (i + 1) % 7 == 0:
                for batch in valid:
                    step(batch)
        torch.ones(1).cuda().item()
        """,
        at=14 + 23 + 11,
        iteration=11,
    ),
    "enumerate": Kind(
        """
        seed()
        for i, batch in enumerate(DataLoader(Rows(), 4, shuffle=True)):
            step(batch)
        torch.ones(1).cuda().item()
        """
    ),
    "enumerate with an index of it": Kind(
        """
        seed()
        for i, (rows, x) in enumerate(tqdm(DataLoader(Rows(), 4, shuffle=True)), 1):
            step((rows, x + i))
        torch.ones(1).cuda().item()
        """
    ),
    "a progress bar that makes an iterator more": Kind(
        """
        seed()
        from tqdm.asyncio import tqdm as bar  # also that of notebooks
        for epoch in range(2):
            for batch in bar(DataLoader(Rows(draw=augment), 4, shuffle=True)):
                step(batch)
        torch.ones(1).cuda().item()
        """
    ),
    "a progress bar that tells the epoch": Kind(
        """
        seed()
        for epoch in range(2):
            for rows, x in tqdm(DataLoader(Rows(), 4, shuffle=True), desc=f"epoch {epoch}"):
                step((rows, x))
        torch.ones(1).cuda().item()
        """
    ),
    "zip": Kind(
        """
        seed()
        def made(size): return DataLoader(Rows(size), 4, shuffle=True)
        for (rows, x), (more, y) in zip(made(120), made(112)):
            step((torch.cat([rows, more]), torch.cat([x, y])))
        torch.ones(1).cuda().item()
        """
    ),
    "zip of two alike": Kind(
        """
        seed()
        def made(): return DataLoader(Rows(), 4, shuffle=True)
        for (rows, x), (more, y) in zip(made(), made()):
            step((torch.cat([rows, more]), torch.cat([x, y])))
        torch.ones(1).cuda().item()
        """
    ),
    "zip of two that draw from one generator": Kind(
        """
        seed()
        def made(): return DataLoader(Rows(draw=augment), 4, shuffle=True)
        for (rows, x), (more, y) in zip(made(), made()):
            step((torch.cat([rows, more]), torch.cat([x, y])))
        torch.ones(1).cuda().item()
        """,
        likely="random numbers were drawn between the batches",
    ),
    "islice": Kind(
        """
        seed()
        for batch in itertools.islice(DataLoader(Rows(), 4, shuffle=True), 28):
            step(batch)
        torch.ones(1).cuda().item()
        """
    ),
    "cycle": Kind(
        """
        seed()
        for _, batch in zip(range(50), itertools.cycle(DataLoader(Rows(), 4, shuffle=True))):
            step(batch)
        torch.ones(1).cuda().item()
        """
    ),
    "next of an iterator": Kind(
        """
        seed()
        batches = iter(DataLoader(Rows(), 4, shuffle=True))
        for i in range(29):
            step(next(batches))
        torch.ones(1).cuda().item()
        """
    ),
    "next of two iterators, one made anew": Kind(
        """
        seed()
        few, many = DataLoader(Rows(40), 4, shuffle=True), DataLoader(Rows(), 4, shuffle=True)
        one, two = iter(many), iter(few)
        for i in range(29):
            rows, x = next(one)
            try:
                more, y = next(two)
            except StopIteration:
                two = iter(few)
                more, y = next(two)
            step((torch.cat([rows, more]), torch.cat([x, y])))
        torch.ones(1).cuda().item()
        """
    ),
    "a function of an earlier cell": Kind(
        "seed()\ntrain(DataLoader(Rows(), 4, shuffle=True), 3)",
        """
        def train(loader, epochs):
            for epoch in range(epochs):
                for batch in tqdm(loader):
                    loss = step(batch)
                print(loss.item())
        """,
        at=75,
        iteration=15,
    ),
    "a class with fit": Kind(
        "seed()\nTrainer(DataLoader(Rows(), 4, shuffle=True)).fit()",
        """
        class Trainer:
            def __init__(self, loader):
                self.loader, self.steps = loader, 0
            def fit(self):
                while self.steps < 80:
                    self.epoch()
            def epoch(self):
                for batch in self.loader:
                    step(batch)
                    self.steps += 1
                torch.ones(1).cuda().item()
        """,
        at=75,
        iteration=15,
    ),
    "random numbers in the body": Kind(
        """
        seed()
        for rows, x in DataLoader(Rows(), 4, shuffle=True):
            step((rows, x + torch.randint(500, ())))
        torch.ones(1).cuda().item()
        """,
        likely="draws random numbers in its loop",
    ),
    "a counter of batches": Kind(
        """
        seed()
        count = 0
        for rows, x in DataLoader(Rows(), 4, shuffle=True):
            step((rows, x + count))
            count += 1
        torch.ones(1).cuda().item()
        """,
        likely="`count` counts rounds",
    ),
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(simulated_gpu=True, extension=True, setup="") as kernel:
        for code in (SETUP, HELP, HOST):
            made = kernel.run(code)
            assert made.error is None, made.text
        yield kernel


def crash(kernel: Kernel, cell: str, setup: str = "") -> dict[str, Any]:
    """Run a cell that dies, in the state of a new kernel; its report."""
    kernel.run(setup)
    kernel.run("again(replay=True)", store_history=False)
    outcome = kernel.run(cell)
    assert outcome.error is not None
    return outcome.report


@pytest.mark.parametrize("name", KINDS)
def test_the_failing_batch_is_the_users(kernel: Kernel, name: str) -> None:
    kind = KINDS[name]
    setup, cell = textwrap.dedent(kind.setup), textwrap.dedent(kind.cell)
    kernel.run(f"{setup}\nBAD = []")
    kernel.run("again(replay=False)", store_history=False)
    dry = kernel.run(cell)
    assert dry.error is None, dry.text
    report = crash(kernel, cell, f"{setup}\nBAD = given.rows[{kind.at}]")
    at = kernel.value("next((i for i, rows in enumerate(given.rows) if rows == BAD), None)")
    rows, ids = kernel.value(f"(given.rows[{at}], given.ids[{at}])")
    assert at == kind.at
    finding = report["finding"]
    told = "\n".join([report["headline"], *report["replays"][-1]["differences"]])
    assert finding is not None, told
    values = sorted({v for row in ids for v in row})
    if kind.likely:
        assert (report["confidence"], kind.likely in told) == ("likely", True), told
        assert finding["step"]["iteration"] == at
        return
    assert finding["bad_values"] == values, told
    assert finding["step"]["iteration"] == (at if kind.iteration is None else kind.iteration)
    assert finding["bad_count"] == sum(map(len, ids))
    left_out = [Span(**span) for span in finding["step"]["left_out"]]
    assert all(span.first <= span.last < at for span in left_out)
    assert bool(left_out) == (f"{batches(left_out)} not re-run" in told)
    if "zip" not in name and "two" not in name and "stream" not in name:
        assert finding["step"]["dataset_indices"] == rows
    assert report["confidence"] == "certain", told


# ---- what a replay that leaves batches out cannot find


def engines(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(replay["engine"], replay["outcome"]) for replay in report["replays"]]


def test_a_fault_of_a_counter_is_found_from_the_start(kernel: Kernel) -> None:
    cell = """
    seed()
    few, count = nn.Embedding(26, 2).cuda(), 0
    for rows, x in DataLoader(Rows(), 4, shuffle=True):
        few(torch.tensor([count]).cuda())
        count += 1
    torch.ones(1).cuda().item()
    """
    report = crash(kernel, textwrap.dedent(cell))
    assert engines(report) == [("ghost", "clean"), ("ghost", "fault")]
    assert report["finding"]["bad_values"] == [26]
    assert report["finding"]["step"]["iteration"] == 26
    assert report["confidence"] == "certain"


FLOATS = """
seed()
few, weight = nn.Embedding(26, 2).cuda(), nn.Parameter(torch.zeros(1, device="cuda"))
for rows, x in DataLoader(Rows(), 4, shuffle=True):
    few({}.long())
    {}
torch.ones(1).cuda().item()
"""


def test_a_fault_of_trained_weights_is_found_from_the_start(kernel: Kernel) -> None:
    report = crash(kernel, FLOATS.format("weight", "weight.data += 1"))
    assert engines(report) == [("ghost", "clean"), ("cpu", "fault")]
    assert report["finding"]["bad_values"] == [26]
    assert report["finding"]["step"]["iteration"] == 26


def test_without_time_for_all_batches_the_weights_are_doubted(kernel: Kernel) -> None:
    kernel.run("%config AssertDoc.replay_seconds = 12.0\nimport time")
    shown = "(x[:, :1].cuda() * (rows == 17).any() + weight)"
    try:
        report = crash(kernel, FLOATS.format(f"({shown} * 3)", "time.sleep(0.3)"))
    finally:
        kernel.run("%config AssertDoc.replay_seconds = 90.0")
    assert engines(report) == [("ghost", "clean"), ("cpu", "fault")]
    assert 51 in report["finding"]["bad_values"]
    assert report["confidence"] == "likely"
    reason = "batches were left out: the weights are not those of the user's step"
    assert reason in report["replays"][-1]["differences"]


def test_a_model_that_does_not_fit_is_not_computed(kernel: Kernel) -> None:
    kernel.run("%config AssertDoc.worker_bytes = 900_000_000")
    try:
        report = crash(
            kernel,
            FLOATS.format("weight", "weight.data += 1"),
            "large = types.SimpleNamespace(model=nn.Linear(30_000, 30_000, device='meta'))",
        )
    finally:
        kernel.run("%config AssertDoc.worker_bytes = 0\ndel large")
    assert engines(report) == [("ghost", "clean")]
    assert report["confidence"] == "not_found"
    words = "no replay with real floats: it would need about 14.4 GB of memory, and may use 0.9 GB"
    assert words in report["next_steps"]


STORED = (
    "import sqlite3\nbase = sqlite3.connect(':memory:')\nbase.execute('create table t (i, x)')",
    "base.executemany('insert into t values (?, ?)', [(i, i) for i in range(120)])",
    "base.execute('update t set x = x + 1')",
    "print(torch.rand(3)); unrelated = list(range(10))",
    """
class Stored(Rows):
    def __getitem__(self, i):
        asked = base.execute("select x, ? from t where i = ?", (self.draw(), i))
        return i, torch.tensor(asked.fetchone())
""",
)


def test_cells_that_run_again_lead_to_the_same_batch(kernel: Kernel) -> None:
    cell = "for batch in DataLoader(Stored(draw=augment), 4, shuffle=True):\n    step(batch)\n"
    cell += "torch.ones(1).cuda().item()"
    kernel.run("again(replay=False)", store_history=False)
    for code in (SETUP, *STORED, "seed(4)", cell):
        assert kernel.run(code).error is None
    rows, ids = kernel.value("(given.rows[26], given.ids[26])")
    kernel.run(f"seed(4)\nBAD = {rows}")
    kernel.run("ran = [*_flow.recorder.executions]; again(replay=True)", store_history=False)
    kernel.run(
        "for execution in ran: execution.succeeded = True\n_flow.recorder.executions.extend(ran)",
        store_history=False,
    )

    report = kernel.run(cell).report
    assert engines(report) == [("ghost", "other_error"), ("history", "fault")]
    finding = report["finding"]
    assert finding["bad_values"] == sorted({v + 5000 for row in ids for v in row})
    assert finding["step"]["iteration"] == 26
    assert finding["step"]["dataset_indices"] == rows
    again = "earlier cells were run again to rebuild what the cell needs"
    assert again in report["replays"][-1]["differences"]


GROUPS = {  # files of a control group, and the limit that each sets, in gigabytes
    "0::/a/b": ({"a/memory.max": "6", "a/b/memory.max": "max"}, "current", "inactive_file"),
    "4:cpu,memory:/a": (
        {"memory/a/memory.limit_in_bytes": "6"},
        "usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("line", GROUPS)
def test_the_limit_of_a_container_counts(tmp_path: Path, line: str) -> None:
    giga = 10**9
    files, use, cached = GROUPS[line]
    (tmp_path / "own").write_text(f"{line}\n1:name=systemd:/x\n")
    for name, limit in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit if limit == "max" else str(giga // 100 * int(limit)))
        (file.parent / f"memory.{use}").write_text(str(giga // 100 * 5))
        (file.parent / "memory.stat").write_text(f"anon 1\n{cached} {giga // 100 * 4}\n")
    assert free_memory(tmp_path / "own", tmp_path) == giga // 100 * 5 * 4 // 5
    assert free_memory(tmp_path / "nothing", tmp_path) > giga // 100 * 5
