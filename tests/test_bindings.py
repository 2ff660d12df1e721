"""What a cell changed before it died is put back, or said: a replay must not call it certain."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from kernels import Kernel

from nb_assertdoc.recorder.bindings import Bindings


def test_keeps_no_tensor_or_module_alive() -> None:
    space: dict[str, Any] = {"w": torch.ones(3), "m": torch.nn.Linear(2, 2), "data": [1]}
    bindings = Bindings(space)
    del space["w"], space["m"]
    found, gone = bindings.namespace(space)
    assert found == {"data": [1]}
    assert sorted(gone) == ["m", "w"]


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
    assert [d.split("`")[1] for d in bindings.doubts(cell)] == changed


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
