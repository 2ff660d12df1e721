"""What a diagnosis says and edits where facts decide, and that it says less where they do not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_diagnosis import labels, mask, seen, table, told, wrong_ids

from nb_assertdoc import diagnosis
from nb_assertdoc.model import Fix, Observed, Step, Tokenizer, Variable

TEST_PASS = Step(loop="for x in test_dl:", iteration=1, split="test")


def fixes(observed: Observed) -> tuple[Fix, ...]:
    return diagnosis.diagnose(observed)[1]


def edit(observed: Observed, which: int = 0) -> tuple[str, str] | None:
    """The lines before and after of a fix's edit."""
    found = fixes(observed)[which].edit
    return (found.old, found.new) if found is not None else None


# ---- tokenizers

EMBEDDINGS = """\
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(50, 4), nn.Embedding(8, 4)

    def forward(self, ids):
        return self.tok(ids) + self.pos(torch.arange(ids.size(1)))
"""
ROWS = """\
class Rows(Dataset):
    def __init__(self, texts, tok):
        self.texts, self.tok = texts, tok

    def __getitem__(self, i):
        return self.tok(self.texts[i], padding=True)
"""


@pytest.mark.parametrize(
    ("sources", "tokenizers", "new"),
    [
        ((EMBEDDINGS,), (), None),  # a table that is called `tok`
        ((EMBEDDINGS, "tok = BertTokenizer(f)\nx = tok(t)"), (), "x = tok(t, CUT)"),
        ((ROWS, "t = AutoTokenizer.from_pretrained(n)\nd = Rows(x, t)"), (), "PAD, CUT)"),
        ((ROWS, "d = Rows(x, load())"), (), None),  # it is not known what that gives
        ((ROWS, "bert_tok = load()\nd = Rows(x, bert_tok)"), wrong_ids(9, 9), "PAD, CUT)"),
        (("tok = BertTokenizer(f)\nx = tok.encode(t)",), (), "x = tok.encode(t, CUT)"),
        (("tok = BertTokenizer(f)\nx = tok(t, max_length=9)",), (), None),
        (("tok = BertTokenizer(f)\nx = tok(t)\ny = tok(u)",), (), None),  # which of them?
    ],
)
def test_only_what_is_known_to_be_a_tokenizer_is_told_to_truncate(
    sources: tuple[str, ...], tokenizers: tuple[Tokenizer, ...], new: str | None
) -> None:
    observed = table(range(11), 8, "enc.pos", shape=(11,), sources=sources, tokenizers=tokenizers)
    found = edit(observed)
    if new is None:
        assert found is None
    else:
        new = new.replace("PAD", "return self.tok(self.texts[i], padding=True")
        assert found is not None
        assert found[1] == new.replace("CUT", "truncation=True, max_length=8")


def test_without_text_in_sight_no_tokenizer_is_named() -> None:
    frames = told(table(range(28), 24, "motion.pos_encoder", shape=(28,)))
    assert "tokeni" not in frames.lower()
    assert "Cut sequences to 24 positions" in frames
    tokenizer = wrong_ids(99, 99)
    texts = told(table(range(28), 24, "bert.pos", shape=(28,), tokenizers=tokenizer))
    assert "Give the tokenizer truncation=True, max_length=24" in texts


# ---- edits that a name alone would mislead


def test_a_table_of_the_same_size_is_left_alone() -> None:
    code = ("a = nn.Embedding(9, 4)\nb = nn.Embedding(count(rows), 4)",)
    assert edit(table([3, 9], 9, "b", index_expression="i", sources=code)) is None
    (old, new) = edit(table([3, 9], 9, "a", index_expression="i", sources=code)) or ("", "")
    assert (old, new) == ("a = nn.Embedding(9, 4)", "a = nn.Embedding(10, 4)")


def test_another_loss_is_left_alone() -> None:
    code = ("aux = nn.BCELoss()\nloss = F.binary_cross_entropy(p, y)",)
    facts: dict[str, Any] = {"closed": True, "index_expression": "p", "sources": code}
    old, _ = edit(seen("binary_cross_entropy", [-3.5, 2.0], 1, **facts)) or ("", "")
    assert old == "loss = F.binary_cross_entropy(p, y)"


@pytest.mark.parametrize(
    ("line", "new"),
    [
        (
            "m = cv2.resize(mask, s, interpolation=cv2.INTER_LINEAR)",
            "interpolation=cv2.INTER_NEAREST)",
        ),
        ("mask_tf = T.Compose([T.Resize(64, InterpolationMode.BICUBIC)])", "NEAREST)])"),
        ("x = x.resize(mask.size, Image.BILINEAR)", None),  # the picture, to the mask's size
        ("x, mask = x.resize(s, Image.BILINEAR), mask.resize(s, Image.NEAREST)", None),
        ("mask = mask.resize(s, Image.BILINEAR)\nseg = seg.resize(s, Image.BILINEAR)", None),
    ],
)
def test_only_the_masks_own_resizing_is_changed(line: str, new: str | None) -> None:
    found = edit(mask([0, 1, 40, 77, 200], 2, ignore=255, sources=(line,)))
    assert found is None if new is None else (found or ("", ""))[1].endswith(new)


MODEL = """\
class Net(nn.Module):
    def __init__(self, features, outputs, hidden=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, hidden), nn.Linear(hidden, outputs))
"""


@pytest.mark.parametrize(
    ("sources", "new"),
    [
        ((MODEL, "net = Net(2, outputs=1)"), "net = Net(2, outputs=4)"),
        ((MODEL, "net = Net(2, outputs=size(y))"), None),  # not known
        ((MODEL, "net = Net(2, outputs=1, hidden=1)"), "net = Net(2, outputs=4, hidden=1)"),
        ((MODEL, "net = Net(2, outputs=1)", "import torchvision"), None),
    ],
)
def test_one_output_for_several_classes_becomes_as_many(
    sources: tuple[str, ...], new: str | None
) -> None:
    number = (Variable(name="NUM_CLASSES", value="4"),)
    observed = labels([0, 1, 2, 3] * 9, 1, sources=sources, variables=number)
    assert "Give the model 4 outputs, one per class" in told(observed)
    assert "BCE" not in told(observed)
    found = edit(observed)
    assert (found[1] if found else None) == (None if "hidden=1" in sources[1] else new)
    two = told(labels([0, 1] * 9, 1, sources=sources, variables=number))
    assert "BCEWithLogitsLoss" in two


# ---- labels


def test_labels_from_1_to_one_more_than_the_classes() -> None:
    data = {"index_expression": "y", "data": range(1, 107), "data_name": "faces"}
    titles = [fix.title for fix in fixes(labels([5, 105], 105, **data))]
    assert titles[:2] == [
        "Give the model 107 classes",
        "Or subtract 1 and give the model 106 classes",
    ]
    gaps = {**data, "data": [*range(1, 60), *range(70, 107)]}
    assert "subtract" not in told(labels([5, 106], 105, **gaps)).lower()


def test_a_split_without_labels() -> None:
    hidden: dict[str, Any] = {"data": [-1] * 6, "data_name": "rows", "step": TEST_PASS}
    text = told(labels([-1] * 4, 2, **hidden))
    assert "This split has no labels" in text
    assert "All labels of the test data are -1" in text
    assert "ignore_index=-1" not in text
    some = {**hidden, "data": [-1] * 6 + [0]}
    assert "ignore_index=-1" in told(labels([-1] * 4, 2, **some))


def test_padded_labels_as_an_index() -> None:
    facts: dict[str, Any] = {"low": -5, "table_expression": "self.transitions"}
    observed = seen("index", [-100, 2], 5, index_expression="tags[i]", **facts)
    cause, _ = diagnosis.diagnose(observed)
    assert cause.key == "label_negative_sentinel"
    assert "masked_fill" in told(observed)
    assert "ignore_index" not in told(observed)
    other = seen("index", [-100, 2], 5, index_expression="best[i]", low=-5)
    assert diagnosis.diagnose(other)[0].key == "negative_index"


def test_a_one_hot_helper_is_known_by_its_name() -> None:
    facts: dict[str, Any] = {
        "line": "torch.full((len(x), num_classes), off).scatter_(1, x, on)",
        "index_expression": "x",
        "variables": (Variable(name="num_classes", value="5"),),
    }
    helper = seen("scatter_", [1, 5], 5, functions=(), **facts)
    place = msgspec.structs.replace(helper.finding.location, function="one_hot(num_classes=5)")
    finding = msgspec.structs.replace(helper.finding, location=place)
    known = msgspec.structs.replace(helper, finding=finding)
    assert diagnosis.diagnose(known)[0].key == "one_hot_class_ge_num_classes"
    assert "`num_classes` is 5" in told(known)
    assert diagnosis.diagnose(helper)[0].key == "index_out_of_bounds"


def test_no_loss_is_named_where_there_is_none() -> None:
    scattered = seen("scatter_", [0, 18], 14, index_expression="label_map", shape=(1, 1, 4, 4))
    assert diagnosis.diagnose(scattered)[0].key == "one_hot_class_ge_num_classes"
    assert "loss" not in told(scattered)
    void = seen("scatter_", [0, 255], 14, index_expression="label_map", shape=(1, 1, 4, 4))
    assert diagnosis.diagnose(void)[0].key == "mask_value_unmapped"
    assert "the loss has" in told(mask([0, 18], 14))


# ---- ids


def test_a_test_split_tells_nothing_of_how_ids_are_numbered() -> None:
    ids = {"data": [1, 5, 19, 3, 20, 33], "data_name": "rows", "index_expression": "x"}
    unseen = table([4, 20], 20, "m.item_factors", step=TEST_PASS, **ids)
    cause, _ = diagnosis.diagnose(unseen)
    assert cause.key == "category_unseen"
    assert "count from 1" not in told(unseen)
    assert "34 rows" in fixes(unseen)[0].title  # for all that is known, not for this call's 20
    train = table([4, 20], 20, "m.item_factors", **ids)
    assert diagnosis.diagnose(train)[0].key == "category_id_ge_table"
    assert "Ids count from 1" not in told(train)  # the largest is 33, not 20
    exact = {**ids, "data": range(1, 21)}
    assert "Ids count from 1" in told(table([4, 20], 20, "m.item_factors", **exact))


def test_ids_without_gaps_are_not_called_raw() -> None:
    facts = {"data_name": "rows", "index_expression": "items"}
    dense = told(table([4, 5], 4, "item_emb", data=range(6), **facts))
    assert "numbered 0..5 without gaps" in dense
    assert "raw" not in dense
    assert "without gaps" not in told(table([4, 9], 4, "item_emb", data=[0, 4, 9], **facts))


def test_one_table_of_several_fields() -> None:
    code = ("field_dims = [frame[c].nunique() for c in columns]",)
    observed = table([7, 55], 55, "fm.embedding", shape=(1, 2), sources=code)
    assert diagnosis.diagnose(observed)[0].key == "category_id_ge_table"
    assert "uses a row of the next field" in told(observed)
    assert all(fix.edit is None for fix in fixes(observed))
    plain = table([7, 55], 55, "fm.embedding", shape=(1, 2))
    assert diagnosis.diagnose(plain)[0].key == "vocab_or_table_too_small"


def test_a_table_sized_by_a_count_of_distinct_values() -> None:
    code = ("sizes = {c: frame[c].nunique() for c in columns}",)
    counted = table([3], 3, "embeddings['bucket']", shape=(1, 1), sources=code)
    assert diagnosis.diagnose(counted)[0].key == "category_id_ge_table"
    assert "the code counts distinct" in told(counted)


def test_a_larger_table_has_no_row_for_minus_1() -> None:
    code = ("enc = OrdinalEncoder()\ncards = [len(c) for c in enc.categories_]",)
    (fix,) = fixes(table([-1, 2], 4, "net.embs.0", index_expression="c", sources=code))
    assert fix.title == "Give unknown categories a row of their own"
    assert fix.code is not None and "< 5" in fix.code


def test_an_id_after_the_last_of_the_list() -> None:
    code = ("n_vocab = len(symbols)\nemb = nn.Embedding(n_vocab, 4)",)
    facts: dict[str, Any] = {"index_expression": "x", "sources": code}
    facts |= {"variables": (Variable(name="symbols", value="list of 62"),)}
    extra = table([3, 62], 62, "emb", table_expression="symbol_emb", **facts)
    assert "`symbols` has 62 entries, ids 0..61" in told(extra)
    assert "longer than the one" not in told(extra)
    assert edit(extra) == ("n_vocab = len(symbols)", "n_vocab = len(symbols) + 1")
    longer = (Variable(name="symbols", value="list of 70"),)
    assert "longer than the one" in told(msgspec.structs.replace(extra, variables=longer))


# ---- values


def test_arithmetic_on_a_probability() -> None:
    facts: dict[str, Any] = {"closed": True, "sources": ("p = torch.sigmoid(net(x))",)}
    less = seen("binary_cross_entropy", [-7.5, 0.5], 1, index_expression="p - fine(h)", **facts)
    assert "Add a penalty to the loss" in told(less)
    assert "raw outputs" not in told(less)
    plain = told(seen("binary_cross_entropy", [-7.5, 0.5], 1, index_expression="q", **facts))
    assert "do not come straight from one" in plain
    assert "Add a penalty" not in plain


def test_nan_of_a_row_that_is_masked_completely() -> None:
    code = ('a = s.masked_fill(~m, float("-inf")).softmax(-1)',)
    facts: dict[str, Any] = {"closed": True, "index_expression": "p"}
    masked = seen("binary_cross_entropy", ["nan", 0.4], 1, sources=code, **facts)
    assert fixes(masked)[0].title == "Leave no row completely masked"
    assert "look at the bad rows" in told(masked)
    plain = seen("binary_cross_entropy", ["nan", "nan"], 1, **facts)
    assert "masked" not in told(plain)
    assert "bad rows" not in told(plain)


def test_another_dimension_that_holds_the_values() -> None:
    facts: dict[str, Any] = {"low": -6, "index_expression": "xy[:, 0]", "size": "dimension 0"}
    swapped = told(seen("index", [0, 6], 6, input_shape=(6, 9), **facts))
    assert "fit dimension 1, of size 9" in swapped
    assert "off by one" not in swapped.split("\n")[1]
    square = told(seen("index", [0, 6], 6, input_shape=(6, 6), **facts))
    assert "fit dimension" not in square


def test_labels_of_a_pass_after_training_do_not_tell_where_numbers_begin() -> None:
    data: dict[str, Any] = {"data": [*range(1, 8)] * 9, "data_name": "rows", "step": TEST_PASS}
    training = ("loss.backward()\nfor x in test_dl: f(x)",)
    after = labels([1, 7], 7, sources=training, **data)
    assert diagnosis.diagnose(after)[0].key == "label_ge_num_classes"
    alone = labels([1, 7], 7, sources=("for x in test_dl: f(x)",), **data)
    assert diagnosis.diagnose(alone)[0].key == "label_starts_at_1"


def test_hours_do_not_count_from_1_by_nature() -> None:
    month = told(table([1, 12], 12, "month_emb", index_expression="m"))
    assert "counts from 1 to 12" in month
    assert "counts from 1" not in told(table([1, 24], 24, "hour_emb", index_expression="h"))


def test_one_batch_of_actions_does_not_tell_that_they_count_from_1() -> None:
    few = seen("gather", [1, 3], 3, index_expression="actions", line="q.gather(1, actions)")
    assert "numbered from 1" not in told(few)
    assert edit(few) is None
    many = seen("gather", [1, 2, 3] * 9, 3, index_expression="actions", line="q.gather(1, actions)")
    assert edit(many) == ("q.gather(1, actions)", "q.gather(1, actions - 1)")
