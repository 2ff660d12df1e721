"""The bad values one by one: position, row, and what each stands for in the user's own data."""

from __future__ import annotations

from pathlib import Path

import replays

from nb_assertdoc.model import Example

PHOTOS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

class Photos(Dataset):
    def __init__(self):
        self.samples = [(f"photos/img_{i}.png", i % 4) for i in range(12)]
        self.classes = ["cat", "dog", "cow", "emu"]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, i):
        return torch.randn(5), self.samples[i][1]

model = nn.Linear(5, 3).to("cuda")
for x, y in DataLoader(Subset(Photos(), range(11, 3, -1)), batch_size=8):
    nn.functional.cross_entropy(model(x.to("cuda")), y.to("cuda"))
"""
WORDS = {
    "a dict": "word2id = {'<pad>': 0, 'the': 1, 'zebra': 2}",
    "not a numbering": "sizes = {'width': 2, 'height': 640}",
    "a list of another kind": "texts = ['a', 'b', 'c']",
    "a list of names": "class_names = ['a', 'b', 'c']",
    "an encoder": "class Encoder: classes_ = ['x', 'y', 'z']\nencoder = Encoder()",
    "a tokenizer": "class Tok:\n    vocab_size = 2\n    def __len__(self): return 3\n"
    "    def convert_ids_to_tokens(self, i): return ['a', 'b', '<ent>' + 'x' * 90][i]\ntok = Tok()",
}
LOOKUP = """
import torch
table = torch.nn.Embedding(2, 3).to("cuda")
ids = torch.tensor([[0, 1], [2, 1]])
table(ids.to("cuda"))
"""


def test_rows_files_and_categories_of_a_data_set(tmp_path: Path) -> None:
    (observed,) = replays.run(PHOTOS, tmp_path).observed[:1]
    category = "dataset.classes[3] = 'emu'"
    assert observed.finding.examples == tuple(
        Example(
            value=3,
            position=(row,),
            batch_row=row,
            dataset_index=row,
            meaning=category,
            file=f"img_{11 - row}.png",
        )
        for row in (0, 4)
    )


def test_values_that_are_no_index(tmp_path: Path) -> None:
    found = replays.run_each(
        {
            "a bool": "import torch\ntorch._assert_async(torch.zeros(1, device='cuda').bool())",
            "nan": "import torch\ntorch.nn.functional.binary_cross_entropy("
            "torch.tensor([0.5, float('nan')]).to('cuda'), torch.ones(2, device='cuda'))",
        },
        tmp_path,
        engine="cpu",
        real_floats=True,
    )
    first = {name: snippet.observed[0].finding.examples[0] for name, snippet in found.items()}
    assert first == {
        "a bool": Example(value=0, position=(0,)),
        "nan": Example(value="nan", position=(1,)),
    }


def test_what_a_value_stands_for(tmp_path: Path) -> None:
    found = replays.run_each({name: f"{w}\n{LOOKUP}" for name, w in WORDS.items()}, tmp_path)
    meanings = {}
    for name, snippet in found.items():
        (example,) = snippet.observed[0].finding.examples
        assert (example.value, example.position, example.batch_row) == (2, (1, 0), None)
        meanings[name] = example.meaning
    token = "<ent>" + "x" * 32 + "..."
    assert meanings == {
        "a dict": "word2id['zebra']",
        "not a numbering": None,
        "a list of another kind": None,
        "a list of names": "class_names[2] = 'c'",
        "an encoder": "encoder.classes_[2] = 'z'",
        "a tokenizer": f"tok: token {token!r}",
    }


SUBSCRIPTS = {  # of what is indexed, and the part that is at fault
    "grid[rows.cuda(), cols.cuda()]": "cols.cuda()",
    "grid[cols, rows]": "cols",
    "cube[one, rows, cols]": "cols",
    "cube[..., cols]": "cols",
    "cube[-1, :, cols]": "cols",
    "cube[None, 1:, rows, cols]": "cols",
    "cube[1, [0, 1, 2], cols]": "cols",
    "cube[torch.tensor([True, False]), rows[:1], cols[1:2]]": "cols[1:2]",
    "grid[(rows, cols)]": "cols",
    "grid[both]": "both",  # one name for all: that is what the user has
}


def test_of_several_indices_the_faulty_one_is_named(tmp_path: Path) -> None:
    lines = "".join(f"{subscript}\n" for subscript in SUBSCRIPTS)
    found = {}
    for part in (lines.splitlines()[:5], lines.splitlines()[5:]):  # some 8 faults are reported
        evidence = replays.run(
            "import torch\nrows, cols, one = torch.tensor([0, 1, 2]), torch.tensor([1, 9, 3]), 1\n"
            "grid, cube, both = torch.zeros(4, 5), torch.zeros(2, 4, 5), (rows, cols)\n"
            + "\n".join(part),
            tmp_path / "order",
        )
        for seen in evidence.observed:
            found[seen.finding.location.source.strip()] = seen.index_expression
    assert found == SUBSCRIPTS
