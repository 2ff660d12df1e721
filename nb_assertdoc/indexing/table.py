"""Which aten operators have index-like arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from . import positions, sparse, values
from .positions import Along
from .usage import Arguments, Usage

Find = Callable[[str, Arguments], Iterator[Usage]]


@dataclass(frozen=True)
class Operator:
    """One row: an aten operator, with every overload of it that this torch has."""

    aten: str
    op: str  # public name
    find: Find

    def overloads(self) -> tuple[OpOverload, ...]:
        """The overloads present in this torch; () if it lacks the operator."""
        packet = getattr(torch.ops.aten, self.aten, None)
        return tuple(getattr(packet, name) for name in packet.overloads()) if packet else ()


_TABLE: tuple[tuple[str, Find], ...] = (
    ("nll_loss_forward nll_loss2d_forward", values.nll),
    ("multi_margin_loss", values.multi_margin),
    ("multilabel_margin_loss_forward", values.multilabel_margin),
    ("_ctc_loss _cudnn_ctc_loss", values.ctc),
    ("binary_cross_entropy", values.unit),
    ("multinomial", values.multinomial),
    ("bernoulli bernoulli_", values.bernoulli),
    ("normal", values.normal),
    ("poisson", values.poisson),
    ("segment_reduce", values.segment_lengths),
    ("_assert_async", values.assert_async),
    ("masked_scatter masked_scatter_", values.masked_scatter),
    ("repeat_interleave", values.repeats),
    ("_grouped_mm _scaled_grouped_mm", values.grouped_mm),
    ("embedding embedding_renorm_ embedding_renorm", positions.embedding),
    ("_embedding_bag _embedding_bag_forward_only", positions.embedding_bag),
    ("index _unsafe_index index_put index_put_", positions.advanced),
    ("_index_put_impl_ _index_put_impl _unsafe_index_put", positions.advanced),
    ("gather", Along("scatter_gather")),
    ("scatter scatter_ scatter_add scatter_add_", positions.scatter),
    ("scatter_reduce scatter_reduce_", positions.scatter),
    ("index_select", Along("index_select_small", "self")),
    ("index_add index_add_ index_reduce index_reduce_", Along("index_add", "source")),
    ("index_copy index_copy_", Along("index_copy", "source")),
    ("index_fill index_fill_", Along("index_fill", "self", wraps=True)),
    ("take put put_", positions.flat),
    ("max_unpool2d max_unpool3d", positions.unpool),
    ("fractional_max_pool2d_backward fractional_max_pool3d_backward", positions.fractional),
    ("sparse_compressed_tensor", sparse.compressed),
    ("_validate_compressed_sparse_indices", sparse.validated),
)

_PUBLIC = {
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "multilabel_margin_loss_forward": "multilabel_margin_loss",
    "_cudnn_ctc_loss": "ctc_loss",
    "embedding_renorm_": "embedding",
    "_embedding_bag_forward_only": "embedding_bag",
    "_unsafe_index": "index",
    "_unsafe_index_put": "index_put",
    "_index_put_impl_": "index_put_",
    "_assert_async": "_assert_async",
    "embedding_renorm": "embedding",
    "_index_put_impl": "index_put",
    "fractional_max_pool2d_backward": "fractional_max_pool2d",
    "fractional_max_pool3d_backward": "fractional_max_pool3d",
    "_validate_compressed_sparse_indices": "sparse_compressed_tensor",
}

_OPERATORS = {
    name: Operator(name, _PUBLIC.get(name, name.removeprefix("_")), find)
    for names, find in _TABLE
    for name in names.split()
}

# public functions that reach another one's aten operator; only the Python stack tells them apart
_CALLERS = {
    "nll_loss": ("cross_entropy",),
    "embedding": ("embedding_bag",),
    "max_unpool2d": ("max_unpool1d",),
}

_known: dict[object, tuple[Operator, tuple[str, ...], dict[str, Any]] | None] = {}


def operators() -> tuple[Operator, ...]:
    """The table itself."""
    return tuple(_OPERATORS.values())


def public_name(op: str, functions: Sequence[str]) -> str:
    """The name the user called `op` by, from the names of torch functions on the Python stack."""
    return next((name for name in _CALLERS.get(op, ()) if name in functions), op)


class Unread(Exception):
    """A call of the operator `op` could not be read: it is malformed, or its row has a bug.

    Of a malformed call the operator itself says what is wrong with it; one that runs was not
    checked. The text is the reason.
    """

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(reason)
        self.op = op


def usages(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Usage, ...]:
    """The index-like arguments of this call; () for other operators, which costs a dict look-up.

    Raises `Unread`.
    """
    try:
        row = _known[func]
    except KeyError:
        row = _known[func] = _row(func)
    if row is None:
        return ()
    operator, names, defaults = row
    try:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return tuple(operator.find(operator.op, arguments))
    except Exception as error:
        raise Unread(operator.op, f"{type(error).__name__}: {error}"[:200]) from error


def _row(func: OpOverload) -> tuple[Operator, tuple[str, ...], dict[str, Any]] | None:
    schema: Any = getattr(func, "_schema", None)  # higher-order operators have none
    namespace, _, name = str(getattr(schema, "name", "")).partition("::")
    operator = _OPERATORS.get(name) if namespace == "aten" else None
    if operator is None:
        return None
    names = tuple(argument.name for argument in schema.arguments)
    defaults = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
    return operator, names, defaults
