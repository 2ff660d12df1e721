"""Causes in arguments that are neither an index nor a probability: sizes, offsets, rates, checks.

The operator's own rule is the cause: what broke it is in the user's code that made the argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from nb_assertdoc.model import Fix

from .facts import Facts
from .fixes import name_of
from .rule import Match, Rule


@dataclass(frozen=True)
class _Demand:
    """What one argument must be: words, and the assertion that keeps it (`{x}`: its name)."""

    title: str
    must: str
    fix: str
    keep: str


_GROUPS = _Demand(
    "The groups of a grouped product do not fit",
    "`offs` holds the ends of the groups: they may not decrease, and the last is at most the size "
    "that is grouped. Along a contiguous dimension, Hopper and newer GPUs want groups of a "
    "multiple of 16 bytes (8 numbers of bfloat16), the last one excepted.",
    "Make `offs` with torch.cumsum of the group sizes, and pad groups to a multiple of 8.",
    "assert bool(({x}.diff() >= 0).all()) and int({x}[0]) >= 0, 'group ends decrease'",
)
_COMPRESSED = _Demand(
    "The indices of a compressed sparse tensor break its invariants",
    "crow_indices (ccol_indices) begins with 0, ends with the number of stored values and does "
    "not decrease; col_indices (row_indices) are below the size, sorted and distinct in each row.",
    "Let torch make them: tensor.to_sparse_csr(), or a COO tensor, .coalesce() and then "
    ".to_sparse_csr().",
    "assert int({x}.min()) >= 0, 'a negative index in a sparse tensor'",
)
_DEMANDS: dict[tuple[str, str], _Demand] = {
    ("normal", "std"): _Demand(
        "A standard deviation is negative",
        "torch.normal takes standard deviations of at least 0.",
        "Give std, not its logarithm: torch.exp or softplus of what the network predicts.",
        "assert bool(({x} >= 0).all()), 'a negative standard deviation'",
    ),
    ("poisson", "input"): _Demand(
        "A Poisson rate is negative",
        "torch.poisson takes rates of at least 0.",
        "Give rates, not their logarithms: torch.exp or softplus of what the network predicts.",
        "assert bool(({x} >= 0).all()), 'a negative rate'",
    ),
    ("segment_reduce", "lengths"): _Demand(
        "The length of a segment is negative",
        "segment_reduce with unsafe=True checks lengths only on the GPU: they are at least 0.",
        "Correct the lengths; offsets go into `offsets`, not into `lengths`.",
        "assert bool(({x} >= 0).all()), 'a negative length'",
    ),
    ("repeat_interleave", "repeats"): _Demand(
        "The repeats do not fit",
        "repeat_interleave takes repeats of at least 0, and `output_size`, where it is given, "
        "must be their sum.",
        "Correct the repeats, or leave `output_size` out: it only saves a wait for the GPU.",
        "assert int({x}.min()) >= 0, 'a negative repeat'",
    ),
    ("masked_scatter", "mask"): _Demand(
        "The source is shorter than the mask",
        "masked_scatter takes one value of `source` for each True of the mask.",
        "Give as many values as the mask has True: in multi-modal models, as many image features "
        "as there are placeholder tokens in the text.",
        "assert int({x}.sum()) <= source.numel(), 'fewer values than True in the mask'",
    ),
    ("_assert_async", "input"): _Demand(
        "A check in the code itself is not met",
        "torch._assert_async (or an assert under torch.compile) tests a condition on the GPU; "
        "it is false. Its message is in the driver's line.",
        "Look at what the check is about: the line that makes the condition says it.",
        "assert bool({x}), 'the condition is false'",
    ),
    ("embedding_bag", "offsets"): _Demand(
        "The bags of an embedding bag decrease",
        "`offsets` holds where each bag begins in `input`: it may not decrease, and is at most "
        "the length of `input`.",
        "Make offsets with torch.cumsum of the bag sizes, beginning with 0, for this very batch.",
        "assert bool(({x}.diff() >= 0).all()), 'offsets decrease'",
    ),
    ("index_put", "indices"): _Demand(
        "An index is beyond its row of a nested tensor",
        "In the ragged dimension each row has a length of its own, and an index must be below "
        "that of its row.",
        "Compare the indices with the lengths of the rows: nt.offsets().diff().",
        "assert int({x}.min()) >= 0, 'negative index'",
    ),
}


def _demand(facts: Facts) -> _Demand | None:
    finding = facts.observed.finding
    if facts.op.startswith("sparse_"):
        return _COMPRESSED
    if facts.op.endswith("grouped_mm"):
        return _GROUPS
    if facts.op == "index_put" and finding.bound is not None:
        return None
    return _DEMANDS.get((facts.op, finding.argument))


def argument(facts: Facts) -> Match | None:
    demand = _demand(facts)
    if demand is None:
        return None
    finding = facts.observed.finding
    return Match(
        score=90,
        title=demand.title,
        explanation=f"{facts.called} holds {facts.found}. {demand.must}",
        because=(f"the call has {finding.table}",) if finding.table else (),
        fixes=(
            Fix(
                title="Correct the argument where it is made",
                explanation=demand.fix,
                code=demand.keep.format(x=name_of(facts, finding.argument)),
            ),
        ),
    )


RULES = (
    Rule(
        "argument_out_of_range",
        "An argument breaks the operator's own rule",
        "Offsets, lengths, repeats, rates, standard deviations, masks with too short a source, the "
        "indices of sparse tensors, or a condition of torch._assert_async: not an index into the "
        "data, but an argument that the operator checks on the GPU. The report says the rule.",
        argument,
    ),
)
