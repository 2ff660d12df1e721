"""Found by trying to break it: a report is certain only where the replay is the cell that died."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from kernels import Kernel
from replays import Snippet, run_each

from nb_assertdoc.detector import recognise
from nb_assertdoc.mutations import State
from nb_assertdoc.recorder.bindings import Bindings
from nb_assertdoc.worker.rewind import rewind
from nb_assertdoc.worker.sources import set_generator

# What a cell goes on from, a call that takes the next value, and the value that comes next.
TAKES = {
    "a cursor in an object": (
        "class Buffer:\n"
        "    def __init__(self): self.items, self.at = [4, 5, 6], 0\n"
        "    def take(self):\n"
        "        self.at += 1\n"
        "        return self.items[self.at - 1]\n"
        "buffer = Buffer()\n"
        "take = lambda: buffer.take()"
    ),
    "a queue in an object": (
        "class Queue: pass\n"
        "queue = Queue()\n"
        "queue.items = [4, 5, 6]\n"
        "take = lambda: queue.items.pop(0)"
    ),
    "a list that is made anew": (
        "class Queue: pass\n"
        "queue = Queue()\n"
        "queue.items = [4, 5, 6]\n"
        "def take():\n"
        "    first, *queue.items = queue.items\n"
        "    return first"
    ),
    "a class attribute": ("class Count: n = 3\ndef take():\n    Count.n += 1\n    return Count.n"),
    "a closure": (
        "def make():\n"
        "    n = 3\n"
        "    def take():\n"
        "        nonlocal n\n"
        "        n += 1\n"
        "        return n\n"
        "    return take\n"
        "take = make()"
    ),
    "a default argument": "def take(n=[3]):\n    n[0] += 1\n    return n[0]",
    "a function's attribute": "def take():\n    take.n += 1\n    return take.n\ntake.n = 3",
    "a dict": "state = {'n': 3}\ndef take():\n    state['n'] += 1\n    return state['n']",
    "a set": "left = {4}\ndef take():\n    return left.pop()",
    "a nested generator": (
        "import numpy as np\nrngs = [np.random.default_rng(0)]\n"
        "take = lambda: int(rngs[0].integers(10**9))"
    ),
    "a generator in a closure": (
        "import random\n"
        "def make():\n    rng = random.Random(0)\n    return lambda: rng.randrange(10**9)\n"
        "take = make()"
    ),
}


def notebook(code: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(code, space)
    return space


@pytest.mark.parametrize("name", TAKES)
def test_what_a_cell_takes_from_is_put_back(name: str) -> None:
    space = notebook(TAKES[name])
    state = State(space)
    taken = space["take"]()

    patches, lost = state.changes(space)
    assert lost == []
    assert rewind(space, patches, set_generator) == ()
    assert space["take"]() == taken


def test_what_grew_is_cut_back_and_what_is_new_goes() -> None:
    space = notebook("class Log: pass\nlog = Log()\nlog.losses = [object()]\nlog.known = {'a': 1}")
    state = State(space)
    log = space["log"]
    first = log.losses[0]
    log.losses.append(2)
    log.known["b"] = 2
    log.epoch = 1

    patches, lost = state.changes(space)
    assert lost == []
    rewind(space, patches, set_generator)
    assert vars(log) == {"losses": [first], "known": {"a": 1}}


ITERATORS = {
    "list": "iter([1, 2, 3])",
    "enumerate": "enumerate([1, 2, 3])",
    "zip": "zip([1, 2, 3], 'abc')",
    "map": "map(int, '123')",
    "count": "itertools.count(7)",
    "cycle": "itertools.cycle([1, 2])",
    "csv": "csv.reader(['1,2', '3,4'])",
}


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_that_went_on_is_named(name: str) -> None:
    import csv

    space = {"steps": eval(ITERATORS[name], {"itertools": itertools, "csv": csv})}
    bindings = Bindings(space)
    assert bindings.doubts("x = next(steps)", space) == ()
    next(space["steps"])
    doubts = bindings.doubts("x = next(steps)", space)
    assert [d.split("`")[1] for d in doubts] == ["steps"]
    assert bindings.doubts("y = 1", space) == ()  # the cell does not reach it


@pytest.mark.parametrize("change", ["held.y -= 1", "held.t.sub_(1)", "held.frame['y'] -= 1"])
def test_arrays_in_objects_that_changed_are_named(change: str) -> None:
    pandas = pytest.importorskip("pandas")
    space = notebook("class Held: pass\nheld = Held()")
    held = space["held"]
    held.y, held.t = np.arange(5000), torch.arange(4)
    held.frame = pandas.DataFrame({"y": [3, 4]})
    bindings = Bindings(space)
    assert bindings.doubts("use(held)", space) == ()
    exec(change, space)
    assert [d.split("`")[1] for d in bindings.doubts("use(held)", space)] == ["held"]


def test_a_seed_of_the_moment_is_named() -> None:
    (doubt,) = Bindings({}).doubts("import time\nrandom.seed(int(time.time()))\nrandom.seed(3)", {})
    assert "`random.seed(int(time.time()))`" in doubt


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        kept = torch.arange(3)
    assert Bindings({"kept": kept}).doubts("kept + 1", {"kept": kept}) == ()


def test_an_object_that_answers_anything_is_passed_over() -> None:
    space = notebook(
        "class Odd:\n"
        "    def __getattribute__(self, name): raise MemoryError(name)\n"
        "odd, n = Odd(), [1]"
    )
    state = State(space)
    space["n"].append(2)
    assert [path for path, *_ in state.changes(space)[0]] == [("n",)]


HEAD = "import os, random, secrets, uuid\nimport numpy as np, torch\n"
HEAD += "t, t_ids = torch.nn.Embedding(5, 2), torch.tensor([25])\n"
LIN = "lin = torch.nn.Linear(3, 20)\np = lin(torch.ones(2, 3)).argmax(1)\n"
DOUBTFUL = {
    "generator without a seed": "t(torch.from_numpy(np.random.default_rng().integers(9, 99, 3)))",
    "Random without a seed": "t(torch.tensor([random.Random().randrange(9, 99)]))",
    "seed of the system": "random.seed()\nt(torch.tensor([random.randrange(9, 99)]))",
    "urandom": "t(torch.tensor([9 + os.urandom(1)[0]]))",
    "secrets": "t(torch.tensor([9 + secrets.randbelow(9)]))",
    "chosen by an array": LIN + "t(torch.from_numpy(np.arange(9, 40)[p.numpy()]))",
    "chosen by a list": LIN + "t(torch.tensor([list(range(9, 40))[i] for i in p.tolist()]))",
    "counted by a range": LIN + "n = 9\nfor _ in range(p[0].item()): n += 1\nt(torch.arange(n))",
    "a size by int()": LIN + "torch.nn.Embedding(int(p.max()) + 1, 2)(t_ids)",
    "a size by len()": LIN + "torch.nn.Embedding(len(p.unique()), 2)(t_ids)",
    "classes by int()": LIN + "torch.nn.functional.one_hot(t_ids, int(p.max()) + 1)",
    "classes of a layer": (
        LIN + "head = torch.nn.Linear(3, int(p.max()) + 1)\n"
        "torch.nn.functional.cross_entropy(head(torch.ones(1, 3)), t_ids)"
    ),
    "an earlier call was not checked": LIN + "t(p)\nt(torch.tensor([9]))",
}
CERTAIN = {
    "generator with a seed": "t(torch.from_numpy(np.random.default_rng(1).integers(9, 99, 3)))",
    "Random with a seed": "t(torch.tensor([random.Random(1).randrange(9, 99)]))",
    "class kept": "assert isinstance(random.Random(1), random.Random)\nt(torch.tensor([9]))",
    "a count of hits": LIN + "n = (p == 3).sum().item()\nt(torch.tensor([9]))",
    "weights by chance": (
        "w = torch.randn(3, 5, device='cuda') @ torch.nn.Linear(5, 5).weight.cuda()\n"
        "torch.nn.functional.cross_entropy(w[:1], t_ids.cuda())"
    ),
    "positions in range": (LIN + "torch.nn.Embedding(20, 2)(p)\nt(torch.tensor([9]))\n"),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Snippet]:
    snippets = {name: HEAD + text for name, text in {**DOUBTFUL, **CERTAIN}.items()}
    return run_each(snippets, tmp_path_factory.mktemp("breaker") / "replay")


@pytest.mark.parametrize("name", [*DOUBTFUL, *CERTAIN])
def test_certain_only_where_nothing_hangs_on_chance(ran: dict[str, Snippet], name: str) -> None:
    snippet = ran[name]
    assert snippet.error == ""
    (observed,) = snippet.observed
    assert bool(observed.unknown) == (name in DOUBTFUL), observed.unknown


ODD = {
    "args that raise": "args = property(lambda self: 1 / 0)",
    "args that exit": "args = property(lambda self: exit(3))",
    "str that raises": "def __str__(self): raise ValueError",
    "str that exits": "def __str__(self): raise SystemExit(3)",
}


@pytest.mark.parametrize("name", ODD)
def test_any_exception_is_read_without_its_own_code(name: str) -> None:
    space = notebook(f"class Odd(RuntimeError):\n    {ODD[name]}")
    assert recognise(space["Odd"]("CUDA error: device-side assert triggered")) is not None
    assert recognise(space["Odd"]("another")) is None


def test_of_a_huge_text_both_ends_are_read() -> None:
    filler = "x" * 5_000_000
    assert recognise(RuntimeError("CUDA error: device-side assert triggered\n" + filler))
    assert recognise(RuntimeError(filler + "\nCUDA error: device-side assert triggered"))


BREAK = """
import nb_assertdoc.detector as detector
def exits(*args): raise SystemExit(3)
detector.recognise = exits
"""


def test_an_exit_in_our_own_code_changes_nothing() -> None:
    with Kernel(extension=True) as kernel:
        kernel.run(BREAK)
        failed = kernel.run("1 / 0")
        assert failed.status == "error"
        assert failed.error is not None and failed.error["ename"] == "ZeroDivisionError"
        assert kernel.run("print(7)").stdout == "7\n"


def test_a_counter_in_an_object_is_certain_from_where_the_cell_began() -> None:
    with Kernel(extension=True, simulated_gpu=True) as kernel:
        kernel.run(TAKES["a cursor in an object"] + "\nimport torch")
        kernel.run("table = torch.nn.Embedding(5, 2).cuda()")
        crash = kernel.run("while True: table(torch.tensor([take()]).cuda()).sum().item()")
        assert crash.report["confidence"] == "certain"
        assert crash.report["finding"]["bad_values"] == [5]
