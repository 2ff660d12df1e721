"""What a replay begins with where the dead cell has bound names anew, or objects are hostile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import replays
from kernels import Kernel

from nb_assertdoc.doctor import start_of
from nb_assertdoc.recorder import Execution
from nb_assertdoc.recorder.bindings import Bindings

Start = Callable[..., Kernel]


def test_integers_that_the_cell_has_freed(start_kernel: Start) -> None:
    """Their copies are known. Tensors made since have the ids of freed ones, and other values."""
    kernel = start_kernel(simulated_gpu=True, extension=True)
    names = [f"x{i}" for i in range(12)]
    kernel.run(
        "import torch\nfrom torch.nn import functional as F\n"
        "labels = (torch.arange(12) % 6 + 1).cuda()\n"
        + "\n".join(f"{n} = (torch.arange(12) + {1000 * i}).cuda()" for i, n in enumerate(names, 1))
    )
    crashed = kernel.run(
        "for _ in range(3):\n"
        + "".join(f"    {n} = {n} + 0\n" for n in names)
        + "labels = labels - 1\nlogits = torch.randn(12, 5).cuda()\n"
        "print(F.cross_entropy(logits, labels).item())"
    ).report

    finding = crashed["finding"]
    assert (finding["bad_values"], finding["bad_count"]) == ([5], 2)
    assert finding["positions"] == [[5], [11]]
    assert crashed["confidence"] == "certain"


def test_what_the_cell_wrote_into_tensors_of_the_gpu(start_kernel: Start) -> None:
    """Integers are put back, and floats have no values that could matter."""
    kernel = start_kernel(simulated_gpu=True, extension=True)
    kernel.run(
        "import torch\nmemory = torch.zeros(6, 2).cuda()\nlast = torch.zeros(6).long().cuda()\n"
        "rows = [[0, 1], [2, 3], [4, 6]]"
    )
    crashed = kernel.run(
        "for row in rows:\n    ids = torch.tensor(row).cuda()\n"
        "    seen = memory[ids].sum().item(), last[last[ids]].sum().item()\n"
        "    memory[ids] = 1.0\n    last[ids] = 5"
    ).report

    assert crashed["finding"]["bad_values"] == [6]
    assert crashed["finding"]["step"]["iteration"] == 2
    assert crashed["confidence"] == "certain"


def test_a_value_that_is_lost_and_bound_anew(start_kernel: Start) -> None:
    """Too large to be kept, of a class that knows no references, or of the GPU: never certain."""
    kernel = start_kernel(simulated_gpu=True, extension=True)
    kernel.run("import nb_assertdoc.recorder.bindings as b; b.KEPT_BYTES = 200")
    kernel.run(
        "import torch\nids = torch.arange(40)\nids[-1] = 96\nlists = [torch.zeros(1).cuda(), 96]\n"
        "table = torch.nn.Embedding(100, 3).cuda()\nfresh = torch.arange(40)\nsmall = [1, 2]"
    )
    for cell, name in {
        "ids = ids + 3; table(ids[-4:])": "ids",
        "lists = [lists[0], lists[1] + 3]; table(torch.tensor([lists[1], 1]))": "lists",
    }.items():
        kernel.run(f"{cell}; del table.gone")  # it fails, and the names have new values
        report = kernel.run("%cpu_replay").report
        told = f"`{name}` was bound anew, and its old value is lost: the replay began with the new"
        assert report["finding"]["bad_values"] == [102]  # 99 was in the cell's own run
        assert report["confidence"] == "likely"
        assert any(told in d for d in report["replays"][-1]["differences"])

    kernel.run("fresh = torch.tensor([100]); small = small + [3]; table(fresh.cuda()); undefined")
    report = kernel.run("%cpu_replay").report
    assert report["finding"]["bad_values"] == [100]
    assert report["confidence"] == "certain"  # what is bound before it is read needs no old value


def test_modules_of_the_users_own_that_a_cell_has_set(tmp_path: Path) -> None:
    """A worker imports the file, which says otherwise."""
    own, library = ModuleType("settings"), ModuleType("library")
    own.__file__ = str(tmp_path / "settings.py")
    library.__file__ = f"{sys.prefix}/lib/python3/site-packages/library.py"
    space = {"cfg": own, "lib": library}

    def doubts(earlier: str, cell: str) -> tuple[str, ...]:
        before, last = (
            Execution(n, n, text, None, lambda text, count: "<cell>")
            for n, text in enumerate((earlier, cell), 1)
        )
        last.bindings = Bindings(space)
        return start_of(last, space, [before], []).doubts

    told = ("`cfg.rows` was set by a cell, and is as in its file",)
    assert doubts("cfg.rows = 50\nlib.quiet = True", "use(cfg.rows, lib)") == told
    assert doubts("cfg.rows = 50", "use(lib)") == ()
    assert doubts("print(cfg.rows)", "cfg.rows = 7\nuse(cfg.rows)") == ()


def test_tensors_are_made_as_the_notebook_has_set_it(tmp_path: Path) -> None:
    evidence = replays.run(
        "import torch\ntable = torch.nn.Embedding(9, 2)\nx = torch.tensor([0.29])\n"
        "ids = (x * 100).long() if x.is_cuda else x.long()\ntable(ids)",
        tmp_path / "order",
        default_dtype="float64",
        default_device="cuda",
    )
    (observed,) = evidence.observed
    assert observed.finding.bad_values == (28,)  # of float32 it would be 29


def test_values_are_from_the_loader_that_gave_them(start_kernel: Start) -> None:
    """Not from the one whose loop is under way."""
    kernel = start_kernel(simulated_gpu=True, extension=True)
    kernel.run(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "train = DataLoader(TensorDataset(torch.arange(12)), 2)\n"
        "val = DataLoader(TensorDataset(torch.cat([torch.arange(7), torch.tensor([99])])), 2)\n"
        "table = torch.nn.Embedding(50, 2).cuda()"
    )
    crashed = kernel.run(
        "them = iter(val)\nfor i, (x,) in enumerate(train):\n    table(x.cuda()).sum().item()\n"
        "    y, = next(them)\n    table(y.cuda()).sum().item()\n    print(i)"
    )

    assert crashed.stdout == "0\n1\n2\n"
    step = crashed.report["finding"]["step"]
    assert (step["split"], step["dataset_indices"]) == ("validation", [7])
    assert step["iteration"] == 3


HOSTILE = """
import numpy as np, torch

class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("no application is running")

class Leaves:
    def __getattribute__(self, name):
        raise SystemExit(name)

class Panics(list):
    def __iter__(self): raise GeneratorExit
    def __len__(self): raise BaseException("a panic of another language")

class Data:
    def __init__(self, generator):
        self.parts = [{"rng": generator}]

proxy, leaves, panics = Proxy(), Leaves(), Panics([1])
data = [Data(np.random.Generator(kind(0))) for kind in
        (np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64)]
data += [Data(np.random.RandomState(0)), Data(torch.Generator())]
with torch.inference_mode():
    predicted = torch.randn(4, 4).cuda().argmax(-1)
table = torch.nn.Embedding(5, 3).cuda()
"""


def test_objects_that_answer_with_errors_hide_no_cell(start_kernel: Start) -> None:
    kernel = start_kernel(simulated_gpu=True, extension=True)
    assert kernel.run(HOSTILE).text == ""
    assert kernel.run("x = 1").text == ""
    drawn = kernel.run(
        "ids = torch.tensor([d.parts[0]['rng'].integers(50, 60) for d in data[:4]]\n"
        "    + [data[4].parts[0]['rng'].randint(50, 60)]\n"
        "    + torch.randint(50, 60, (1,), generator=data[5].parts[0]['rng']).tolist())\n"
        "used = proxy, panics\ntable(ids.cuda()).sum().item()"
    )

    assert drawn.error is not None
    assert drawn.report["finding"]["location"]["source"] == "table(ids.cuda()).sum().item()"
    assert sorted(drawn.report["finding"]["bad_values"]) == kernel.value(
        "sorted(set(ids.tolist()))"
    )
    assert drawn.report["confidence"] == "certain"


MOVED = {  # a loop over a list whose items it moves to the GPU, in place: their values are lost
    "items replaced": (
        "batches = [{'ids': torch.tensor([k, 9 if k in (2, 4) else 1])} for k in range(6)]",
        "for k, batch in enumerate(batches):\n"
        "    batches[k] = batch = {name: t.cuda() for name, t in batch.items()}\n"
        "    print(k, table(batch['ids']).sum().item())",
    ),
    "objects that move themselves": (
        "class Graph:\n    def __init__(self, ids): self.ids = ids\n"
        "    def to(self, device): self.ids = self.ids.to(device); return self\n"
        "graphs = [Graph(torch.tensor([k, 9 if k in (2, 4) else 1])) for k in range(6)]",
        "for epoch in range(2):\n    for graph in graphs:\n        graph = graph.to('cuda')\n"
        "        print(epoch, table(graph.ids).sum().item())",
    ),
}


@pytest.mark.parametrize("how", MOVED)
def test_data_that_the_loop_moved_to_the_gpu(start_kernel: Start, how: str) -> None:
    """The fault of a later round, which the host never came to, is not the user's."""
    made, loop = MOVED[how]
    kernel = start_kernel(simulated_gpu=True, extension=True)
    kernel.run(f"import torch\ntable = torch.nn.Embedding(8, 3).cuda()\n{made}")
    crashed = kernel.run(loop)

    assert len(crashed.stdout.splitlines()) == 2
    finding = crashed.report["finding"]
    assert (finding["bad_values"], finding["step"]["iteration"]) == ([9], 2)
    assert crashed.report["replays"][-1]["engine"] == "history"
    assert crashed.report["confidence"] == "likely"
    assert crashed.report["other_findings"] == []
