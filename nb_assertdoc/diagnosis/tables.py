"""Causes in embedding tables whose rows are tokens, types, boxes or symbols."""

from __future__ import annotations

import re

from nb_assertdoc.model import Edit, Fix, Tokenizer

from .facts import LOSSES, TABLES, Facts, vocabulary
from .fixes import edit_line, keep, keep_rows, name_of
from .numbering import CLASS_LISTS
from .rule import Match, Rule
from .sizes import VOCABULARIES, edit_size, rows_needed, set_in, table_size, uncounted_zero

TYPE = vocabulary(
    "token_type segment segments seg type_ids type_emb type_embedding type_embeddings"
)
# Words of a tensor that is a table, though no nn.Embedding; `pos` alone may be points in space.
ROWS = r"emb|w[pt]e$|pe$|positional|rel(ative)?_pos|pos(ition)?_(bias|table|enc)|rope|rotary"
OTHER_TYPE = r"(?<!token)(?<!segment)(?<!sentence)(?<!seq)_type$"  # edge_type, store_type
MOST_TYPES = 16  # rows; a larger table of segments holds something else
BOX = vocabulary("bbox bboxes box boxes")
SYMBOL = vocabulary(
    "symbol symbols phoneme phonemes phone phones speaker speakers spk tts grapheme graphemes"
)
TOKEN = vocabulary(
    "wte word words tok toks token tokens vocab vocabulary embed_tokens input_ids token_ids shared "
    "src tgt trg caption captions char chars subword bpe"
)


def is_table(facts: Facts) -> bool:
    """A lookup in a table of rows: embedding, or an index into something named like one."""
    if facts.op in TABLES:
        return True
    named = any(re.match(ROWS, word) for word in facts.table_words)
    return facts.op in {"index", "index_select", "gather"} and named


def config_says(facts: Facts, *names: str) -> list[str]:
    """What the model's config says about the size of the table, by name."""
    return [
        f"the model's config has {n}={facts.observed.config[n]}"
        for n in names
        if facts.observed.config.get(n) is not None
    ]


def bbox_coordinate(facts: Facts) -> Match | None:
    axes = any(re.match(r"[xywh]_pos", word) for word in facts.table_words)
    if not is_table(facts) or not (axes or BOX & facts.names):
        return None
    if (beyond := _beyond_page(facts)) is not None:
        return beyond
    name, high = name_of(facts, "bbox"), facts.high
    top = 1000 if high is not None and high > 1000 else (high or 1) - 1
    extent = any(re.match(r"[hw]_pos|width|height", word) for word in facts.table_words)
    swapped = " A negative width or height means that a box has its corners swapped."
    sign = swapped if extent and facts.bad[:1] < (0,) else ""
    return Match(
        score=86,
        explanation=f"{facts.table} has a row for each coordinate {facts.valid}; the boxes hold "
        f"{facts.found}. Boxes must be scaled to 0..{top} with the size of their own page.{sign}",
        because=tuple(config_says(facts, "max_2d_position_embeddings")),
        fixes=(
            Fix(
                title=f"Scale the boxes to 0..{top} by their page's width and height",
                explanation="Check right after scaling: the boxes and the picture's size must "
                "have the same unit, x0 <= x1 and y0 <= y1.",
                code=keep("bbox" if axes else name, top + 1),
            ),
        ),
    )


def _beyond_page(facts: Facts) -> Match | None:
    """Some coordinates lie a little outside; all others are in scale."""
    extent = any(re.match(r"[hw]_pos|width|height", word) for word in facts.table_words)
    high, largest = facts.high or 0, facts.seen.maximum
    top = 1000 if high > 1000 else high - 1
    if extent or not facts.all_negative or not isinstance(largest, int) or high < 100:
        return None
    if facts.bad[0] < -top / 5 or not top / 5 < largest < high:
        return None  # all coordinates in another scale, or too few to tell
    made = re.search(r"def (\w*(?:box|norm)\w*)\(", facts.code)
    where = f"`{made[1]}`" if made else "the code that scales the boxes"
    return Match(
        score=87,
        title="A box reaches beyond its page",
        explanation=f"{facts.table} has a row for each coordinate {facts.valid}; "
        f"{facts.found} lies outside, and the largest known is {largest}: the scale is right, "
        "a box begins outside the page.",
        fixes=(
            Fix(
                title=f"Clamp the boxes to 0..{top}",
                explanation=f"In {where}: min(max(v, 0), {top}) for every coordinate; text "
                "recognition often gives boxes that reach over the edge.",
                code=keep(name_of(facts, "bbox"), top + 1),
            ),
        ),
    )


def token_type(facts: Facts) -> Match | None:
    few = len(facts.observed.shape) <= 2 and (facts.high or 0) <= MOST_TYPES
    of_others = any(re.search(OTHER_TYPE, name) for name in facts.names)
    if not is_table(facts) or not TYPE & facts.names or not few or of_others:
        return None
    rows, need = facts.high, int(max(facts.bad, default=0)) + 1
    because = config_says(facts, "type_vocab_size")
    return Match(
        score=86,
        explanation=f"The tokenizer marked text with token type {facts.found} (second sentence), "
        f"and {facts.table} has {rows} row{'' if rows == 1 else 's'}: type_vocab_size in the "
        "config. Models such as RoBERTa have one row and want no token types.",
        because=tuple(because),
        fixes=(
            Fix(
                title=f"Set type_vocab_size={need}, if you train from scratch",
                explanation="With a pretrained one-row table, leave token_type_ids out instead.",
                code=keep(name_of(facts, "token_type_ids"), need),
                edit=edit_line(
                    facts, rf"type_vocab_size\s*=\s*{rows}\b", f"type_vocab_size={need}"
                ),
            ),
            Fix(
                title="Or give the model no token types",
                explanation="Call the tokenizer with return_token_type_ids=False, or drop the "
                "field.",
                code="batch.pop('token_type_ids', None); assert 'token_type_ids' not in batch",
            ),
        ),
    )


def tts_symbol(facts: Facts) -> Match | None:
    if facts.op not in TABLES or not facts.too_large:
        return None
    if SYMBOL & facts.names:
        score = 82
    elif facts.mentions(
        r"n_symbols|num_symbols|text_to_sequence|phonemi|tacotron|\bvits\b|glow_?tts|fast_?speech|"
        r"n_speakers|num_speakers"
    ):  # their table of symbols is often called one of words
        score = 81 if TOKEN & facts.names and not facts.observed.tokenizers else 58
    else:
        return None
    speaker = {"speaker", "speakers", "spk"} & facts.names
    what, lists = ("Speaker", "speaker|spk") if speaker else ("Symbol", "symbol|phone|graphem")
    need = rows_needed(facts, lists)
    longer = facts.longer(lists)
    why = (
        f"The list of {what.lower()}s that numbers the data is longer than the one that the model "
        "was built with."
    )
    if not longer:
        why = why[:-1] + ", or the ids have gaps or begin at 1."
    extra = [name for name, size in facts.containers(lists) if size == facts.high]
    if extra and facts.only_high:  # an id that no list has: of a blank, or of padding
        why = (
            f"`{extra[0]}` has {facts.high} entries, ids 0..{(facts.high or 1) - 1}: the data also "
            f"uses {facts.high}, an id after the last (a blank between symbols, padding, unknown)."
        )
    return Match(
        score=score,
        title=f"A {what.lower()} id is outside its table",
        explanation=f"{what} ids go up to {facts.bad[-1]}, {facts.table} has {facts.high} rows. "
        f"{why}",
        because=(*facts.sizes(lists if speaker else f"{lists}|vocab"), *longer),
        fixes=(
            Fix(
                title=f"Count the extra id too: {need} rows"
                if extra and facts.only_high
                else f"Build the table from the same list: at least {need} rows",
                explanation=f"Use len() of the {what.lower()} list that the data is encoded "
                "with (other language, added punctuation, padding symbol); with a checkpoint "
                f"use the checkpoint's list.{set_in(table_size(facts))}",
                code=keep_rows(facts, name_of(facts, "symbol_ids"), need),
                edit=edit_size(facts, need),
            ),
        ),
    )


def _score_tokens(facts: Facts) -> int | None:
    """How sure it is that the index holds token ids."""
    vocab = facts.observed.config.get("vocab_size")
    if facts.op in LOSSES:
        named = {"vocab", "vocab_size", "input_ids", "captions"} & facts.names
        if not {"label", "labels", "tag", "tags"} & facts.index_words:  # labels of tokens
            named |= {"token", "tokens"} & facts.names
        classes = facts.containers(CLASS_LISTS)  # then these number the targets
        if not classes and facts.mentions(r"vocab|token|\b[sb]os\b|\beos\b|stoi|word2i"):
            named |= {"tgt", "trg"} & facts.names
        if vocab == facts.high and facts.observed.config.get("num_labels") != facts.high:
            return 66
        return 62 if named and not {"token_type"} & facts.names else None
    if not is_table(facts):
        return None
    named_tokens = TOKEN - {"src", "tgt", "trg"} if facts.graph else TOKEN
    if named_tokens & facts.names or vocab == facts.high:
        return 80
    if any(t.size > (facts.high or 0) for t in facts.observed.tokenizers):
        return 60
    if facts.mentions(
        r"input_ids|token_ids|tokeniz|\bvocab\b|vocab_size|word2idx|stoi|word_to_i[dx]"
    ):
        return 48
    return 22 if len(facts.observed.shape) == 2 and (facts.high or 0) >= 1000 else None


def _wrong_tokenizer(facts: Facts) -> tuple[Tokenizer | None, str]:
    """The tokenizer that made the ids, as far as known, and the sub-cause."""
    rows = facts.high or 0
    known = sorted(facts.observed.tokenizers, key=lambda t: t.size, reverse=True)
    for tokenizer in known:
        if tokenizer.size > rows:
            base = tokenizer.vocab_size
            added = base is not None and base <= rows
            return tokenizer, "added" if added else "other"
    return (known[0] if known else None), "unknown"


def token_id(facts: Facts) -> Match | None:
    score = _score_tokens(facts)
    if score is None or not facts.too_large:
        return None
    rows, need = facts.high, rows_needed(facts, VOCABULARIES)
    tokenizer, why = _wrong_tokenizer(facts)
    because = config_says(facts, "vocab_size")
    if tokenizer is not None:
        size = f"`len({tokenizer.name})` is {tokenizer.size:,}"
        base = "" if tokenizer.vocab_size is None else f", its vocab_size {tokenizer.vocab_size:,}"
        because.append(f"{size}{base}; the table has {rows:,} rows")
        because += [f"id {i} is the token {t!r}" for i, t in list(tokenizer.tokens.items())[:4]]
        need = max(need, tokenizer.size) if why != "unknown" else need
    because += facts.sizes("vocab|token|word") + facts.longer(f"{VOCABULARIES}|token")
    target = facts.op in LOSSES
    place = f"the output has {rows} classes" if target else f"{facts.table} has {rows} rows"
    title: str | None = None
    explanation = (
        f"Token id{'s' if len(facts.bad) > 1 else ''} {facts.found} in "
        f"{facts.called}, but {place}. "
    )
    if why == "added":
        title = "Tokens were added, the table was not resized"
        explanation += (
            "Tokens were added to the tokenizer (vocab_size does not count them), "
            "and the model was not resized."
        )
    elif why == "other":
        title = "Tokenizer and model have different vocabularies"
        explanation += (
            "The tokenizer belongs to another checkpoint, or the model was built "
            "with a smaller vocabulary."
        )
    else:
        explanation += (
            "The vocabulary that numbered the tokens is larger than the one the model was built for"
            + (": often one special token such as padding." if facts.follows_high else ".")
        )
    origin, one_more = None if target else table_size(facts), None
    if why == "unknown" and not target and (counted := uncounted_zero(facts)) is not None:
        origin, title = counted[0], "The table has no row for the last number"
        explanation = f"{explanation.partition('. ')[0]}. {counted[1]}"
        if origin.plus_one is not None:
            one_more = Edit(cell_id=None, old=origin.plus_one[0], new=origin.plus_one[1])
    named = tokenizer.name if tokenizer is not None else "tokenizer"
    ids = name_of(facts, "input_ids")
    transformer = bool(facts.observed.config) or facts.mentions(
        r"transformers|from_pretrained|PreTrained"
    )
    base = rf"(?<!print\()(?<=[=(,\s]){re.escape(named)}\.vocab_size\b"  # a value that is given
    edit = edit_line(facts, base, f"len({named})")
    large = f"assert model.get_input_embeddings().num_embeddings >= len({named})"
    resize = Fix(
        title=f"Resize the model's embeddings to {need} tokens",
        explanation=f"model.resize_token_embeddings(len({named})) after the last token was added, "
        f"before training; or build the model with len({named}), which counts added tokens.",
        code=large if edit else f"model.resize_token_embeddings(len({named})); {large}",
        edit=edit,
    )
    rebuild = Fix(
        title=f"Give the last layer at least {need} outputs"
        if target
        else f"Build the table with at least {need} rows",
        explanation=f"Take the number of {'outputs' if target else 'rows'} from the vocabulary "
        f"that numbers the tokens, padding and unknown included.{set_in(origin)}",
        code=keep_rows(facts, ids, need),
        edit=one_more
        or edit_line(facts, rf"(?<!\w)vocab_size\s*=\s*{rows}\b", f"vocab_size={need}")
        or (None if target else edit_size(facts, need)),
    )
    check = Fix(
        title="Or use the model's own tokenizer",
        explanation="Load tokenizer and model from the same checkpoint; or use an existing "
        "token for padding (tokenizer.pad_token = tokenizer.eos_token).",
        code=keep(ids, rows),
    )
    fixes = (resize, check) if transformer else (rebuild,)
    return Match(
        score=score, title=title, explanation=explanation, because=tuple(because), fixes=fixes
    )


def table_too_small(facts: Facts) -> Match | None:
    if facts.op not in TABLES or not facts.too_large:
        return None
    need = int(facts.bad[-1]) + 1
    return Match(
        score=20,
        explanation=f"{facts.table} has {facts.high} rows ({facts.valid}), and {facts.called} "
        f"holds {facts.found}. Either the table is too small or the index is wrong.",
        because=tuple(facts.sizes("vocab|num|size|n_|len")),
        fixes=(
            Fix(
                title=f"Give the table at least {need} rows, or correct the index",
                explanation="Take the number of rows from the data: the largest index of every "
                f"split plus one.{set_in(table_size(facts))}",
                code=keep_rows(facts, name_of(facts, "index"), need),
                edit=edit_size(facts, need),
            ),
        ),
    )


RULES = (
    Rule(
        "bbox_coordinate_range",
        "A box coordinate is outside the table of coordinates",
        "Document models such as LayoutLM look each box coordinate up in a table; boxes must "
        "be scaled to 0..1000 with the size of their own page, with x0 <= x1 and y0 <= y1.",
        bbox_coordinate,
    ),
    Rule(
        "token_type_ge_table",
        "A token type is outside the type table",
        "Token types tell first and second sentence apart: 0 and 1. Models such as RoBERTa "
        "have one row (type_vocab_size=1): leave token_type_ids out, or set type_vocab_size=2 "
        "when training from scratch.",
        token_type,
    ),
    Rule(
        "tts_symbol_out_of_table",
        "A symbol or speaker id is outside its table",
        "Text-to-speech models number letters, phonemes and speakers by a list. The list used "
        "for the data is longer than the one the model (or its checkpoint) was built with.",
        tts_symbol,
    ),
    Rule(
        "token_id_ge_vocab",
        "A token id is not below the vocabulary size",
        "A token table of V rows takes ids 0..V-1. Usual triggers: tokens added to the "
        "tokenizer without model.resize_token_embeddings(len(tokenizer)); tokenizer and model "
        "of different checkpoints; vocab_size read before a token was added.",
        token_id,
    ),
    Rule(
        "vocab_or_table_too_small",
        "The table has too few rows",
        "An embedding with V rows takes indices 0..V-1. The largest index of all data plus one "
        "is the number of rows needed.",
        table_too_small,
    ),
)
