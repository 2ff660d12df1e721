"""Where the user's code says how large a table or a layer is, and the edit that makes it larger."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nb_assertdoc.model import Edit

from .facts import Facts
from .reading import Spot, last

_MAKERS = ("Embedding", "EmbeddingBag")
_LAYERS = ("Linear", "Conv1d", "Conv2d")
_READY_MADE = r"from_pretrained|create_model|torchvision|timm|transformers|torch_geometric"
VOCABULARIES = r"vocab|[si]to[si]|w(ord)?2i|2id|token2|to_i(d|n?dx|ndex)"  # word2idx, stoi, itos


def rows_needed(facts: Facts, pattern: str) -> int:
    """Rows for every index that is known: of the smallest of the user's containers with a matching
    name that numbers the bad ones too, else up to the largest bad one."""
    least = int(max(facts.bad)) + 1
    return min((size for _, size in facts.containers(pattern) if size >= least), default=least)


def edit_size(facts: Facts, need: int) -> Edit | None:
    """The edit of the one place that gives the failing table its size: a number, or `len(x) - 2`.

    It is looked for from `nn.Embedding(n, ...)` to what `n` is: an argument of the class around it,
    or a variable. None where that does not lead to one place.
    """
    search = _Search(facts, need)
    found = _of_table(search, facts)
    if any(origin.value is None for origin in found):  # it may be the one
        return None
    return search.only({edit for origin in found for edit in origin.edits})


def table_size(facts: Facts) -> Origin | None:
    """The one place that gives the failing table its size; None where there may be others."""
    own = (facts.observed.finding.module or "").rsplit(".", 1)[-1]
    search = _Search(facts, 0)
    if not any(at.target == own for _, at in search.code.calls(*_MAKERS)):
        return None
    return _single(_of_table(search, facts))


def outputs_size(facts: Facts) -> Origin | None:
    """The one place that gives a layer as many outputs as the loss has classes; else None."""
    found = _of_layers(_Search(facts, 0))
    # One whose number is not known may be it; a list may have grown since its length was taken.
    fits = [o for o in found if o.value in (facts.high, None) or o.code.startswith("len(")]
    return _single(fits)


def set_in(origin: Origin | None) -> str:
    """Where a size is given, as a sentence to add; "" where that is not known."""
    if origin is None or len(origin.line) > 100:
        return ""
    return f" The size is given in `{origin.line}`."


def uncounted_zero(facts: Facts) -> tuple[Origin, str] | None:
    """The size is a count, and the values are 0 to that count: one number more. With the reason."""
    origin = table_size(facts)
    if origin is None or not re.search(r"^len\(|nunique\(\)$", origin.code):
        return None
    values = facts.seen
    if not facts.only_high or facts.smallest != 0 or values.distinct_count != (facts.high or 0) + 1:
        return None
    from_1 = facts.mentions(r"word_index|start\s*=\s*1\)|, 1\)\}|\b\w \+ 1 for")
    reason = (
        f"The numbers run from 1 to {facts.high}, and 0 stands for padding"
        if from_1
        else f"The numbers are 0 to {facts.high}"
    )
    return origin, f"{reason}: one row more than `{origin.code}` counts."


def _single(found: list[Origin]) -> Origin | None:
    return found[0] if len({origin.line for origin in found}) == 1 else None


def _of_table(search: _Search, facts: Facts) -> list[Origin]:
    sizes = [
        (size, at)
        for call, at in search.code.calls(*_MAKERS)
        if (size := _argument(call, 0, "num_embeddings")) is not None
    ]
    own = (facts.observed.finding.module or "").rsplit(".", 1)[-1]
    sizes = [(size, at) for size, at in sizes if at.target == own] or sizes
    return [origin for size, at in sizes for origin in search.origins(size, at)]


def _of_layers(search: _Search) -> list[Origin]:
    sizes = [
        (size, at)
        for call, at in search.code.calls(*_LAYERS)
        if (size := _argument(call, 1, "out_features", "out_channels")) is not None
    ]
    return [origin for size, at in sizes for origin in search.origins(size, at)]


def edit_outputs(facts: Facts, need: int) -> Edit | None:
    """The edit of the one place that gives a layer as many outputs as the loss has classes.

    None unless the user's code makes all layers, the size of each is known, and one place fits.
    """
    if facts.mentions(_READY_MADE):
        return None
    search = _Search(facts, need)
    found = _of_layers(search)
    if any(origin.value is None for origin in found):
        return None
    return search.only({edit for origin in found for edit in origin.edits})


def _argument(call: ast.Call, position: int, *names: str) -> ast.expr | None:
    if any(isinstance(a, ast.Starred) for a in call.args):
        return None
    named = [k.value for k in call.keywords if k.arg in names]
    return next(iter([*call.args[position : position + 1], *named]), None)


@dataclass(frozen=True)
class Origin:
    """What a size is written as: its number, where known, and the edit that makes it larger."""

    code: str
    line: str
    value: int | None
    plus_one: tuple[str, str] | None  # the line before and after 1 is added
    edits: tuple[tuple[str, str], ...]  # a line before and after; of the right size only


class _Search:
    def __init__(self, facts: Facts, need: int) -> None:
        self.code = facts.reading
        self._rows, self._need = facts.high, need
        self._sizes = dict(facts.containers(""))
        self._numbers = {
            v.name: int(v.value) for v in facts.observed.variables if v.value.isdecimal()
        }

    def origins(self, size: ast.expr, at: Spot) -> Iterator[Origin]:
        for expr, there in self.code.origins(size, at):
            value = self._value(expr)
            new = self._larger(expr) if value == self._rows else None
            edit = there.replaced(expr, new) if new is not None else None
            line = there.text.splitlines()[expr.lineno - 1].strip()
            code = ast.unparse(expr)
            more = there.replaced(expr, f"{code} + 1")
            yield Origin(code, line, value, more, (edit,) if edit is not None else ())

    def only(self, edits: set[tuple[str, str]]) -> Edit | None:
        if len(edits) != 1:
            return None
        ((old, new),) = edits
        return Edit(cell_id=None, old=old, new=new)

    def _value(self, expr: ast.expr) -> int | None:
        """The number that an expression gives, where that is known."""
        if isinstance(expr, ast.Constant):
            return expr.value if type(expr.value) is int else None
        if isinstance(expr, ast.Name):
            return self._numbers.get(expr.id)
        if isinstance(expr, ast.Call) and last(expr.func) == "len" and len(expr.args) == 1:
            return self._sizes.get(ast.unparse(expr.args[0]))
        if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add | ast.Sub):
            left, right = self._value(expr.left), self._value(expr.right)
            if left is not None and right is not None:
                return left + right if isinstance(expr.op, ast.Add) else left - right
        return None

    def _larger(self, expr: ast.expr) -> str | None:
        """The code of a size that is large enough, in the user's own words where these are."""
        if isinstance(expr, ast.Constant):
            return str(self._need)
        if isinstance(expr, ast.BinOp) and (self._value(expr.left) or 0) >= self._need:
            return ast.unparse(expr.left)
        if isinstance(expr, ast.Call) and self._rows == self._need - 1:
            return f"{ast.unparse(expr)} + 1"  # an extra id after those of the list
        return None
