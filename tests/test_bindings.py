"""What a cell changed before it died is put back, or said: a replay must not call it certain."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from kernels import Kernel

from nb_assertdoc.recorder.bindings import KEPT_BYTES, Bindings


def test_keeps_no_module_and_no_large_tensor_alive() -> None:
    large = torch.empty(KEPT_BYTES + 1, dtype=torch.uint8)
    space: dict[str, Any] = {"w": large, "m": torch.nn.Linear(2, 2), "data": [1]}
    del large
    bindings = Bindings(space)
    del space["w"], space["m"]
    found, gone, newer = bindings.namespace(space)
    assert found == {"data": [1]}
    assert (sorted(gone), newer) == (["m", "w"], ())


def test_a_name_that_the_cell_gives_to_its_gpu_copy_keeps_its_values() -> None:
    with Kernel(extension=True, simulated_gpu=True) as kernel:
        kernel.run(
            "import torch\nids = torch.tensor([3, 9, 12])\ntable = torch.nn.Embedding(10, 4)"
        )
        crash = kernel.run("ids = ids.to('cuda')\nrows = table.to('cuda')(ids)\nrows.sum().item()")
        assert crash.report["confidence"] == "certain"
        assert crash.report["finding"]["bad_values"] == [12]
        assert len(crash.report["replays"]) == 1
        again = kernel.run("%cpu_replay 1")
        assert again.report["confidence"] == "clean"


def test_a_cell_from_before_the_load_can_be_replayed_by_its_number() -> None:
    with Kernel(simulated_gpu=True) as kernel:
        kernel.run("import torch\ntable = torch.nn.Embedding(10, 4)")
        kernel.run("rows = table(torch.tensor([11]))")
        kernel.run("undefined_name")  # its error hides the first one
        kernel.run("%load_ext nb_assertdoc")
        found = kernel.run("%cpu_replay 2").report
        assert found["finding"]["bad_values"] == [11]
        assert found["confidence"] == "likely"


@pytest.mark.parametrize(
    ("cell", "changed"),
    [
        ("y -= 1", ["y"]),
        ("y[0] = 7", ["y"]),
        ("z = y - 1", []),
        ("t.sub_(1)", ["t"]),
        ("t + 1", []),
        ("memory.append(4)\nbatch = random.sample(memory, 2)", ["memory"]),
        ("memory.append(4)\nprint(len(memory))", []),  # a log that nothing is drawn from
        ("random.sample(memory, 2)", []),
        ("log['x'] = 1", []),
    ],
)
def test_names_what_the_cell_changed_in_place(cell: str, changed: list[str]) -> None:
    import random

    space: dict[str, Any] = {
        "y": np.arange(3),
        "t": torch.arange(3),
        "memory": deque([1, 2, 3]),
        "log": {},
        "random": random,
    }
    bindings = Bindings(space)
    exec(cell, space)
    assert [d.split("`")[1] for d in bindings.doubts(cell, space)] == changed


LINES = """\
y[0] = 5
for i in range(3):
    a[i] = i
    step(a)
    b[i] = i
z += predict()
w[0] = 1
q[0] = 1; step(q)
"""


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        (1, []),  # what its value hangs on was still being computed
        (4, ["y", "a", "b"]),  # `b` in an earlier round
        (6, ["y", "a", "b"]),
        (8, ["y", "a", "b", "z", "w", "q"]),
        (None, ["y", "a", "b", "z", "w", "q"]),
    ],
)
def test_what_had_not_run_yet_is_not_changed(line: int | None, changed: list[str]) -> None:
    space: dict[str, Any] = {name: np.arange(3) for name in "yabzwq"}
    doubts = Bindings(space).doubts(LINES, space, line)
    assert sorted(d.split("`")[1] for d in doubts) == sorted(changed)


def test_an_error_of_leaving_a_with_block_comes_after_all_of_it() -> None:
    space: dict[str, Any] = {"y": np.arange(3)}
    cell = "with timer():\n    y[0] = 5\n    step(y)\nz = y\ny[1] = 2"
    (doubt,) = Bindings(space).doubts(cell, space, 1)
    assert doubt.startswith("`y` was changed by the cell")
    assert Bindings(space).doubts("with timer(): pass\ny[1] = 2", space, 1) == ()


GENERATORS = """
import numpy as np, random, torch
class Env:
    def __init__(self):
        self.rng = np.random.default_rng(5)
env, rng, py = Env(), np.random.default_rng(6), random.Random(7)
gen = torch.Generator().manual_seed(8)
"""
DRAWS = """
seen = [int(env.rng.integers(100)), int(rng.integers(100)), py.randrange(100),
        int(torch.randint(100, (1,), generator=gen))]
table = torch.nn.Embedding(5, 2).cuda()
rows = table(torch.tensor(seen).cuda() + 1000)
rows.cpu()
"""


def test_generators_of_variables_are_where_they_were() -> None:
    with Kernel(extension=True, simulated_gpu=True) as kernel:
        kernel.run(GENERATORS)
        kernel.run("before = [int(np.random.default_rng(5).integers(100))]")
        crash = kernel.run(DRAWS)
        assert crash.report["confidence"] == "certain"
        found = crash.report["finding"]["bad_values"]
        assert found == sorted(v + 1000 for v in kernel.value("seen"))


def test_labels_shifted_in_place_are_not_certain() -> None:
    with Kernel(extension=True, simulated_gpu=True) as kernel:
        kernel.run("import numpy as np, torch\ny = np.array([3, 1, 2])")
        crash = kernel.run(
            "y += 1\n"
            "loss = torch.nn.functional.cross_entropy(torch.randn(3, 3).cuda(), "
            "torch.from_numpy(y).cuda())\n"
            "loss.item()"
        )
        assert crash.report["confidence"] == "likely"
        assert "`y` was changed by the cell" in str(crash.report["replays"])
