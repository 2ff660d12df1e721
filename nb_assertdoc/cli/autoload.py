"""`nb-assertdoc enable | disable`: load the extension in every new kernel, and take that back.

The entries of `jupyter-config/ipython_kernel_config.json` are merged into the file of that name in
one of the folders that IPython reads. `extra_extensions` is used, not `extensions`: of that list
only the last file's counts, so that ours would switch off the user's own extensions (tried).

A record beside the file keeps what was there before, so that `disable` can undo to the byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import nb_assertdoc
from nb_assertdoc.errors import UsageError

FILE = "ipython_kernel_config.json"
RECORD = "nb_assertdoc-undo.json"  # beside the file; IPython does not read it
_HERE = Path(nb_assertdoc.__file__).parent


class Place(NamedTuple):
    """A file that kernels read, and the option that chooses it."""

    option: str
    path: Path


class UndoRecord(NamedTuple):
    """What `enable` found and did."""

    before: str | None  # the file's text; None: there was none
    after: str  # SHA-256 of what was written
    folders: list[str]  # made for it, the outermost first


# ---- where


def place(option: str, profile: str | None = None) -> Place:
    """The file behind `--sys-prefix`, `--user`, `--system` or `--profile NAME`.

    Raises `UsageError` for a profile that does not exist.
    """
    from IPython.core.application import ENV_CONFIG_DIRS, SYSTEM_CONFIG_DIRS

    if option == "--system":
        folder = Path(SYSTEM_CONFIG_DIRS[0])
    elif option == "--sys-prefix":
        folder = Path([*ENV_CONFIG_DIRS, *SYSTEM_CONFIG_DIRS][0])
    else:
        known = _profiles()
        name = profile or "default"
        folder = _ipython() / f"profile_{name}"
        if profile is not None and name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"--profile {name}: there is no such profile in {_ipython()} (there: {listed}); "
                f"`ipython profile create {name}` makes it"
            )
    return Place(option, folder / FILE)


def places() -> list[Place]:
    """Every file from which a kernel of this Python may be told to load the extension."""
    found = []
    for option in ("--sys-prefix", "--user", "--system"):
        with contextlib.suppress(UsageError):  # there is no home folder
            found.append(place(option))
    found += [place("--profile", name) for name in sorted(_profiles() - {"default"})]
    return [place for n, place in enumerate(found) if place.path not in {p.path for p in found[:n]}]


def _ipython() -> Path:
    """The user's folder; IPython's own function would make it. Raises `UsageError`: no home."""
    try:
        return Path(os.environ.get("IPYTHONDIR") or "~/.ipython").expanduser().absolute()
    except RuntimeError as error:
        raise UsageError("there is no home folder: set HOME or IPYTHONDIR") from error


def _profiles() -> set[str]:
    with contextlib.suppress(UsageError):
        folders = [path for path in _ipython().glob("profile_*") if path.is_dir()]
        return {path.name[len("profile_") :] for path in folders}
    return set()


# ---- what is there


def fragment() -> dict[str, Any]:
    """The entries that switch the extension on, as they are shipped."""
    folders = (_HERE / "jupyter-config", _HERE.parent / "jupyter-config")  # wheel, checkout
    path = next(path for folder in folders if (path := folder / FILE).exists())
    entries: dict[str, Any] = json.loads(path.read_bytes())
    return entries


def is_on(path: Path) -> bool:
    """True if kernels that read this file load the extension. Raises `UsageError`: broken file."""
    text = _text(path)
    entries = {} if text is None else _parsed(path, text)
    app = entries.get("InteractiveShellApp")
    lists = (
        [app.get(key) for key in ("extra_extensions", "extensions")]
        if isinstance(app, dict)
        else []
    )
    return any("nb_assertdoc" in names for names in lists if isinstance(names, list))


def is_switched_off(path: Path) -> bool:
    """True if the file lets the extension load and do nothing."""
    text = _text(path)
    section = _parsed(path, text).get("AssertDoc") if text is not None else None
    return isinstance(section, dict) and section.get("enabled") is False


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: mend it first") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}): mend it first") from error
    if not isinstance(entries, dict):
        raise UsageError(f"{path} holds no JSON object: mend it first")
    return entries


# ---- enable, disable


def enable(path: Path) -> bool:
    """Merge our entries into the file; False if they are there already. Raises `UsageError`."""
    path = Path(os.path.realpath(path))  # a link to the user's own file stays a link
    before = _text(path)
    entries = {} if before is None else _parsed(path, before)
    wanted = _merged(entries, fragment(), path)
    if wanted == entries:
        return False
    if (other := _rival(path)) is not None:
        raise UsageError(
            f"{other} sets InteractiveShellApp.extra_extensions: of such lists kernels read "
            "one alone, so that extensions would be lost; add 'nb_assertdoc' to that list instead"
        )
    text = _dumped(wanted, like=before)
    old = _record(path)
    try:
        made = _make_folders(path.parent)
        folders = list(dict.fromkeys([*(old.folders if old else []), *made]))
        record = UndoRecord(before, _digest(text), folders)
        _replace(path.with_name(RECORD), json.dumps(record._asdict(), indent=1), mode=0o600)
        _replace(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return True


def disable(path: Path) -> bool:
    """Undo `enable`; False if there was nothing to undo. Raises `UsageError`.

    A file that has not changed since gets its former bytes back, or goes with the folders that were
    made for it. From another only our entries are taken out.
    """
    path = Path(os.path.realpath(path))
    record = _record(path)
    if record is None and not is_on(path):
        return False
    text = _text(path)
    if record is not None and text is not None and _digest(text) == record.after:
        rest = record.before
    elif text is None:
        rest = None
    else:
        entries = _parsed(path, text)
        before = json.loads(record.before) if record and record.before is not None else {}
        ours = fragment()
        ours["InteractiveShellApp"]["extensions"] = ["nb_assertdoc"]  # where it was put by hand
        kept = _without(entries, ours, before) or {}
        was_there = record is not None and record.before is not None
        rest = _dumped(kept, like=text) if kept or was_there else None
        if kept == entries:
            rest = text
    try:
        if rest is None:
            path.unlink(missing_ok=True)
        elif rest != text:
            _replace(path, rest)
        path.with_name(RECORD).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    for folder in reversed(record.folders if record else []):
        with contextlib.suppress(OSError):  # somebody else's files are in it
            os.rmdir(folder)
    return rest != text


def _rival(path: Path) -> Path | None:
    """Another file that kernels read beside this one, with extensions in the same list."""
    ours = path.parent.name.startswith("profile_")
    options = ("--sys-prefix", "--system") if ours else ("--sys-prefix", "--user", "--system")
    folders = [path.parent, *(p.path.parent for p in places() if p.option in options)]
    for folder in dict.fromkeys(folders):
        for stem in ("ipython_config", "ipython_kernel_config"):
            for file in (folder / f"{stem}.json", folder / f"{stem}.py"):
                if os.path.realpath(file) != str(path) and _has_extensions(file):
                    return file
    return None


def _has_extensions(file: Path) -> bool:
    """The file fills `extra_extensions` with others than ours."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        text = file.read_bytes().decode()
        if file.suffix == ".py":
            return re.search(r"^[^#\n]*\bextra_extensions\b", text, re.MULTILINE) is not None
        listed = json.loads(text)["InteractiveShellApp"]["extra_extensions"]
        return any(name != "nb_assertdoc" for name in listed)
    return False


def _record(path: Path) -> UndoRecord | None:
    """The record of the last `enable`; one that cannot be read counts as none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return UndoRecord(**json.loads(path.with_name(RECORD).read_bytes()))
    return None


def _merged(there: Any, ours: Any, path: Path, key: str = "") -> Any:
    """`there` with `ours`: keys added, lists extended, every other value left as it is."""
    if type(there) is not type(ours) and isinstance(ours, (dict, list)):
        kind = "an object" if isinstance(ours, dict) else "a list"
        raise UsageError(f"{path}: {key} must be {kind}: mend it first")
    if isinstance(ours, dict):
        merged = {k: _merged(there[k], v, path, k) if k in there else v for k, v in ours.items()}
        return {**there, **merged}
    if isinstance(ours, list):
        return [*there, *(item for item in ours if item not in there)]
    return there


def _without(there: Any, ours: Any, before: Any) -> Any:
    """`there` without what `_merged` added to `before`; None where nothing of it is left."""
    if isinstance(ours, dict) and isinstance(there, dict):
        before = before if isinstance(before, dict) else None
        kept = {}
        for key, value in there.items():
            if key in ours:
                value = _without(value, ours[key], before.get(key) if before else None)
            if value is not None or key not in ours:
                kept[key] = value
        return kept if kept or before is not None else None
    if isinstance(ours, list) and isinstance(there, list):
        known = before if isinstance(before, list) else []
        left = [item for item in there if item not in ours or item in known]
        return left if left or isinstance(before, list) else None
    return None if there == ours and before is None else there


# ---- files


def _dumped(entries: dict[str, Any], like: str | None) -> str:
    """JSON in the layout of `like`: its indentation, line ends and last line."""
    if like is None:
        return json.dumps(entries, indent=2) + "\n"
    indent = re.search(r"^[\[{\s]*\n([ \t]+)\S", like)
    text = json.dumps(
        entries,
        indent=indent[1] if indent else 2 if "\n" in like.strip() else None,
        ensure_ascii=like.isascii(),
    )
    if "\r\n" in like:
        text = text.replace("\n", "\r\n")
    return text + like[len(like.rstrip()) :]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _make_folders(folder: Path) -> list[str]:
    missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
    for path in missing:
        path.mkdir()
    return [str(path) for path in missing]


def _replace(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file so that it is never seen half written. Keeps an existing file's mode."""
    if mode is None:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
