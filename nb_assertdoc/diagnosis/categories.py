"""Causes in tables of categories, users and items, and calendar features."""

from __future__ import annotations

import re

import msgspec

from nb_assertdoc.model import Fix

from .facts import TABLES, Facts, vocabulary
from .fixes import MINUS_1, after, edit_index, keep, keep_rows, name_of
from .rule import Match, Rule
from .sizes import set_in, table_size
from .tables import is_table

# Sizes that a calendar feature's table can rightly have; the first is that of values from 0.
CALENDAR = {
    "month": (12, 13),
    "day of the year": (366, 365, 367),
    "weekday": (7, 8),
    "time of day": (1440, 288, 144, 96, 48, 24),
    "day": (31, 32, 7),
    "hour": (24, 25),
    "minute": (60, 4),
    "week": (53, 52, 54),
    "quarter": (4, 5),
}
# These count from 1 by nature; hours and minutes only where the data shows it.
FROM_ONE = {"month", "day of the year", "weekday", "day", "week", "quarter"}
# Other names of these features: as part of a longer name, alone, and alone where the size fits.
WITHIN = {
    "dayofyear": "day of the year",
    "weekday": "weekday",
    "dayofweek": "weekday",
    "dayinweek": "weekday",
    "timeofday": "time of day",
    "timeinday": "time of day",
}
ALONE = {"doy": "day of the year", "yday": "day of the year", "dow": "weekday", "wday": "weekday"}
SHORT = {"hr": "hour", "mon": "month", "min": "minute", "dom": "day", "tod": "time of day"}
IDS = vocabulary(
    "user users item items movie movies book books product products song songs artist track "
    "tracks video customer customers location locations loc poi shop store stores merchant uid "
    "iid sku entity entities user_id item_id"
)
CATEGORY = vocabulary("cat cats categorical category categories cat_x x_cat cat_cols cardinality")
ENCODED = r"(Ordinal|Label|Category|Categorical|Target)Encoder|\.cat\.codes|factorize|Categorify"
COUNTED = r"\bnunique\(\)|len\([^()]*\.unique\(\)\)|len\(set\(|len\(np\.unique\("
SIZED = r"cardinalit|cat_dims|cat_idxs|emb_szs|cat_cols|cat_features|n_categories|num_categories"
ONE_LIST = "Number the ids with the list that sizes the table"


def _table(facts: Facts) -> bool:
    return facts.op in TABLES or (facts.op in {"index", "index_select"} and bool(IDS & facts.names))


def _ids(facts: Facts) -> bool:
    """The names speak of users, items and their kin, or end in `_id`."""
    named = any(re.search(r"(?<!token)(?<!class)_ids?$", word) for word in facts.index_words)
    return named or bool(IDS & facts.names)


def _feature(facts: Facts) -> str | None:
    """The calendar feature that the names speak of."""
    plain = {w.removesuffix("s").replace("_", "") for w in facts.names}
    found = {feature for part, feature in WITHIN.items() if any(part in w for w in plain)}
    found |= {ALONE[w] for w in plain & ALONE.keys()}
    found |= {SHORT[w] for w in plain & SHORT.keys() if facts.high in CALENDAR[SHORT[w]]}
    return next((feature for feature in CALENDAR if feature in found | plain), None)


def time_feature(facts: Facts) -> Match | None:
    if not is_table(facts) or not facts.too_large or {"user", "item"} & facts.names:
        return None
    feature = _feature(facts)
    encoded = facts.mentions(ENCODED) or facts.mentions(SIZED)
    if feature is None or (encoded and facts.high not in CALENDAR[feature]):
        return None
    size, from_one = CALENDAR[feature][0], facts.smallest == 1 and facts.only_high
    from_one = from_one and (feature in FROM_ONE or facts.starts_at_one)
    name = name_of(facts, feature.replace(" ", "_"))
    if from_one:
        explanation = (
            f"{facts.called} counts from 1 to {facts.high}, the table's rows from 0: subtract 1."
        )
        title = f"Subtract 1 from the {feature}"
        because: tuple[str, ...] = (
            f"{feature} values run from 1; row 0 of {facts.table} is never used",
        )
    else:
        explanation = (
            f"The {feature} goes up to {facts.bad[-1]}, {facts.table} has {facts.high} rows "
            f"({facts.valid}): the table does not fit the feature's range, or the feature is in "
            "another unit."
        )
        title = (
            f"Give the {feature} table {max(size, int(facts.bad[-1]) + 1)} rows, or convert "
            "the feature"
        )
        because = ()
    edit = edit_index(facts, MINUS_1) if from_one else None
    rows = facts.high if from_one else max(size, int(facts.bad[-1]) + 1)
    return Match(
        score=83,
        explanation=explanation,
        because=because,
        fixes=(
            Fix(
                title=title,
                explanation="Calendar features of pandas: month 1..12, day 1..31, hour 0..23, "
                "weekday 0..6, isoweekday 1..7.",
                code=keep(after(name, MINUS_1) if edit else name, rows),
                edit=edit,
            ),
        ),
    )


def _signs(facts: Facts) -> tuple[int, int]:
    """Points for "a category that training had not" and for "ids that are not the rows' numbers".

    Only training data tells how ids are numbered: other splits have gaps anyhow.
    """
    finding, seen = facts.observed.finding, facts.seen
    encoded, sized = facts.mentions(ENCODED), facts.mentions(SIZED)
    listed = re.search(r"(emb|cat)\w*s\.(?!\w*emb)\w+$", finding.module or "") is not None
    unseen = 2 * encoded + sized + bool(CATEGORY & facts.names) + (listed and not IDS & facts.names)
    raw = 2 * _ids(facts) + (facts.op == "embedding_bag")
    raw += 2 * (not encoded and (facts.mentions(COUNTED) or _fields(facts)))
    if unseen or raw:
        few = facts.follows_high and finding.distinct_bad <= 5
        unseen += 2 * bool(facts.held_out) + few + (facts.bad == (-1,))
        raw += 2 * (facts.too_large and not facts.follows_high)
    if (unseen or raw) and not facts.held_out:
        raw += facts.starts_at_one or (
            facts.whole and facts.smallest is not None and facts.smallest > 0
        )
        gaps = facts.whole and seen.distinct_count <= (facts.high or 0)
        raw += 3 * (gaps and facts.too_large)
    return int(unseen), int(raw)


def _fields(facts: Facts) -> bool:
    """One table holds several fields one after the other: ids are shifted by offsets."""
    shape = facts.observed.shape
    return len(shape) == 2 and facts.mentions(r"field_dims|offsets?\b.*cumsum|cumsum.*offsets?\b")


def _dense(facts: Facts) -> bool:
    """The values known are 0..n-1 without a gap, -1 for unknown ones left out."""
    known = [v for v in facts.seen.distinct if not isinstance(v, str) and v >= 0]
    known += [v for v in facts.bad if v >= 0 and v not in known]
    return min(known, default=1) == 0 and len(known) == max(known) + 1


def _need(facts: Facts) -> int:
    """Rows for every value that is known."""
    return int(max(facts.largest or 0, facts.bad[-1])) + 1


def _left_gaps(facts: Facts) -> bool:
    """A count of distinct ids sizes the table, and training has no more of them, but larger ones.

    So some numbers are not in use: rows were dropped after the ids were numbered, for example.
    """
    if facts.op not in TABLES or not facts.too_large or facts.held_out:
        return False
    origin = table_size(facts)
    counted = origin is not None and re.search(COUNTED, origin.code) and "train" not in origin.line
    return bool(counted) and facts.seen.distinct_count <= (facts.high or 0)


def category_unseen(facts: Facts) -> Match | None:
    if not _table(facts) or not facts.bad or _left_gaps(facts):
        return None
    unseen, raw = _signs(facts)
    if unseen < 2 or unseen < raw:
        return None
    finding, high = facts.observed.finding, facts.high
    column = (finding.module or "").rsplit(".", 1)[-1]
    key = f"'{column}': {high}"
    which = f" `{column}`" if column and not column.isdigit() else ""
    when = f" in the {facts.held_out} data" if facts.held_out else ""
    sized = ": the table was sized by data that did not hold this category"
    sized = sized if facts.too_large else ""
    missing = " -1 is how encoders mark a missing or unknown category." if -1 in facts.bad else ""
    codes, encoded = name_of(facts, "codes"), facts.mentions(ENCODED)
    own_row = Fix(
        title="Give unknown categories a row of their own",
        explanation="Reserve row 0: add 1 to every code, so that -1 becomes 0, and give the table "
        "one row more."
        if -1 in facts.bad
        else "Number the categories of the training data, and map what it does not hold to a "
        "reserved code (of an encoder: handle_unknown='use_encoded_value', then shift by one).",
        code=keep(codes, (high or 0) + 1 if -1 in facts.bad else high),
    )
    larger = Fix(
        title=f"Size the table for all splits: {_need(facts)} rows or more",
        explanation=(
            "Number of rows = len(categories) of an encoder that is fitted on all data"
            if encoded
            else "Take the largest value of training, validation and test data together"
        )
        + ", plus one; rows that training never sees stay as they were initialised."
        + set_in(table_size(facts)),
        code=keep(codes, max(high or 0, _need(facts))),
    )
    return Match(
        score=78 if unseen >= 4 else 56,
        title=f"A category that the table{which} does not know",
        explanation=f"Code {facts.found}{when} has no row in {facts.table} "
        f"({facts.valid}){sized}.{missing}",
        because=(
            *facts.sizes("card|cat|dim|num|n_"),
            *(f"`{v.name}` says {key}" for v in facts.observed.variables if key in v.value),
        ),
        # A larger table has no row for -1 either.
        fixes=(larger, msgspec.structs.replace(own_row, title="Or g" + own_row.title[1:]))
        if facts.too_large
        else (own_row,),
    )


def _numbering(facts: Facts) -> tuple[str, str]:
    """What is known of how the ids are numbered, and what the first fix is."""
    whole = facts.whole and not facts.held_out
    if _fields(facts):
        return (
            "The table holds several fields one after the other. An id that is too large for its "
            "own field uses a row of the next field, in silence; only the last field's are seen "
            "here.",
            "Number the ids of every field 0..n-1, each field for itself",
        )
    if facts.only_high and whole and facts.smallest == 1 and facts.largest == facts.high:
        return "Ids count from 1, rows from 0.", "Number the ids 0..n-1 once"
    if whole and _dense(facts):
        return (
            f"They are numbered 0..{_need(facts) - 1} without gaps: another list numbered them "
            "than the one that sized the table.",
            ONE_LIST,
        )
    if whole and facts.seen.distinct_count <= (facts.high or 0):
        return "They would fit if they were numbered 0..n-1.", "Number the ids 0..n-1 once"
    return (
        "The table was sized by a count of ids, or by other data than this.",
        "Number the ids 0..n-1 once, by one list for all data",
    )


def _left() -> tuple[str, str]:
    return (
        "The table has a row for each distinct id of the data that was counted. A larger id means "
        "that the numbers have gaps (rows were dropped after the ids were numbered), or that the "
        "count was of other data.",
        "Number the ids 0..n-1 after the last row is dropped",
    )


def category_id(facts: Facts) -> Match | None:
    if not _table(facts) or not facts.bad:
        return None
    if not facts.too_large:
        return None
    unseen, raw = _signs(facts)
    left = _left_gaps(facts)
    plain = len(facts.observed.shape) == 1 and not {"bins", "bucketize", "digitize"} & facts.names
    guess = facts.op in TABLES and plain and (facts.high or 0) >= 200
    if raw < 2 and not guess and not left:
        return None
    if raw >= 2 and raw < unseen and not left:
        return None
    high, seen, name = facts.high, facts.seen, name_of(facts, "ids")
    because = facts.sizes("user|item|movie|num|n_|card")
    if facts.whole and facts.largest is not None and seen.distinct_count <= facts.largest:
        because.append(
            f"{seen.distinct_count:,} distinct ids, but the largest is {facts.largest:,}: there "
            "are gaps"
        )
    if facts.mentions(COUNTED):
        because.append("the code counts distinct ids: fewer than the largest id, if there are gaps")
    why, title = _left() if left else _numbering(facts)
    fields = _fields(facts)
    return Match(
        score=79 if fields or left else (77 if raw >= 3 else 57) if raw >= 2 else 25,
        explanation=f"{facts.called} holds ids up to {facts.bad[-1]}; {facts.table} has "
        f"{high} rows ({facts.valid}). {why}",
        because=tuple(because),
        fixes=(
            Fix(
                title=title,
                explanation="Or size the table by len() of the list that numbers the ids."
                if title == ONE_LIST
                else "frame[column].astype('category').cat.codes, pd.factorize or a dict; keep "
                "the mapping for prediction.",
                code=keep(name, high),
            ),
            Fix(
                title="Or size every field by its largest id plus one"
                if fields
                else "Or size the table by the largest id plus one",
                explanation="More rows at the end of the table would leave the other fields wrong."
                if fields
                else f"Rows of ids that never occur stay unused.{set_in(table_size(facts))}",
                code=None if fields else keep_rows(facts, name, _need(facts)),
            ),
        ),
    )


RULES = (
    Rule(
        "time_feature_ge_table",
        "A calendar feature does not fit its table",
        "Months count 1..12 and ISO weekdays 1..7, tables count from 0; minutes need 60 rows "
        "unless they are grouped. Subtract 1 or size the table by the feature's range.",
        time_feature,
    ),
    Rule(
        "category_unseen",
        "A category that the table does not know",
        "The table was sized by the training data, and validation, test or prediction data "
        "hold a further category. Size tables by the encoder's list of categories and keep a "
        "row for unknown ones.",
        category_unseen,
    ),
    Rule(
        "category_id_ge_table",
        "Ids are larger than the table",
        "Ids of users, items or places have gaps or start at 1; a table sized by the number of "
        "distinct ids is too short. Number the ids 0..n-1 first.",
        category_id,
    ),
)
