"""Which earlier executions must run again to make what a cell needs."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from .frames import body, compiled, parsed
from .model import Source

_STEPS = {"backward", "step", "zero_grad"}  # of training: it makes no data
_SHELL = {"get_ipython", "display", "In", "Out", "exit", "quit", "_", "__", "___"}
_LOOKS = set(  # methods that leave their object as it is
    "head tail describe info item numpy tolist cpu cuda mean sum std max min argmax keys items "
    "values get copy astype value_counts unique nunique groupby format join split strip lower "
    "upper startswith endswith replace parameters named_parameters state_dict decode encode "
    "tokenize batch_decode convert_ids_to_tokens convert_tokens_to_ids hist plot show imshow "
    "index count isna isnull any all size dim numel detach clone view reshape transpose permute "
    "squeeze unsqueeze flatten long int bool print_trainable_parameters".split()
)
_SEEDS = {"manual_seed", "seed", "seed_everything", "set_seed", "manual_seed_all"}


@dataclass
class _Names:
    reads: set[str] = field(default_factory=set)  # of what there was before the cell
    writes: set[str] = field(default_factory=set)
    surely: set[str] = field(default_factory=set)  # of `writes`, whatever branch is taken
    changes: set[str] = field(default_factory=set)  # objects that may be altered in place
    defines: dict[str, set[str]] = field(default_factory=dict)  # what a call of one may alter
    imports: set[str] = field(default_factory=set)
    seeds: bool = False
    trains: bool = False
    opaque: bool = False  # binds names that are not in the text: `exec`, a star import, `%run`


def needed(earlier: Sequence[Source], cell: Source, training: bool = False) -> tuple[Source, ...]:
    """The least set of `earlier` (in order) that makes every name which `cell` reads.

    An execution counts when it binds a needed name, may change the object behind one
    (`x.append(...)`, `x[0] = ...`, `prepare(x)`), or seeds a random generator. One that trains what
    another has made counts with `training` only. Of a name that no text binds it is assumed that
    each `exec`, star import and `%run` may do so.
    """
    names = [names_of(source.source) for source in earlier]
    wanted = names_of(cell.source).reads
    chosen, unknown = _makers(names, wanted, set(), training)
    if unknown:
        chosen, _ = _makers(names, wanted, unknown, training)
    return tuple(source for i, source in enumerate(earlier) if i in chosen)


def _makers(
    names: Sequence[_Names], wanted: set[str], unknown: set[str], training: bool
) -> tuple[set[int], set[str]]:
    """Positions of the executions that make `wanted`, and the names that none of them binds."""
    train = {n for each in names if each.trains for n in each.defines}
    calls = {n: altered for each in names for n, altered in each.defines.items()}
    modules = {n for each in names for n in each.imports}
    chosen: set[int] = set()
    wanted = set(wanted)
    for i in reversed(range(len(names))):
        each = names[i]
        trains = not training and (bool(each.reads & train) or (each.trains and not each.defines))
        called = set().union(*(calls[n] for n in each.reads & calls.keys()))
        altered = set() if trains else (each.changes | called) - modules
        seeds = each.seeds and not trains
        if each.writes & wanted or altered & wanted or seeds or (each.opaque and unknown & wanted):
            chosen.add(i)
            wanted = (wanted - (each.surely - altered)) | each.reads
    bound = {n for i in chosen for n in names[i].writes}
    return chosen, wanted - bound


def with_dependents(
    sequence: Sequence[Source], changed: Collection[int], needs: Collection[str]
) -> set[int]:
    """The executions of `sequence` to run again because those at `changed` have other sources now.

    They are those that hang on what the changed ones make, and make one of the names `needs`, or
    something for one that does. A training loop makes no data, and is not repeated.
    """
    names = [names_of(source.source) for source in sequence]
    made: set[str] = set()
    reached: list[int] = []
    for i, each in enumerate(names):
        if i in changed or (each.reads & made and not each.trains):
            made |= each.writes | each.changes
            reached.append(i)
    wanted, chosen = set(needs), set(changed)
    for i in reversed(reached):
        if i in chosen or (names[i].writes | names[i].changes) & wanted:
            chosen.add(i)
            wanted |= names[i].reads
    return chosen


def with_makers(
    sequence: Sequence[Source], chosen: Collection[int], have: Collection[str], past: int
) -> set[int]:
    """`chosen` and the executions that make what those read, as far as it is not among `have`.

    `have` are values from after the first `past` executions: what a chosen one of these changes is
    there in its changed form, so it is made anew.
    """
    names = [names_of(source.source) for source in sequence]
    result = set(chosen)
    while True:
        altered = {n for i in result if i < past for n in names[i].writes | names[i].changes}
        known = set(have) - altered
        wanted: set[str] = set()
        before = len(result)
        for i in reversed(range(len(sequence))):
            makes = names[i].writes | names[i].changes
            if i not in result and not (makes & wanted) - known:
                continue
            result.add(i)
            wanted = (wanted - (names[i].writes - names[i].reads)) | (names[i].reads - known)
        if len(result) == before:
            break
    first_again = [j for j in result if j < past]
    seeding = {i for i, each in enumerate(names) if each.seeds and not acts(sequence[i].source)}
    return result | {i for i in seeding if any(i < j for j in first_again)}


def acts(cell: str) -> bool:
    """The cell may change the notebook's state: it does more than look at it or import."""
    tree = parsed(cell)
    return tree is not None and any(
        isinstance(node, _ACTS) or _alters(node) for node in ast.walk(tree)
    )


def calls(cell: str) -> bool:
    """The cell calls something as it runs: it does more than import, define and set."""
    tree = parsed(cell)
    waiting: list[ast.AST] = [tree] if tree is not None else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))
    return False


_ACTS = (
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Delete),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)
_ALTERING = {
    *("append", "extend", "insert", "remove", "pop", "clear", "update", "add", "discard", "sort"),
    *("reverse", "setdefault", "fill", "resize", "load_state_dict", "apply", "set_format"),
    *("eval", "train", "to", "half", "float", "shuffle", "put", "setflags", "popitem"),
}


def _alters(node: ast.AST) -> bool:
    """A call that stands as a statement, of a function of the user's or a method that alters."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    call = node.value
    if isinstance(call.func, ast.Name):
        return call.func.id not in vars(builtins) and call.func.id != "display"
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    inplace = any(k.arg == "inplace" for k in call.keywords)
    return inplace or name in _ALTERING or (name.endswith("_") and not name.endswith("__"))


def bound_first(cell: str) -> set[str]:
    """The names that a cell binds before it reads them: loop variables, intermediate results."""
    with contextlib.suppress(SyntaxError, ValueError):
        code = compiled(cell)
        read: set[str] = set()
        return {n for how, n in _uses(code) if _first(how, n, read)}
    return set()


def _first(how: str, name: str, read: set[str]) -> bool:
    if how == "read":
        read.add(name)
    return how == "bound" and name not in read


def _uses(code: types.CodeType, top: bool = True) -> list[tuple[str, str]]:
    """Reads and bindings of global names in the order of the bytecode, nested code included."""
    found: list[tuple[str, str]] = []
    own: set[str] = set()  # a class's attributes
    for instruction in dis.get_instructions(code):
        how, name = instruction.opname, instruction.argval
        if how == "STORE_NAME" and not top:
            own.add(name)
        elif how in ("STORE_NAME", "STORE_GLOBAL"):
            found.append(("bound", name))
        elif how in ("LOAD_NAME", "LOAD_GLOBAL") and name not in own:
            found.append(("read", name))
        elif isinstance(name, types.CodeType):
            found += _uses(name, top=False)
    return found


def names_of(cell: str) -> _Names:
    """Names that a cell reads, binds and changes; a cell that is not Python has none."""
    found = _Names()
    try:
        tree = ast.parse(body(cell))
        code = compiled(cell)
    except (SyntaxError, ValueError):
        return found
    uses = _uses(code)
    bound = bound_first(cell)
    found.reads = {n for how, n in uses if how == "read"} - bound - set(vars(builtins)) - _SHELL
    found.writes = {n for how, n in uses if how == "bound"}
    found.surely = set(_surely(tree.body))
    found.imports = _imported(tree)
    for statement in tree.body:
        altered = _altered(statement, found) - _imported(tree)
        if isinstance(statement, _DEFINITIONS):
            found.defines[statement.name] = altered & found.reads  # not arguments and local names
        else:
            found.changes |= altered
    return found


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _altered(tree: ast.AST, found: _Names) -> set[str]:
    """Names of objects that code may alter in place; what else it does is noted in `found`."""
    altered: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.opaque |= any(a.name == "*" for a in node.names)
        elif isinstance(node, ast.Call):
            altered |= _call(node, found)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            altered |= _given(node.value)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            altered |= _owner(node)
    return altered - _SHELL


def _call(node: ast.Call, found: _Names) -> set[str]:
    if isinstance(node.func, ast.Name):
        found.seeds |= node.func.id in _SEEDS
        found.opaque |= node.func.id in ("exec", "globals")
        return set()
    if not isinstance(node.func, ast.Attribute):
        return set()
    name, owner = node.func.attr, _owner(node.func)
    found.seeds |= name in _SEEDS
    trainer = name in ("fit", "train") and any("trainer" in n.lower() for n in owner)
    found.trains |= name in _STEPS or trainer
    runs = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
    found.opaque |= name == "run_line_magic" and runs in (["run"], ["load"], ["pylab"])
    looks = name in _LOOKS and not any(k.arg == "inplace" for k in node.keywords)
    return set() if looks else owner


def _given(call: ast.Call) -> set[str]:
    """Names given to a call that stands as a statement: what it is for is to change something."""
    if isinstance(call.func, ast.Attribute):
        name = call.func.attr
        if name not in _ALTERING and not name.endswith("_"):
            return set()
    elif not isinstance(call.func, ast.Name) or call.func.id in {*vars(builtins), *_SHELL}:
        return set()
    return {a.id for a in call.args if isinstance(a, ast.Name)}


def _surely(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements bind whatever branch is taken."""
    for node in statements:
        if isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, ast.With | ast.AsyncWith):
            yield from _surely(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            yield from (n.id for n in stored if isinstance(n.ctx, ast.Store))


def _owner(node: ast.expr) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _imported(tree: ast.AST) -> set[str]:
    return {
        (a.asname or a.name).split(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    }
