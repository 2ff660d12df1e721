"""Lines to paste: assertions to keep, and edits of the user's own code where they are safe."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable

from nb_assertdoc.model import Edit

from .facts import Facts

MINUS_1 = "{} - 1"  # what an edit makes of the index
# An expression that can be read twice without harm, and calls that leave its values as they are.
CHAIN = r"[A-Za-z_]\w*([.]\w+|\[['\"]?\w+['\"]?\])*"
ONCE = r"next|pop|popleft|popitem|get|read\w*|send|recv|sample\w*|rand\w*|choice\w*|\w*_"
MOVES = r"([.](to|cuda|cpu|long|int|detach|clone|contiguous|squeeze|flatten)\([^()]*\))*"


def parses(code: str) -> bool:
    """True if `code` is valid Python as it stands."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


def name_of(facts: Facts, default: str) -> str:
    """The user's expression for the index if it can be read twice without harm, else `default`.

    "y" for `y.to(device)`: the values are the same.
    """
    own = (facts.observed.index_expression or "").strip()
    plain = re.sub(rf"(?<=.){MOVES}$", "", own)
    if re.fullmatch(CHAIN, plain) and parses(plain):
        return plain
    try:
        tree = ast.parse(own, mode="eval").body
    except (SyntaxError, ValueError):
        return default
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    if len(own) > 60 or isinstance(tree, ast.Tuple | ast.Constant | ast.Starred):
        return default
    if any(not isinstance(c, ast.Attribute) or re.fullmatch(ONCE, c.attr) for c in calls):
        return default  # a function of the user's, or one whose second call gives something else
    alone = isinstance(tree, ast.Call | ast.Attribute | ast.Subscript | ast.Name)
    return own if alone else f"({own})"


def to_paste(facts: Facts, code: str | None) -> str | None:
    """The code, if every name in it exists at the failing line; else None."""
    if code is None:
        return None
    if not parses(code):
        return None
    names = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name)]
    made = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return code if {n.id for n in names} <= made | facts.existing | set(dir(builtins)) else None


def keep(name: str, high: int | None, ignore: int | None = None, low: int = 0) -> str:
    """The assertion that the values of tensor `name` lie in low..high-1, or are `ignore`."""
    if high is None:
        return f"assert int({name}.min()) >= {low}, 'negative index'"
    if ignore is not None:
        inside = f"({name} >= {low}) & ({name} < {high}) | ({name} == {ignore})"
        return f"assert bool(({inside}).all()), '{low}..{high - 1} or {ignore} expected'"
    # Short enough for one line of the report, where it is to be copied from.
    inside = f"int({name}.min()) >= {low} and int({name}.max()) < {high}"
    return f"assert {inside}, 'outside {low}..{high - 1}'"


def keep_rows(facts: Facts, name: str, need: int) -> str:
    """The assertion for a table that has got `need` rows.

    One batch does not tell how many are needed: the number is then read from the table itself.
    """
    own = facts.observed.table_expression or ""
    of_batch = not facts.whole and need <= int(max(facts.bad)) + 1
    made = (facts.observed.finding.module_type or "").startswith("Embedding")
    if not of_batch or not made or not re.fullmatch(CHAIN, own):
        return keep(name, need)
    inside = f"int({name}.min()) >= 0 and int({name}.max()) < {own}.num_embeddings"
    return f"assert {inside}, 'no such row'"


def keep_labels(facts: Facts, high: int | None = None, changed: str = "{}") -> str:
    """The assertion for a loss's target: `ignore_index` is let through where it is in use.

    `changed`: what an edit makes of the index, as for `edit_index`.
    """
    ignore = facts.ignore
    used = ignore is not None and (ignore != -100 or ignore in facts.seen.distinct)
    name, high = after(name_of(facts, "labels"), changed), high or facts.high
    within = used and ignore is not None and high is not None and 0 <= ignore < high
    return keep(name, high, ignore if used and not within else None)


def after(name: str, changed: str) -> str:
    """The expression that an edit leaves: "(y - 1)" for "y" and "{} - 1"."""
    return name if changed == "{}" else f"({changed.format(name)})"


def edit_index(facts: Facts, new: str) -> Edit | None:
    """An edit of the failing line: `{}` in `new` stands for the index expression.

    Only for a name or a part of one, moved and cast or not, that stands once in a line of a cell.
    """
    place, name = facts.observed.finding.location, facts.observed.index_expression or ""
    if name not in place.source:  # as Python writes it; `.to("cuda")` is written as often
        name = name.replace("'", '"')
    whole = rf"(?<![\w.]){re.escape(name)}(?![\w.(\[])"
    simple = re.fullmatch(CHAIN + MOVES, name) is not None
    if not simple or len(re.findall(whole, place.source)) != 1 or place.file is not None:
        return None
    old = place.source.strip()
    replaced = re.sub(whole, lambda _: new.format(name), old)
    safe = parses(old) and parses(replaced)
    return Edit(cell_id=place.cell_id, old=old, new=replaced) if safe else None


def edit_line(
    facts: Facts, pattern: str, new: str | Callable[[re.Match[str]], str], also: str = ""
) -> Edit | None:
    """An edit of the one line of the user's code that matches `pattern` (and `also`), else None."""
    lines = {line.strip() for line in facts.code.splitlines() if not line.lstrip().startswith("#")}
    hits = [
        line for line in lines if re.search(pattern, line) and re.search(also, line, re.IGNORECASE)
    ]
    if len(hits) != 1 or len(re.findall(pattern, hits[0])) != 1:
        return None
    place = facts.observed.finding.location
    cell = place.cell_id if place.source.strip() == hits[0] else None
    return Edit(cell_id=cell, old=hits[0], new=re.sub(pattern, new, hits[0]))


def edit_ignored(facts: Facts, mark: int) -> Edit | None:
    """The edit that makes the failing nn.CrossEntropyLoss() ignore `mark`."""
    if facts.observed.finding.module_type != "CrossEntropyLoss":
        return None  # a function, or the model's own loss: the line would be another loss's
    return edit_line(facts, r"CrossEntropyLoss\(\)", f"CrossEntropyLoss(ignore_index={mark})")
