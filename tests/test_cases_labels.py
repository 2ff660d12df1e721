"""Notebook-like code whose fault is a class label, a mask, a target or a probability.

The cells of `CASES` run one after the other in one worker, those of `FLOATS` in one that computes
floats; the rules then see each cell alone.
"""

from __future__ import annotations

import linecache
import sys
import textwrap
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from kernels import Kernel
from replays import Snippet, run_each

from nb_assertdoc import diagnosis
from nb_assertdoc.frames import Cells
from nb_assertdoc.model import Number, Source
from nb_assertdoc.worker.loops import LoopCounter

START = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
"""


@dataclass(frozen=True)
class Case:
    """A cell, and what the report must say of it. `line` is a part of the faulty line."""

    code: str
    op: str
    argument: str
    values: list[Number]
    bound: tuple[int, int, int | None] | None  # low, high, ignore_index
    cause: str
    line: str
    index: str | None = None  # the faulty argument in the user's words
    step: dict[str, Any] = field(default_factory=dict)
    module: str | None = None


CASES = {
    "a trimap of 1..3": Case(
        """
        trimaps = 1 + torch.arange(3).repeat_interleave(3).repeat(6, 10, 1)
        net = nn.Conv2d(3, 3, 1).cuda()
        for x, y in DataLoader(TensorDataset(torch.randn(6, 3, 10, 9), trimaps), 6):
            loss = F.cross_entropy(net(x.cuda()), y.cuda())
        """,
        "cross_entropy",
        "target",
        [3],
        (0, 3, -100),
        "label_starts_at_1",
        "loss = F.cross_entropy(net(x.cuda()), y.cuda())",
        "y.cuda()",
        {"iteration": 0, "batch_rows": (0, 1, 2, 3, 4, 5), "dataset_indices": (0, 1, 2, 3, 4, 5)},
    ),
    "more bad pixels than are shown": Case(
        """
        masks = torch.zeros(8, 20, 20, dtype=torch.long)
        masks[[1, 4, 6]] = 255
        net = nn.Conv2d(1, 2, 1).cuda()
        criterion = nn.CrossEntropyLoss(weight=torch.ones(2).cuda())
        for x, mask in DataLoader(TensorDataset(torch.randn(8, 1, 20, 20), masks), 8):
            logits = net(x.cuda()).permute(0, 2, 3, 1).reshape(-1, 2)
            loss = criterion(logits, mask.cuda().view(-1))
        """,
        "cross_entropy",
        "target",
        [255],
        (0, 2, -100),
        "mask_value_unmapped",
        "loss = criterion(logits, mask.cuda().view(-1))",
        "mask.cuda().view(-1)",
        {"iteration": 0, "batch_rows": (1, 4, 6), "dataset_indices": (1, 4, 6)},
        "criterion",
    ),
    "one-hot after an ignore_index": Case(
        """
        class DiceLoss(nn.Module):
            def forward(self, logits, target):
                onehot = F.one_hot(target, num_classes=3).permute(0, 3, 1, 2)
                return 1 - (logits.softmax(1) * onehot).mean()

        dice, ce = DiceLoss(), nn.CrossEntropyLoss(ignore_index=255)
        masks = torch.tensor([[[0, 1], [2, 255]]]).cuda()
        logits = nn.Conv2d(3, 3, 1).cuda()(torch.randn(1, 3, 2, 2).cuda())
        loss = ce(logits, masks) + dice(logits, masks)
        """,
        "one_hot",
        "input",
        [255],
        (0, 3, None),
        "mask_value_unmapped",
        "onehot = F.one_hot(target, num_classes=3)",
        "target",
        {},
        "dice",
    ),
    "the row of a shuffled target": Case(
        """
        y = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1])
        head = nn.Linear(4, 5).cuda()
        for xb, yb in DataLoader(TensorDataset(torch.randn(12, 4), y), batch_size=6):
            order = torch.arange(5, -1, -1, device="cuda")
            loss = F.cross_entropy(head(xb.cuda()[order]), yb.cuda()[order])
        """,
        "cross_entropy",
        "target",
        [5],
        (0, 5, -100),
        "label_ge_num_classes",
        "loss = F.cross_entropy(",
        "yb.cuda()[order]",
        {"iteration": 1, "batch_rows": (), "dataset_indices": None},
    ),
    "an answer that was cut off": Case(
        """
        qa_outputs = nn.Linear(4, 2).cuda()
        start, end = torch.tensor([1, 2, 3]).cuda(), torch.tensor([4, 10, 15]).cuda()
        start_logits, end_logits = qa_outputs(torch.randn(3, 10, 4).cuda()).unbind(-1)
        ignored_index = start_logits.size(1)
        loss_fct = nn.CrossEntropyLoss(ignore_index=ignored_index)
        loss = loss_fct(start_logits, start) + loss_fct(end_logits, end)
        """,
        "cross_entropy",
        "target",
        [15],
        (0, 10, 10),
        "label_position_ge_sequence",
        "loss_fct(end_logits, end)",
        "end",
        {},
        "loss_fct",
    ),
    "no object is one class more": Case(
        """
        num_classes = 5
        class_embed = nn.Linear(8, num_classes).cuda()
        src_logits = class_embed(torch.randn(2, 6, 8).cuda())
        target_classes = torch.full(src_logits.shape[:2], num_classes, device="cuda")
        target_classes[0, 2] = 3
        loss = F.cross_entropy(src_logits.transpose(1, 2), target_classes)
        """,
        "cross_entropy",
        "target",
        [5],
        (0, 5, -100),
        "label_ge_num_classes",
        "loss = F.cross_entropy(src_logits.transpose(1, 2), target_classes)",
        "target_classes",
    ),
    "tags padded with another mark": Case(
        """
        logits = nn.Linear(4, 11).cuda()(torch.randn(2, 5, 4).cuda())
        labels = torch.tensor([[1, 2, 3, -1, -1], [4, 5, -1, -1, -1]]).cuda()
        shifted = logits[:, :-1].reshape(-1, 11)
        loss = F.cross_entropy(shifted, labels[:, 1:].reshape(-1), ignore_index=0)
        """,
        "cross_entropy",
        "target",
        [-1],
        (0, 11, 0),
        "label_negative_sentinel",
        "loss = F.cross_entropy(shifted,",
        "labels[:, 1:].reshape(-1)",
    ),
    "labels with missing values": Case(
        """
        y = torch.tensor([0.0, float("nan"), 1.0]).long().cuda()
        log_probs = F.log_softmax(nn.Linear(3, 2).cuda()(torch.randn(3, 3).cuda()), 1)
        loss = nn.NLLLoss()(log_probs, target=y)
        """,
        "nll_loss",
        "target",
        [-(2**63)],
        (0, 2, -100),
        "nan_inf_in_data",
        "loss = nn.NLLLoss()(log_probs, target=y)",
        "y",
    ),
    "a blank that was not counted": Case(
        """
        alphabet = "abcdefghijklmnopqrstuvwxyz"
        log_probs = nn.Linear(5, len(alphabet)).cuda()(torch.randn(9, 2, 5).cuda())
        ctc = nn.CTCLoss(zero_infinity=True)
        targets = torch.tensor([[1, 5, 26], [3, 2, 99]]).cuda()
        sizes = torch.tensor([9, 9]), torch.tensor([3, 2])
        loss = ctc(log_probs.log_softmax(-1), targets, *sizes)
        """,
        "ctc_loss",
        "targets",
        [26],  # 99 is padding
        (0, 26, None),
        "label_ge_num_classes",
        "loss = ctc(log_probs.log_softmax(-1), targets, *sizes)",
        "targets",
        {},
        "ctc",
    ),
    "several labels a row": Case(
        """
        scores = nn.Linear(4, 5).cuda()(torch.randn(2, 4).cuda())
        tags = torch.tensor([[1, 5, -1, 9, 0], [0, 1, -1, -1, -1]]).cuda()
        loss = nn.MultiLabelMarginLoss()(scores, tags)
        """,
        "multilabel_margin_loss",
        "target",
        [5],
        (0, 5, -1),
        "label_ge_num_classes",
        "loss = nn.MultiLabelMarginLoss()(scores, tags)",
        "tags",
    ),
    "classes in a binary loss": Case(
        """
        out = torch.sigmoid(nn.Linear(3, 1).cuda()(torch.randn(6, 3).cuda()))
        y = torch.tensor([0, 1, 2, 3, 1, 0]).cuda()
        loss = nn.BCELoss()(out.squeeze(), y.float())
        """,
        "binary_cross_entropy",
        "target",
        [2.0, 3.0],
        (0, 1, None),
        "loss_mismatch",
        "loss = nn.BCELoss()(out.squeeze(), y.float())",
        "y.float()",
    ),
    "a binary target of 1 and 2": Case(
        """
        out = torch.sigmoid(nn.Linear(3, 1).cuda()(torch.randn(8, 3).cuda())).squeeze(1)
        y = torch.tensor([1.0, 2.0] * 4).cuda()
        loss = F.binary_cross_entropy(out, y)
        """,
        "binary_cross_entropy",
        "target",
        [2.0],
        (0, 1, None),
        "label_starts_at_1",
        "loss = F.binary_cross_entropy(out, y)",
        "y",
    ),
    "a missing target": Case(
        """
        out = torch.sigmoid(nn.Linear(3, 1).cuda()(torch.randn(3, 3).cuda())).squeeze(1)
        y = torch.tensor([0.0, float("nan"), 1.0]).cuda()
        loss = F.binary_cross_entropy(out, y)
        """,
        "binary_cross_entropy",
        "target",
        ["nan"],
        (0, 1, None),
        "nan_inf_in_data",
        "loss = F.binary_cross_entropy(out, y)",
        "y",
    ),
    "one sigmoid unit": Case(
        """
        net = nn.Sequential(nn.Linear(9, 1), nn.Sigmoid()).cuda()
        churned = torch.tensor([0, 1, 1, 0]).cuda()
        loss = nn.CrossEntropyLoss()(net(torch.randn(4, 9).cuda()), churned)
        """,
        "cross_entropy",
        "target",
        [1],
        (0, 1, -100),
        "loss_mismatch",
        "loss = nn.CrossEntropyLoss()(net(",
        "churned",
    ),
    "a mask of one channel": Case(
        """
        mask = torch.zeros(2, 4, 4, dtype=torch.long)
        mask[:, 2:] = 1
        logits = nn.Conv2d(1, 1, 1).cuda()(torch.randn(2, 1, 4, 4).cuda())
        loss = F.cross_entropy(logits, mask.cuda())
        """,
        "cross_entropy",
        "target",
        [1],
        (0, 1, -100),
        "label_ge_num_classes",
        "loss = F.cross_entropy(logits, mask.cuda())",
        "mask.cuda()",
    ),
    "scattered ones": Case(
        """
        tags = torch.tensor([[1, 4], [0, 6]]).cuda()
        multi_hot = torch.zeros(2, 6, device="cuda").scatter_(1, tags, 1.0)
        """,
        "scatter_",
        "index",
        [6],
        (0, 6, None),
        "one_hot_class_ge_num_classes",
        "multi_hot = torch.zeros(",
        "tags",
    ),
    "the class of a generator": Case(
        """
        class Generator(nn.Module):
            def __init__(self):
                super().__init__()
                self.label_emb = nn.Embedding(10, 4)

            def forward(self, y):
                return self.label_emb(y)

        generator = Generator().cuda()
        fake = generator(torch.tensor([3, 10]).cuda())
        """,
        "embedding",
        "input",
        [10],
        (0, 10, None),
        "label_ge_num_classes",
        "return self.label_emb(y)",
        "y",
        {},
        "generator.label_emb",
    ),
    "a confusion matrix": Case(
        """
        truth, pred = torch.tensor([0, 3, 2]).cuda(), torch.tensor([0, 1, 2]).cuda()
        hist = torch.zeros(3, 3, device="cuda")
        hist.index_put_((truth, pred), torch.ones(3, device="cuda"), accumulate=True)
        """,
        "index_put_",
        "indices",
        [3],
        (-3, 3, None),
        "label_ge_num_classes",
        "hist.index_put_((truth, pred)",
        "(truth, pred)",
    ),
    "a trainer that holds the model": Case(
        """
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.classifier = nn.Linear(4, 6)

            def forward(self, x, labels):
                return nn.CrossEntropyLoss()(self.classifier(x), labels)

        class Trainer:
            def __init__(self, model):
                self.model = model.cuda()

            def fit(self, batches):
                for x, labels in batches:
                    loss = self.model(x.cuda(), labels.cuda())

        trainer = Trainer(Tagger())
        x = torch.randn(2, 4)
        trainer.fit([(x, torch.tensor([0, 5])), (x, torch.tensor([100, 2]))])
        """,
        "cross_entropy",
        "target",
        [100],
        (0, 6, -100),
        "label_ge_num_classes",
        "nn.CrossEntropyLoss()(self.classifier(x), labels)",
        "labels",
        {"iteration": 1},
        "trainer.model",
    ),
    "rows of a parameter by a list": Case(
        """
        classes = nn.Linear(2, 4).cuda()
        picked = classes.weight[[0, 2, 4]]
        """,
        "index",
        "indices",
        [4],
        (-4, 4, None),
        "index_out_of_bounds",
        "picked = classes.weight[[0, 2, 4]]",
        "[0, 2, 4]",
    ),
    "a keep rate above 1": Case(
        """
        for step in range(6):
            keep = torch.full((4,), 0.75 + 0.0625 * step, device="cuda")
            drawn = keep.bernoulli()
        """,
        "bernoulli",
        "input",
        [1.0625],
        (0, 1, None),
        "bce_input_outside_unit",
        "drawn = keep.bernoulli()",
        "keep",
        {"iteration": 5},
    ),
    "nothing left to sample": Case(
        """
        allowed = torch.ones(2, 5)
        allowed[1] = 0
        negatives = allowed.cuda().multinomial(2, replacement=True)
        """,
        "multinomial",
        "input",
        [0.0],
        None,
        "multinomial_invalid_distribution",
        "negatives = allowed.cuda().multinomial(",
        "allowed.cuda()",
    ),
}
FLOATS = {
    "temperature 0": Case(
        """
        class Generator(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb, self.rnn = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True)
                self.out = nn.Linear(8, 9)

            def forward(self, ids, h=None):
                y, h = self.rnn(self.emb(ids), h)
                return self.out(y), h

        model, ids, h = Generator().cuda(), torch.tensor([[1]]).cuda(), None
        for temperature in [1.0, 0.5, 0.0]:
            logits, h = model(ids, h)
            probs = F.softmax(logits[:, -1] / temperature, dim=-1)
            ids = torch.multinomial(probs, num_samples=1)
        """,
        "multinomial",
        "input",
        ["nan"],
        None,
        "multinomial_nan_inf_neg",
        "ids = torch.multinomial(probs, num_samples=1)",
        "probs",
        {"iteration": 2},
    ),
    "raw scores": Case(
        """
        scores = nn.Linear(1, 3, bias=False).cuda()(torch.zeros(1, 1).cuda()) - 2
        pick = scores.multinomial(1)
        """,
        "multinomial",
        "input",
        [-2.0],
        None,
        "multinomial_nan_inf_neg",
        "pick = scores.multinomial(1)",
        "scores",
    ),
    "a constant column": Case(
        """
        values = torch.tensor([[3.0, 1.0], [3.0, 2.0]])
        values = (values - values.mean(0)) / values.std(0)
        net = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()).cuda()
        loss = nn.BCELoss()(net(values.cuda()), torch.ones(2, 1).cuda())
        """,
        "binary_cross_entropy",
        "input",
        ["nan"],
        (0, 1, None),
        "nan_inf_in_data",
        "loss = nn.BCELoss()(net(values.cuda())",
        "net(values.cuda())",
    ),
}
ALL = CASES | FLOATS


def _text(case: Case) -> str:
    return START + textwrap.dedent(case.code)


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Snippet]:
    folder = tmp_path_factory.mktemp("labels")
    texts = {name: _text(case) for name, case in CASES.items()}
    texts["answers that are ignored"] = START + textwrap.dedent(
        """
        start_logits = nn.Linear(4, 1).cuda()(torch.randn(2, 9, 4).cuda()).squeeze(-1)
        ignored_index = start_logits.size(1)
        start = torch.tensor([3, 40]).cuda().clamp(0, ignored_index)
        loss = F.cross_entropy(start_logits, start, ignore_index=ignored_index)
        """
    )
    floats = {name: _text(case) for name, case in FLOATS.items()}
    computed = run_each(floats, folder / "cpu", engine="cpu", real_floats=True)
    return run_each(texts, folder / "ghost") | computed


@pytest.mark.parametrize("name", ALL)
def test_case(snippets: dict[str, Snippet], name: str) -> None:
    case, snippet = ALL[name], snippets[name]
    assert snippet.observed, snippet.error
    observed = msgspec.structs.replace(snippet.observed[0], sources=(_text(case),))
    finding, bound = observed.finding, observed.finding.bound
    assert (finding.op, finding.argument) == (case.op, case.argument)
    assert list(finding.bad_values) == case.values
    assert (bound and (bound.low, bound.high, bound.ignore)) == case.bound
    assert case.line in finding.location.source
    assert observed.index_expression == case.index
    assert finding.module == case.module
    assert {k: getattr(finding.step, k) for k in case.step} == case.step
    assert bool(observed.unknown) == (name in FLOATS)  # computed floats may differ from a GPU's
    cause, fixes = diagnosis.diagnose(observed)
    assert cause.key == case.cause
    assert fixes


def test_what_ignore_index_lets_through_is_no_fault(snippets: dict[str, Snippet]) -> None:
    snippet = snippets["answers that are ignored"]
    assert (snippet.observed, snippet.error, snippet.unchecked) == ((), "", ())


def test_loops_of_a_cell_that_ipython_7_names() -> None:
    """IPython 7 gives a cell's code the name `<cell line: N>` in place of `<module>`."""
    text = "for step in range(4):\n    for part in 'ab':\n        look()\n"
    seen: list[list[int]] = []
    loops = LoopCounter(Cells([Source(filename="<a cell>", source=text)]))

    def look() -> None:
        cell = sys._getframe(1)
        seen.append([iteration for _, iteration in loops.around(cell, cell.f_lineno)])

    linecache.cache["<a cell>"] = len(text), None, text.splitlines(True), "<a cell>"
    code = compile(text, "<a cell>", "exec").replace(co_name="<cell line: 1>")
    before = sys.gettrace()
    loops.start()
    try:
        exec(code, {"look": look})
    finally:
        sys.settrace(before)
        threading.settrace(before)
        del linecache.cache["<a cell>"]
    assert seen == [[step, part] for step in range(4) for part in range(2)]


def test_notebook_with_a_module_of_its_own(gpu_kernel: Kernel) -> None:
    """The fault is in a file that a cell wrote, on labels that workers loaded and a call mixed."""
    cells = (
        """
        %%writefile mixing.py
        import torch

        class Mixup:
            def __init__(self, num_classes=10):
                self.num_classes = num_classes

            def __call__(self, x, y):
                soft = torch.zeros(len(y), self.num_classes, device=y.device)
                soft.scatter_(1, y.view(-1, 1), 1.0)
                order = torch.arange(len(y) - 1, -1, -1)
                return 0.5 * (x + x[order]), 0.5 * (soft + soft[order])
        """,
        """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        from mixing import Mixup

        species = "wren robin jay crow owl kite swift tit finch dove gull heron".split()
        y = torch.arange(60) % len(species)
        loader = DataLoader(TensorDataset(torch.randn(60, 6), y), batch_size=5, num_workers=1)
        model, mixup = nn.Linear(6, 10).cuda(), Mixup()
        """,
        """
        %%time
        losses = []
        for xb, yb in loader:
            xb, soft = mixup(xb.cuda(), yb.cuda())
            loss = -(soft * model(xb).log_softmax(-1)).sum(-1).mean()
            losses.append(loss.item())
        """,
    )
    for cell in cells:
        outcome = gpu_kernel.run(textwrap.dedent(cell).strip())
    report = outcome.report
    finding, step = report["finding"], report["finding"]["step"]
    assert report["confidence"] == "certain"
    assert (finding["op"], finding["argument"]) == ("scatter_", "index")
    assert finding["bad_values"] == [10, 11]
    assert (finding["bound"]["low"], finding["bound"]["high"]) == (0, 10)
    assert finding["location"]["file"].endswith("mixing.py")
    assert "soft.scatter_(1, y.view(-1, 1), 1.0)" in finding["location"]["source"]
    assert (step["loop"], step["iteration"]) == ("for xb, yb in loader:", 2)
    assert (step["batch_rows"], step["dataset_indices"]) == ([0, 1], [10, 11])
    assert report["cause"]["key"] == "one_hot_class_ge_num_classes"
