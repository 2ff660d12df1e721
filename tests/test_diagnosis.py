"""The cause rules: for each a case that it must take and a neighbour that it must leave."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from nb_assertdoc import diagnosis
from nb_assertdoc.model import (
    Bound,
    Crash,
    Finding,
    Number,
    Observed,
    Place,
    Step,
    Tokenizer,
    Values,
    Variable,
)


def values(found: Iterable[Number], complete: bool = True) -> Values:
    found = list(found)
    numbers = sorted({v for v in found if not isinstance(v, str)})
    return Values(
        count=len(found),
        minimum=numbers[0] if numbers else None,
        maximum=numbers[-1] if numbers else None,
        distinct=tuple(numbers[:256]),
        distinct_count=len(numbers),
        complete=complete,
    )


def seen(
    op: str,
    found: Iterable[Number],
    high: float | None,
    *,
    low: int = 0,
    ignore: int | None = None,
    closed: bool = False,
    argument: str = "index",
    shape: tuple[int, ...] | None = None,
    line: str = "",
    module: str | None = None,
    module_type: str | None = None,
    step: Step | None = None,
    margin: float = 1.0,
    size: str | None = None,
    functions: tuple[str, ...] = (),
    **facts: Any,
) -> Observed:
    """A finding of `op` whose index tensor holds `found`; valid are low..high-1 and `ignore`."""
    found = list(found)

    def is_bad(value: Number) -> bool:
        if isinstance(value, str):
            return True
        if high is None:
            return value < 0
        return value != ignore and not (low <= value <= high if closed else low <= value < high)

    bad = [v for v in found if is_bad(v)]
    distinct = sorted(set(bad), key=lambda v: (isinstance(v, str), v))
    finding = Finding(
        op=op,
        aten_op=f"aten::{op}",
        argument=argument,
        bad_values=tuple(distinct[:256]),
        distinct_bad=len(distinct),
        bad_count=len(bad),
        total=len(found),
        positions=((0,),),
        bound=None
        if high is None
        else Bound(low=low, high=high, high_inclusive=closed, ignore=ignore),
        margin=margin,
        location=Place(line=2, source=line, cell_id="cell-a", expression=line or None),
        table=f"size {high} of {size}" if size else None,
        user_frames=tuple(Place(line=1, source="", function=name) for name in functions),
        module=module,
        module_type=module_type,
        step=step,
    )
    if "data" in facts:
        facts["data"] = values(facts["data"])
    shape = (len(found),) if shape is None else shape
    return Observed(finding=finding, dtype="int64", shape=shape, values=values(found), **facts)


def labels(found: Iterable[Number], classes: int, **facts: Any) -> Observed:
    facts.setdefault("ignore", -100)
    facts.setdefault("index_expression", "rating")
    return seen("cross_entropy", found, classes, argument="target", **facts)


def table(found: Iterable[Number], rows: int, module: str | None = None, **facts: Any) -> Observed:
    facts.setdefault("argument", "input")
    return seen(facts.pop("op", "embedding"), found, rows, module=module, **facts)


def mask(found: Iterable[Number], classes: int, **facts: Any) -> Observed:
    return labels(found, classes, shape=(2, 8, 8), index_expression="gt", **facts)


def wrong_ids(size: int, base: int | None) -> tuple[Tokenizer, ...]:
    return (Tokenizer(name="bert_tok", size=size, vocab_size=base, tokens={"700": "<ent>"}),)


NAN_CAST = -(2**63)
GRAPH = ("from torch_geometric.nn import SAGEConv",)
LAYER: dict[str, Any] = {
    "line": "self.gnn(hidden, edges)",
    "module": "net.gnn",
    "module_type": "SAGEConv",
    "sources": GRAPH,
}
BUTTONS = "q_sa = net(s).gather(1, actions)"

CASES: list[tuple[str, str, Observed]] = [
    # ---- labels
    ("label_starts_at_1", "scanned", labels([1, 4, 7], 7, data=[*range(1, 8)] * 9)),
    ("label_starts_at_1", "a large batch alone", labels([*range(1, 5)] * 9, 4)),
    (
        "label_starts_at_1",
        "one-hot",
        seen("one_hot", [1, 2, 3] * 9, 3, index_expression="kind"),
    ),
    ("label_ge_num_classes", "0 occurs", labels([2, 7], 7, data=range(8))),
    ("label_ge_num_classes", "a small batch proves nothing", labels([1, 4, 7], 7)),
    ("label_ge_num_classes", "a few batches neither", labels([1, 7], 7, data=range(1, 8))),
    ("label_starts_at_1", "the whole data set does", labels([1, 7], 7, data=[1, 7], data_name="d")),
    ("label_ge_num_classes", "0 is the ignore_index", labels([0, 1, 2, 3] * 30, 3, ignore=0)),
    ("label_ge_num_classes", "ctc lacks the blank", seen("ctc_loss", [1, 2, 3] * 30, 3)),
    (
        "label_ge_num_classes",
        "a weight per class",
        seen("index", [0, 5], 4, index_expression="cls"),
    ),
    (
        "label_ge_num_classes",
        "a selected target",
        labels([0, 9], 4, index_expression="y[seg_mask]"),
    ),
    ("label_negative_sentinel", "unlabelled", labels([-1, 0, 3], 4)),
    ("label_negative_sentinel", "void pixels", mask([-1, 0, 3], 4)),
    ("negative_index", "not a label", seen("gather", [-1, 0], 4, index_expression="best")),
    (
        "label_position_ge_sequence",
        "answer cut off",
        labels([3, 400], 384, index_expression="start_positions"),
    ),
    ("label_ge_num_classes", "not a span", labels([3, 400], 384, index_expression="intent")),
    ("mask_value_unmapped", "0 and 255", mask([0, 255], 2)),
    ("mask_value_unmapped", "interpolated", mask([0, 1, 17, 60, 201], 2, ignore=255)),
    ("mask_value_unmapped", "flat, by name", labels([0, 255], 2, index_expression="mask.view(-1)")),
    ("label_ge_num_classes", "a plain label of 255", labels([0, 255], 2)),
    ("one_hot_class_ge_num_classes", "one_hot", seen("one_hot", [0, 9], 8, index_expression="v")),
    (
        "one_hot_class_ge_num_classes",
        "scattered by hand",
        seen("scatter_", [0, 9], 8, index_expression="labels.unsqueeze(1)"),
    ),
    (
        "index_out_of_bounds",
        "scatter of no label",
        seen("scatter_", [0, 9], 8, line="a.scatter_(0, j, 1)", index_expression="j"),
    ),
    (
        "loss_mismatch",
        "classes into bce",
        seen("binary_cross_entropy", [0, 1, 2], 1, closed=True, argument="target"),
    ),
    (
        "loss_mismatch",
        "one sigmoid output",
        labels([0, 1], 1, sources=("out = torch.sigmoid(head(x))",)),
    ),
    ("label_ge_num_classes", "one output, no sigmoid", labels([0, 1], 1)),
    # ---- tables
    (
        "token_id_ge_vocab",
        "added tokens",
        table([5, 700], 700, "lm.wte", tokenizers=wrong_ids(702, 700)),
    ),
    ("token_id_ge_vocab", "by tokenizer", table([5, 900], 700, tokenizers=wrong_ids(950, 950))),
    ("token_id_ge_vocab", "decoder's loss", labels([5, 900], 700, config={"vocab_size": 700})),
    ("vocab_or_table_too_small", "nothing known", table([5, 12], 12, shape=(1, 2))),
    ("position_ge_max", "by name", table(range(70), 64, "enc.position_embeddings", shape=(1, 70))),
    ("position_ge_max", "by counting up", table(range(70), 64, "net.b", shape=(70,))),
    (
        "position_ge_max",
        "a lookup by indexing",
        seen("index", range(70), 64, low=-64, module="dec.embed_positions", shape=(1, 70)),
    ),
    ("vocab_or_table_too_small", "part of speech", table([1, 17], 17, "pos_tag", shape=(1, 2))),
    ("token_type_ge_table", "one row", table([0, 1], 1, "r.embeddings.token_type_embeddings")),
    (
        "token_type_ge_table",
        "own model",
        table([0, 2], 2, "seg_emb", index_expression="segment_ids"),
    ),
    ("bbox_coordinate_range", "LayoutLM", table([8, 1400], 1024, "l.x_position_embeddings")),
    ("bbox_coordinate_range", "negative width", table([8, -3], 1024, "l.w_position_embeddings")),
    (
        "index_out_of_bounds",
        "boxes picked",
        seen(
            "index",
            [9],
            4,
            low=-4,
            line="b = boxes[keep]",
            table_expression="boxes",
            index_expression="keep",
        ),
    ),
    ("tts_symbol_out_of_table", "phonemes", table([3, 80], 80, "encoder.phoneme_emb")),
    ("tts_symbol_out_of_table", "speakers", table([3, 11], 10, "spk_table")),
    (
        "category_unseen",
        "encoder, test data",
        table(
            range(6),
            5,
            "embs.colour",
            sources=("enc = OrdinalEncoder().fit(all_rows)",),
            data_name="test_rows",
        ),
    ),
    (
        "category_unseen",
        "-1 for unknown",
        table([-1, 2], 5, "cats.shop_type", sources=("cat_dims = {}",)),
    ),
    (
        "category_unseen",
        "a new user in validation",
        table([0, 6], 6, "user_emb", functions=("evaluate",), sources=("LabelEncoder()",)),
    ),
    (
        "category_id_ge_table",
        "gaps",
        table([10, 990], 400, "book_factors", data=[*range(10, 200), 990], data_name="r"),
    ),
    (
        "category_id_ge_table",
        "from 1",
        table([1, 50], 50, "user_emb", data=range(1, 51), data_name="r"),
    ),
    (
        "token_id_ge_vocab",
        "words, not items",
        table([10, 990], 400, "word_emb", sources=("n_items",)),
    ),
    ("time_feature_ge_table", "months from 1", table([1, 12], 12, "month_embed")),
    ("time_feature_ge_table", "minutes", table([1, 59], 4, "temporal.minute_embed")),
    (
        "category_unseen",
        "an encoded month",
        table([0, 5], 5, "embs.month", sources=("LabelEncoder()",)),
    ),
    (
        "action_index_out_of_range",
        "from 1",
        seen("gather", [1, 2, 3], 3, index_expression="actions", line=BUTTONS),
    ),
    (
        "label_ge_num_classes",
        "gather of labels",
        seen("gather", [1, 2, 3], 3, index_expression="labels", line=BUTTONS),
    ),
    # ---- graphs
    (
        "node_index_ge_num_nodes",
        "edges",
        seen("index_select", [0, 40], 31, index_expression="edge_index[0]"),
    ),
    (
        "node_index_ge_num_nodes",
        "in a layer",
        seen("scatter_add_", [0, 40], 31, module="conv", module_type="SAGEConv", sources=GRAPH),
    ),
    (
        "node_features_extra_dimension",
        "nodes counted along a dimension of size 1",
        seen("index_select", [0, 2], 1, input_shape=(3, 1, 16), size="dimension 1", **LAYER),
    ),
    (
        "node_index_ge_num_nodes",
        "a graph of one node",
        seen("index_select", [0, 2], 1, input_shape=(1, 16), size="dimension 0", **LAYER),
    ),
    (
        "node_index_ge_num_nodes",
        "too many nodes for the first dimension, too",
        seen("index_select", [0, 3], 1, input_shape=(3, 1, 16), size="dimension 1", **LAYER),
    ),
    (
        "group_id_ge_num_groups",
        "pooled",
        seen("scatter_add_", [0, 3], 3, line="global_add_pool(h, batch, size=n)", sources=GRAPH),
    ),
    (
        "group_id_ge_num_groups",
        "clusters",
        seen("scatter_reduce", [0, 5], 5, line="scatter(h, cluster, dim_size=k)", sources=GRAPH),
    ),
    (
        "group_id_ge_num_groups",
        "by hand",
        seen("index_add_", [0, 3], 3, index_expression="batch", sources=GRAPH),
    ),
    (
        "node_index_ge_num_nodes",
        "messages, not groups",
        seen("scatter_add_", [0, 3], 3, line="scatter(x[src], dst, dim_size=n)", sources=GRAPH),
    ),
    (
        "index_internal_oob",
        "neither edges nor groups in sight",
        seen("scatter_add_", [0, 3], 3, line="out = net(data)", sources=GRAPH),
    ),
    (
        "node_index_ge_num_nodes",
        "node table",
        table([0, 40], 31, "emb", index_expression="src", sources=GRAPH),
    ),
    (
        "token_id_ge_vocab",
        "src of a translation",
        table([0, 40], 31, "emb", index_expression="src"),
    ),
    # ---- values
    (
        "bce_input_outside_unit",
        "raw outputs",
        seen("binary_cross_entropy", [-3.5, 0.2, 2.0], 1, closed=True),
    ),
    ("nan_inf_in_data", "NaN", seen("binary_cross_entropy", [0.5, "nan"], 1, closed=True)),
    ("nan_inf_in_data", "NaN made an id", table([4, NAN_CAST], 9, "user_emb")),
    ("nan_inf_in_data", "NaN made a label", labels([0, NAN_CAST], 9)),
    ("multinomial_nan_inf_neg", "NaN", seen("multinomial", [0.5, "nan"], None)),
    ("multinomial_nan_inf_neg", "negative", seen("multinomial", [0.5, -0.2], None)),
    ("multinomial_invalid_distribution", "zeros", seen("multinomial", [0.0, 0.0], None)),
    ("argument_out_of_range", "a rate", seen("poisson", [-1.0, 2.0], None, argument="input")),
    (
        "argument_out_of_range",
        "bags that decrease",
        seen("embedding_bag", [0, 9], 5, closed=True, argument="offsets"),
    ),
    ("nan_inf_in_data", "a rate that is NaN", seen("poisson", ["nan"], None, argument="input")),
    # ---- code
    ("negative_index", "padding in an embedding", table([-100, 4], 900, "tok")),
    ("negative_index", "beyond the wrap", seen("index", [-9, 2], 4, low=-4, index_expression="j")),
    ("index_out_of_bounds", "own line", seen("index", [4], 4, low=-4, index_expression="rows")),
    (
        "index_internal_oob",
        "in a library",
        seen("index", [4], 4, low=-4, line="net(x)", module="head"),
    ),
    (
        "dataparallel_split_breaks_index",
        "whole-batch numbers",
        seen(
            "index",
            [0, 7],
            4,
            low=-4,
            module="det",
            index_expression="img",
            sources=("nn.DataParallel(det)",),
        ),
    ),
    (
        "index_out_of_bounds",
        "distributed is another thing",
        seen(
            "index",
            [0, 7],
            4,
            low=-4,
            module="det",
            index_expression="img",
            sources=("DistributedDataParallel(det)",),
        ),
    ),
]


@pytest.mark.parametrize(
    ("key", "observed"), [pytest.param(k, o, id=f"{k}: {n}") for k, n, o in CASES]
)
def test_cause(key: str, observed: Observed) -> None:
    cause, fixes = diagnosis.diagnose(observed)
    assert cause.key == key
    assert cause.title
    assert cause.explanation
    assert cause.because
    assert 1 <= len(fixes) <= 3
    for fix in fixes:
        if fix.code is None:  # there is no name to paste
            continue
        assert "\n" not in fix.code
        assert "assert " in fix.code
        ast.parse(fix.code)
        if fix.edit is not None:
            assert fix.edit.old != fix.edit.new
    sentence = diagnosis.headline(observed, cause)
    assert sentence.endswith(".")
    assert "None" not in " ".join((sentence, cause.explanation, *cause.because))


def test_every_rule_has_a_case_and_every_key_has_words() -> None:
    assert {rule.key for rule in diagnosis.RULES} == {key for key, _, _ in CASES}
    for key in diagnosis.cause_keys():
        text = diagnosis.explain_cause(key)
        assert text is not None
        assert len(text) > 80
    for key in (
        "torch_version_bug",
        "compile_false_assert",
        "multi_gpu_device_bug",
        "driver_or_hardware",
        "illegal_access",
        "misattributed_oom",
        "stale_context",
        "not_reproduced_on_cpu",
    ):
        assert key in diagnosis.cause_keys()
    assert diagnosis.explain_cause("no_such_cause") is None


def told(observed: Observed, crash: Crash | None = None) -> str:
    """All that a diagnosis says, in one text."""
    cause, fixes = diagnosis.diagnose(observed, crash)
    said = [diagnosis.headline(observed, cause), cause.title, cause.explanation, *cause.because]
    for fix in fixes:
        said += [fix.title, fix.explanation, fix.code or ""]
    return "\n".join(said)


def test_labels_from_1_in_the_users_words() -> None:
    observed = labels(
        [1, 4, 7],
        7,
        index_expression="stars",
        data=[*range(1, 8)] * 100,
        data_name="hotels",
        line="loss = loss_fn(model(x), stars)",
    )
    cause, fixes = diagnosis.diagnose(observed)
    assert (
        diagnosis.headline(observed, cause)
        == "Label 7 does not exist: the loss has 7 classes, 0..6."
    )
    assert cause.because[0] == (
        "the values of `stars` of hotels run from 1 to 7; 0 never occurs (700 rows)"
    )
    assert fixes[0].edit is not None
    assert fixes[0].edit.new == "loss = loss_fn(model(x), stars - 1)"
    assert fixes[0].edit.cell_id == "cell-a"
    assert fixes[0].code is not None
    # What the edit leaves is checked: `stars` itself still runs from 1 to 7.
    assert fixes[0].code == (
        "assert int((stars - 1).min()) >= 0 and int((stars - 1).max()) < 7, 'outside 0..6'"
    )


@pytest.mark.parametrize(
    ("observed", "line", "new", "code"),
    [
        (
            labels([1, 7], 7, index_expression="y.to(device).long()", data=range(1, 8)),
            "loss = f(out, y.to(device).long())",
            "loss = f(out, y.to(device).long() - 1)",
            "assert int((y - 1).min()) >= 0 and int((y - 1).max()) < 7, 'outside 0..6'",
        ),
        (
            labels([-1, 1], 2, index_expression="data.y"),
            "loss = f(out, data.y)",
            "loss = f(out, (data.y + 1) // 2)",
            "assert int(((data.y + 1) // 2).min()) >= 0 and int(((data.y + 1) // 2).max()) < 2, "
            "'outside 0..1'",
        ),
        (
            table([1, 12], 12, "month_embed", index_expression="m"),
            "e = month_embed(m)",
            "e = month_embed(m - 1)",
            "assert int((m - 1).min()) >= 0 and int((m - 1).max()) < 12, 'outside 0..11'",
        ),
        # The name stands twice, is another's part, or is a call with an effect: no edit.
        (labels([1, 7], 7, index_expression="y", data=range(1, 8)), "f(y, y)", None, "int(y.min("),
        (labels([1, 7], 7, index_expression="y", data=range(1, 8)), "f(x.y)", None, "int(y.min("),
        (
            labels([1, 7], 7, index_expression="take()", data=range(1, 8)),
            "f(x, take())",
            None,
            None,
        ),
    ],
)
def test_the_assertion_fits_the_edit(
    observed: Observed, line: str, new: str | None, code: str | None
) -> None:
    data = msgspec.structs.replace(observed, data_name="d" if observed.data else None)
    place = msgspec.structs.replace(observed.finding.location, source=line)
    finding = msgspec.structs.replace(observed.finding, location=place)
    fix = diagnosis.diagnose(msgspec.structs.replace(data, finding=finding))[1][0]
    assert (fix.edit.new if fix.edit else None) == new
    assert fix.code is None if code is None else code in (fix.code or "")


@pytest.mark.parametrize(
    ("index", "line", "code"),
    [
        ("x.view(-1)", "emb(x.view(-1))", "assert int(x.view(-1).min()) >= 0 and int(x.view(-1)."),
        ("x + 1", "emb(x + 1)", "assert int((x + 1).min()) >= 0"),
        ("next(batches)", "emb(next(batches))", None),  # the next one is another
        ("net(x)", "emb(net(x))", None),
        (None, "out = net(x)", None),  # no name is invented
    ],
)
def test_an_assertion_has_names_of_the_failing_line(
    index: str | None, line: str, code: str | None
) -> None:
    observed = table([5, 9], 9, "net.emb", index_expression=index, line=line)
    found = diagnosis.diagnose(observed)[1][0].code
    assert found is None if code is None else (found or "").startswith(code)


NET = """\
class Net(nn.Module):
    def __init__(self, rows, dim=4):
        super().__init__()
        self.emb = nn.Embedding(rows, dim)
        self.other = nn.Embedding(9, dim)
"""


@pytest.mark.parametrize(
    ("sources", "old", "new"),
    [
        (
            (NET, "%time 1\nnet = Net(len(vocab) - 2).to(d)"),
            "net = Net(len(vocab) - 2).to(d)",
            "net = Net(len(vocab)).to(d)",
        ),
        (
            (NET, "net = Net(dim=8, rows=25)"),
            "net = Net(dim=8, rows=25)",
            "net = Net(dim=8, rows=27)",
        ),
        ((NET, "n = len(vocab) - 2\nnet = Net(n)"), "n = len(vocab) - 2", "n = len(vocab)"),
        (("n = 25\nemb = nn.Embedding(n, 4)",), "n = 25", "n = 27"),
        ((NET, "net = Net(count(vocab))"), None, None),  # what it gives is not known
        ((NET, "a = Net(25)\nb = Net(25)"), None, None),  # which of them?
    ],
)
def test_the_size_of_the_table_is_mended_where_it_is_given(
    sources: tuple[str, ...], old: str | None, new: str | None
) -> None:
    vocab = (Variable(name="vocab", value="dict of 27"),)
    facts = {"index_expression": "tokens", "sources": sources, "variables": vocab}
    fix = diagnosis.diagnose(table([3, 25], 25, "net.emb", **facts))[1][0]
    assert fix.title == "Build the table with at least 27 rows"  # `vocab` numbers 26 as well
    assert (fix.edit.old, fix.edit.new) == (old, new) if fix.edit else old is None
    assert fix.code == "assert int(tokens.min()) >= 0 and int(tokens.max()) < 27, 'outside 0..26'"


def test_the_assertion_of_a_larger_table_lets_its_rows_through() -> None:
    observed = table([1, 59], 4, "temporal.minute_embed", index_expression="m")
    minutes = diagnosis.diagnose(observed)[1][0]
    assert minutes.title.startswith("Give the minute table 60 rows")
    assert minutes.code is not None and "< 60" in minutes.code
    scanned = {"data": [0, 9], "data_name": "d"}
    one_hot = diagnosis.diagnose(seen("one_hot", [0, 9], 8, index_expression="v", **scanned))[1][0]
    assert one_hot.code is not None and "at least 10" in one_hot.title and "< 10" in one_hot.code


@pytest.mark.parametrize(
    ("observed", "good"),
    [
        (labels([1, 7], 7, index_expression="batch['y']", data=range(1, 8), data_name="d"), [0, 6]),
        (labels([1, 7], 7, index_expression="y", data=range(1, 8), data_name="d"), [0, 6]),
        (labels([-1, 3], 7, index_expression="y"), [0, 6, -1]),
        (mask([0, 255, 3], 7, ignore=200), [0, 6, 200]),
    ],
)
def test_the_kept_assertion_tells_good_from_bad(observed: Observed, good: list[int]) -> None:
    numpy = pytest.importorskip("numpy")
    code = diagnosis.diagnose(observed)[1][0].code
    assert code is not None
    for more, fails in (([], False), ([7], True), ([-2], True)):
        y = numpy.array(good + more)
        names = {"y": y, "gt": y, "batch": {"y": y}}
        with pytest.raises(AssertionError) if fails else contextlib.nullcontext():
            exec(code, names)


def test_fields_of_a_models_config_are_named() -> None:
    observed = labels([0, 2], 2, index_expression=None, config={"num_labels": 2, "vocab_size": 90})
    assert "num_labels=3" in told(observed)
    assert "type_vocab_size" in told(table([0, 1], 1, "m.token_type_embeddings"))


def test_tokens_added_and_another_checkpoint_are_told_apart() -> None:
    added = told(table([5, 700], 700, "wte", tokenizers=wrong_ids(702, 700)))
    assert "added" in added
    assert "`len(bert_tok)` is 702" in added
    assert "'<ent>'" in added
    assert "another checkpoint" in told(table([5, 900], 700, "wte", tokenizers=wrong_ids(950, 950)))


def test_positions_that_start_at_2_leave_two_tokens_less() -> None:
    observed = table(range(2, 72), 64, "enc.position_embeddings", shape=(1, 70))
    text = told(observed)
    assert (
        "Position 64 does not exist: the position table has rows 0..63, this batch needs 2..71."
        in text
    )
    assert "so 62 positions fit" in text


def test_truncation_is_put_into_the_only_call_of_the_tokenizer() -> None:
    line = "tokenizer = AutoTokenizer.from_pretrained(name)\nenc = tokenizer(texts, padding=True)"
    observed = table(range(70), 64, "position_embeddings", shape=(1, 70), sources=(line,))
    edit = diagnosis.diagnose(observed)[1][0].edit
    assert edit is not None
    assert edit.new == "enc = tokenizer(texts, padding=True, truncation=True, max_length=64)"
    twice = (line, "more = tokenizer(others)")
    observed = table(range(70), 64, "position_embeddings", shape=(1, 70), sources=twice)
    assert diagnosis.diagnose(observed)[1][0].edit is None


def test_masks_are_resized_with_nearest() -> None:
    code = (
        "img = img.resize(size, Image.BILINEAR)",
        "lab_mask = lab_mask.resize(size, Image.BILINEAR)",
    )
    observed = mask([0, 1, 40, 77, 200], 2, ignore=255, sources=code)
    edit = diagnosis.diagnose(observed)[1][0].edit
    assert edit is not None
    assert (edit.old, edit.new) == (code[1], "lab_mask = lab_mask.resize(size, Image.NEAREST)")
    text = told(observed)
    assert "The mask was resized with interpolation" in text
    assert "NEAREST" in text
    guess = told(mask([0, 1, 40, 77, 200], 2))
    assert "The mask was resized" not in guess
    assert "resized with interpolation" in guess


def test_ignore_index_is_set_where_the_loss_is_made() -> None:
    code = ("crit = nn.CrossEntropyLoss()", "loss = crit(out, y)")
    facts: dict[str, Any] = {"module": "crit", "module_type": "CrossEntropyLoss"}
    edit = diagnosis.diagnose(labels([-1, 2], 4, sources=code, **facts))[1][0].edit
    assert edit is not None
    assert edit.new == "crit = nn.CrossEntropyLoss(ignore_index=-1)"
    two = (*code, "other = nn.CrossEntropyLoss()")
    assert diagnosis.diagnose(labels([-1, 2], 4, sources=two, **facts))[1][0].edit is None
    assert diagnosis.diagnose(labels([-1, 2], 4, sources=code))[1][0].edit is None  # a function


def test_the_loss_without_sigmoid_is_replaced() -> None:
    facts: dict[str, Any] = {"closed": True, "sources": ("bce = nn.BCELoss()",)}
    facts["module_type"] = "BCELoss"
    observed = seen("binary_cross_entropy", [-3.5, 0.2, 2.0], 1, index_expression="score", **facts)
    edit = diagnosis.diagnose(observed)[1][0].edit
    assert edit is not None
    assert edit.new == "bce = nn.BCEWithLogitsLoss()"
    assert "`score` goes from -3.5 to 2.0" in told(observed)


def test_split_number_of_classes_and_messenger_are_named() -> None:
    observed = labels(
        [0, 5],
        5,
        step=Step(loop="for b in dev_loader:", iteration=3, split="val"),
        variables=(Variable(name="N_CLASSES", value="5"), Variable(name="epochs", value="5")),
        sources=("N_CLASSES = 5",),
    )
    crash = Crash(
        exception="RuntimeError",
        message="CUBLAS_STATUS_NOT_INITIALIZED",
        surface=Place(line=1, source=""),
        execution_count=3,
        messenger="cuBLAS",
    )
    text = told(observed, crash)
    assert "it is in the val pass: `for b in dev_loader:`" in text
    assert "`N_CLASSES` is 5" in text
    assert "epochs" not in text
    assert "cuBLAS" not in text  # the report's head says it, once
    edit = diagnosis.diagnose(observed)[1][0].edit
    assert edit is not None
    assert edit.new == "N_CLASSES = 6"


def test_classes_are_0_up_even_where_negative_indices_wrap() -> None:
    scanned: dict[str, Any] = {"data": [0, 10], "data_name": "train"}
    eye = {"index_expression": "target", "table_expression": "torch.eye(10)"}
    one_hot = seen("index", [0, 10], 10, low=-10, **eye, **scanned)
    cause, fixes = diagnosis.diagnose(one_hot)
    assert diagnosis.headline(one_hot, cause) == (
        "Class 10 does not exist: the one-hot encoding has 10 classes, 0..9."
    )
    assert "-10" not in told(one_hot)
    inside = "int(target.min()) >= 0 and int(target.max()) < 11"
    assert fixes[0].code == f"assert {inside}, 'outside 0..10'"
    label = seen("index", [0, 4], 4, low=-4, index_expression="labels", table_expression="logits")
    assert "there are 4 classes (0..3)" in told(label)
    assert "-4" not in told(label)


def test_plain_indexing_tells_what_counts_from_the_end() -> None:
    def said(found: list[int]) -> tuple[str, str | None]:
        rows = seen("index", found, 5, low=-5, index_expression="rows", table_expression="x")
        cause, fixes = diagnosis.diagnose(rows)
        assert cause.key == "index_out_of_bounds"
        return diagnosis.headline(rows, cause), fixes[0].code

    headline, code = said([0, 5])
    assert headline.endswith("`x` has size 5 there, valid is 0..4 (or -5..-1, from the end).")
    assert code == "assert int(rows.min()) >= 0 and int(rows.max()) < 5, 'outside 0..4'"
    assert said([-2, 5])[1] == (
        "assert int(rows.min()) >= -5 and int(rows.max()) < 5, 'outside -5..4'"
    )


def test_a_librarys_names_are_left_out_and_one_value_is_one() -> None:
    inside = told(seen("scatter_add", [6], 5))
    assert "`index`" not in inside
    assert "the only value of the index of the call is 6" in inside
    assert "the only value in the call outside 0..4: 6" in inside
    same = told(seen("gather", [-1, -1], 5, index_expression="rows"))
    assert "all 2 values of `rows` of the call are -1" in same


def test_a_scan_of_another_field_is_not_believed() -> None:
    observed = labels([1, 2, 7], 7, data=[1, 2, 3], data_name="other")
    assert "other" not in told(observed)


def test_bare_facts_still_give_an_answer() -> None:
    finding = Finding(
        op="some_new_op",
        aten_op="aten::some_new_op",
        argument="index",
        bad_values=(),
        distinct_bad=0,
        bad_count=0,
        total=0,
        positions=(),
        bound=None,
        margin=None,
        location=Place(line=1, source=""),
    )
    for op in ("some_new_op", "embedding", "cross_entropy", "binary_cross_entropy", "multinomial"):
        bare = Observed(
            finding=msgspec.structs.replace(finding, op=op),
            dtype="int64",
            shape=(),
            values=Values(count=0),
        )
        cause, fixes = diagnosis.diagnose(bare)
        assert cause.key in diagnosis.cause_keys()
        assert diagnosis.headline(bare, cause)
        for fix in fixes:
            ast.parse(fix.code or "")


OPERATORS = (
    "cross_entropy nll_loss ctc_loss multi_margin_loss one_hot embedding embedding_bag index "
    "index_put_ index_select index_add_ gather scatter_ scatter_add_ take binary_cross_entropy "
    "bernoulli multinomial normal max_unpool2d"
).split()


@pytest.mark.parametrize("op", OPERATORS)
def test_no_combination_of_facts_breaks_a_rule(op: str) -> None:
    found: tuple[list[Number], ...] = ([0, 3], [1, 3, 255], [-1], [-7, 9], [NAN_CAST], ["nan"], [])
    shapes: tuple[tuple[int, ...], ...] = ((), (2,), (2, 4, 4))
    names = (None, "labels", "mask", "a.b(c)[d['e']]", "actions", "edge_index[1]")
    modules = itertools.cycle((None, "m.0", "m.embs.month", "m.token_type_embeddings", "m.x"))
    for given, shape, name in itertools.product(found, shapes, names):
        observed = seen(
            op,
            given,
            3,
            shape=shape,
            index_expression=name,
            table_expression=name,
            module=next(modules),
        )
        cause, fixes = diagnosis.diagnose(observed)
        assert diagnosis.headline(observed, cause)
        for fix in fixes:
            ast.parse(fix.code or "")


@pytest.mark.parametrize(
    ("op", "allowed", "agrees"),
    [
        ("embedding", {"embedding", "index_select"}, True),
        ("embedding", {"index_select"}, True),
        ("nll_loss", {"cross_entropy"}, True),
        ("scatter_add_", {"gather", "scatter_"}, True),
        ("one_hot", {"scatter_"}, True),
        ("embedding", {"cross_entropy", "nll_loss"}, False),
        ("cross_entropy", {"index", "index_put_"}, False),
        ("multinomial", {"binary_cross_entropy"}, False),
    ],
)
def test_driver_and_finding(op: str, allowed: set[str], agrees: bool) -> None:
    sentence = diagnosis.contradiction(op, frozenset(allowed))
    if agrees:
        assert sentence is None
    else:
        assert sentence is not None
        assert op in sentence
        assert min(allowed) in sentence


def test_no_driver_line_is_no_contradiction() -> None:
    assert diagnosis.contradiction("embedding", None) is None
    assert diagnosis.contradiction("embedding", frozenset()) is None
