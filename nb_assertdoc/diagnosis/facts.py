"""The measured facts of one finding, in the shape in which the rules ask for them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from nb_assertdoc.model import Crash, Number, Observed, Values

from .reading import Reading, bound

SUMS = frozenset({"scatter_add", "scatter_reduce", "index_add", "index_reduce"})
LOSSES = frozenset(
    {"cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss", "ctc_loss"}
)
TABLES = frozenset({"embedding", "embedding_bag"})
UNIT_VALUES = frozenset({"binary_cross_entropy", "bernoulli"})
# What `nan.long()` gives on x86 and on CUDA.
NAN_AS_INTEGER = frozenset({-(2**63), 2**63 - 1, -(2**31), 2**31 - 1})


def vocabulary(text: str) -> frozenset[str]:
    """The words of `text`, to be met with `words()` of a name."""
    return frozenset(text.split())


# Module names that say nothing: the name of the module around them counts.
GENERIC = vocabulary(
    "emb embed embedding embeddings embs embeds weight table tables lookup module layer layers"
)


# Words in names of loaders, functions and data sets -> the pass they speak of.
HELD_OUT = {
    "predict": "prediction",
    "test": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "eval": "evaluation",
    "evaluate": "evaluation",
    "inference": "inference",
}
# What arguments without a range must be.
NO_RANGE = {
    "_assert_async": "true",
    "masked_scatter": "covered by `source`",
    "repeat_interleave": "fitting",
    "index_put": "below the length of the row",
}
# Code of graph networks.
GRAPH = r"torch_geometric|\bdgl\b|edge_index|(GCN|SAGE|GAT|GIN)Conv|torch_scatter"


def words(text: str | None) -> frozenset[str]:
    """Identifiers of `text`, their parts and neighbouring parts, all in lower case.

    "tokenTypeIds" gives tokentypeids, token, type, ids, token_type, type_ids.
    """
    found: set[str] = set()
    for name in re.findall(r"[A-Za-z_]\w*", text or ""):
        parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
        pairs = (f"{a}_{b}" for a, b in itertools.pairwise(parts))
        found.update(part.lower() for part in (name, *parts, *pairs))
    return frozenset(found)


def spell(values: Sequence[Number], distinct: int | None = None) -> str:
    """Values as words: "5", "3 and 4", "512..639", "3, 9, 17 ... 254 (40 distinct)"."""
    shown = [v if isinstance(v, str | int) else float(f"{v:.4g}") for v in values]
    total = max(distinct or 0, len(shown))
    whole = [v for v in shown if isinstance(v, int)]
    if len(shown) == total > 2 and len(whole) == total and whole[-1] - whole[0] == total - 1:
        return f"{whole[0]}..{whole[-1]}"
    if total > 4:
        return f"{', '.join(map(str, shown[:3]))} ... {shown[-1]} ({total:,} distinct)"
    return " and ".join(filter(None, [", ".join(map(str, shown[:-1])), *map(str, shown[-1:])]))


@dataclass(frozen=True)
class Facts:
    """`Observed` with what several rules derive from it. Nothing here fails on missing facts."""

    observed: Observed
    crash: Crash | None = None

    # ---- the call

    @cached_property
    def op(self) -> str:
        """The operator without the in-place underscore and the variants of one operator."""
        name = self.observed.finding.op.rsplit(".", 1)[-1].rstrip("_")
        return {"nll_loss2d": "nll_loss", "embedding_renorm": "embedding"}.get(name, name)

    @property
    def indexes(self) -> bool:
        """True for x[i], gather, scatter and their kin: no loss, no table, no value."""
        ops = LOSSES | TABLES | UNIT_VALUES | {"one_hot", "multinomial"}
        return self.op not in ops

    @property
    def sums(self) -> bool:
        """True for operators that add values up by the number of their group."""
        return self.op in SUMS

    @cached_property
    def bad(self) -> tuple[int | float, ...]:
        """The bad values that are numbers, sorted; at most the first 256."""
        return tuple(sorted(v for v in self.observed.finding.bad_values if not isinstance(v, str)))

    @cached_property
    def strange(self) -> tuple[str, ...]:
        """Which of "nan", "inf", "-inf" were found."""
        return tuple(v for v in self.observed.finding.bad_values if isinstance(v, str))

    @cached_property
    def low(self) -> int | None:
        bound = self.observed.finding.bound
        return None if bound is None else int(bound.low)

    @cached_property
    def high(self) -> int | None:
        """Number of classes, rows or columns: the end of the half-open range."""
        bound = self.observed.finding.bound
        return None if bound is None else int(bound.high)

    @property
    def ignore(self) -> int | None:
        bound = self.observed.finding.bound
        return None if bound is None else bound.ignore

    @property
    def all_negative(self) -> bool:
        return bool(self.bad) and not self.strange and self.bad[-1] < 0

    @property
    def too_large(self) -> bool:
        return self.high is not None and any(v >= self.high for v in self.bad)

    @property
    def only_high(self) -> bool:
        """The one bad value is the size itself: off by one."""
        return self.high is not None and not self.strange and self.bad == (self.high,)

    @property
    def follows_high(self) -> bool:
        """The bad values are the size and its successors without a gap."""
        if self.high is None or not self.bad or self.bad[0] != self.high:
            return False
        return self.bad[-1] - self.bad[0] + 1 == self.observed.finding.distinct_bad

    # ---- the values around it

    @cached_property
    def seen(self) -> Values:
        """The widest set of values known: the data set's where it was scanned, else the call's."""
        data, own = self.observed.data, self.observed.values
        if data is None or not data.count:
            return own
        ends = [v for v in (data.minimum, data.maximum) if not isinstance(v, str | None)]
        within = len(ends) == 2 and all(ends[0] <= v <= ends[1] for v in self.bad)
        return data if within or not data.complete else own  # else another field was scanned

    @property
    def whole(self) -> bool:
        """All of a data set was looked at, and every distinct value is known."""
        data = self.seen is self.observed.data
        return data and self.seen.complete and self.observed.data_name is not None

    @cached_property
    def smallest(self) -> int | float | None:
        """Smallest value apart from `ignore_index`."""
        return min(self._extremes, default=None)

    @cached_property
    def largest(self) -> int | float | None:
        """Largest value apart from `ignore_index`."""
        return max(self._extremes, default=None)

    @cached_property
    def _extremes(self) -> tuple[int | float, ...]:
        values = self.seen
        known: list[Number | None] = [*values.distinct, values.minimum, values.maximum]
        return tuple(
            v for v in (*known, *self.bad) if isinstance(v, int | float) and v != self.ignore
        )

    @property
    def starts_at_one(self) -> bool:
        """No 0 among the values, and enough of them that this is no accident of one batch."""
        if self.smallest != 1 or self.high is None:
            return False
        if self.whole:
            return True
        return (1 - 1 / (self.high + 1)) ** self.seen.count <= 0.05

    @property
    def arange_like(self) -> bool:
        """The index counts up along its last dimension, as positions do (or is padded)."""
        shape, values = self.observed.shape, self.observed.values
        if not shape or shape[-1] < 4 or not isinstance(values.maximum, int):
            return False
        if not isinstance(values.minimum, int) or not 0 <= values.minimum <= 2:
            return False
        steps = values.distinct_count
        return steps == values.maximum - values.minimum + 1 and steps - shape[-1] in (0, 1)

    # ---- names

    @cached_property
    def index_words(self) -> frozenset[str]:
        """Words of the index expression, selections left out: y of `data.y[data.train_mask]`."""
        return words(re.sub(r"\[(?!['\"])[^\]]*\]", "", self.observed.index_expression or ""))

    @cached_property
    def table_words(self) -> frozenset[str]:
        """Words of the table: the last module name that says something, and the expression."""
        parts = (self.observed.finding.module or "").split(".")
        telling = [p for p in parts if p and not p.isdigit() and p.lower() not in GENERIC]
        return words(telling[-1] if telling else None) | words(self.observed.table_expression)

    @cached_property
    def names(self) -> frozenset[str]:
        return self.index_words | self.table_words

    @cached_property
    def code(self) -> str:
        """All code known to be in play: cells, classes, functions, frames."""
        finding = self.observed.finding
        places = (*finding.user_frames, finding.location)
        frames = (f"{p.function or ''}\n{p.source}" for p in places)
        return "\n".join((*self.observed.sources, *frames))

    @cached_property
    def reading(self) -> Reading:
        """The cells, to be searched for calls and for what names stand for."""
        return Reading(self.observed.sources)

    @property
    def classes(self) -> str:
        """The number of classes as words: "5 classes"."""
        return f"{self.high} class{'' if self.high == 1 else 'es'}"

    def mentions(self, pattern: str) -> bool:
        """True if the code in play matches the pattern, letter case ignored."""
        return re.search(pattern, self.code, re.IGNORECASE) is not None

    @property
    def graph(self) -> bool:
        return self.mentions(GRAPH)

    @cached_property
    def held_out(self) -> str | None:
        """The failing pass, if names say that it is not training: "validation", "prediction"."""
        finding, step = self.observed.finding, self.observed.finding.step
        if step is not None and step.split:
            return None if step.split.startswith("train") else step.split
        places = (*finding.user_frames, finding.location)
        told: Iterable[str | None] = (
            *((p.function or "").split("(")[0] for p in places),
            *(p.source for p in places),
            self.observed.data_name,
            *((step.loop, step.of_data.loop) if step else ()),
        )
        lines = (found for text in told if "train" not in (found := words(text)))
        passes = (HELD_OUT[word] for found in lines for word in HELD_OUT if word in found)
        return next(passes, None)

    @cached_property
    def existing(self) -> frozenset[str]:
        """Names that the failing line can use: its own, the notebook's variables, the module's."""
        observed, finding = self.observed, self.observed.finding
        own = (finding.location.source, observed.index_expression, observed.table_expression)
        found = {name for text in own for name in re.findall(r"[A-Za-z_]\w*", text or "")}
        found |= {re.split(r"\W", v.name)[0] for v in observed.variables} | {"torch"}
        for text in observed.sources:
            found |= bound(text)
        return frozenset(found)

    # ---- words for the report

    @property
    def called(self) -> str:
        """The user's own words for the index, in backticks; else what it is, not a library's."""
        own = (self.observed.index_expression or "").strip()
        if own and len(own) <= 40 and "\n" not in own:
            return f"`{own}`"
        argument = self.observed.finding.argument
        if self.op in LOSSES:
            return "the target"
        indexes = self.op in TABLES or argument in ("index", "indices")
        return "the index" if indexes else f"the argument `{argument}`"

    @property
    def table(self) -> str:
        """The user's name of the table or of the indexed tensor, quoted, or "the table"."""
        finding = self.observed.finding
        own = finding.module if self.op in TABLES and finding.module else None
        own = own or self.observed.table_expression
        return f"`{own}`" if own and len(own) <= 60 and "\n" not in own else "the table"

    @property
    def valid(self) -> str:
        """The valid range as words: "0..4"."""
        bound = self.observed.finding.bound
        if bound is None:
            return NO_RANGE.get(self.op, "finite and not negative")
        if bound.high_inclusive:
            return f"[{bound.low:g}, {bound.high:g}]"
        return f"{0 if self.wraps else self.low}..{int(bound.high) - 1}"

    @property
    def wraps(self) -> bool:
        """Negative indices count from the end; few who index mean to use them."""
        return self.low is not None and self.low < 0 and self.low == -(self.high or 0)

    @property
    def lowest(self) -> int:
        """Where an assertion begins: below 0 only where the user's valid values do."""
        low = self.low or 0
        known = (*self.seen.distinct, self.seen.minimum)
        return low if any(isinstance(v, int | float) and low <= v < 0 for v in known) else 0

    @property
    def found(self) -> str:
        """The bad values as words."""
        finding = self.observed.finding
        return spell(finding.bad_values, finding.distinct_bad)

    def measured(self) -> list[str]:
        """The sentences that every diagnosis can give: what the values are and how many are bad."""
        finding, observed = self.observed.finding, self.observed
        whose = "so far" if self.seen is observed.data else "of the call"
        whose = f"of {observed.data_name}" if observed.data_name and whose == "so far" else whose
        outside = f"not {self.valid}" if finding.bound is None else f"outside {self.valid}"
        if self.wraps and self.lowest < 0:
            outside = f"outside {self.lowest}..{(self.high or 0) - 1}"
        if finding.bound is not None and finding.margin is None and not self.strange:
            outside = "against the operator's rule"  # in range, but decreasing for example
        many = f"{finding.bad_count:,} of {finding.total:,} values"
        many = "the only value" if finding.total == 1 else many
        sentences = [f"{many} in the call {outside}: {self.found}"]
        ends = (self.seen.minimum, self.seen.maximum)
        if all(isinstance(v, int | float) and math.isfinite(v) for v in ends):
            sentences.insert(0, self._range(self.seen, f"{self.called} {whose}"))
        if finding.step is not None and finding.step.split:
            loop = finding.step.of_data.loop
            sentences.append(f"it is in the {finding.step.split} pass: `{loop}`")
        return sentences

    def _range(self, values: Values, whose: str) -> str:
        unit = "row" if len(self.observed.shape) == 1 and self.observed.data_name else "value"
        ends = [values.minimum, values.maximum]
        if "int" in self.observed.dtype:  # the data may hold them as floats: 41.0
            ends = [int(v) if isinstance(v, float) and v.is_integer() else v for v in ends]
        if values.count == 1:
            return f"the only value of {whose} is {ends[0]}"
        if ends[0] == ends[1]:
            return f"all {values.count:,} {unit}s of {whose} are {ends[0]}"
        others = ""
        kept = [v for v in values.distinct if v != self.ignore]
        if self.ignore in ends and kept and len(values.distinct) == values.distinct_count:
            ends, others = [kept[0], kept[-1]], f" and {self.ignore}, which is ignored"
        text = f"the values of {whose} run from {ends[0]} to {ends[1]}{others}"
        text += "; 0 never occurs" if self.starts_at_one and not others else ""
        return f"{text} ({values.count:,} {unit}s)"

    def longer(self, pattern: str) -> list[str]:
        """The user's containers with a matching name and more entries than the valid range."""
        found = self.containers(pattern)
        high = self.high or 0
        return [f"`{name}` has {size} entries" for name, size in found if size > high]

    def containers(self, pattern: str) -> list[tuple[str, int]]:
        """The user's containers with a matching name, and their sizes."""
        sized = [
            (v.name, re.match(r"(?:dict|list|tuple|set) of (\d+)", v.value))
            for v in self.observed.variables
            if re.search(pattern, v.name, re.IGNORECASE)
        ]
        return [(name, int(size[1])) for name, size in sized if size]

    def counts(self, pattern: str, least: int) -> dict[str, int]:
        """The user's numbers with a matching name, from `least` on."""
        found = {
            v.name: int(v.value)
            for v in self.observed.variables
            if v.value.isdecimal() and re.search(pattern, v.name, re.IGNORECASE)
        }
        return {name: value for name, value in found.items() if value >= least}

    def sizes(self, pattern: str) -> list[str]:
        """The user's variables with a matching name that hold the size of the valid range."""
        high = -1 if self.high is None else self.high
        return [f"`{n}` is {v}" for n, v in self.counts(pattern, high).items() if v == high]
