"""The operator table against torch's CPU kernels, and against CUDA's rules where they differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nb_assertdoc import catalogue, indexing
from nb_assertdoc.indexing import Bad, Usage
from nb_assertdoc.model import Bound

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")
Call = Callable[[], object]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def ints(*values: Any, dtype: Any = torch.int64) -> Any:
    return torch.tensor(values, dtype=dtype)


class Watch(TorchDispatchMode):
    """Notes every usage and every bad one; with `repair`, lets the call go on with valid values."""

    def __init__(self, repair: bool = False) -> None:
        super().__init__()
        self.usages: list[Usage] = []
        self.bad: list[tuple[Usage, Bad]] = []
        self.repair, self.hopeless = repair, False

    def note(self, usage: Usage) -> None:
        self.usages.append(usage)
        found = None if usage.tensor.is_meta else indexing.bad(usage)
        if found is not None:
            self.bad.append((usage, found))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = indexing.usages(func, args, kwargs)
        for usage in found:
            self.note(usage)
        if self.repair and found:
            mended = indexing.repaired(func, args, kwargs, found)
            if mended is None:
                self.hopeless = True
            else:
                args, kwargs = mended
        return func(*args, **kwargs)


def watched(call: Call) -> Watch:
    """Run `call`, whatever it raises."""
    with Watch() as watch, contextlib.suppress(IndexError, RuntimeError, NotImplementedError):
        call()
    return watch


@contextlib.contextmanager
def wrapped(watch: Watch) -> Iterator[None]:
    def on_usage(usage: Usage) -> Usage | None:
        watch.note(usage)
        return None

    undo = indexing.wrap_functions(on_usage)
    try:
        yield
    finally:
        undo()


def raises(call: Call) -> bool:
    try:
        call()
    except (IndexError, RuntimeError):
        return True
    return False


# ---- generated calls, one family each: where the CPU checks, it and the table must agree

Draw = st.DataObject
sizes = st.integers(1, 5)


def layout(data: Draw, tensor: Any) -> Any:
    """The same kind of tensor in another memory layout."""
    kind = data.draw(st.sampled_from(["plain", "transposed", "strided", "expanded"]))
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "strided":
        return torch.stack([tensor, tensor], -1)[..., 0]
    if kind == "expanded" and tensor.dim() and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    return tensor


def indices(data: Draw, shape: Any, low: int, high: int, dtype: Any = torch.int64) -> Any:
    """Values in and, half of the time, around [low, high)."""
    slack = data.draw(st.sampled_from([0, 0, 1, 7]))
    if high + slack <= low - slack:
        slack = 1
    count = torch.Size(shape).numel()
    values = st.integers(low - slack, high + slack - 1)
    if dtype == torch.uint8:
        values = st.integers(max(0, low - slack), min(255, high + slack))
    drawn = data.draw(st.lists(values, min_size=count, max_size=count))
    return layout(data, torch.tensor(drawn, dtype=dtype).reshape(shape))


def floats(data: Draw, shape: Any, choices: tuple[float, ...]) -> Any:
    count = torch.Size(shape).numel()
    usual = st.sampled_from([0.0, 0.25, 1.0])
    values = data.draw(st.sampled_from([usual, usual | st.sampled_from(choices)]))
    drawn = data.draw(st.lists(values, min_size=count, max_size=count))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    return layout(data, torch.tensor(drawn, dtype=dtype).reshape(shape))


def shapes(data: Draw, least: int = 0, most: int = 3, size: Any = sizes) -> tuple[int, ...]:
    return tuple(data.draw(st.lists(size, min_size=least, max_size=most)))


def loss(data: Draw) -> Call:
    classes, ignore = data.draw(sizes), data.draw(st.sampled_from([-100, -1, 0, 2, 255]))
    tail = data.draw(st.sampled_from([None, (), (), (3,), (2, 3), (1, 2, 2)]))
    rows = () if tail is None else (data.draw(st.integers(0, 4)),)
    spatial = tail or ()
    dtype = torch.int64 if spatial else data.draw(st.sampled_from([torch.int64, torch.uint8]))
    scores = layout(data, torch.randn(*rows, classes, *spatial))
    target = indices(data, (*rows, *spatial), 0, classes, dtype)
    if len(spatial) != 2:
        target = target.contiguous()  # other layouts are refused on the host
    if data.draw(st.booleans()) and target.numel() and not (dtype == torch.uint8 and ignore < 0):
        target = target.clone()
        target[(0,) * target.dim()] = ignore
    options: dict[str, Any] = {
        "ignore_index": ignore,
        "reduction": data.draw(st.sampled_from(["none", "mean", "sum"])),
        "weight": torch.rand(classes) if data.draw(st.booleans()) else None,
    }
    if data.draw(st.booleans()):
        return lambda: F.nll_loss(scores, target, **options)
    if dtype == torch.int64:
        options["label_smoothing"] = data.draw(st.sampled_from([0.0, 0.1]))
    return lambda: F.cross_entropy(scores, target, **options)


def multi_margin(data: Draw) -> Call:
    rows, classes = data.draw(sizes), data.draw(sizes)
    target = indices(data, (rows,), 0, classes)
    return lambda: F.multi_margin_loss(torch.randn(rows, classes), target)


def multilabel_margin(data: Draw) -> Call:
    shape = shapes(data, 1, 2)
    target = indices(data, shape, 0, shape[-1]).abs()  # CUDA does not read past a negative one
    return lambda: F.multilabel_margin_loss(torch.randn(shape), target)


def embedding(data: Draw) -> Call:
    rows = data.draw(st.integers(0, 5))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
    index = indices(data, shapes(data, size=st.integers(0, 4)), 0, rows, dtype)
    table = layout(data, torch.randn(rows, data.draw(sizes)))
    padding = data.draw(st.sampled_from([None, 0])) if rows else None
    return lambda: F.embedding(index, table, padding_idx=padding)


def embedding_renorm(data: Draw) -> Call:
    rows = data.draw(sizes)
    index = indices(data, shapes(data), 0, rows)
    table = torch.randn(rows, 3)
    return lambda: F.embedding(index, table.clone(), max_norm=1.0)


def embedding_bag(data: Draw) -> Call:
    rows, count = data.draw(sizes), data.draw(st.integers(0, 6))
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
    table = torch.randn(rows, 3, dtype=data.draw(st.sampled_from([torch.float32, torch.float64])))
    if data.draw(st.booleans()):
        index = indices(data, (data.draw(sizes), data.draw(sizes)), 0, rows, dtype)
        return lambda: F.embedding_bag(index, table, mode=mode)
    index = indices(data, (count,), 0, rows, dtype)
    last = data.draw(st.booleans())
    inner = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
    offsets = torch.tensor([0, *inner, *([count] if last else [])], dtype=dtype)
    return lambda: F.embedding_bag(index, table, offsets, mode=mode, include_last_offset=last)


def key(data: Draw, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index of `x[...]`: slices, index tensors that broadcast, masks."""
    common = shapes(data, 1, 2, st.integers(0, 3))
    parts: list[Any] = []
    for size in shape:
        kind = data.draw(st.sampled_from(["slice", "index", "row", "mask"]))
        if kind == "index":
            parts.append(indices(data, common, -size, size))
        elif kind == "row":
            dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
            parts.append(indices(data, (1,), -size, size, dtype))
        elif kind == "mask":
            chosen = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
            parts.append(torch.tensor(chosen, dtype=torch.bool))
        else:
            parts.append(slice(None))
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    selected = [(int(t.sum()),) if t.dtype == torch.bool else t.shape for t in tensors]
    try:
        torch.broadcast_shapes(*selected)
    except RuntimeError:
        assume(False)  # refused on the host
    return tuple(parts)


def indexed(data: Draw) -> Call:
    shape = shapes(data, 1, 3, st.integers(0, 4))
    x, where = layout(data, torch.randn(shape)), key(data, shape)
    return lambda: x[where]


def assigned(data: Draw) -> Call:
    shape = shapes(data, 1, 3)
    x, where = torch.randn(shape), key(data, shape)
    if data.draw(st.booleans()):
        return lambda: x.clone().__setitem__(where, 1.0)
    tensors = [None if isinstance(part, slice) else part for part in where]
    assume(any(part is not None for part in tensors))
    accumulate = data.draw(st.booleans())
    return lambda: aten.index_put_.default(x.clone(), tensors, torch.tensor(1.0), accumulate)


def along(data: Draw) -> Call:
    shape = shapes(data, 0, 3)
    dim = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    size = shape[dim] if shape else 1
    count = data.draw(st.integers(0, 4)) if shape else 1
    x = layout(data, torch.randn(shape))
    index = indices(data, (count,), 0, size)
    source = torch.randn(shape)
    if shape:
        source = torch.randn([count if i == dim % len(shape) else n for i, n in enumerate(shape)])
    fill = indices(data, (count,), -size, size)
    return data.draw(
        st.sampled_from(
            [
                lambda: x.index_select(dim, index),
                lambda: x.index_select(dim, index.int()),
                lambda: x.index_add(dim, index, source),
                lambda: x.clone().index_add_(dim, index.int(), source),
                lambda: x.index_copy(dim, index, source),
                lambda: x.clone().index_copy_(dim, index, source),
                lambda: x.index_fill(dim, fill, 1.0),
                lambda: x.clone().index_fill_(dim, fill, torch.tensor(2.0)),
                lambda: x.index_reduce(dim, index, source, "prod"),
                lambda: x.clone().index_reduce_(dim, index, source, "amax"),
            ]
        )
    )


def gathered(data: Draw) -> Call:
    shape = shapes(data, 0, 3)
    dim = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    size = shape[dim] if shape else 1
    index = indices(data, [data.draw(st.integers(0, n)) for n in shape], 0, size)
    x, source = layout(data, torch.randn(shape)), torch.randn(shape)
    return data.draw(
        st.sampled_from(
            [
                lambda: torch.gather(x, dim, index),
                lambda: x.scatter(dim, index, source),
                lambda: x.clone().scatter_(dim, index, 1.0),
                lambda: x.clone().scatter_(dim, index, source, reduce="add"),
                lambda: x.clone().scatter_(dim, index, 2.0, reduce="multiply"),
                lambda: x.scatter_add(dim, index, source),
                lambda: x.clone().scatter_add_(dim, index, source),
                lambda: x.scatter_reduce(dim, index, source, "amax"),
                lambda: x.clone().scatter_reduce_(dim, index, source, "sum", include_self=False),
            ]
        )
    )


def flat(data: Draw) -> Call:
    x = layout(data, torch.randn(shapes(data, 0, 2, st.integers(0, 3))))
    index = indices(data, shapes(data, 0, 2), -x.numel(), x.numel())
    if data.draw(st.booleans()):
        return lambda: torch.take(x, index)
    return lambda: x.clone().put_(index, torch.ones(index.shape))


def unpool(data: Draw) -> Call:
    deep = data.draw(st.booleans())
    shape = (1, 1, 2, 2, 2) if deep else (1, 2, 2)
    index = indices(data, shape, 0, 64 if deep else 16)
    function = F.max_unpool3d if deep else F.max_unpool2d
    return lambda: function(torch.randn(shape), index, 2)


def repeats(data: Draw) -> Call:
    count = data.draw(sizes)
    number = indices(data, (count,), 0, 3)
    return lambda: torch.repeat_interleave(torch.randn(count, 2), number, 0)


def masked_scatter(data: Draw) -> Call:
    shape = shapes(data, 1, 2)
    mask = torch.rand(shape) < 0.5
    source = torch.randn(data.draw(st.integers(0, 8)))
    return lambda: torch.zeros(shape).masked_scatter(mask, source)


def probabilities(data: Draw) -> Call:
    shape = shapes(data, 0, 2)
    p = floats(data, shape, (-0.5, 1.5, NAN, INF, -INF))
    target = floats(data, shape, (-0.5, 1.5)).to(p.dtype)
    return data.draw(
        st.sampled_from(
            [
                lambda: F.binary_cross_entropy(p, target),
                lambda: F.binary_cross_entropy(
                    p, target, weight=torch.ones_like(p), reduction="none"
                ),
                lambda: torch.bernoulli(p),
                lambda: torch.empty(shape).bernoulli_(p),
            ]
        )
    )


def rates(data: Draw) -> Call:
    rate = floats(data, shapes(data, 1, 2), (-0.5, 3.0, NAN))
    return data.draw(
        st.sampled_from(
            [
                lambda: torch.poisson(rate),
                lambda: torch.normal(0.0, rate),
                lambda: torch.normal(torch.zeros_like(rate), rate),
            ]
        )
    )


def multinomial(data: Draw) -> Call:
    p = floats(data, shapes(data, 1, 2), (-1.0, -0.25, NAN, INF))
    replacement = data.draw(st.booleans())
    samples = data.draw(st.integers(1, 4 if replacement else p.shape[-1]))
    return lambda: torch.multinomial(p, samples, replacement)


def asserted(data: Draw) -> Call:
    condition = torch.tensor(data.draw(st.sampled_from([0.0, 1.0, NAN])))
    return lambda: torch._assert_async(condition, "no")


FAMILIES = [
    loss,
    multi_margin,
    multilabel_margin,
    embedding,
    embedding_renorm,
    embedding_bag,
    indexed,
    assigned,
    along,
    gathered,
    flat,
    unpool,
    repeats,
    masked_scatter,
    probabilities,
    rates,
    multinomial,
    asserted,
]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_fault_exactly_where_the_cpu_raises(family: Callable[[Draw], Call], data: Draw) -> None:
    call = family(data)
    watch = watched(call)
    assert bool(watch.bad) == raises(call), watch.usages
    for usage, found in watch.bad:
        mask = usage.rule(usage.tensor)
        assert mask.shape == usage.tensor.shape
        assert found.count == int(mask.sum()) == len(found.positions)
        assert all(bool(mask[position]) for position in found.positions)
        assert found.total == usage.tensor.numel()
    with Watch(repair=True) as second, contextlib.suppress(IndexError):
        try:
            call()
        except (IndexError, RuntimeError):
            assert second.hopeless  # nothing is valid: an empty table


# ---- what is told, by hand-made examples


def only(call: Call) -> tuple[Usage, Bad]:
    watch = watched(call)
    assert len(watch.bad) == 1
    return watch.bad[0]


def test_labels() -> None:
    usage, found = only(
        lambda: F.cross_entropy(torch.randn(2, 5, 3), ints([5, 0, -1], [-100, 7, 5]))
    )
    assert (usage.op, usage.argument, usage.table) == ("nll_loss", "target", "num_classes=5")
    assert indexing.public_name(usage.op, ["train", "cross_entropy"]) == "cross_entropy"
    assert indexing.public_name(usage.op, ["train", "nll_loss"]) == "nll_loss"
    assert usage.bound == Bound(low=0, high=5, ignore=-100)
    assert found.values == (-1, 5, 7)
    assert (found.distinct, found.count, found.total, found.margin) == (3, 4, 6, 3.0)
    assert found.positions == ((0, 0, 0), (0, 0, 2), (1, 0, 1), (1, 0, 2))  # as the kernel sees it
    assert indexing.assert_site(usage) == "nll2d_target"
    usage, _ = only(lambda: F.nll_loss(torch.randn(2, 3), ints(0, 9), reduction="none"))
    assert indexing.assert_site(usage) == "nll_target_none"


def test_probabilities_as_targets_have_no_bound() -> None:
    watch = watched(lambda: F.cross_entropy(torch.randn(2, 3), torch.full((2, 3), 7.0)))
    assert watch.usages == []


def test_embedding() -> None:
    table = nn.Embedding(4, 2)
    usage, found = only(lambda: table(ints([0, 4], [-1, 3])))
    assert (usage.op, usage.argument, usage.table) == ("embedding", "input", "num_embeddings=4")
    assert usage.bound == Bound(low=0, high=4)
    assert usage.size_of is not None
    assert usage.size_of.shape == (4, 2)
    assert (found.values, found.positions, found.margin) == ((-1, 4), ((0, 1), (1, 0)), 1.0)
    assert indexing.assert_site(usage) == "index_select_small"
    usage, _ = only(lambda: table(torch.full((20,), 4)))
    assert indexing.assert_site(usage) == "scatter_gather"  # rows of 8 bytes are not aligned
    usage, _ = only(lambda: nn.Embedding(4, 4)(torch.full((20,), 4)))
    assert indexing.assert_site(usage) == "vectorized_gather"


def test_several_index_tensors_have_a_dimension_each() -> None:
    x = torch.randn(4, 2, 5)
    mask = torch.tensor([[True, False]] * 4)
    watch = watched(lambda: x[ints(-4, 4), :, ints(5, -6)])
    told = [(usage.table, usage.bound, found.values) for usage, found in watch.bad]
    assert told == [
        ("size 4 of dimension 0", Bound(low=-4, high=4), (4,)),
        ("size 5 of dimension 2", Bound(low=-5, high=5), (-6, 5)),
    ]
    usage, _ = only(lambda: x[mask, ints(9)])  # the mask stands for two dimensions
    assert (usage.op, usage.table) == ("index", "size 5 of dimension 2")
    assert [found.count for _, found in watched(lambda: x[~mask & mask, ints(9)]).bad] == []
    assert watched(lambda: x[mask]).usages == []
    assert watched(lambda: x[torch.ones(4, dtype=torch.uint8)]).usages == []


def test_assignment() -> None:
    x = torch.zeros(3, 2)
    usage, _ = only(lambda: x.__setitem__((slice(None), ints(2)), 1.0))
    assert (usage.op, usage.argument) == ("index_put_", "indices")
    assert usage.table == "size 2 of dimension 1"
    assert indexing.assert_site(usage) == "index_kernel"
    usage, _ = only(lambda: x.index_put_((ints(3),), torch.ones(1, 2), accumulate=True))
    assert indexing.assert_site(usage) == "index_put_accumulate"


def test_values_that_are_no_json_numbers() -> None:
    p = torch.tensor([[0.5, NAN], [INF, -INF], [2.0, NAN]])
    usage, found = only(lambda: F.binary_cross_entropy(p, torch.ones(3, 2)))
    assert (usage.op, usage.argument) == ("binary_cross_entropy", "input")
    assert found.values == ("-inf", 2.0, "inf", "nan")
    assert (found.distinct, found.count, found.margin) == (4, 5, None)
    _, found = only(lambda: torch.bernoulli(torch.tensor([1.0, 1.25, -0.5])))
    assert (found.values, found.margin) == ((-0.5, 1.25), 0.5)


def test_multinomial() -> None:
    usage, found = only(lambda: torch.multinomial(torch.tensor([[1.0, 2], [0, 0], [3, -1]]), 1))
    assert usage.bound is None
    assert (found.values, found.margin) == ((-1.0, 0.0), 1.0)
    assert found.positions == ((1, 0), (1, 1), (2, 1))
    assert indexing.assert_site(usage) == "multinomial_async"

    def site(values: list[float], samples: int) -> str | None:
        usage, _ = only(lambda: torch.multinomial(torch.tensor(values), samples, True))
        return indexing.assert_site(usage)

    assert site([0.0, 0.0], 1) == "multinomial_async_sum"
    assert site([0.0, 0.0], 2) == "multinomial_sum"
    assert site([NAN, 1.0], 2) == "multinomial_nan"
    assert site([INF, 1.0], 2) == "multinomial_inf"
    assert site([-1.0, 1.0], 2) == "multinomial_negative"


def test_too_few_nonzero_entries_without_replacement_is_no_fault() -> None:
    call = lambda: torch.multinomial(torch.tensor([0.0, 0.0, 1.0]), 2)  # noqa: E731
    assert watched(call).bad == []
    assert not raises(call)


def test_many_bad_values_are_counted_exactly() -> None:
    index = torch.arange(1000).repeat(2)
    _, found = only(lambda: torch.randn(10)[index])
    assert (found.count, found.distinct, found.total) == (1980, 990, 2000)
    assert found.values == tuple(range(10, 266))
    assert found.positions == tuple((i,) for i in range(10, 266))
    assert found.margin == 990.0


def test_wide_integers_and_scalars() -> None:
    _, found = only(lambda: torch.gather(torch.randn(3), 0, ints(2**40, 1)))
    assert found.values == (2**40,)
    _, found = only(lambda: F.nll_loss(torch.randn(2), torch.tensor(2)))
    assert found.positions == ((),)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.bool):
        index = torch.tensor([1, 0], dtype=dtype)
        (usage,) = indexing.usages(aten.gather.default, (torch.randn(1), 0, index), {})
        found = indexing.bad(usage)
        assert found is not None
        assert (found.values, found.positions) == ((1,), ((0,),))


def test_tightest() -> None:
    def tightest(call: Call) -> tuple[Any, float] | None:
        (usage,) = watched(call).usages
        return indexing.tightest(usage)

    table, x = nn.Embedding(10, 2), torch.randn(10)
    assert tightest(lambda: table(ints(3, 9))) == (9, 0.0)
    assert tightest(lambda: table(ints(3, 12, 7))) == (7, 2.0)
    assert tightest(lambda: table(ints(12))) is None
    assert tightest(lambda: x[ints(-9, 5)]) == (-9, 1.0)
    assert tightest(lambda: F.nll_loss(torch.randn(2, 300), ints(5, 255), ignore_index=255)) == (
        5,
        294.0,
    )
    assert tightest(lambda: torch.bernoulli(torch.tensor([0.25, 0.75]))) == (0.75, 0.25)
    assert tightest(lambda: torch.poisson(torch.ones(2))) is None


def test_repair_touches_only_the_bad_entries() -> None:
    x, index = torch.randn(4, 5), ints(-4, 9, 2)
    args = (x, [None, index])
    found = indexing.usages(aten.index.Tensor, args, {})
    repaired = indexing.repaired(aten.index.Tensor, args, {}, found)
    assert repaired is not None
    assert repaired[0][0] is x
    assert repaired[0][1][0] is None
    assert repaired[0][1][1].tolist() == [-4, 4, 2]
    assert index.tolist() == [-4, 9, 2]
    by_name = {"self": torch.randn(3), "dim": 0, "index": ints(5)}
    found = indexing.usages(aten.gather.default, (), by_name)
    repaired = indexing.repaired(aten.gather.default, (), by_name, found)
    assert repaired is not None
    assert repaired[0] == ()
    assert repaired[1]["index"].tolist() == [2]


def test_nothing_is_valid_in_an_empty_table() -> None:
    args = (torch.randn(0, 3), ints(0))
    found = indexing.usages(aten.embedding.default, args, {})
    assert indexing.repaired(aten.embedding.default, args, {}, found) is None


# ---- where CUDA's rule is not the CPU's


def test_ctc_targets_are_checked_though_the_cpu_is_silent() -> None:
    scores = torch.randn(6, 2, 5).log_softmax(2)
    lengths = ints(6, 6)
    padded = ints([1, 5, -1], [2, 3, 4])
    call = lambda: F.ctc_loss(scores, padded, lengths, ints(2, 3))  # noqa: E731
    usage, found = only(call)
    assert not raises(call)
    assert (usage.op, usage.argument, usage.table) == ("ctc_loss", "targets", "num_classes=5")
    assert (found.values, found.positions) == ((5,), ((0, 1),))  # -1 is padding
    assert indexing.assert_site(usage) is None
    _, found = only(lambda: F.ctc_loss(scores, ints(1, 9, 3, 99), (6, 6), (2, 1)))
    assert found.values == (9,)
    repair = Watch(repair=True)
    with repair:
        assert torch.isfinite(call()).all()


def test_offsets_of_an_embedding_bag() -> None:
    table = torch.randn(4, 2)

    def offsets(*values: int, **options: Any) -> list[tuple[str, tuple[Any, ...]]]:
        watch = watched(lambda: F.embedding_bag(ints(0, 1, 2, 3), table, ints(*values), **options))
        return [(usage.argument, found.values) for usage, found in watch.bad]

    assert offsets(0, 3, 2, mode="max") == [("offsets", (3,))]  # accepted by the CPU
    assert offsets(0, 5) == [("offsets", (5,))]
    assert offsets(0, -1, 2) == [("offsets", (-1,))]
    assert offsets(0, 2, 2, 4) == []
    assert offsets(0, 2, 9, include_last_offset=True) == []  # CUDA takes the number of indices
    found = indexing.usages(
        aten._embedding_bag.default, (table, ints(0, 1, 2, 3), ints(0, 3, 2, 9)), {}
    )
    repaired = indexing.repaired(
        aten._embedding_bag.default, (table, ints(0, 1, 2, 3), ints(0, 3, 2, 9)), {}, found
    )
    assert repaired is not None
    assert repaired[0][2].tolist() == [0, 3, 3, 4]


def test_multilabel_labels_after_the_first_negative_one_are_not_read() -> None:
    target = ints([0, -1, 9], [3, -1, 0])
    usage, found = only(lambda: F.multilabel_margin_loss(torch.randn(2, 3), target))
    assert found.positions == ((1, 0),)
    assert indexing.assert_site(usage) is None


def test_nothing_is_launched_for_empty_results() -> None:
    bare = torch.empty(4, 0)
    for call in (
        lambda: bare.index_select(0, ints(9)),
        lambda: F.embedding(ints(9), bare),
        lambda: bare.index_reduce(0, ints(9), torch.empty(1, 0), "prod"),
    ):
        assert watched(call).bad == []


@pytest.mark.skipif(not hasattr(aten, "_grouped_mm"), reason="this torch has no grouped_mm")
def test_grouped_mm() -> None:
    left, right = torch.randn(8, 16), torch.randn(2, 16, 8)

    def bad(offs: Any) -> list[Any]:
        found = indexing.usages(aten._grouped_mm.default, (left, right, offs), {})
        return [(usage.argument, indexing.bad(usage)) for usage in found]

    assert bad(ints(4, 8, dtype=torch.int32)) == [("offs", None)]
    ((_, found),) = bad(ints(9, 4, dtype=torch.int32))
    assert found.values == (4, 9)
    ((_, found),) = bad(ints(6, 4, dtype=torch.int32))
    assert (found.values, found.margin) == ((4,), None)


def test_lengths_of_segment_reduce() -> None:
    args = (torch.randn(4), "sum")  # run on the CPU, unsafe=True reads outside its buffers
    (usage,) = indexing.usages(aten.segment_reduce.default, args, {"lengths": ints(-1, 3)})
    found = indexing.bad(usage)
    assert found is not None
    assert (usage.argument, found.values, found.margin) == ("lengths", (-1,), 1.0)
    assert indexing.usages(aten.segment_reduce.default, args, {"offsets": ints(0, 4)}) == ()


def test_index_select_on_a_sparse_tensor_wraps() -> None:
    x = torch.eye(3).to_sparse()
    (usage,) = indexing.usages(aten.index_select.default, (x, 0, ints(-3, 3)), {})
    found = indexing.bad(usage)
    assert found is not None
    assert found.values == (3,)


# ---- the calls of public functions, seen from a dispatch mode; `d` is the device of the floats

NINE = torch.tensor([9.0])
SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.1)


def rand(*size: int, d: str) -> Any:
    return torch.rand(size, device=d)


def categorical(logits: Any) -> Any:
    return torch.distributions.Categorical(logits=logits, validate_args=False)


PUBLIC: list[tuple[str, str, tuple[Any, ...], Callable[[str], object]]] = [
    ("nll_loss", "target", (9,), lambda d: F.cross_entropy(rand(2, 5, d=d), ints(1, 9))),
    ("nll_loss", "target", (-1,), lambda d: SMOOTH(rand(2, 5, d=d), ints(1, -1))),
    ("embedding", "input", (9,), lambda d: F.embedding(ints(9), rand(5, 2, d=d))),
    ("embedding", "input", (9,), lambda d: nn.Embedding(5, 2, max_norm=1.0, device=d)(ints(9))),
    ("embedding_bag", "input", (9,), lambda d: nn.EmbeddingBag(5, 2, device=d)(ints(9), ints(0))),
    ("index", "indices", (9,), lambda d: rand(3, 5, d=d)[:, ints(9)]),
    ("index", "indices", (9,), lambda d: rand(5, d=d)[[1, 9]]),
    ("index_put_", "indices", (9,), lambda d: rand(5, d=d).__setitem__(ints(9), 0.0)),
    ("index_add_", "index", (9,), lambda d: rand(5, d=d).index_add_(0, ints(9), rand(1, d=d))),
    ("gather", "index", (9,), lambda d: torch.gather(rand(5, d=d), 0, ints(9))),
    ("scatter_add_", "index", (9,), lambda d: rand(5, d=d).scatter_add_(0, ints(9), rand(1, d=d))),
    ("one_hot", "input", (9,), lambda d: F.one_hot(ints(1, 9), 5)),
    ("one_hot", "input", (-2,), lambda d: F.one_hot(ints(1, -2))),
    ("take", "index", (9,), lambda d: torch.take(rand(5, d=d), ints(9))),
    (
        "binary_cross_entropy",
        "target",
        (9.0,),
        lambda d: F.binary_cross_entropy(rand(1, d=d), NINE),
    ),
    ("multinomial", "input", (-9.0,), lambda d: torch.multinomial(torch.cat([NINE, -NINE]), 1)),
    ("bernoulli", "input", (9.0,), lambda d: torch.bernoulli(NINE)),
    ("ctc_loss", "targets", (9,), lambda d: F.ctc_loss(rand(6, 1, 5, d=d), ints([9]), (6,), (1,))),
    ("take_along_dim", "indices", (9,), lambda d: torch.take_along_dim(rand(5, d=d), ints(9))),
    ("take_along_dim", "indices", (-6,), lambda d: rand(5, d=d).take_along_dim(ints(-6))),
    ("multi_margin_loss", "target", (9,), lambda d: F.multi_margin_loss(rand(1, 5, d=d), ints(9))),
    ("gather", "index", (9,), lambda d: categorical(rand(2, 5, d=d)).log_prob(ints(1, 9))),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("op", "argument", "values", "call"), PUBLIC)
def test_public_functions_are_seen(
    op: str, argument: str, values: tuple[Any, ...], call: Callable[[str], object], device: str
) -> None:
    watch = Watch()
    with wrapped(watch), watch, contextlib.suppress(IndexError, RuntimeError):
        call(device)
    usage, found = watch.bad[0]
    assert (usage.op, usage.argument, found.values) == (op, argument, values)
    site = indexing.assert_site(usage)
    assert site is None or catalogue.entry(site).id == site


def test_take_along_dim_with_a_dim_follows_this_torch() -> None:
    watch = Watch()
    call = lambda: torch.take_along_dim(torch.randn(2, 3), ints([3], [-1]), 1)  # noqa: E731
    with wrapped(watch), watch, contextlib.suppress(RuntimeError):
        call()
    assert bool(watch.bad) == raises(call)
    ghost = Watch()
    with wrapped(ghost):
        result = torch.take_along_dim(torch.randn(2, 3, device="meta"), ints([0], [1]), 1)
    assert result.is_meta
    assert result.shape == (2, 1)


def test_a_wrapped_function_takes_the_repaired_argument_and_is_put_back() -> None:
    before = (F.one_hot, torch.take_along_dim, torch.ctc_loss, torch.Tensor.__getitem__)

    def on_usage(usage: Usage) -> Usage | None:
        assert usage.op == "one_hot"
        clean = usage.tensor.clamp(0, 2)
        return Usage(**{**vars(usage), "tensor": clean})

    undo = indexing.wrap_functions(on_usage)
    assert F.one_hot(ints(1, 7), num_classes=3).tolist() == [[0, 1, 0], [0, 0, 1]]
    with pytest.raises(TypeError):
        F.one_hot()
    undo()
    assert (F.one_hot, torch.take_along_dim, torch.ctc_loss, torch.Tensor.__getitem__) == before
    assert "__getitem__" not in vars(torch.Tensor)


def test_keys_of_a_ghost_mean_what_they_mean_on_a_solid() -> None:
    numpy = pytest.importorskip("numpy")
    solid, ghost = torch.randn(4, 5), torch.randn(4, 5, device="meta")
    keys: list[Any] = [
        [1, 2],
        ([0, 1], [2, 3]),
        (slice(None), range(3)),
        numpy.array([[0, 1]]),
        (..., numpy.array([1])),
        (None, [3]),
        (numpy.array([0, 1], dtype=numpy.int32), 2),
        [],
        2,
    ]
    with wrapped(Watch()):
        for where in keys:
            assert ghost[where].shape == solid[where].shape


def test_a_meta_index_gives_a_usage_and_is_left_alone() -> None:
    args = (torch.randn(4, 2, device="meta"), torch.ones(3, dtype=torch.int64, device="meta"))
    found = indexing.usages(aten.embedding.default, args, {})
    assert [usage.bound for usage in found] == [Bound(low=0, high=4)]
    repaired = indexing.repaired(aten.embedding.default, args, {}, found)
    assert repaired is not None
    assert repaired[0][1] is args[1]


# ---- valid programs, and the table itself


def train(number: int) -> None:
    """A valid training step with many kinds of look-ups, forward and backward."""
    torch.manual_seed(number)
    rows, classes, vocabulary = torch.randint(1, 9, (3,)).tolist()
    ids = torch.randint(0, vocabulary, (rows, 3))
    labels = torch.randint(0, classes, (rows,))
    labels[number % rows] = -100
    table = torch.randn(vocabulary, 4, requires_grad=True)
    hidden = F.embedding(ids, table).sum(1) + F.embedding_bag(ids, table)
    scores = hidden[torch.randint(-rows, rows, (rows,))][:, torch.randint(-4, 4, (classes,))]
    value = F.cross_entropy(scores, labels, label_smoothing=0.1, reduction="sum")
    picked = scores.gather(1, labels.clamp(min=0)[:, None])
    gate = F.binary_cross_entropy(picked.sigmoid(), torch.rand(rows, 1))
    total = torch.zeros(classes).index_add(0, labels.clamp(min=0), torch.rand(rows))
    total[torch.multinomial(scores.detach().softmax(1), 1).flatten()] += 1
    (value + gate + total.sum() + F.one_hot(ids, vocabulary).sum()).backward()


def test_no_false_fault_in_valid_training_steps() -> None:
    watch = Watch()
    with wrapped(watch), watch:
        for number in range(30):
            train(number)
            assert watch.bad == [], number
    assert len({usage.op for usage in watch.usages}) >= 10


def batch() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Valid calls on one generated batch, at their bounds as often as not."""
    rows, classes, size = torch.randint(1, 5, (3,)).tolist()
    ids, labels = torch.randint(0, size, (rows, 3)), torch.randint(0, classes, (rows,))
    ids[0, 0], labels[0] = size - 1, classes - 1
    ignored = torch.where(torch.rand(rows) < 0.3, -100, labels)
    scores, table, wrapping = torch.randn(rows, classes), torch.randn(size, 2), ids - size
    yield aten.nll_loss_forward.default, (scores, ignored, None, 1, -100)
    yield aten.embedding.default, (table, ids)
    yield aten._embedding_bag.default, (table, ids.flatten(), torch.arange(rows) * 3)
    yield aten.index.Tensor, (table, [wrapping, torch.full((1,), -2)])
    yield aten.index_put_.default, (table, [ids], torch.zeros(()))
    yield aten.gather.default, (scores, 1, labels[:, None])
    yield aten.index_add_.default, (table, 0, ids[:, 0], torch.zeros(rows, 2))
    yield aten.take.default, (table, wrapping)
    yield aten.binary_cross_entropy.default, (torch.rand(rows).round(), torch.rand(rows))
    yield aten.multinomial.default, (torch.eye(rows), 1)


def test_no_false_fault_in_1000_valid_batches() -> None:
    torch.manual_seed(0)
    for number in range(1000):
        for func, args in batch():
            found = indexing.usages(func, args, {})
            assert found
            assert [indexing.bad(usage) for usage in found] == [None] * len(found), (number, func)


EXPECTED = """
    nll_loss_forward.default nll_loss2d_forward.default multi_margin_loss.default
    multilabel_margin_loss_forward.default _ctc_loss.default _ctc_loss.Tensor embedding.default
    embedding_renorm_.default _embedding_bag.default _embedding_bag_forward_only.default
    index.Tensor index_put.default index_put_.default _index_put_impl_.default
    _unsafe_index.Tensor index_select.default index_add.default index_add_.default
    index_copy.default index_copy_.default index_fill.int_Scalar index_fill.int_Tensor
    index_fill_.int_Scalar index_fill_.int_Tensor index_reduce.default index_reduce_.default
    gather.default gather.out scatter.src scatter.value scatter.reduce scatter.value_reduce
    scatter_.src scatter_.value scatter_.reduce scatter_.value_reduce scatter_add.default
    scatter_add_.default scatter_reduce.two scatter_reduce_.two take.default put.default
    put_.default masked_scatter.default masked_scatter_.default binary_cross_entropy.default
    multinomial.default bernoulli.default bernoulli.Tensor bernoulli_.Tensor
    normal.float_Tensor normal.Tensor_Tensor poisson.default max_unpool2d.default
    max_unpool3d.default repeat_interleave.Tensor segment_reduce.default _assert_async.msg
""".split()


def test_the_table_covers_the_overloads_of_this_torch() -> None:
    present = {str(func) for row in indexing.operators() for func in row.overloads()}
    assert {f"aten.{name}" for name in EXPECTED} <= present
    assert indexing.usages(aten.add.Tensor, (torch.ones(1), torch.ones(1)), {}) == ()
    assert indexing.usages(torch.ops.prims.add.default, (torch.ones(1), torch.ones(1)), {}) == ()
    names = [row.aten for row in indexing.operators()]
    assert len(names) == len(set(names))


def test_malformed_calls_are_left_to_the_operator() -> None:
    for func, args in [
        (aten.gather.default, (torch.randn(3), 7, ints(1))),
        (aten.embedding.default, (None,)),
        (aten.index.Tensor, (torch.randn(3), [ints(0), ints(0)])),
    ]:
        with pytest.raises(indexing.Unread) as unread:
            indexing.usages(func, args, {})
        assert unread.value.op == func._schema.name.removeprefix("aten::")
        with pytest.raises((IndexError, RuntimeError)):
            func(*args)
