"""Causes that the names in notebook-like code tell apart, where operator and values are alike.

Each cell runs in one worker; the rules then see it alone.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec
import pytest
from replays import Snippet, run, run_each

from nb_assertdoc import diagnosis

START = """import torch
from torch import nn
from torch.nn import functional as F
"""

# What it is -> (cause, bad values, cell)
CASES: dict[str, tuple[str, list[int], str]] = {
    "tags of a conditional random field": (
        "label_ge_num_classes",
        [3],
        """
        transitions, tags = torch.randn(3, 3).cuda(), torch.tensor([[0, 2], [1, 3]]).cuda()
        score = transitions[tags[:, 0], tags[:, 1]]
        """,
    ),
    "padded tags of a conditional random field": (
        "label_negative_sentinel",
        [-100],
        """
        transitions, tags = torch.randn(3, 3).cuda(), torch.tensor([[0, 2], [1, -100]]).cuda()
        score = transitions[tags[:, 0], tags[:, 1]]
        """,
    ),
    "a one-hot helper": (
        "one_hot_class_ge_num_classes",
        [3],
        """
        def one_hot(x, num_classes, on, off):
            return torch.full((len(x), num_classes), off, device=x.device).scatter_(1, x, on)

        one_hot(torch.tensor([[0], [3]]).cuda(), 3, 0.9, 0.1)
        """,
    ),
    "rows summed by a cluster's number": (
        "group_id_ge_num_groups",
        [2],
        """
        cluster = torch.tensor([0, 2]).cuda()
        pooled = torch.zeros(2, 4).cuda().index_add_(0, cluster, torch.ones(2, 4).cuda())
        """,
    ),
    "class weights of each row": (
        "label_ge_num_classes",
        [4],
        """
        class_weights, y = torch.ones(4).cuda(), torch.tensor([0, 4]).cuda()
        weight = class_weights[y]
        """,
    ),
    "a mask that a loss of its own makes flat": (
        "mask_value_unmapped",
        [255],
        """
        def focal(logits, target):
            logits = logits.permute(0, 2, 3, 1).reshape(-1, 3)
            return logits.log_softmax(1).gather(1, target.reshape(-1, 1))

        masks = torch.zeros(2, 4, 4, dtype=torch.long)
        masks[0, 0] = 255
        focal(nn.Conv2d(3, 3, 1).cuda()(torch.randn(2, 3, 4, 4).cuda()), masks.cuda())
        """,
    ),
    "a class more in such a mask": (
        "mask_value_unmapped",
        [3],
        """
        def criterion(logits, target):
            logits = logits.permute(0, 2, 3, 1).reshape(-1, 3)
            return F.cross_entropy(logits, target.reshape(-1))

        masks = torch.zeros(2, 4, 4, dtype=torch.long)
        masks[0, 0] = 3
        criterion(nn.Conv2d(3, 3, 1).cuda()(torch.randn(2, 3, 4, 4).cuda()), masks.cuda())
        """,
    ),
    "labels beside an attention mask": (
        "label_ge_num_classes",
        [3],
        """
        def criterion(logits, labels, mask):
            return F.cross_entropy(logits.view(-1, 3), labels.view(-1)) * mask.sum()

        mask = torch.ones(2, 4).cuda()
        criterion(nn.Linear(4, 3).cuda()(torch.randn(2, 4, 4).cuda()), (mask * 3).long(), mask)
        """,
    ),
    "segments that are summed": (
        "index_out_of_bounds",
        [5],
        """
        seg = torch.tensor([0, 1, 5]).cuda()
        pooled = torch.zeros(3, 4).cuda().index_add(0, seg, torch.ones(3, 4).cuda())
        """,
    ),
    "a map of classes looked up in a table": (
        "vocab_or_table_too_small",
        [255],
        """
        seg_emb = nn.Embedding(19, 4).cuda()
        seg_emb(torch.full((1, 4, 4), 255).cuda())
        """,
    ),
    "the type of an edge": (
        "vocab_or_table_too_small",
        [4],
        """
        edge_type_emb = nn.Embedding(4, 4).cuda()
        edge_type_emb(torch.tensor([0, 4]).cuda())
        """,
    ),
    "messages along edges": (
        "node_index_ge_num_nodes",
        [6],
        """
        nodes, x = 6, torch.randn(6, 4).cuda()
        s, d = torch.tensor([0, 6]).cuda(), torch.tensor([1, 2]).cuda()
        total = torch.zeros_like(x).index_add_(0, d, x[s])
        """,
    ),
    "the probability of an action": (
        "action_index_out_of_range",
        [3],
        """
        acts = torch.tensor([0, 1, 3]).cuda()
        logits = nn.Linear(4, 3).cuda()(torch.randn(3, 4).cuda())
        log = torch.distributions.Categorical(logits=logits, validate_args=False).log_prob(acts)
        """,
    ),
    "what a critic says of an action": (
        "action_index_out_of_range",
        [2],
        """
        critic, reward = nn.Linear(3, 2).cuda(), 1.0
        u = torch.tensor([[0], [2]]).cuda()
        q1 = critic(torch.randn(2, 3).cuda()).gather(1, u)
        """,
    ),
    "a table of distances": (
        "position_ge_max",
        [9, 10],
        """
        relative_position_bias_table = torch.randn(9, 2).cuda()
        r = torch.arange(7).cuda()
        bias = relative_position_bias_table[(r[:, None] - r[None, :]).clamp(min=0) + 4]
        """,
    ),
    "rotary positions": (
        "position_ge_max",
        [8, 9],
        """
        cos_cached, position_ids = torch.randn(8, 4).cuda(), torch.arange(10)[None].cuda()
        cos = cos_cached[position_ids]
        """,
    ),
    "a leap year": (
        "time_feature_ge_table",
        [365],
        """
        doy_emb = nn.Embedding(365, 4).cuda()
        doy_emb(torch.tensor([0, 365]).cuda())
        """,
    ),
    "a table of weekdays without nn.Embedding": (
        "time_feature_ge_table",
        [7],
        """
        day_in_week_emb = torch.randn(7, 4).cuda()
        day_in_week_emb[torch.tensor([1, 7]).cuda()]
        """,
    ),
    "bins of a real value": (
        "vocab_or_table_too_small",
        [255],
        """
        pitch, pitch_bins = torch.tensor([0.5, 3.0]), torch.linspace(0, 1, 255)
        pitch_embedding = nn.Embedding(255, 4).cuda()
        pitch_embedding(torch.bucketize(pitch, pitch_bins).cuda())
        """,
    ),
    "symbols of speech in a table of words": (
        "tts_symbol_out_of_table",
        [30],
        """
        def text_to_sequence(text):
            return [30]

        src_word_emb = nn.Embedding(30, 4).cuda()
        src_word_emb(torch.tensor([text_to_sequence("ü")]).cuda())
        """,
    ),
    "a speaker by a short name": (
        "tts_symbol_out_of_table",
        [4],
        """
        n_speakers, sid = 4, torch.tensor([1, 4]).cuda()
        emb_g = nn.Embedding(n_speakers, 4).cuda()
        emb_g(sid)
        """,
    ),
}


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Snippet]:
    texts = {name: START + textwrap.dedent(code) for name, (_, _, code) in CASES.items()}
    return run_each(texts, tmp_path_factory.mktemp("more") / "replay")


@pytest.mark.parametrize("name", CASES)
def test_cause(snippets: dict[str, Snippet], name: str) -> None:
    (cause, values, code), snippet = CASES[name], snippets[name]
    assert snippet.observed, snippet.error
    observed = msgspec.structs.replace(
        snippet.observed[0], sources=(START + textwrap.dedent(code),)
    )
    assert list(observed.finding.bad_values) == values
    found, fixes = diagnosis.diagnose(observed)
    assert found.key == cause
    assert fixes


def test_a_tokenizer_that_another_object_holds_is_known(tmp_path: Path) -> None:
    made = """
        class Tok:
            vocab_size = 5
            def __len__(self): return 7
            def convert_ids_to_tokens(self, i): return "<pad>" if i == 5 else "word"

        class Collator:
            def __init__(self): self.tokenizer = Tok()

        class Trainer:
            def __init__(self): self.collator, self.emb = Collator(), nn.Embedding(5, 4).cuda()
            def train(self): self.emb(torch.tensor([1, 5]).cuda())

        trainer = Trainer()
        """
    evidence = run("trainer.train()", tmp_path / "w", history=(START + textwrap.dedent(made),))
    (tokenizer,) = evidence.observed[0].tokenizers
    assert (tokenizer.name, tokenizer.size) == ("trainer.collator.tokenizer", 7)
    assert tokenizer.tokens == {"5": "<pad>"}
    _, fixes = diagnosis.diagnose(evidence.observed[0])
    assert "7" in fixes[0].title  # both tokens that were added, not only the one that was met
