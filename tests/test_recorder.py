"""What is remembered before a cell: it keeps nothing alive, and is what the cell began with."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from kernels import Kernel

START = """
import functools, gc, random, weakref
import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
host = get_ipython()._nb_assertdoc.flow
recorder, watch = host.recorder, host.watch
def execution(count): return recorder.by_count(count)
"""
LOADERS = """
import torch
data = TensorDataset(torch.arange(10))
def given(loader):
    return [row.tolist() for row, in loader]
def noted():
    return [list(indices) for indices in watch.latest.yielded()]
"""
VARIANTS = {
    "in order": "DataLoader(data, batch_size=4)",
    "shuffled": "DataLoader(data, batch_size=4, shuffle=True)",
    "drop_last": "DataLoader(data, batch_size=4, shuffle=True, drop_last=True)",
    "workers": "DataLoader(data, batch_size=4, shuffle=True, num_workers=2)",
    "persistent workers": "DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)",
    "own batch sampler": "DataLoader(data, batch_sampler=BatchSampler(range(9), 3, True))",
    "generator": "DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator())",
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(simulated_gpu=True, extension=True) as kernel:
        for code in (START, LOADERS):
            started = kernel.run(code)
            assert started.error is None, started.text
        yield kernel


HOLDERS = """
class Holder:
    def __init__(self, held): self.held = held
def tensor(): return torch.zeros(1000, device='cuda')
def layer(): return nn.Linear(3, 3).cuda()
model, big, opt = layer(), tensor(), torch.optim.Adam(layer().parameters())
pair, several, named = (tensor(), 1), [tensor()], {'a': {'b': tensor()}}
holder, models, unique = Holder(tensor()), [layer()], {layer()}
bound, part = layer().forward, functools.partial(layer(), 1)
kept = [weakref.ref(t) for t in (
    model, big, model.weight, opt.param_groups[0]['params'][0], pair[0], several[0],
    named['a']['b'], holder.held, models[0], *unique,
    bound.__self__, part.func)]
"""


def test_nothing_on_the_gpu_is_kept_alive(kernel):
    kernel.run(HOLDERS)
    kernel.run("note = 1")
    kernel.run(
        "del model, big, opt, pair, several, named, holder, models, unique, bound, part\n"
        "gc.collect()"
    )

    assert kernel.value("[one() is None for one in kept]") == [True] * 12


def test_bindings_are_those_of_the_start_of_the_cell(kernel):
    kernel.run("count, table, gone = 1, nn.Linear(2, 2), nn.Linear(2, 2)")
    number = kernel.run("count, old = 2, table\ntable = nn.Linear(9, 9)\ndel gone").reply[
        "execution_count"
    ]
    kernel.run(f"found, lost, _ = execution({number}).bindings.namespace(get_ipython().user_ns)")

    assert kernel.value("found['count']") == 1
    assert kernel.value("found['table'] is old") is True
    assert kernel.value("lost") == ("gone",)


def test_only_the_newest_executions_keep_their_bindings(kernel):
    for number in range(5):
        kernel.run(f"step = {number}")

    held = kernel.value("[e.bindings is not None for e in list(recorder.executions)[-5:]]")
    assert held == [False, False, True, True, True]


def test_random_states_are_those_of_the_start_of_the_cell(kernel):
    kernel.run("random.seed(1); np.random.seed(2); torch.manual_seed(3)")
    drawn = kernel.run("drawn = random.random(), np.random.rand(), torch.rand(1).item()")
    number = drawn.reply["execution_count"]
    kernel.run(f"state = execution({number}).rng")
    kernel.run(
        "random.setstate(state[0]); np.random.set_state(state[1]); torch.set_rng_state(state[2])"
    )
    kernel.run("again = random.random(), np.random.rand(), torch.rand(1).item()")

    assert kernel.value("again == drawn") is True


@pytest.mark.parametrize("variant", VARIANTS)
def test_index_lists_are_the_batches_that_the_loop_received(kernel, variant):
    made = kernel.run(f"loader = {VARIANTS[variant]}\nwhole = given(loader)")
    assert made.error is None, made.text
    assert kernel.value("whole == noted()") is True
    assert kernel.value("(watch.latest.finished, watch.latest.first)") == (True, 0)

    # In the middle of a loop the workers have run ahead.
    running = kernel.run(
        "running = iter(loader)\npart = [next(running)[0].tolist() for _ in range(2)]"
    )
    assert kernel.value("(len(part), part == noted())") == (2, True)
    assert kernel.value("watch.latest.finished") is False
    owner = kernel.value(
        "next(e.execution_count for e in recorder.executions if e.number == watch.latest.execution)"
    )
    assert owner == running.reply["execution_count"]
    kernel.run("del running")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_index_lists_of_accelerate(kernel):
    made = kernel.run(
        "from accelerate import Accelerator\n"
        "loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=4, shuffle=True))\n"
        "whole = given(loader)"
    )
    assert made.error is None, made.text
    assert kernel.value("whole == noted()") is True


def test_large_index_lists_of_any_type_count_by_their_length(kernel):
    kernel.run(
        "class Rows:\n    def __getitem__(self, key): return 0\n    def __len__(self): return 9"
    )
    kernel.run("def lists(*given):\n    return list(DataLoader(Rows(), None, sampler=given))")
    kernel.run("_ = lists(*[np.arange(400_000)] * 4)")
    assert kernel.value("[len(kept) for kept in watch.latest.lists]") == [400_000, 400_000]

    kernel.run("_ = lists(torch.tensor(3), 4, range(5))")  # one without a length, one number
    assert kernel.value("watch.latest.indices") == 7


def test_the_cells_are_made_once_a_cell_and_are_those_of_now(kernel):
    kernel.run("first = recorder.cells(); first_again = recorder.cells()")
    assert kernel.value("first is first_again") is True

    timed = "%%time\ninside = [s.source for s in recorder.cells() if s.filename == '<timed exec>']"
    kernel.run(timed)
    kernel.run("after = recorder.cells()")
    assert kernel.value("inside") == [timed.partition("\n")[2] + "\n"]
    assert kernel.value("after is not first and after.get('<timed exec>') is None") is True
    assert kernel.value("after.get(recorder.current.filename).source") == (
        "after = recorder.cells()"
    )


def test_the_lists_end_with_the_extension(start_kernel):
    kernel = start_kernel(extension=True)
    kernel.run(START + LOADERS)
    kernel.run("%unload_ext nb_assertdoc")
    kernel.run("given(DataLoader(data))")

    assert kernel.value("watch.latest") is None


INTEGERS = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('lookup', torch.arange(3))
class Holder: pass
holder, head = Holder(), Head().cuda()
holder.ids = torch.tensor([7, 8]).cuda()
labels = {'train': [torch.tensor([4, 5]).cuda()]}
weights = torch.ones(3).cuda()
on_host = torch.tensor([6])
everything = [holder.ids, labels['train'][0], head.lookup, weights, on_host]
def copied(): # before the cell that runs
    copies = recorder.current.integers
    return [copies[id(t)][1].tolist() if id(t) in copies else None for t in everything]
"""


def test_integers_on_the_gpu_are_copied_while_it_lives(start_kernel):
    kernel = start_kernel(simulated_gpu=True, extension=True, settings={"replay": False})
    kernel.run(START)
    made = kernel.run(INTEGERS)
    assert made.error is None, made.text
    kernel.run("first = copied()\nholder.ids += 1")
    kernel.run("second = copied()")

    assert kernel.value("first") == [[7, 8], [4, 5], [0, 1, 2], None, None]
    assert kernel.value("second") == [[8, 9], [4, 5], [0, 1, 2], None, None]

    kernel.run("from nb_assertdoc.simulated_gpu import calls_after_death as calls")
    assert kernel.run("nn.Embedding(2, 2).cuda()(holder.ids).sum().item()").status == "error"
    kernel.run("late = torch.tensor([1])\ncalls_before = calls()")
    kernel.run("note = copied()")
    assert kernel.value("note") == [None] * 5
    assert kernel.value("recorder.context_dead") is True
    assert kernel.value("calls() - calls_before") == 0


def test_copies_are_not_older_than_what_was_written(start_kernel):
    """Of what the budget left out, and of `x.data = y`, which counts as no write."""
    kernel = start_kernel(
        simulated_gpu=True, extension=True, settings={"replay": False, "integer_copy_bytes": 4000}
    )
    kernel.run(START)
    kernel.run("ids, other = torch.tensor([3]).cuda(), torch.tensor([5]).cuda()")
    kernel.run("def copied(t):\n    held = recorder.current.integers.get(id(t))\n"
               "    return held and held[1].tolist()")  # fmt: skip
    kernel.run("first = copied(ids), copied(other)\nids.data = torch.tensor([8]).cuda()")
    kernel.run(
        "second = copied(ids), copied(other)\nids += 1\nlarge = torch.zeros(900).long().cuda()"
    )
    kernel.run("third = copied(ids), copied(other)")

    assert kernel.value("first") == ([3], [5])
    assert kernel.value("second") == ([8], [5])
    assert kernel.value("third")[0] in (None, [9])


def test_tensors_without_one_place_are_copied_too(start_kernel):
    """A sparse tensor among the variables keeps the recorder from nothing."""
    kernel = start_kernel(simulated_gpu=True, extension=True, settings={"replay": False})
    kernel.run(START)
    kernel.run("sparse = torch.eye(3).long().to_sparse().cuda()\nids = torch.tensor([3]).cuda()")
    seen = kernel.run("held = recorder.current.integers[id(ids)][1].tolist()\n"
                      "noted = recorder.current.bindings is not None")  # fmt: skip

    assert seen.error is None, seen.text
    assert seen.text == ""
    assert (kernel.value("held"), kernel.value("noted")) == ([3], True)
