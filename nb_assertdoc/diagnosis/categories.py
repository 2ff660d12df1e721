"""Causes in tables of categories, users and items, and calendar features."""

from __future__ import annotations

import re

from nb_assertdoc.model import Fix

from .facts import TABLES, Facts, vocabulary
from .fixes import MINUS_1, after, edit_index, keep, name_of
from .rule import Match, Rule
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
SIZED = r"cardinalit|cat_dims|cat_idxs|emb_szs|cat_cols|cat_features|n_categories|num_categories"


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
    name = name_of(facts, feature.replace(" ", "_"))
    if from_one:
        explanation = (
            f"`{facts.name}` counts from 1 to {facts.high}, the table's rows from 0: subtract 1."
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
    """Points for "a category that training had not" and for "raw ids, not numbered 0..n-1"."""
    finding, seen = facts.observed.finding, facts.seen
    encoded, sized = facts.mentions(ENCODED), facts.mentions(SIZED)
    listed = re.search(r"(emb|cat)\w*s\.(?!\w*emb)\w+$", finding.module or "") is not None
    unseen = 2 * encoded + sized + bool(CATEGORY & facts.names) + (listed and not IDS & facts.names)
    raw = 2 * _ids(facts) + (facts.op == "embedding_bag")
    if unseen or raw:
        few = facts.follows_high and finding.distinct_bad <= 5
        unseen += 2 * bool(facts.held_out) + few + (facts.bad == (-1,))
        raw += 2 * (facts.too_large and not facts.follows_high)
        raw += facts.starts_at_one or (
            facts.whole and facts.smallest is not None and facts.smallest > 0
        )
        gaps = facts.whole and seen.distinct_count <= (facts.high or 0)
        raw += 3 * (gaps and facts.too_large)
    return int(unseen), int(raw)


def category_unseen(facts: Facts) -> Match | None:
    if not _table(facts) or not facts.bad:
        return None
    unseen, raw = _signs(facts)
    if unseen < 2 or unseen < raw:
        return None
    finding, high = facts.observed.finding, facts.high
    column = (finding.module or "").rsplit(".", 1)[-1]
    key = f"'{column}': {high}"
    which = f" of `{column}`" if column and not column.isdigit() else ""
    when = f" in the {facts.held_out} data" if facts.held_out else ""
    missing = " -1 is how encoders mark a missing or unknown category." if -1 in facts.bad else ""
    return Match(
        score=78 if unseen >= 4 else 56,
        title=f"A category{which} that the table does not know",
        explanation=f"Code {facts.found}{which}{when} has no row in {facts.table} "
        f"({facts.valid}): the table was sized by data that did not hold this category.{missing}",
        because=(
            *facts.sizes("card|cat|dim|num|n_"),
            *(f"`{v.name}` says {key}" for v in facts.observed.variables if key in v.value),
        ),
        fixes=(
            Fix(
                title="Size the table by the encoder's categories",
                explanation="Number of rows = len(categories) of the encoder that makes the "
                "codes, plus one for unknown; not nunique() of one split.",
                code=keep(name_of(facts, "codes"), max(high or 0, int(facts.bad[-1]) + 1)),
            ),
            Fix(
                title="Or give unknown categories a row of their own",
                explanation="Fit the encoder on the training data only and map what it does "
                "not know to a reserved code (handle_unknown='use_encoded_value', then shift "
                "codes by one).",
                code=keep(name_of(facts, "codes"), high),
            ),
        ),
    )


def category_id(facts: Facts) -> Match | None:
    if not _table(facts) or not facts.bad:
        return None
    if not facts.too_large:
        return None
    unseen, raw = _signs(facts)
    plain = len(facts.observed.shape) == 1 and not {"bins", "bucketize", "digitize"} & facts.names
    guess = facts.op in TABLES and plain and (facts.high or 0) >= 200
    if raw < 2 and not guess:
        return None
    if raw >= 2 and raw < unseen:
        return None
    high, seen, name = facts.high, facts.seen, name_of(facts, "ids")
    because = facts.sizes("user|item|movie|num|n_|card")
    if facts.whole and facts.largest is not None and seen.distinct_count <= facts.largest:
        because.append(
            f"{seen.distinct_count:,} distinct ids, but the largest is {facts.largest:,}: there "
            "are gaps"
        )
    from_one = facts.only_high and facts.smallest == 1
    why = "Ids count from 1, rows from 0." if from_one else "The ids are not numbered 0..n-1."
    return Match(
        score=(77 if raw >= 3 else 57) if raw >= 2 else 25,
        explanation=f"`{facts.name}` holds raw ids up to {facts.bad[-1]}; {facts.table} has "
        f"{high} rows ({facts.valid}). {why}",
        because=tuple(because),
        fixes=(
            Fix(
                title="Number the ids 0..n-1 once",
                explanation="frame[column].astype('category').cat.codes, pd.factorize or a "
                "dict; keep the mapping for prediction.",
                code=keep(name, high),
            ),
            Fix(
                title="Or size the table by the largest id plus one",
                explanation="Rows of ids that never occur stay unused.",
                code=keep(name, int(facts.bad[-1]) + 1),
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
        "Raw ids are larger than the table",
        "Ids of users, items or places have gaps or start at 1; a table sized by the number of "
        "distinct ids is too short. Number the ids 0..n-1 first.",
        category_id,
    ),
)
