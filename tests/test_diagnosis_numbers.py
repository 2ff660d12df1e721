"""How values are numbered, and by what: each rule with a case to take and a neighbour to leave."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_diagnosis import labels, mask, seen, table

from nb_assertdoc import diagnosis
from nb_assertdoc.model import Cause, Example, Fix, Observed, Step, Tokenizer, Variable


def diagnosed(observed: Observed) -> tuple[Cause, tuple[Fix, ...]]:
    return diagnosis.diagnose(observed)


def named(observed: Observed, *examples: Example) -> Observed:
    """The same with the places or meanings of bad values."""
    finding = msgspec.structs.replace(observed.finding, examples=examples)
    return msgspec.structs.replace(observed, finding=finding)


def sized(**values: str) -> tuple[Variable, ...]:
    return tuple(Variable(name=name, value=value) for name, value in values.items())


# ---- positions


def positions(config: dict[str, Any], **facts: Any) -> Observed:
    """A row of 16 columns: 15 tokens numbered from 2, and one of padding, whose position is 1."""
    found = [*range(2, 17), 1]
    observed = table(found, 16, "enc.position_embeddings", shape=(1, 16), config=config, **facts)
    return named(observed, Example(value=16, position=(0, 14)))


def test_the_position_of_padding_is_not_the_first() -> None:
    observed = positions({"max_position_embeddings": 16, "vocab_size": 9})
    cause, (cut, longer) = diagnosed(observed)
    assert diagnosis.headline(observed, cause).endswith("this batch needs 2..16.")
    assert "the longest row has 15 tokens, positions start at 2, so 14 tokens fit" in cause.because
    assert cut.title == "Cut texts to 14 tokens"
    assert "tokenizer" not in cut.explanation  # there is none
    assert "max_position_embeddings=17" in longer.explanation
    assert cut.code is None  # a row padded to 16 columns is right with 14 tokens


def test_a_row_without_padding_begins_with_its_first_position() -> None:
    full = table(range(1, 17), 16, "position_embeddings", shape=(1, 16), sources=("input_ids",))
    _, (cut, _) = diagnosed(named(full, Example(value=16, position=(0, 15))))
    assert cut.title == "Cut texts to 15 tokens"
    tokenizer = (Tokenizer(name="tok", size=9),)
    _, (cut, _) = diagnosed(positions({}, tokenizers=tokenizer))
    assert "Give the tokenizer truncation=True, max_length=14" in cut.explanation


def test_the_field_of_the_config_that_sizes_the_table_is_named() -> None:
    of_decoder = {"max_target_positions": 64, "vocab_size": 9}
    names = ("input_ids", "model")
    observed = table(range(70), 64, "embed_positions", shape=(1, 70), config=of_decoder)
    observed = msgspec.structs.replace(observed, sources=(" = ".join((*names, "1")),))
    cut, longer = diagnosed(observed)[1]
    assert "max_target_positions=70" in longer.explanation
    assert longer.code == "assert input_ids.size(-1) <= model.config.max_target_positions"
    assert cut.code is not None and "<= 64" in cut.code


# ---- which table numbers the values

SPEAKERS = {"line": "self.speaker_emb(s)", "index_expression": "s"}


def test_a_list_of_letters_says_nothing_of_speakers() -> None:
    letters = sized(n_speakers="3", symbols="list of 16", sym2id="dict of 16")
    observed = table([0, 3], 3, "net.speaker_emb", variables=letters, **SPEAKERS)
    cause, (fix,) = diagnosed(observed)
    assert cause.title == "A speaker id is outside its table"
    assert diagnosis.headline(observed, cause).startswith("Speaker id 3 does not exist")
    assert "at least 4 rows" in fix.title
    assert "symbols" not in " ".join((*cause.because, cause.explanation))
    known = table([0, 3], 3, "net.speaker_emb", variables=sized(speakers="list of 7"), **SPEAKERS)
    cause, (fix,) = diagnosed(known)
    assert "at least 7 rows" in fix.title and "`speakers` has 7 entries" in cause.because


@pytest.mark.parametrize(
    ("lists", "key"),
    [
        ({"word2idx": "dict of 9", "tag2idx": "dict of 5"}, "label_ge_num_classes"),
        ({"word2idx": "dict of 9"}, "token_id_ge_vocab"),
    ],
)
def test_targets_are_classes_where_a_table_of_classes_exists(lists: Any, key: str) -> None:
    observed = labels(
        [0, 4],
        4,
        index_expression="tgt",
        variables=sized(**lists),
        sources=("word2idx = build()",),
    )
    cause, fixes = diagnosed(observed)
    assert cause.key == key
    assert "table" not in fixes[0].title  # a loss has none
    if key == "label_ge_num_classes":
        assert fixes[0].title == "Give the model 5 classes"
        assert "`tag2idx` has 5 entries" in cause.because


# ---- gaps, and what one batch shows


def test_gaps_of_one_split_are_not_closed() -> None:
    step = Step(loop="for x, y in val_dl:", iteration=0, split="validation")
    facts: dict[str, Any] = {"data": [0, 1, 3, 0], "data_name": "val_dl.dataset"}
    _, fixes = diagnosed(labels([0, 3], 3, step=step, **facts))
    assert fixes[0].title == "Compare the numbering with that of the training data"
    assert "Only the labels of val_dl.dataset are known" in fixes[0].explanation
    assert not any("without gaps" in fix.title for fix in fixes)
    _, fixes = diagnosed(labels([0, 3], 3, **facts | {"data_name": "everything"}))
    assert fixes[0].title == "Number the labels 0..C-1 without gaps"
    both = facts | {"sources": ("train, val = random_split(d, [8, 2])",)}
    both |= {"data": [0, 1, 9], "data_name": "d"}
    _, fixes = diagnosed(labels([0, 9], 4, **both))
    assert fixes[0].title == "Number the labels 0..C-1 with one mapping for all splits"


def test_one_batch_does_not_tell_the_number_of_classes() -> None:
    facts: dict[str, Any] = {"index_expression": "y", "table_expression": "logits"}
    far = diagnosed(labels([0, 6, 15], 5, input_shape=(3, 5), **facts))[1][0]
    assert far.title == "Give the model all classes, or number the labels 0..4"
    assert far.code == "assert bool(((y >= 0) & (y < logits.shape[1])).all()), 'no such class'"
    near = diagnosed(labels([0, 5], 5, **facts))[1][0]
    assert near.title == "Give the model at least 6 classes" and near.code is None
    scanned = diagnosed(labels([0, 5], 5, data=range(6), data_name="d", **facts))[1][0]
    assert scanned.title == "Give the model 6 classes"
    assert scanned.code is not None and "< 6" in scanned.code


def test_classes_of_an_episode_are_numbered_anew() -> None:
    episode = ("ways, shots = 5, 2\nx_support, x_query = sample(ways, shots)",)
    fix = diagnosed(labels([0, 6, 15], 5, sources=episode))[1][0]
    assert fix.title == "Number the classes of each episode 0..4"
    fix = diagnosed(labels([0, 6, 15], 5, sources=("in many ways",)))[1][0]
    assert "episode" not in fix.title


def test_category_ids_of_annotations_are_mapped() -> None:
    code = ('target = [a["category_id"] for a in annotations]',)
    fix = diagnosed(labels([1, 7], 4, sources=code))[1][0]
    assert fix.title == "Map the category ids to 0..C-1"
    fix = diagnosed(labels([0, 4], 4, sources=code))[1][0]  # numbered from 0 already
    assert fix.title == "Give the model at least 5 classes"


FROM_1 = sized(names="dict of 3 {'helmet': 1, 'vest': 2, 'person': 3}")
PERSON = Example(value=3, position=(1,), meaning="names['person']")


def test_the_users_table_tells_that_labels_start_at_1() -> None:
    picked = seen("index", [1, 3], 3, low=-3, index_expression="ind[1]", variables=FROM_1)
    cause, _ = diagnosed(named(picked, PERSON))
    assert cause.key == "label_starts_at_1"
    assert cause.explanation.startswith("`names` numbers the 3 classes 1..3")
    padded = seen("index", [0, 1, 3], 3, low=-3, index_expression="ind[1]", variables=FROM_1)
    assert "0 occurs too" in diagnosed(named(padded, PERSON))[0].explanation
    assert diagnosed(picked)[0].key == "index_out_of_bounds"  # the table is of something else
    loss = named(labels([0, 1, 3], 3, variables=FROM_1), PERSON)  # 0 is a class there
    assert diagnosed(loss)[0].key == "label_ge_num_classes"


# ---- masks


def test_as_many_values_as_classes_are_a_palette() -> None:
    palette = sized(palette="dict of 5 {0: 0, 1: 38, 2: 75, 3: 113, 4: 14}")
    grey = [0, 14, 38, 75, 113, 255]
    never = ("masks = read(path)  # the mask is never resized",)
    cause, (fix,) = diagnosed(mask(grey, 5, ignore=255, sources=never, variables=palette))
    assert cause.title == "Mask values are the colours of the classes"
    assert "interpolation" not in cause.explanation
    assert "`palette` lists them" in fix.explanation
    assert "from 0 to 113 and 255, which is ignored" in cause.because[0]
    more = mask([*grey, 20, 51, 90], 5, ignore=255, sources=("mask = resize(mask)",))
    assert diagnosed(more)[0].title == "Mask values between the class ids"
    nearest = mask([*grey, 20], 5, ignore=255, sources=("mask = resize(mask, NEAREST)",))
    assert "was resized" not in diagnosed(nearest)[0].explanation
    few = diagnosed(mask([0, 1, 2, 3, 30], 5))[0]  # one value of another kind
    assert few.title == "Mask values are not class ids"


CODES = ("void_code = 3\nnet = nn.Conv2d(3, n, 1)\nmask = target != void_code",)


def test_a_mask_that_was_made_one_row() -> None:
    flat: dict[str, Any] = {"index_expression": "target.view(-1)", "shape": (5,)}
    observed = labels([0, 1, 2, 3, 30], 4, sources=CODES, **flat)
    assert diagnosed(observed)[0].key == "mask_value_unmapped"
    pooled = (*CODES, "head = nn.Linear(8, 4)")
    observed = labels([0, 1, 2, 3, 30], 4, sources=pooled, **flat)
    assert diagnosed(observed)[0].key == "label_ge_num_classes"


def test_an_uncounted_class_of_a_mask() -> None:
    net = "class Net(nn.Module):\n def __init__(self, n):\n  self.out = nn.Conv2d(4, n, 1)\n"
    fixes = diagnosed(mask([0, 1, 2, 3], 3, sources=(net, "net = Net(n=3)")))[1]
    assert fixes[1].title == "Or give the model 4 classes, if 3 is one"
    assert fixes[1].edit is not None and fixes[1].edit.new == "net = Net(n=4)"
    fixes = diagnosed(mask([0, 1, 2, 9], 3, sources=(net, "net = Net(n=3)")))[1]
    assert not any("give the model" in fix.title for fix in fixes)


def test_an_unsigned_byte_wraps_around() -> None:
    code = ('label = torch.from_numpy(raw.astype("uint8")[i]) - 1',)
    maps = ("maps = [m.astype('uint8') for m in files]", "label = torch.from_numpy(maps[i]) - 1")
    cause, (fix,) = diagnosed(mask([0, 1, 2, 255], 3, ignore=-1, sources=maps))
    assert cause.title == "0 - 1 became 255 in an unsigned byte"
    assert fix.edit is not None and fix.edit.new == "label = torch.from_numpy(maps[i]).long() - 1"
    assert diagnosed(mask([0, 255], 3, sources=code))[1][0].edit is None  # not that simple
    plain = mask([0, 1, 2, 255], 3, sources=("maps = uint8(files)", "size = n - 1"))
    assert diagnosed(plain)[0].title == "Mask values are not class ids"


# ---- tables

NUMBERED = "words = Counter(texts)\nword_index = {w: i for i, w in enumerate(words, start=1)}\n"
MODEL = "class Net:\n def __init__(self, n):\n  self.emb = nn.Embedding(n, 8)\n"


@pytest.mark.parametrize(
    ("code", "found", "new"),
    [
        ("n_words = len(word_index)", range(5), "n_words = len(word_index) + 1"),
        ("n_words = len(set(words))", range(5), "n_words = len(set(words)) + 1"),
        ("n_words = len(word_index)", [0, 2, 4], None),  # a number between may be the spare one
        ("n_words = load_size()", range(5), None),
    ],
)
def test_a_count_leaves_zero_out(code: str, found: Any, new: str | None) -> None:
    sources = (NUMBERED + code, MODEL + "net = Net(n_words)")
    facts: dict[str, Any] = {"data": found, "data_name": "d", "index_expression": "words"}
    cause, fixes = diagnosed(table(found, 4, "net.emb", sources=sources, **facts))
    assert (fixes[0].edit.new if fixes[0].edit else None) == new
    assert (cause.title == "The table has no row for the last number") == (new is not None)
    assert f"The size is given in `{code}`." in fixes[0].explanation


FACTORIZED = "df['loc'] = pd.factorize(df['venue'])[0]\n"


def test_ids_with_gaps_in_a_table_of_as_many_rows_as_ids() -> None:
    counted = "n_loc = active['loc'].nunique()\nloc_emb = nn.Embedding(n_loc, 4)"
    facts: dict[str, Any] = {"index_expression": "loc", "data": [0, 1, 3, 4]}
    observed = table([4], 4, "loc_emb", sources=(FACTORIZED + counted,), **facts)
    cause, fixes = diagnosed(observed)
    assert cause.key == "category_id_ge_table"
    assert fixes[0].title == "Number the ids 0..n-1 after the last row is dropped"
    assert "n_loc = active['loc'].nunique()" in fixes[1].explanation
    held_out = Step(loop="for x in test_loader:", iteration=0, split="test")
    observed = table([4], 4, "loc_emb", sources=(FACTORIZED + counted,), step=held_out, **facts)
    cause, _ = diagnosed(observed)
    assert cause.key == "category_unseen"
    assert cause.title == "A category that the table `loc_emb` does not know"


def test_a_box_over_the_edge_is_clamped() -> None:
    facts: dict[str, Any] = {"sources": ("def scale_box(b): ...",), "index_expression": "bbox"}
    _, (fix,) = diagnosed(table([-25, 100, 850], 1024, "m.x_position_embeddings", **facts))
    assert fix.title == "Clamp the boxes to 0..1000" and "`scale_box`" in fix.explanation
    for found in ([-25, 3], [-900, 850], [100, 2400]):  # in another scale, or too few to tell
        _, (fix,) = diagnosed(table(found, 1024, "m.x_position_embeddings", **facts))
        assert fix.title.startswith("Scale the boxes")
    cause, _ = diagnosed(table([-25, 850], 1024, "m.w_position_embeddings", **facts))
    assert "corners swapped" in cause.explanation
    cause, _ = diagnosed(table([-25, 3], 1024, "m.x_position_embeddings", **facts))
    assert "corners swapped" not in cause.explanation


# ---- losses inside a model, NaN, sizes


def test_a_model_that_computes_the_loss_itself_gets_no_labels() -> None:
    facts: dict[str, Any] = {"sources": ("pred = trainer.predict(test)",)}
    inside = labels(
        [-1, 0],
        3,
        module_type="BertForSequenceClassification",
        config={"num_labels": 3},
        index_expression=None,
        **facts,
    )
    _, (fix,) = diagnosed(inside)
    assert "remove_columns" in fix.explanation and "ignore_index" not in fix.title
    fixes = diagnosed(labels([-1, 0], 3, **facts))[1]
    assert fixes[0].title == "Tell the loss to ignore -1"


@pytest.mark.parametrize(
    ("code", "key"),
    [
        ("policy = nn.Linear(3, 2)\nobs = env.reset()", "nan_inf_in_data"),
        ("policy = nn.Linear(3, 2)\nloss.backward()", "multinomial_nan_inf_neg"),
        ("model = Net.from_pretrained(name)", "multinomial_nan_inf_neg"),
        ("scores = scores.masked_fill(mask, -1e9)", "multinomial_nan_inf_neg"),
    ],
)
def test_nan_without_training_comes_from_the_input(code: str, key: str) -> None:
    observed = seen("multinomial", ["nan", 0.5], None, index_expression="p", sources=(code,))
    cause, _ = diagnosed(observed)
    assert cause.key == key
    headline = diagnosis.headline(observed, cause)
    assert headline == "Sampling got NaN as a probability (1 of 2)."


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("head = nn.Linear(8, len(tag2idx))", "head = nn.Linear(8, len(tag2idx))"),
        ("n_tags = 4\nbody = nn.Linear(2, 8)\nhead = nn.Linear(8, n_tags)", "n_tags = 4"),
        ("a = nn.Linear(8, count())\nb = nn.Linear(8, other())", None),  # which of them?
        ("head = nn.Linear(8, 9)", None),  # of another model
    ],
)
def test_the_line_that_gives_the_number_of_classes(code: str, line: str | None) -> None:
    fix = diagnosed(labels([0, 7], 4, sources=(code,)))[1][0]
    told = fix.explanation.partition("The size is given in ")[2]
    assert told == (f"`{line}`." if line else "")
