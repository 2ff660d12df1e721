"""The bad values one by one: position, row, and what each stands for in the user's own data."""

from __future__ import annotations

from pathlib import Path

import replays
from kernels import Kernel

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
WORDS |= {
    "a vocabulary": "class Vocab: pass\nvocab = Vocab()\nvocab.itos = ['<pad>', 'a', 'b']\n"
    "vocab.stoi = {'<pad>': 0, 'a': 1, 'b': 2}",
    "torchtext": "class Vocab:\n    def get_itos(self): return ['<pad>', 'a', 'b']\nv = Vocab()",
    "numbers to words": "idx2word = {0: '<pad>', 1: 'a', 2: 'b'}",
    "tokenizers": "class T:\n    def get_vocab_size(self): return 3\n"
    "    def id_to_token(self, i): return ['a', 'b', '[PAD]'][i]\nt = T()",
    "encoders of columns": "class E:\n    def __init__(self, c): self.classes_ = c\n"
    "encoders = {'month': E(['jan', 'feb', 'mar']), 'n': E(['x'])}",
    "an ordinal encoder": "class E: categories_ = [['x'], ['lo', 'mid', 'hi']]\nenc = E()",
    "several that differ": "word2id = {'a': 0, 'b': 1, 'c': 2}\ntag2id = {'x': 0, 'y': 1, 'z': 2}",
    "too large a table": "ix_to_name = [str(n) for n in range(500)]",
    "a constant": "PAD_IDX = 2\nnum_rows = 2\nidx = 2\nN_ROWS = 2",
    "two constants": "PAD_IDX = UNK_IDX = 2",
    "a constant of a module": "import sys, types\nconstants = types.ModuleType('constants')\n"
    "constants.PAD_INDEX = 2\nconstants.SIZE = 2\nsys.modules['constants'] = constants",
    "a column of categories": "import pandas as pd\n"
    "frame = pd.DataFrame({'tag': pd.Categorical(['bug', 'docs', 'wontfix'])})",
    "a column of codes": "import pandas as pd\n"
    "frame = pd.DataFrame({'tag': ['wontfix', 'bug', 'docs', 'bug'], 'tag_id': [2, 0, 1, 0],"
    " 'who': ['a', 'a', 'b', 'a']})",
}
# Of several tables that know a value, the one that the names of the call speak of.
TABLES = """
import torch
word2idx, tag2idx = {'<pad>': 0, 'the': 1, 'zebra': 2}, {'O': 0, 'B': 1, 'L': 2}
symbols, emb, ids = ['_', 'a', 'b'], torch.nn.Embedding(2, 3).to("cuda"), torch.tensor([2]).cuda()
"""
CALLS = {
    "torch.nn.functional.cross_entropy(torch.zeros(1, 2).cuda(), ids)": "tag2idx['L']",
    "word_emb = emb; del emb; word_emb(ids)": "word2idx['zebra']",
    "speaker_emb = emb; del emb; speaker_emb(ids)": None,
    "emb(ids)": None,  # which of them?
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
    texts = {name: f"{w}\n{LOOKUP}" for name, w in WORDS.items()}
    texts["of another kind"] = "user_names = ['a', 'b', 'c']\n" + LOOKUP.replace("ids", "words")
    found = replays.run_each(texts | {call: TABLES + call for call in CALLS}, tmp_path)
    told = {call: found.pop(call).observed[0].finding.examples[0].meaning for call in CALLS}
    assert told == CALLS
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
        "a tokenizer": f"token {token!r} of tok",
        "a vocabulary": "vocab.itos[2] = 'b'",
        "torchtext": "v.get_itos()[2] = 'b'",
        "numbers to words": "idx2word[2] = 'b'",
        "tokenizers": "token '[PAD]' of t",
        "encoders of columns": "encoders['month'].classes_[2] = 'mar'",
        "an ordinal encoder": "enc.categories_[1][2] = 'hi'",
        "several that differ": None,
        "too large a table": None,
        "of another kind": None,
        "a constant": "PAD_IDX",
        "two constants": None,
        "a constant of a module": "constants.PAD_INDEX",
        "a column of categories": "frame['tag'].cat.categories[2] = 'wontfix'",
        "a column of codes": "frame['tag'] = 'wontfix', by frame['tag_id']",
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


def test_variables_that_the_cell_does_not_reach_name_a_value(tmp_path: Path) -> None:
    with Kernel(simulated_gpu=True, extension=True, cwd=tmp_path) as kernel:
        kernel.run(
            "import torch, pandas as pd\n"
            "tickets = pd.DataFrame({'tag': pd.Categorical(['bug', 'docs', 'wontfix'])})\n"
            "codes = torch.tensor(tickets['tag'].cat.codes.to_numpy().copy()).long()\n"
            "head = torch.nn.Linear(4, 2).to('cuda')"
        )
        outcome = kernel.run(
            "loss = torch.nn.functional.cross_entropy(head(torch.ones(3, 4, device='cuda')), "
            "codes.to('cuda'))\nloss.item()"
        )
    (example,) = outcome.report["finding"]["examples"]
    assert (example["value"], example["position"]) == (2, [2])
    assert example["meaning"] == "tickets['tag'].cat.categories[2] = 'wontfix'"
