"""Read notebook files, and say in one line what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nb_assertdoc.errors import NotebookError, UsageError


def read(path: Path) -> Any:
    """The notebook as nbformat's node; NotebookError says what is wrong with the file.

    It is not validated further: Jupyter opens, and users have, many notebooks with small faults.
    """
    if not path.exists():
        raise NotebookError(f"{path}: no such file")
    if path.is_dir():
        raise NotebookError(f"{path}: this is a folder, not a notebook")
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text)
    except OSError as error:
        raise NotebookError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise NotebookError(f"{path}: not a notebook, since it is not JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("nbformat"), int):
        raise NotebookError(f"{path}: not a notebook, since it has no `nbformat` number")
    if data["nbformat"] < 4:
        raise NotebookError(
            f"{path}: format {data['nbformat']} is too old, 4 is needed; upgrade it with "
            f"`jupyter nbconvert --to notebook {path}`"
        )
    if data["nbformat"] > 4:
        raise NotebookError(f"{path}: format {data['nbformat']} is not known, 4 is needed")
    cells = data.get("cells")
    if not isinstance(cells, list):
        raise NotebookError(f"{path}: not a notebook, since it has no list of `cells`")
    for index, cell in enumerate(cells):
        if not _is_cell(cell):
            raise NotebookError(f"{path}: cell {index} has no `cell_type` and `source`")
    if not any(map(_has_code, cells)):
        raise NotebookError(f"{path}: this notebook has no code")
    if (language := _language(data)) != "python":
        raise NotebookError(f"{path}: a notebook of {language}; only Python is understood")
    return _complete(path, data)


def _language(data: dict[str, Any]) -> str:
    metadata = data.get("metadata") or {}
    names = [
        (metadata.get(part) or {}).get(key)
        for part, key in (("kernelspec", "language"), ("language_info", "name"))
    ]
    return str(names[0] or names[1] or "python").lower()


def _complete(path: Path, data: dict[str, Any]) -> Any:
    """The node, with the empty fields that its readers count on."""
    import nbformat

    data["metadata"] = data.get("metadata") or {}
    for cell in data["cells"]:
        cell["metadata"] = cell.get("metadata") or {}
        if cell["cell_type"] == "code":
            cell["outputs"] = cell.get("outputs") or []
            cell.setdefault("execution_count", None)
    try:
        return nbformat.v4.reads(json.dumps(data))
    except (AttributeError, KeyError, TypeError) as error:
        raise NotebookError(f"{path}: a damaged notebook ({error})") from error


def _is_cell(cell: Any) -> bool:
    if not isinstance(cell, dict) or not isinstance(cell.get("cell_type"), str):
        return False
    source = cell.get("source")
    lines = source if isinstance(source, list) else [source]
    return all(isinstance(line, str) for line in lines)


def to_text(notebook: Any) -> str:
    """The text of an .ipynb file."""
    import nbformat

    text: str = nbformat.v4.writes(notebook)
    return text + "\n"


def check_cell(notebook: Any, index: int, *, code: bool = False) -> None:
    """UsageError unless `notebook` has a cell `index`, and that has code where `code` is asked."""
    cells = notebook.cells
    if not 0 <= index < len(cells):
        raise UsageError(f"--cell {index}: this notebook has cells 0 to {len(cells) - 1}")
    if code and not _has_code(cells[index]):
        known = ", ".join(str(number) for number, cell in enumerate(cells) if _has_code(cell))
        raise UsageError(f"--cell {index}: this cell has no code; cells with code: {known}")


def failing_cell(notebook: Any) -> tuple[int | None, list[str]]:
    """The first cell whose saved outputs hold a device-side assert; else the other errors."""
    from nb_assertdoc.detector import recognise_text

    others = []
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.get("output_type") != "error":
                continue
            name = str(output.get("ename"))
            lines = [f"{name}: {output.get('evalue')}", *map(str, output.get("traceback") or [])]
            if recognise_text("\n".join(lines)) is not None:
                return index, []
            others.append(f"{name_of(cell, index)}: {name}")
    return None, others


def name_of(cell: Any, index: int) -> str:
    """ "cell 2 (counted from 0), In [3]"."""
    count = cell.get("execution_count")
    return f"cell {index} (counted from 0)" + (f", In [{count}]" if count else "")


def add_display(notebook: Any, index: int, bundle: dict[str, Any]) -> None:
    """Append a display to the saved outputs of a cell."""
    from nbformat.v4 import new_output

    notebook.cells[index].outputs.append(new_output("display_data", data=bundle))


def _has_code(cell: Any) -> bool:
    return cell["cell_type"] == "code" and bool("".join(cell["source"]).strip())
