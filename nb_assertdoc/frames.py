"""User code in stacks and tracebacks: which frames are the user's, and their lines as `Place`s.

Shared by host and worker, so that both name a line alike.
"""

from __future__ import annotations

import ast
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

from .model import Place, Source

_LIBRARY = tuple(
    {
        os.path.join(folder, "")
        for folder in (
            *(sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
            os.path.dirname(os.path.abspath(__file__)),
        )
    }
)
_SHOWN = (bool, int, float, str, type(None))
_LONGEST = 40  # characters of a value shown as name=value


class Cells:
    """The executions of a notebook by the file names of their code objects."""

    def __init__(self, sources: Iterable[Source] = ()) -> None:
        self._by_file: dict[str, Source] = {}
        for source in sources:
            self.add(source)

    def add(self, source: Source) -> None:
        """Register an execution; a later one with the same file name (same text) wins."""
        self._by_file[source.filename] = source

    def get(self, filename: str) -> Source | None:
        """The execution behind a file name."""
        return self._by_file.get(filename)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._by_file.values())

    def is_user(self, filename: str) -> bool:
        """True for a cell, and for a file outside the installed packages."""
        if filename in self._by_file:
            return True
        if filename.startswith("<") or not filename.endswith(".py"):
            return False
        return not filename.startswith(_LIBRARY) and os.path.isfile(filename)

    def is_user_frame(self, frame: FrameType) -> bool:
        """The same of running code: what a library generated, wherever it wrote it, is its own."""
        filename = frame.f_code.co_filename
        if filename in self._by_file:
            return True
        return self.is_user(filename) and not _of_library(str(frame.f_globals.get("__name__")))

    def teach_linecache(self) -> None:
        """Let `linecache`, tracebacks and `executing` see the cells under their file names."""
        for source in self:
            text = transformed(source.source)
            lines = [line + "\n" for line in text.splitlines()]
            linecache.cache[source.filename] = (len(text), None, lines, source.filename)


def _of_library(module: str) -> bool:
    """True for a module inside an installed package, by its name."""
    package = sys.modules.get(module.partition(".")[0])
    return module != "__main__" and str(getattr(package, "__file__", None)).startswith(_LIBRARY)


def transformed(cell: str) -> str:
    """A cell as Python: IPython's line magics, `!` and `?` rewritten, line numbers kept."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        return str(TransformerManager().transform_cell(cell))
    except SyntaxError:
        return cell


def body(cell: str) -> str:
    """The Python of a cell: of a `%%time` cell, what stands below the magic, at its own lines."""
    first, _, rest = unpadded(cell)[0].partition("\n")
    return "\n" + rest if first.startswith("%%") else transformed(cell)


def compiled(cell: str) -> CodeType:
    """The code of a cell; it may `await`. Raises `SyntaxError` or `ValueError`."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code: CodeType = compile(body(cell), "<cell>", "exec", flags, dont_inherit=True)
    return code


def parsed(cell: str) -> ast.Module | None:
    """A cell's Python; None where it is none."""
    try:
        return ast.parse(body(cell))
    except (SyntaxError, ValueError):
        return None


def loops(cell: str) -> bool:
    """True where the cell itself runs a loop; one inside a function that it defines is none."""
    tree = parsed(cell)
    inside: list[ast.AST] = list(tree.body) if tree is not None else []
    for node in inside:
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            inside += ast.iter_child_nodes(node)
    return False


def unpadded(cell: str) -> tuple[str, int]:
    """A cell without its leading blank lines, and their number: IPython counts lines after them."""
    lines = cell.splitlines(keepends=True)
    blank = next((i for i, line in enumerate(lines) if not line.isspace()), 0)
    return "".join(lines[blank:]), blank


def stack(frame: FrameType | None) -> list[FrameType]:
    """The frames from `frame` outwards."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def user_frames(frame: FrameType | None, cells: Cells) -> list[FrameType]:
    """The user's frames, outermost first, from the cell that runs inwards."""
    found = [f for f in stack(frame) if cells.is_user_frame(f)]
    return found[::-1]


def user_traceback(tb: TracebackType | None, cells: Cells) -> list[TracebackType]:
    """The user's entries of a traceback, outermost first."""
    found = []
    while tb is not None:
        if cells.is_user_frame(tb.tb_frame):
            found.append(tb)
        tb = tb.tb_next
    return found


def place(where: FrameType | TracebackType, cells: Cells) -> Place:
    """The line that a frame or a traceback entry stands at."""
    if isinstance(where, TracebackType):
        frame, line = where.tb_frame, where.tb_lineno
    else:
        frame, line = where, where.f_lineno
    filename = frame.f_code.co_filename
    cell = cells.get(filename)
    text = linecache.getline(filename, line).rstrip("\n")
    if not text and cell is not None:
        lines = transformed(cell.source).splitlines()
        text = lines[line - 1] if 0 < line <= len(lines) else ""
    return Place(
        line=line + (cell.above if cell else 0),
        source=text,
        cell=cell.cell if cell else None,
        execution_count=cell.execution_count if cell else None,
        cell_id=cell.cell_id if cell else None,
        file=None if cell else filename,
        expression=_expression(where),
        function=_function(frame),
    )


def _expression(where: FrameType | TracebackType) -> str | None:
    """The exact sub-expression that runs."""
    try:
        from executing import Source as ExecutingSource

        found = ExecutingSource.executing(where)
        node: Any = found.node  # None where the bytecode cannot tell
        return None if node is None else ast.get_source_segment(found.source.text, node)
    except Exception:
        # An expression is a nicety: code without source, or compiled another way, has none.
        return None


def at_top(code: CodeType) -> bool:
    """True for the code of a cell or module, False for a function's. IPython 7 names cells."""
    return code.co_name == "<module>" or code.co_name.startswith("<cell line")


def _function(frame: FrameType) -> str | None:
    name = frame.f_code.co_name
    if at_top(frame.f_code):
        return None
    shown = getattr(frame.f_code, "co_qualname", name).replace("<locals>.", "")
    owner = frame.f_locals.get("self")
    if "." not in shown and owner is not None and name in dir(type(owner)):
        shown = f"{type(owner).__name__}.{name}"
    return f"{shown}({', '.join(named_values(frame))})"


def named_values(frame: FrameType) -> list[str]:
    """Arguments of a call as `name=value`: only values of plain types, never a tensor's repr."""
    if at_top(frame.f_code):
        return []
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [f"{n}={shown(frame.f_locals[n])}" for n in names if plain(frame.f_locals.get(n, ...))]


def plain(value: Any) -> bool:
    """True for a value that can be shown in a few characters without running user code."""
    return type(value) in _SHOWN and len(repr(value)) <= _LONGEST


def shown(value: Any) -> str:
    """A plain value as text."""
    return repr(value)


def loop_variables(frame: FrameType, targets: Iterable[str]) -> list[str]:
    """Loop variables of a frame as `name=value`."""
    return [f"{n}={shown(frame.f_locals[n])}" for n in targets if plain(frame.f_locals.get(n, ...))]


def call_site(frame: FrameType | None, cells: Cells, skip: tuple[str, ...] = ()) -> str:
    """A key of the place that runs, alike in host and worker.

    Made of function names, lines and short file names from `frame` out to the cell. Frames of
    files whose name holds one of `skip` do not count.
    """
    parts = []
    for f in stack(frame):
        filename = f.f_code.co_filename
        if any(s in filename for s in skip):
            continue
        user = cells.get(filename) is not None
        short = filename if user else os.sep.join(filename.split(os.sep)[-3:])
        parts.append(f"{short}:{f.f_code.co_name}:{f.f_lineno}")
        if user and at_top(f.f_code):
            break
    return " < ".join(parts[:12])


_LOADER_FRAMES = ("torch/utils/data/", "nb_assertdoc/", "tqdm/")  # host and worker differ in these


def loader_key(loader: Any, cells: Cells, frame: FrameType) -> str:
    """A key of the loop over a DataLoader that `frame` begins, alike in host and worker."""
    return f"{data_key(loader)} @ {call_site(frame, cells, _LOADER_FRAMES)}"


def data_key(loader: Any) -> str:
    """What a loader's key says of its data set."""
    try:
        size = len(loader.dataset)
    except TypeError:
        size = -1
    return f"{type(loader.dataset).__name__}[{size}]"


def here(depth: int = 1) -> FrameType:
    """The caller's frame."""
    return sys._getframe(depth + 1)
