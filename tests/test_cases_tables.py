"""Notebook-like code whose fault is an id, position or row number outside a table or tensor.

The cells of `CASES` run one after the other in one worker, which a loop that goes on after the
fault would end; the rules then see each cell alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from kernels import Kernel
from replays import Snippet, run_each

from nb_assertdoc import diagnosis

START = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
LOADER = """
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset
"""


@dataclass(frozen=True)
class Case:
    """A cell, and what the report must say of it. `line` is a part of the faulty line."""

    code: str
    op: str
    argument: str
    values: list[int]
    bound: tuple[int, int]
    cause: str
    line: str
    finding: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)


CASES = {
    "learned positions while generating": Case(
        """
        class GPT(nn.Module):
            def __init__(self, vocab_size=20, block_size=16):
                super().__init__()
                self.wte, self.wpe = nn.Embedding(vocab_size, 8), nn.Embedding(block_size, 8)
                self.head = nn.Linear(8, vocab_size)

            def forward(self, idx):
                pos = torch.arange(idx.size(1), device=idx.device)
                return self.head(self.wte(idx) + self.wpe(pos))

        model = GPT().cuda()
        idx = torch.zeros((1, 1), dtype=torch.long, device="cuda")
        for _ in range(17):
            probs = model(idx)[:, -1].softmax(-1)
            idx = torch.cat([idx, torch.multinomial(probs, 1)], 1)
        """,
        "embedding",
        "input",
        [16],
        (0, 16),
        "position_ge_max",
        "self.wpe(pos)",
        {"module": "model.wpe"},
        {"iteration": 16},
    ),
    "a sinusoidal table by x[i]": Case(
        LOADER
        + """
        class Encoding(nn.Module):
            def __init__(self, max_len=30):
                super().__init__()
                self.register_buffer("pe", torch.randn(max_len, 8))

            def forward(self, x):
                positions = torch.arange(x.size(1), device=x.device).expand(x.size(0), -1)
                return x + self.pe[positions]

        waves = [torch.randn(33 if i == 9 else 20, 8) for i in range(12)]
        loader = DataLoader(waves, 4, collate_fn=lambda b: pad_sequence(b, batch_first=True))
        encoding = Encoding().cuda()
        for batch in loader:
            encoding(batch.cuda()).sum()
        """,
        "index",
        "indices",
        [30, 31, 32],
        (-30, 30),
        "position_ge_max",
        "self.pe[positions]",
        {},
        {"iteration": 2},
    ),
    "pixel boxes": Case(
        """
        class Layout(nn.Module):
            def __init__(self):
                super().__init__()
                self.x_position_embeddings = nn.Embedding(1024, 4)
                self.y_position_embeddings = nn.Embedding(1024, 4)

            def forward(self, bbox):
                return self.x_position_embeddings(bbox[..., 0]) + self.y_position_embeddings(
                    bbox[..., 1]
                )

        model = Layout().cuda()
        boxes = torch.tensor([[[10, 20, 30, 40], [1150, 90, 1200, 110]]])
        model(boxes.cuda())
        """,
        "embedding",
        "input",
        [1150],
        (0, 1024),
        "bbox_coordinate_range",
        "self.x_position_embeddings(bbox[..., 0])",
        {"module": "model.x_position_embeddings"},
    ),
    "symbols added after the table was sized": Case(
        """
        symbols = list("_ abcdefghijklmnopqrstuvwxyz")
        n_symbols = len(symbols)
        symbols += list("äöü")
        symbol_to_id = {s: i for i, s in enumerate(symbols)}
        text_encoder = nn.Embedding(n_symbols, 8).cuda()
        for line in ["guten tag", "schöne grüße"]:
            sequence = torch.tensor([symbol_to_id[c] for c in line if c in symbol_to_id])
            text_encoder(sequence.cuda())
        """,
        "embedding",
        "input",
        [29, 30],
        (0, 28),
        "tts_symbol_out_of_table",
        "text_encoder(sequence.cuda())",
        {"module": "text_encoder"},
        {"iteration": 1},
    ),
    "a category that training had not": Case(
        LOADER
        + """
        import pandas as pd

        seen = pd.Series(["sun", "rain", "fog"] * 8, dtype="category").cat.categories
        later = pd.Series(["sun"] * 13 + ["hail"] + ["rain"] * 4)
        codes = torch.tensor(pd.Categorical(later, categories=seen).codes).long()
        emb_szs = [(len(seen), 4)]
        embeds = nn.ModuleList([nn.Embedding(n, size) for n, size in emb_szs]).cuda()
        val_loader = DataLoader(TensorDataset(codes[:, None]), batch_size=6)
        for (x_cat,) in val_loader:
            x_cat = x_cat.cuda()
            torch.cat([e(x_cat[:, i]) for i, e in enumerate(embeds)], 1)
        """,
        "embedding",
        "input",
        [-1],
        (0, 3),
        "category_unseen",
        "e(x_cat[:, i])",
        {"module": "embeds.0"},
        {
            "iteration": 2,
            "batch_rows": (1,),
            "dataset_indices": (13,),
            "split": "validation",
        },
    ),
    "months from 1": Case(
        """
        class Temporal(nn.Module):
            def __init__(self):
                super().__init__()
                self.month_embed, self.hour_embed = nn.Embedding(12, 4), nn.Embedding(24, 4)

            def forward(self, m):
                hour = self.hour_embed(m[:, 1])
                return hour + self.month_embed(m[:, 0])

        temporal = Temporal().cuda()
        marks = torch.tensor([[month, hour] for month in range(1, 13) for hour in range(24)])
        for part in marks.split(36):
            temporal(part.cuda())
        """,
        "embedding",
        "input",
        [12],
        (0, 12),
        "time_feature_ge_table",
        "self.month_embed(m[:, 0])",
        {"module": "temporal.month_embed"},
        {"iteration": 7},
    ),
    "users from 1": Case(
        LOADER
        + """
        user_ids = torch.arange(1, 61)
        num_users = len(user_ids.unique())
        user_emb = nn.Embedding(num_users, 4).cuda()
        for (u,) in DataLoader(TensorDataset(user_ids), batch_size=30):
            user_emb(u.cuda())
        """,
        "embedding",
        "input",
        [60],
        (0, 60),
        "category_id_ge_table",
        "user_emb(u.cuda())",
        {"module": "user_emb"},
        {"iteration": 1, "batch_rows": (29,), "dataset_indices": (59,)},
    ),
    "label padding as decoder input": Case(
        """
        shared = nn.Embedding(60, 8).cuda()
        labels = torch.tensor([[5, 6, 7, 2], [9, 2, -100, -100]]).cuda()
        decoder_input_ids = torch.cat([torch.ones(2, 1).long().cuda(), labels[:, :-1]], 1)
        h = shared(decoder_input_ids)
        """,
        "embedding",
        "input",
        [-100],
        (0, 60),
        "negative_index",
        "h = shared(decoder_input_ids)",
    ),
    "the log-probability of an action": Case(
        """
        policy = nn.Linear(4, 5).cuda()
        actions = torch.tensor([0, 3, 5, 1]).cuda()
        log_probs = F.log_softmax(policy(torch.randn(4, 4).cuda()), -1)
        picked = log_probs[torch.arange(len(actions), device="cuda"), actions]
        """,
        "index",
        "indices",
        [5],
        (-5, 5),
        "action_index_out_of_range",
        "picked = log_probs[",
    ),
    "actions around 0 as one-hot": Case(
        """
        action = torch.tensor([-1, 0, 1, 1]).cuda()
        a = F.one_hot(action, 3).float()
        """,
        "one_hot",
        "input",
        [-1],
        (0, 3),
        "action_index_out_of_range",
        "F.one_hot(action, 3)",
    ),
    "edges of dropped nodes": Case(
        """
        x = torch.randn(6, 4).cuda()
        edge_index = torch.tensor([[0, 1, 7], [2, 7, 3]]).cuda()
        src, dst = edge_index
        deg = torch.zeros(x.size(0), device="cuda").index_add_(0, dst, torch.ones(3).cuda())
        """,
        "index_add_",
        "index",
        [7],
        (0, 6),
        "node_index_ge_num_nodes",
        "deg = torch.zeros(",
    ),
    "a batch index of the full size": Case(
        LOADER
        + """
        BATCH = 4
        rnn = nn.GRU(3, 5, batch_first=True).cuda()
        rows = torch.arange(BATCH)
        for (x,) in DataLoader(TensorDataset(torch.randn(10, 6, 3)), BATCH):
            h, _ = rnn(x.cuda())
            last = h[rows.cuda(), 5]
        """,
        "index",
        "indices",
        [2, 3],
        (-2, 2),
        "index_out_of_bounds",
        "last = h[rows.cuda(), 5]",
        {},
        {"iteration": 2, "batch_rows": (), "dataset_indices": None},
    ),
    "-1 wraps in x[i], not in gather": Case(
        """
        h = torch.randn(2, 6, 3).cuda()
        head = torch.tensor([2, -1]).cuda()
        fine = h[torch.arange(2, device="cuda"), head]
        heads = h.gather(1, head.view(-1, 1, 1).expand(-1, 1, 3))
        """,
        "gather",
        "index",
        [-1],
        (0, 6),
        "negative_index",
        "heads = h.gather(",
    ),
    "padded tags in a multi-hot target": Case(
        """
        tags = torch.tensor([[3, 1, 4], [2, -1, -1]]).cuda()
        target = torch.zeros(2, 30, device="cuda").scatter_(1, tags, 1.0)
        """,
        "scatter_",
        "index",
        [-1],
        (0, 30),
        "negative_index",
        "scatter_(1, tags, 1.0)",
    ),
    "a histogram's last edge": Case(
        """
        image = torch.tensor([[0.1, 0.5], [0.99, 1.0]])
        bins = (image * 64).long().view(-1).cuda()
        counts = torch.zeros(64, device="cuda")
        counts.index_put_((bins,), torch.ones(4, device="cuda"), accumulate=True)
        """,
        "index_put_",
        "indices",
        [64],
        (-64, 64),
        "index_out_of_bounds",
        "counts.index_put_(",
    ),
    "a memory bank from 1": Case(
        """
        bank = torch.zeros(8, 2).cuda()
        places = torch.arange(1, 9)
        for i in range(0, 8, 4):
            bank.index_copy_(0, places[i : i + 4].cuda(), torch.ones(4, 2).cuda())
        """,
        "index_copy_",
        "index",
        [8],
        (0, 8),
        "index_out_of_bounds",
        "bank.index_copy_(",
        {},
        {"iteration": 1},
    ),
    "a loader that is read one batch ahead": Case(
        LOADER
        + """
        docs = [torch.ones(13 if i == 6 else 5).long() for i in range(12)]
        loader = DataLoader(docs, 4, collate_fn=lambda b: pad_sequence(b, batch_first=True))
        pos_emb = nn.Embedding(12, 4).cuda()

        def ahead(loader):
            batches = iter(loader)
            held = next(batches)
            for batch in batches:
                yield held
                held = batch
            yield held

        for step, ids in enumerate(ahead(loader)):
            positions = ids.ne(0).cumsum(1) * ids.ne(0)
            pos_emb(positions.cuda())
            if step == 1:
                break
        """,
        "embedding",
        "input",
        [12, 13],
        (0, 12),
        "position_ge_max",
        "pos_emb(positions.cuda())",
        {"module": "pos_emb"},
        {"iteration": 1, "batch_rows": (2,), "dataset_indices": (6,)},
    ),
    "take counts all elements": Case(
        """
        depth = torch.rand(20, 30).cuda()
        rows, columns = torch.tensor([3, 20]), torch.tensor([2, 4])
        z = torch.take(depth, (rows * 30 + columns).cuda())
        """,
        "take",
        "index",
        [604],
        (-600, 600),
        "index_out_of_bounds",
        "z = torch.take(",
    ),
}


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Snippet]:
    texts = {name: _text(case) for name, case in CASES.items()}
    folder = tmp_path_factory.mktemp("tables")
    made = folder / "made.py"
    made.write_text("def pick(x, index):\n    return x[index]\n")
    texts["generated"] = START + textwrap.dedent(
        f"""
        made = {{"__name__": "numpy.made"}}
        exec(compile(open({str(made)!r}).read(), {str(made)!r}, "exec"), made)
        nodes, edge_index = torch.randn(3, 2).cuda(), torch.tensor([1, 3]).cuda()
        made["pick"](nodes, edge_index)
        """
    )
    texts["not computed"] = START + textwrap.dedent(
        """
        scores = nn.Linear(8, 100).cuda()(torch.randn(2, 8).cuda())
        top = scores.topk(5, dim=1).indices
        boxes = torch.randn(20, 4).cuda()
        boxes[top]
        """
    )
    return run_each(texts, folder / "replay")


def _text(case: Case) -> str:
    first, _, rest = case.code.partition(LOADER)
    return START + (LOADER if rest else "") + textwrap.dedent(rest or first)


@pytest.mark.parametrize("name", CASES)
def test_case(snippets: dict[str, Snippet], name: str) -> None:
    case, snippet = CASES[name], snippets[name]
    assert snippet.observed, snippet.error
    observed = msgspec.structs.replace(snippet.observed[0], sources=(_text(case),))
    finding = observed.finding
    bound = finding.bound
    assert bound is not None
    assert (finding.op, finding.argument) == (case.op, case.argument)
    assert list(finding.bad_values) == case.values
    assert (bound.low, bound.high, bound.high_inclusive) == (*case.bound, False)
    assert case.line in finding.location.source
    assert {k: getattr(finding, k) for k in case.finding} == case.finding
    assert {k: getattr(finding.step, k) for k in case.step} == case.step
    assert observed.unknown == ()  # nothing was made up: it may be called certain
    cause, fixes = diagnosis.diagnose(observed)
    assert cause.key == case.cause
    assert fixes


def test_an_index_that_was_not_computed_is_no_finding(snippets: dict[str, Snippet]) -> None:
    snippet = snippets["not computed"]
    assert snippet.observed == ()
    assert "index" in snippet.unchecked


def test_code_that_a_library_wrote_is_not_the_users(snippets: dict[str, Snippet]) -> None:
    (observed,) = snippets["generated"].observed
    assert observed.finding.op == "index"
    assert observed.finding.location.source == 'made["pick"](nodes, edge_index)'


# ---- on the simulated GPU


def test_data_parallel_splits_a_picture_number(start_kernel: Callable[..., Kernel]) -> None:
    two = "import nb_assertdoc.simulated_gpu as s\ns.load(s.Devices(count=2))"
    with start_kernel(setup=two, extension=True) as kernel:
        kernel.run(
            START
            + textwrap.dedent(
                """
                class Detector(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.backbone = nn.Linear(6, 3)

                    def forward(self, images, targets):
                        features = self.backbone(images)
                        picked = features[targets[:, 0]]
                        return picked.sum().reshape(1)

                model = nn.DataParallel(Detector().cuda())
                targets = torch.tensor([[0, 1], [1, 2], [2, 1], [3, 0]])
                """
            )
        )
        outcome = kernel.run("model(torch.randn(4, 6).cuda(), targets.cuda()).mean().item()")
    report = outcome.report
    finding = report["finding"]
    assert (finding["op"], finding["bad_values"]) == ("index", [2, 3])
    assert (finding["bound"]["low"], finding["bound"]["high"]) == (-2, 2)
    assert finding["location"]["source"].strip() == "picked = features[targets[:, 0]]"
    assert (finding["module"], finding["module_type"]) == ("model.module", "Detector")
    assert report["cause"]["key"] == "dataparallel_split_breaks_index"


def test_a_swallowed_fault_is_that_of_the_first_bad_run(gpu_kernel: Kernel) -> None:
    gpu_kernel.run(
        START
        + textwrap.dedent(
            """
            class Bag(nn.Module):
                def __init__(self, vocab_size):
                    super().__init__()
                    self.words = nn.Embedding(vocab_size, 4)

                def forward(self, ids):
                    return self.words(ids).mean(1)

            corpus = torch.arange(500).view(50, 10)
            """
        )
    )
    outcome = gpu_kernel.run(
        textwrap.dedent(
            """
            results = {}
            for vocab_size in [600, 500, 400, 300]:
                try:
                    model = Bag(vocab_size).cuda()
                    for ids in corpus.split(10):
                        results[vocab_size] = model(ids.cuda()).sum().item()
                except Exception as error:
                    print(vocab_size, "failed")
            """
        )
    )
    assert outcome.error is None
    finding = outcome.report["finding"]
    assert (finding["op"], finding["module"]) == ("embedding", "model.words")
    assert (finding["bad_values"][0], finding["bad_values"][-1]) == (400, 499)
    assert finding["bound"]["high"] == 400
    assert finding["step"]["iteration"] == 4
    assert outcome.report["cause"]["key"] == "token_id_ge_vocab"
