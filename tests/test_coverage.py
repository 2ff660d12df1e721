"""From the catalogue to the operator table: every assert that a user can reach in one process.

For each: the driver's line is recognised, a planted fault is found by its value when its operator
is called, and what was found is explained. `python tests/test_coverage.py` writes the table of
docs/coverage.md.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import replays
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nb_assertdoc import catalogue, diagnosis, indexing
from nb_assertdoc.catalogue import Entry
from nb_assertdoc.indexing import Bad, Usage
from nb_assertdoc.model import Finding, Observed, Place, Values

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"
aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # sparse and nested are young


def ints(*values: Any, dtype: Any = torch.int64) -> Any:
    return torch.tensor(values, dtype=dtype)


def rand(*size: int, dtype: Any = torch.float32) -> Any:
    """Floats as a ghost replay has them: without values."""
    return torch.empty(size, device="meta", dtype=dtype)


@dataclass(frozen=True)
class Case:
    """A call with one fault: what must be found, and the causes that are right for it."""

    call: Callable[[], object]
    op: str
    argument: str
    bad: tuple[Any, ...]
    causes: str


def labels(call: Callable[[], object], bad: Any, op: str = "nll_loss") -> Case:
    return Case(call, op, "target", (bad,), "label_ge_num_classes label_negative_sentinel")


def mask(call: Callable[[], object]) -> Case:
    return Case(call, "nll_loss", "target", (255,), "mask_value_unmapped")


def table(call: Callable[[], object], op: str = "embedding") -> Case:
    return Case(call, op, "input", (10,), "vocab_or_table_too_small category_id_ge_table")


def index(call: Callable[[], object], op: str, argument: str = "index", bad: Any = 5) -> Case:
    causes = "negative_index" if bad < 0 else "index_out_of_bounds index_internal_oob"
    return Case(call, op, argument, (bad,), causes)


def argument(call: Callable[[], object], op: str, name: str, *bad: Any) -> Case:
    return Case(call, op, name, bad, "argument_out_of_range")


def unit(call: Callable[[], object], op: str, name: str, bad: Any = 2.0) -> Case:
    return Case(call, op, name, (bad,), "bce_input_outside_unit")


def draw(bad: Any, samples: int = 1, shown: Any = None) -> Case:
    weights = torch.tensor([bad, 0.0 if bad == 0 else 1.0])
    key = "multinomial_invalid_distribution" if bad == 0 else "multinomial_nan_inf_neg"
    return Case(
        lambda: torch.multinomial(weights, samples, replacement=samples > 1),
        *("multinomial", "input", (bad if shown is None else shown,), key),
    )


def bernoulli() -> Case:
    return unit(lambda: torch.bernoulli(torch.tensor([0.5, 2.0])), "bernoulli", "input")


def many(bad: int) -> Any:
    return torch.cat([torch.zeros(20, dtype=torch.int64), ints(bad)])


def uint8(*values: int) -> Any:
    return ints(*values, dtype=torch.uint8)


def csr(crow: Any, col: Any) -> object:
    size = (*col.shape[:-1], 2, 2)
    return torch.sparse_csr_tensor(crow, col, torch.ones(col.shape), size, check_invariants=True)


def grouped(left: Any, right: Any, *ends: int) -> object:
    offs = ints(*ends, dtype=torch.int32)
    return torch._grouped_mm(left.bfloat16(), right.bfloat16(), offs=offs)


def ragged() -> object:
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    nested[ints(0, 1), ints(2, 1)] = 1.0
    return nested


def unpooled(dims: int, bad: int) -> object:
    shape = (1, 1, *[2] * dims)
    unpool = F.max_unpool2d if dims == 2 else F.max_unpool3d
    positions = torch.zeros(shape, dtype=torch.int64).index_fill_(-1, ints(1), bad)
    return unpool(torch.ones(shape), positions, 2)


def fractional(dims: int, bad: int) -> object:
    pooled, whole = (1, 1, *[2] * dims), (1, 1, *[4] * dims)
    backward = getattr(aten, f"fractional_max_pool{dims}d_backward")
    positions = torch.zeros(pooled, dtype=torch.int64).index_fill_(-1, ints(1), bad)
    return backward(torch.ones(pooled), torch.ones(whole), [2] * dims, [2] * dims, positions)


def bag(*offsets: int, **options: Any) -> object:
    return F.embedding_bag(ints(1, 2, 3, 4), rand(10, 4), ints(*offsets), **options)


def segments(reduce: str) -> object:
    return torch.segment_reduce(torch.ones(3), reduce, lengths=ints(4, -1), unsafe=True)


def checked(condition: Any) -> Case:
    return argument(
        lambda: torch._assert_async(condition, "too large"), "_assert_async", "input", 0
    )


NLL_2D = (2, 5, 4, 4)
LOOKUP = table(lambda: F.embedding(ints(0, 10), rand(10, 4)))
SCATTER_ADD = index(
    lambda: torch.zeros(5, 4).scatter_add_(0, ints([0, 5]), torch.ones(1, 2)), "scatter_add_"
)
ONE_HOT = Case(
    lambda: F.one_hot(ints(0, 5), 5), "one_hot", "input", (5,), "one_hot_class_ge_num_classes"
)
OFFSETS = argument(lambda: bag(0, 3, 1), "embedding_bag", "offsets", 3)
BAG = table(lambda: F.embedding_bag(ints(1, 10), rand(10, 4), ints(0)), "embedding_bag")
INDEX = index(lambda: rand(5, 4)[ints(0, 5)], "index", "indices")
REPEATS = argument(
    lambda: torch.repeat_interleave(torch.arange(3), ints(1, -1, 2)),
    *("repeat_interleave", "repeats", -1),
)

CASES: dict[str, Case] = {
    # ---- labels
    "nll_target": labels(lambda: F.cross_entropy(rand(4, 10), ints(0, 1, 2, 10)), 10),
    "nll_target_none": labels(
        lambda: F.cross_entropy(rand(4, 10), ints(0, 1, 2, 10), reduction="none"), 10
    ),
    "nll_target_uint8": labels(lambda: F.nll_loss(rand(3, 10), uint8(0, 1, 10)), 10),
    "nll_target_none_uint8": labels(
        lambda: F.nll_loss(rand(3, 10), uint8(0, 1, 10), reduction="none"), 10
    ),
    "nll2d_target": mask(lambda: F.cross_entropy(rand(*NLL_2D), torch.full((2, 4, 4), 255))),
    "nll2d_target_none": mask(
        lambda: F.cross_entropy(rand(*NLL_2D), torch.full((2, 4, 4), 255), reduction="none")
    ),
    "multi_margin_target": labels(
        lambda: F.multi_margin_loss(rand(3, 4), ints(0, 1, 4)), 4, "multi_margin_loss"
    ),
    # ---- tables
    "index_select_small": LOOKUP,
    "vectorized_gather": table(lambda: F.embedding(many(10), rand(10, 4))),
    "embedding_renorm": table(lambda: F.embedding(ints(0, 10), rand(10, 4), max_norm=1.0)),
    "embedding_renorm_wrap": table(lambda: F.embedding(ints(0, 10), rand(10, 4), max_norm=1.0)),
    "embedding_bag_index": BAG,
    "embedding_bag_index_2_1": BAG,
    "embedding_bag_index_pr140791": BAG,
    "embedding_bag_offsets": OFFSETS,
    # ---- indexing
    "index_kernel": INDEX,
    "index_kernel_2_0": INDEX,
    "index_fill": index(lambda: torch.zeros(5).index_fill_(0, ints(5), 1.0), "index_fill_"),
    "index_copy": index(
        lambda: torch.zeros(5).index_copy_(0, ints(5), torch.ones(1)), "index_copy_"
    ),
    "take_put": index(lambda: torch.take(rand(5), ints(0, -6)), "take", bad=-6),
    "masked_scatter": argument(
        lambda: torch.zeros(3).masked_scatter_(torch.ones(3) > 0, torch.ones(2)),
        *("masked_scatter_", "mask", 1),
    ),
    "index_add": index(lambda: torch.zeros(5).index_add_(0, ints(5), torch.ones(1)), "index_add_"),
    "index_select_sparse": index(
        lambda: torch.eye(5).to_sparse().index_select(0, ints(5)), "index_select"
    ),
    "index_put_accumulate": index(
        lambda: torch.zeros(5).index_put_((ints(5),), torch.ones(1), accumulate=True),
        *("index_put_", "indices"),
    ),
    "njt_ragged_index": argument(ragged, "index_put_", "indices", 2),
    # ---- gather and scatter
    "scatter_gather": index(lambda: torch.gather(rand(4, 5), 1, ints([5])), "gather"),
    "scatter_fill": index(lambda: torch.zeros(1, 5).scatter_(1, ints([5]), 1.0), "scatter_"),
    "one_hot_compiled_high": ONE_HOT,
    "one_hot_compiled_negative": Case(
        lambda: F.one_hot(ints(0, -1), 5), "one_hot", "input", (-1,), "label_negative_sentinel"
    ),
    "vectorized_scatter_add": SCATTER_ADD,
    "tma_scatter_add": SCATTER_ADD,
    "max_unpool2d": index(lambda: unpooled(2, 16), "max_unpool2d", "indices", 16),
    "max_unpool3d": index(lambda: unpooled(3, 64), "max_unpool3d", "indices", 64),
    "fractional2d_index": index(lambda: fractional(2, -1), "fractional_max_pool2d", "indices", -1),
    "fractional2d_high": index(lambda: fractional(2, 16), "fractional_max_pool2d", "indices", 16),
    "fractional3d_index": index(lambda: fractional(3, -1), "fractional_max_pool3d", "indices", -1),
    "fractional3d_high": index(lambda: fractional(3, 64), "fractional_max_pool3d", "indices", 64),
    # ---- sizes and offsets
    "repeat_output_size": argument(
        lambda: torch.repeat_interleave(torch.arange(3), ints(1, 1, 2), output_size=7),
        *("repeat_interleave", "repeats", 2),
    ),
    "repeat_negative": REPEATS,
    "repeat_negative_old": REPEATS,
    "segment_reduce_lengths": argument(lambda: segments("sum"), "segment_reduce", "lengths", -1),
    "segment_reduce_lengths_mean": argument(
        lambda: segments("mean"), "segment_reduce", "lengths", -1
    ),
    "sparse_compressed_invariants": argument(
        lambda: csr(ints(0, 1, 2), ints(0, 2)), "sparse_csr_tensor", "col_indices", 2
    ),
    "grouped_mm_delta": argument(
        lambda: grouped(rand(32, 16), rand(2, 16, 16), 16, 8), "grouped_mm", "offs", 8
    ),
    "grouped_mm_align_in": argument(
        lambda: grouped(rand(16, 32), rand(32, 16), 3, 32), "grouped_mm", "offs", 3
    ),
    "grouped_mm_align_out": argument(
        lambda: grouped(rand(2, 16, 16), rand(32, 16).t(), 3, 32), "grouped_mm", "offs", 3
    ),
    "grouped_mm_offset_a": argument(
        lambda: grouped(rand(32, 16), rand(2, 16, 16), 16, 64), "grouped_mm", "offs", 64
    ),
    "grouped_mm_offset_b": argument(
        lambda: grouped(rand(2, 16, 16), rand(32, 16).t(), 16, 64), "grouped_mm", "offs", 64
    ),
    "grouped_mm_offset_k": argument(
        lambda: grouped(rand(16, 32), rand(32, 16), 16, 64), "grouped_mm", "offs", 64
    ),
    # ---- values
    "bce_input": unit(
        lambda: F.binary_cross_entropy(torch.tensor([2.0]), torch.ones(1)),
        *("binary_cross_entropy", "input"),
    ),
    "bce_target": unit(
        lambda: F.binary_cross_entropy(torch.ones(1), torch.tensor([1.5])),
        *("binary_cross_entropy", "target", 1.5),
    ),
    "bernoulli_p1": bernoulli(),
    "bernoulli_p2": bernoulli(),
    "bernoulli_p3": bernoulli(),
    "bernoulli_p4": bernoulli(),
    "poisson": argument(lambda: torch.poisson(torch.tensor([1.0, -1.0])), "poisson", "input", -1),
    "normal_std_async": argument(
        lambda: torch.normal(torch.zeros(2), torch.tensor([1.0, -1.0])), "normal", "std", -1
    ),
    "multinomial_async": draw(-1.0),
    "multinomial_async_sum": draw(0.0),
    "multinomial_negative": draw(-1.0, samples=2),
    "multinomial_nan": draw(NAN, samples=2, shown="nan"),
    "multinomial_inf": draw(INF, samples=2, shown="inf"),
    "multinomial_sum": draw(0.0, samples=2),
    "multinomial_cumdist": draw(0.0, samples=2),
    # ---- the user's own checks
    "assert_async_msg": checked(torch.tensor(False)),
    "assert_async_old": checked(torch.tensor(0.0)),
    "assert_async_old_cfloat": checked(torch.tensor(0j, dtype=torch.complex64)),
    "assert_async_old_cdouble": checked(torch.tensor(0j, dtype=torch.complex128)),
    "inductor_assert_async": checked(torch.tensor(False)),
    # ---- torch.compile: a replay runs the same code without it
    "inductor_bounds": LOOKUP,
    "inductor_bounds_upper": INDEX,
}

# What no replay on the CPU can find, and why.
NOT_FOUND = {
    "inductor_nan": "an option for debugging torch.compile itself; eager code has no such check",
    "triton_user": "the user's own GPU kernel: it does not exist on the CPU",
}
# Out of the promise: several processes, or grouped products of FP8 and FP4.
OUTSIDE = {"nancheck", "splits"}


def reachable() -> list[Entry]:
    return [
        one
        for one in catalogue.entries()
        if one.user_reachable
        and one.family not in OUTSIDE
        and one.folder != "third_party/mslk/include/mslk/gemm/cutlass"
    ]


class Watch(TorchDispatchMode):
    """Keeps the bad arguments of every call, as a replay would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Usage, Bad, Any]] = []

    def look(self, usage: Usage, func: Any) -> None:
        bad = None if usage.tensor.is_meta else indexing.bad(usage)
        if bad is not None:
            self.found.append((usage, bad, func))

    def on_usage(self, usage: Usage) -> None:
        self.look(usage, usage.op)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for usage in indexing.usages(func, args, kwargs or {}):
            self.look(usage, func)
        if self.found:
            raise Found  # as a replay: nothing runs on bad values
        return func(*args, **(kwargs or {}))


class Found(Exception):
    """A fault was seen."""


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    watch = Watch()
    undo = indexing.wrap_functions(watch.on_usage)
    try:
        # `one_hot` checks on the host once it was seen
        with contextlib.suppress(Found, RuntimeError), watch:
            yield watch
    finally:
        undo()


def observed(usage: Usage, bad: Bad, func: Any) -> Observed:
    """What the worker hands to the rules, without names and sources."""
    values = usage.tensor
    real = values.numel() and not values.is_complex()
    low, high = (v.item() for v in torch.aminmax(values.float())) if real else (None, None)
    strange = any(isinstance(value, str) for value in bad.values)
    return Observed(
        finding=Finding(
            op=usage.op,
            aten_op=str(func),
            argument=usage.argument,
            bad_values=bad.values,
            distinct_bad=bad.distinct,
            bad_count=bad.count,
            total=bad.total,
            positions=bad.positions,
            bound=usage.bound,
            margin=bad.margin,
            location=Place(line=1, source="x"),
            table=usage.table,
        ),
        dtype=str(values.dtype).removeprefix("torch."),
        shape=tuple(values.shape),
        values=Values(
            count=values.numel(),
            minimum=None if strange else low,
            maximum=None if strange else high,
        ),
        input_shape=tuple(usage.size_of.shape) if usage.size_of is not None else (),
    )


def recognised(known: Entry) -> bool:
    """The line that the driver prints for it names this entry."""
    (line,) = catalogue.parse(catalogue.driver_line(known.id))
    return known in line.candidates


def found(id: str) -> tuple[Usage, Bad, Any] | None:
    """The first fault in the planted call."""
    with watching() as watch:
        CASES[id].call()
    return watch.found[0] if watch.found else None


@pytest.mark.parametrize("known", reachable(), ids=lambda known: known.id)
def test_the_driver_line_is_recognised(known: Entry) -> None:
    assert recognised(known)
    words = " ".join(catalogue.explain(catalogue.driver_line(known.id)).split())
    assert known.explanation in words  # in full, or as another meaning of the same text
    shown = known.rule in words
    assert shown or "The same text can also mean" in words
    assert not shown or known.argument is None or f"`{known.argument}`" in words


def test_every_reachable_assert_has_a_planted_fault_or_a_reason() -> None:
    assert {known.id for known in reachable()} == {*CASES, *NOT_FOUND}


@pytest.mark.parametrize("id", CASES)
def test_the_planted_fault_is_found_by_its_value_and_explained(id: str) -> None:
    case, fault = CASES[id], found(id)
    assert fault is not None
    usage, bad, _ = fault
    assert (usage.op, usage.argument) == (case.op, case.argument)
    assert bad.values == case.bad
    printed = catalogue.fold(catalogue.parse(catalogue.driver_line(id)))
    assert diagnosis.contradiction(usage.op, catalogue.operators_of(printed)) is None

    cause, fixes = diagnosis.diagnose(observed(*fault))
    assert cause.key in case.causes.split()
    assert fixes
    sentence = diagnosis.headline(observed(*fault), cause)
    assert "None" not in " ".join((sentence, cause.explanation, *cause.because))


@pytest.mark.parametrize("id", CASES)
def test_a_repaired_call_has_no_fault(id: str) -> None:
    seen: list[bool] = []

    class Repair(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            usages = indexing.usages(func, args, kwargs)
            if any(not u.tensor.is_meta and indexing.bad(u) for u in usages):
                mended = indexing.repaired(func, args, kwargs, usages)
                assert mended is not None
                again = indexing.usages(func, *mended)
                assert [u.argument for u in again if not u.tensor.is_meta and indexing.bad(u)] == []
                seen.append(True)
                raise Found
            return func(*args, **kwargs)

    with contextlib.suppress(Found, RuntimeError), Repair():
        CASES[id].call()
    assert seen or id.startswith("one_hot"), "one_hot checks on the host"


# ---- the neighbours of what was added last: valid calls


VALID: dict[str, Callable[[], object]] = {
    "repeats that fit": lambda: torch.repeat_interleave(ints(1, 1, 2), output_size=4),
    "sorted rows": lambda: csr(ints(0, 2, 2), ints(0, 1)),
    "equal columns in two rows": lambda: csr(ints(0, 1, 2), ints(1, 1)),
    "a batch of csr": lambda: csr(ints([0, 1, 2], [0, 2, 2]), ints([1, 0], [0, 1])),
    "unchecked": lambda: torch.sparse_csr_tensor(ints(0, 1, 2), ints(0, 9), torch.ones(2), (2, 2)),
    "blocks": lambda: torch.sparse_bsr_tensor(
        ints(0, 1, 2), ints(0, 1), torch.ones(2, 3, 2), (6, 4), check_invariants=True
    ),
    "columns": lambda: torch.sparse_csc_tensor(
        ints(0, 1, 2, 2), ints(4, 0), torch.ones(2), (5, 3), check_invariants=True
    ),
    "last group": lambda: grouped(rand(16, 32), rand(32, 16), 8, 27),
    "rows of any number": lambda: grouped(rand(32, 16), rand(2, 16, 16), 3, 32),
    "pooling": lambda: fractional(2, 15),
    "a full row": lambda: torch.nested.nested_tensor(
        [torch.zeros(2), torch.zeros(4)], layout=torch.jagged
    ).index_put_((ints(0, 1), ints(1, 3)), torch.ones(())),
}


@pytest.mark.parametrize("name", VALID)
def test_valid_neighbours_are_left(name: str) -> None:
    with watching() as watch:
        VALID[name]()
    assert watch.found == []


@pytest.mark.parametrize(
    ("crow", "col", "argument", "bad"),
    [
        (ints(1, 1, 2), ints(0, 1), "crow_indices", (1,)),
        (ints(0, 1, 3), ints(0, 1), "crow_indices", (3,)),
        (ints(0, 2, 1), ints(0, 1), "crow_indices", (1,)),
        (ints(0, 2, 2), ints(1, 0), "col_indices", (0,)),
        (ints(0, 2, 2), ints(1, 1), "col_indices", (1,)),
        (ints(0, 1, 2), ints(-1, 1), "col_indices", (-1,)),
    ],
)
def test_each_invariant_of_a_sparse_tensor(crow: Any, col: Any, argument: str, bad: Any) -> None:
    with pytest.raises(RuntimeError, match="is not satisfied"):
        csr(crow, col)
    with watching() as watch:
        csr(crow, col)
    assert [(u.argument, b.values) for u, b, _ in watch.found] == [(argument, bad)]
    with watching() as watch:
        torch._validate_sparse_csr_tensor_args(crow, col, torch.ones(2), (2, 2))
    assert [(u.argument, b.values) for u, b, _ in watch.found] == [(argument, bad)]


@pytest.mark.parametrize(("capability", "faulty"), [((8, 0), False), ((9, 0), True)])
def test_alignment_of_groups_is_wanted_by_newer_gpus_only(
    capability: tuple[int, int], faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (found("grouped_mm_align_in") is not None) is faulty
    assert found("grouped_mm_delta") is not None


# ---- in a worker, as the host's cell has it: on a GPU that is not there

REPLAYED = {
    "embedding_bag_offsets": "F.embedding_bag(ints(1, 2, 3, 4), rand(10, 4), ints(0, 3, 1))",
    "masked_scatter": "rand(3).masked_scatter_(ints(1, 1, 1) > 0, rand(2))",
    "repeat_output_size": "torch.repeat_interleave(rand(3), ints(1, 1, 2), output_size=7)",
    "segment_reduce_lengths": """
        torch.segment_reduce(rand(3), "sum", lengths=ints(4, -1), unsafe=True)""",
    "sparse_compressed_invariants": """
        rows, columns = ints(0, 1, 2), ints(0, 2)
        torch.sparse_csr_tensor(rows, columns, rand(2), (2, 2), check_invariants=True)""",
    "grouped_mm_align_in": """
        offs = ints(3, 32, dtype=torch.int32)
        torch._grouped_mm(rand(16, 32).bfloat16(), rand(32, 16).bfloat16(), offs=offs)""",
    "poisson": "torch.poisson(torch.tensor([1.0, -1.0], device='cuda'))",
    "assert_async_msg": "torch._assert_async(ints(3) > 4, 'too large')",
    "multinomial_sum": """
        torch.multinomial(torch.zeros(2, device="cuda"), 2, replacement=True)""",
}
PRELUDE = """
import torch
from torch.nn import functional as F
def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device="cuda")
def rand(*size):
    return torch.randn(*size, device="cuda")
"""


def test_a_replay_finds_and_explains_what_is_no_plain_index(tmp_path: Path) -> None:
    snippets = {id: PRELUDE + textwrap.dedent(code) for id, code in REPLAYED.items()}
    seen = replays.run_each(
        snippets, tmp_path / "replay", engine="cpu", real_floats=True, capability=(9, 0)
    )
    for id, case in ((id, CASES[id]) for id in REPLAYED):
        fault = seen[id].observed[0]
        assert (fault.finding.op, fault.finding.argument) == (case.op, case.argument), id
        assert fault.finding.bad_values == case.bad, id
        cause, _ = diagnosis.diagnose(fault)
        assert cause.key in case.causes.split(), id


# ---- the table


def sites_of(known: Entry) -> list[tuple[str, int, str]]:
    """Its (file, line, text) in torch 2.14.1; all messages of `_assert_async` are one text."""
    text = "" if known.file == "TensorCompare.cu" else known.assertion
    return [(known.file, line, text) for line in known.lines]


def page() -> str:
    """docs/coverage.md: what the tests above have seen."""
    rows = []
    sites: dict[tuple[str, int, str], tuple[bool, ...]] = {}
    for known in reachable():
        fault = found(known.id) if known.id in CASES else None
        key = diagnosis.diagnose(observed(*fault))[0].key if fault else None
        right = fault is not None and key in CASES[known.id].causes.split()
        seen = (recognised(known), fault is not None, right)
        for site in sites_of(known):
            before = sites.get(site, (True, True, True))
            sites[site] = tuple(old and new for old, new in zip(before, seen, strict=True))
        told = f"{fault[0].op}, `{fault[0].argument}`" if fault else NOT_FOUND[known.id]
        lines = ", ".join(map(str, known.lines)) or "other releases"
        marks = " | ".join("yes" if yes else "no" for yes in seen)
        cause = f"`{key}`" if key else "-"
        rows.append(f"| `{known.id}` | {known.file} | {lines} | {marks} | {told} | {cause} |")
    counts = [len(sites), *(sum(column) for column in zip(*sites.values(), strict=True))]
    return "\n".join(
        (
            "# What is recognised, found and explained",
            "",
            "Made by `python tests/test_coverage.py`, which plants one fault for each assert that "
            "a user can reach in one process. Asserts for the same mistake share it.",
            "",
            "A site is one line with one text in the GPU code of torch 2.14.1; the messages of "
            "`_assert_async` share three sites. Collectives, NVSHMEM and grouped products of FP8 "
            "and FP4 are recognised and explained from their line, but not replayed.",
            "",
            "| sites | recognised from the line | found by value | explained, right cause |",
            "|---|---|---|---|",
            f"| {' | '.join(map(str, counts))} |",
            "",
            "| assert | file | lines in 2.14.1 | recognised | found | explained | operator and "
            "argument, or why not | cause |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        )
    )


def test_all_73_sites_are_in_the_cases() -> None:
    assert len({site for known in reachable() for site in sites_of(known)}) == 73


def test_the_page_shows_what_was_seen() -> None:
    assert PAGE.read_text() == page(), "run `python tests/test_coverage.py`"


if __name__ == "__main__":
    PAGE.write_text(page())
