"""Which earlier cells run again, for notebooks of the shapes that people write."""

from __future__ import annotations

import textwrap

import pytest

from nb_assertdoc.history import names_of, needed
from nb_assertdoc.model import Source

IMPORTS = "import torch\nfrom torch import nn\nimport pandas as pd, random"
# Cells in order, the last one the failing one; and the numbers of those that must run again.
NOTEBOOKS: dict[str, tuple[list[str], list[int]]] = {
    "only what is read": (
        ["import torch", "a = 1", "b = torch.ones(a)", "c = 5", "print(b, c)", "b + 1"],
        [0, 1, 2],
    ),
    "looking at data changes nothing": (
        [
            IMPORTS,
            "df = pd.DataFrame({'x': [1]})",
            "df.head()",
            "df.describe(); df['x'].value_counts()",
            "print(df, torch.rand(3)); random.random()",
            "df.x.max() + torch.ones(1)",
        ],
        [0, 1],
    ),
    "changes in place": (
        [
            IMPORTS,
            "rows = [3, 1]",
            "rows.append(2)",
            "rows[0] = 9",
            "random.shuffle(rows)",
            "rows += [4]",
            "other = [1]\nother.append(2)",
            "torch.tensor(rows)",
        ],
        [0, 1, 2, 3, 4, 5],
    ),
    "a frame that is cleaned": (
        [
            IMPORTS,
            "df = pd.read_csv('x.csv')",
            "df.dropna(inplace=True)",
            "def clean(frame):\n    frame['y'] = frame['x'] - 1",
            "clean(df)",
            "df['label'] = df['y'].map({1: 0})",
            "torch.tensor(df['label'].values)",
        ],
        [0, 1, 2, 3, 4, 5],
    ),
    "training is not repeated": (
        [
            IMPORTS,
            "model = nn.Linear(2, 2)\nopt = torch.optim.SGD(model.parameters(), 0.1)",
            "def train(model):\n    for x in data:\n        model(x).sum().backward()\n"
            "        opt.step()",
            "data = [torch.ones(2)]",
            "for batch in data:\n    opt.zero_grad(); model(batch).sum().backward(); opt.step()",
            "train(model)",
            "for batch in data:\n    model(batch)",
        ],
        [0, 1, 3],
    ),
    "a tokenizer with tokens added": (
        [
            "from transformers import AutoTokenizer, AutoModel",
            "tok = AutoTokenizer.from_pretrained('x')\nmodel = AutoModel.from_pretrained('x')",
            "added = tok.add_tokens(['<a>'])",
            "tok.decode([1])",
            "ids = tok('text', return_tensors='pt')",
            "model(**ids)",
        ],
        [0, 1, 2, 4],
    ),
    "the newest binding counts": (
        ["n = 3", "n = 4", "import torch", "n = 5", "if torch.rand(1) > 2:\n    n = 6", "n + 1"],
        [2, 3, 4],
    ),
    "what functions and classes need": (
        [
            "vocab = {'a': 0}",
            "unused = 1",
            "PAD = 0",
            "def encode(text, size=3):\n    unused = [vocab[c] for c in text]\n    return unused",
            "class Rows:\n    pad = PAD\n    def item(self, i): return encode('a')",
            "rows = Rows()",
            "rows.item(0)",
        ],
        [0, 2, 3, 4, 5],
    ),
    "loop variables of another cell": (
        ["data = [1]", "for x, y in enumerate(data):\n    total = x", "for x in data:\n    x + 1"],
        [0],
    ),
    "seeds": (
        [
            "import torch, random",
            "torch.manual_seed(0)",
            "def set_seed(n): random.seed(n)",
            "set_seed(3)",
            "x = torch.rand(3)",
            "x",
        ],
        [0, 1, 2, 3, 4],
    ),
    "names that no text binds": (
        ["from helpers import *", "%run setup.py", "exec('z = 1')", "y = 1", "make(y)"],
        [0, 1, 2, 3],
    ),
    "a star import that is not needed": (
        ["from helpers import *", "def make(y): return y", "make(1)"],
        [1],
    ),
    "magics, shell lines and comments": (
        [
            "%%time\nx = 3",
            "!pip install something",
            "%matplotlib inline\nimport torch",
            "# nothing",
            "%%bash\necho x",
            "torch.ones(x)",
        ],
        [0, 2],
    ),
    "a function that changes a variable": (
        ["rows = []", "def add(n):\n    rows.append(n)", "add(1)", "def other(): pass", "rows"],
        [0, 1, 2],
    ),
    "the same cell twice": (["n = 0", "n += 1", "n += 1", "n"], [0, 1, 2]),
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_least_set_of_cells(name: str) -> None:
    cells, expected = NOTEBOOKS[name]
    sources = [
        Source(filename=f"<cell {n}>", source=textwrap.dedent(text), execution_count=n)
        for n, text in enumerate(cells)
    ]
    *earlier, cell = sources
    assert [source.execution_count for source in needed(earlier, cell)] == expected


def test_training_is_repeated_where_floats_are_computed() -> None:
    cells, _ = NOTEBOOKS["training is not repeated"]
    *earlier, cell = [Source(filename=f"<{n}>", source=text) for n, text in enumerate(cells)]
    assert needed(earlier, cell, training=True) == tuple(earlier)


def test_names_of_a_cell_are_global_ones() -> None:
    names = names_of("def f(a):\n    b = a + c\n    return [d for d in b]\ne = [g for g in f(h)]")
    assert names.reads == {"c", "h"}
    assert names.writes == {"f", "e"}


def test_weights_are_drawn_again_as_they_were(start_kernel) -> None:
    """Those of the initialisers would be in range, and acquit the cell. Nothing is seeded."""
    kernel = start_kernel()
    kernel.run_all(
        [
            "%load_ext nb_assertdoc.simulated_gpu\n%load_ext nb_assertdoc",
            "import random, torch, numpy as np\nfrom torch import nn",
            "x, y = torch.randn(64, 6), torch.ones(64)",
            "scratch = torch.rand(5), np.random.rand(5), random.random()",
            *["net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))"] * 2,
            "net.requires_grad_(False)\n"
            "net[0].weight[:] = torch.tensor(np.random.randn(6, 6))\n"
            "net[1].weight[:] = torch.tensor([[random.gauss(0, 1)] * 6 for _ in range(6)])",
            "net[2].weight *= 30\nnet[2].bias[:] = 0.5",
            "expected = sorted(v for v in (net(x).squeeze(1) * 0.1 + 0.45).tolist() if v < 0)",
            'net = net.to("cuda")',
        ]
    )
    crashed = kernel.run(
        'score = net(x.to("cuda")).squeeze(1) * 0.1 + 0.45\n'
        'loss = nn.BCELoss()(score.clamp(max=1), y.to("cuda")).item()'
    ).report

    assert crashed["replays"][-1]["engine"] == "history"
    assert crashed["confidence"] == "likely"
    values = crashed["finding"]["bad_values"]
    assert values == pytest.approx(kernel.value("expected")[: len(values)], abs=1e-5)


COPIES = {  # of the weights, on the CPU: their name in the report, and how they were kept
    "best": "best = {k: v.clone() for k, v in net.state_dict().items()}",
    "checkpoint['model']": "checkpoint = {'epoch': 3, 'model': copy.deepcopy(net.state_dict())}",
    "saved": "saved = {f'module.{k}': v.clone() for k, v in net.state_dict().items()}\n"
    "other = {k: v * 0 for k, v in nn.Linear(6, 1).state_dict().items()}",
}


def test_weights_of_a_copy_on_the_cpu(start_kernel) -> None:
    kernel = start_kernel(simulated_gpu=True, extension=True)
    kernel.run(
        "import copy, torch\nfrom torch import nn\n"
        "frozen = nn.Linear(6, 6).requires_grad_(False)\n"  # it stays on the CPU, as it is
        "x, y = torch.randn(64, 6), torch.ones(64)"
    )
    for name, code in COPIES.items():
        kernel.run(
            "net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).requires_grad_(False)\n"
            "net[1].bias[:] = -3\n"
            "expected = sorted(v for v in net(frozen(x)).squeeze(1).tolist() if v < 0)\n"
            f"{code}\nnet = net.to('cuda')"
        )
        report = kernel.run(
            "%%cpu_replay --engine cpu\nscore = net(frozen(x).to('cuda')).squeeze(1)\n"
            "nn.BCELoss()(score.clamp(max=1), y.to('cuda'))"
        ).report

        told = f"weights of `net` were only on the GPU: those of `{name}` are used"
        assert told in report["replays"][-1]["differences"]
        assert report["confidence"] == "likely"
        values = report["finding"]["bad_values"]
        assert values == pytest.approx(kernel.value("expected")[: len(values)], abs=1e-5)

    kernel.run("del best, checkpoint, saved\nnet = nn.Sequential(nn.Linear(6, 6)).cuda()")
    cell = "%%cpu_replay --engine cpu\nnn.BCELoss()(net(x.cuda()), torch.ones(64, 6).cuda())"
    first, second = (kernel.run(cell).report["finding"]["bad_values"] for _ in range(2))
    assert first == second  # without a copy they are drawn, the same in every replay
