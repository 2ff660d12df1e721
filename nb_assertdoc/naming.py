"""What a number stands for in the user's own tables: a token, a category, a constant.

Only facts: a table is asked where its size fits, and nothing is said where several differ.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .model import Bound

LONGEST = 40  # characters of a token, a category or a file's name
_ENTRIES = 1_000_000  # most of a table that is read
_ROWS, _COLUMNS = 200_000, 8  # of a frame: most rows, most columns of a kind, for `_numbered`
_PARTS = 64  # most attributes of an object, or entries of a dict, that are looked at
_LISTS = re.compile(  # names of lists that number their entries
    r"class|label|categor|names|vocab|tokens|symbols|itos|(idx|id|ind|ix|index|int|i)_?(2|to)_?\w",
    re.IGNORECASE,
)
_KINDS = (  # a table of one kind says nothing of an index of another
    frozenset("word token tok vocab wte itos stoi symbol sym char phone phoneme text src".split()),
    frozenset("label lbl class classe tag categorie category intent slot".split()),
    frozenset("speaker spk voice".split()),
    frozenset("user customer".split()),
    frozenset("item movie product book song".split()),
    frozenset("position pos".split()),
)
_WORDS, _CLASSES = 0, 1
_EMPTY = set("self model idx index dict map list name dataset emb embed embedding id to".split())
_TOKENIZERS = (  # of transformers, tokenizers, sentencepiece: from a number to a token; the size
    ("convert_ids_to_tokens", "__len__"),
    ("id_to_token", "get_vocab_size"),
    ("id_to_piece", "get_piece_size"),
)
_MARKS = set(
    "pad padding ignore ignored unk unknown mask void eos bos sos sep cls missing oov unlabeled "
    "unlabelled background sentinel".split()
)
_ENDINGS = {"index", "idx", "id", "token", "label", "value"}
_COUNTS = set("num n count size len length max min rate ratio prob batch".split())


@dataclass(frozen=True)
class _Table:
    """`said(value)`: the source of the entry, and the entry itself."""

    name: str
    size: int
    said: Callable[[int], tuple[str, str] | None]
    of_tokens: bool = False  # a tokenizer's

    @property
    def kinds(self) -> set[int]:
        return {_WORDS} if self.of_tokens else _kinds(self.name)


_Found = tuple[_Table, str, str]  # and the source of the entry, the entry


@dataclass(frozen=True)
class Call:
    """What a table must fit.

    `about`: the user's names for the index and what it goes into. `labels`: it is a loss's target.
    """

    about: str
    labels: bool
    bound: Bound | None

    @property
    def kinds(self) -> set[int]:
        return _kinds(self.about)

    def takes(self, table: _Table) -> bool:
        """Of no other kind; of about as many entries, unless it is of the very kind."""
        kinds = self.kinds
        if table.kinds and kinds:
            return bool(table.kinds & kinds)
        return self.bound is None or table.size <= 2 * self.bound.high + 2


class Names:
    """The tables among the user's variables; `of` asks those that fit the call."""

    def __init__(self, variables: Mapping[str, Any], call: Call) -> None:
        self._variables = variables
        self._call = call
        self._tables = [table for table in _tables(variables) if call.takes(table)]

    def of(self, value: object) -> str | None:
        """ "word2id['zebra']", "token '<ent>' of tok", "PAD_IDX"; None if nothing fits."""
        if type(value) is not int:
            return None
        found = list(self._entries(value)) if value >= 0 else []
        if _differ(found):  # the one that the call names, or that is of its kind
            wanted = {_CLASSES} if self._call.labels else self._call.kinds
            words = set(_words(self._call.about)) - _EMPTY
            named = [each for each in found if words & set(_words(each[0].name))]
            found = named or [each for each in found if each[0].kinds & wanted]
        if found and not _differ(found):
            return found[0][1]
        constants = dict(_constants(value, self._variables))
        return next(iter(constants.values())) if len(constants) == 1 else None

    def _entries(self, value: int) -> Iterator[_Found]:
        for table in self._tables:
            try:
                said = table.said(value) if value < table.size + 1 else None
            except Exception:  # a user's or a library's object may answer with anything
                continue
            if said is not None:
                yield table, *said


def _differ(found: list[_Found]) -> bool:
    return len({entry for _, _, entry in found}) > 1


def shortened(text: Any) -> str:
    """The text, cut where it is long."""
    line = str(text)
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


# ---- tables


def _tables(variables: Mapping[str, Any]) -> Iterator[_Table]:
    for name, thing in list(variables.items()):
        if name.startswith("_") or issubclass(type(thing), type | ModuleType):
            continue
        try:
            known = list(_of(name, thing))
            yield from known
            if not known:
                for part, inner in _parts(name, thing):
                    yield from _of(part, inner)
        except Exception:
            continue


def _parts(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object that is not torch's, the entries of a dict, by their source."""
    if type(thing) is dict:
        pairs: Iterable[tuple[str, Any]] = ((f"{name}[{k!r}]", v) for k, v in thing.items())
        count = len(thing)
    else:
        held = getattr(thing, "__dict__", None)
        if not isinstance(held, dict) or type(thing).__module__.split(".")[0] == "torch":
            return
        pairs = ((f"{name}.{k}", v) for k, v in held.items() if not k.startswith("_"))
        count = len(held)
    if count <= _PARTS:
        yield from list(pairs)


def _of(name: str, thing: Any) -> Iterator[_Table]:
    """A thing as a table; none if it is another thing."""
    kind = type(thing)
    if kind.__module__.split(".")[0] in ("torch", "collections"):  # a Counter is no numbering
        return
    if isinstance(thing, dict):
        yield from _of_dict(name, thing)
    elif isinstance(thing, list | tuple):
        if _LISTS.search(name):
            yield _listed(name, thing)
    elif kind.__module__.split(".")[0] == "pandas":
        yield from _of_pandas(name, thing)
    elif (classes := _own(thing, "classes_")) is not None:
        if isinstance(classes, dict):
            yield from _of_dict(name, classes, ".classes_")
        else:
            yield _listed(name, classes, ".classes_")
    elif isinstance(columns := _own(thing, "categories_"), list):
        features = _own(thing, "feature_names_in_")
        features = range(len(columns)) if features is None else features
        for i, (feature, column) in enumerate(zip(features, columns, strict=False)):
            table = _listed(name, column, f".categories_[{i}]")
            yield _Table(f"{name} {feature}", table.size, table.said)
    elif hasattr(kind, "get_itos"):
        yield _listed(name, thing.get_itos(), ".get_itos()")
    else:
        for look, size in _TOKENIZERS:
            if hasattr(kind, look) and hasattr(kind, size):
                yield _tokenizer(name, getattr(thing, look), int(getattr(thing, size)()))
                return


def _own(thing: Any, name: str) -> Any:
    """An attribute that is stored: a property, or `__getattr__`, may do anything."""
    return inspect.getattr_static(thing, name, None)


def _of_dict(name: str, table: dict[Any, Any], part: str = "") -> Iterator[_Table]:
    """From names to numbers or from numbers to names, from 0 or 1 on without a gap."""
    if not 2 <= len(table) <= _ENTRIES:
        return
    first_key, first = next(iter(table.items()))
    if type(first) is int and all(type(k) is str and type(v) is int for k, v in table.items()):
        names = {v: k for k, v in table.items()}
        text = "{name}[{entry!r}]"
    elif type(first_key) is int and all(
        type(k) is int and type(v) is str for k, v in table.items()
    ):
        names, text = table, "{name}[{value}] = {entry!r}"
    else:
        return
    if min(names) not in (0, 1) or len(table) != max(names) - min(names) + 1:
        return

    def said(value: int) -> tuple[str, str] | None:
        if value not in names:
            return None
        entry = shortened(names[value])
        return text.format(name=name + part, value=value, entry=entry), entry

    yield _Table(name, len(table), said)


def _listed(name: str, entries: Any, part: str = "") -> _Table:
    """A list, or an array, of names: `part` of the thing that has this name."""

    def said(value: int) -> tuple[str, str] | None:
        if value >= len(entries) or not isinstance(entries[value], str):
            return None
        entry = shortened(entries[value])
        return f"{name}{part}[{value}] = {entry!r}", entry

    return _Table(name, len(entries), said)


def _tokenizer(name: str, look: Callable[[int], Any], size: int) -> _Table:
    def said(value: int) -> tuple[str, str] | None:
        if value >= size:
            return None
        entry = shortened(look(value))
        return f"token {entry!r} of {name}", entry

    return _Table(name, size, said, of_tokens=True)


def _of_pandas(name: str, thing: Any) -> Iterator[_Table]:
    """The categories of a series, or of a frame's columns; what a column of a frame numbers."""
    columns = list(thing.items())[:_PARTS] if hasattr(thing, "columns") else [(None, thing)]
    for column, series in columns:
        if type(getattr(series, "dtype", None)).__name__ == "CategoricalDtype":
            source = name if column is None else f"{name}[{column!r}]"
            yield _listed(source, series.cat.categories, ".cat.categories")
    if not hasattr(thing, "columns") or len(thing) > _ROWS:
        return
    codes = [c for c, series in columns if getattr(series.dtype, "kind", "") in "iu"]
    texts = [c for c, series in columns if str(series.dtype) in ("object", "str", "string")]
    for code in codes[:_COLUMNS]:
        for text in texts[:_COLUMNS]:
            yield from _numbered(name, thing, code, text)


def _numbered(name: str, frame: Any, code: Any, text: Any) -> Iterator[_Table]:
    """A column of numbers from 0 or 1 on, each of which stands beside one text and no other."""
    pairs = frame[[code, text]].drop_duplicates()
    entries = {int(number): entry for number, entry in zip(pairs[code], pairs[text], strict=True)}
    one_to_one = len(entries) == len(pairs) == pairs[text].nunique()
    if not one_to_one or not all(type(entry) is str for entry in entries.values()):
        return
    if (
        len(entries) < 2
        or min(entries) not in (0, 1)
        or len(entries) - 1 + min(entries) != max(entries)
    ):
        return

    def said(value: int) -> tuple[str, str] | None:
        if value not in entries:
            return None
        entry = shortened(entries[value])
        return f"{name}[{text!r}] = {entry!r}, by {name}[{code!r}]", entry

    yield _Table(f"{name} {code}", len(entries), said)


# ---- constants


def _constants(value: int, variables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and source of the user's constants, and of the imported modules', that equal a value."""
    modules: dict[str, ModuleType] = {}
    for name, thing in list(variables.items()):
        if type(thing) is int and thing == value and _is_mark(name):
            yield name, name
        if isinstance(thing, ModuleType):
            modules[thing.__name__] = thing
        elif type(thing).__name__ in ("function", "type") and thing.__module__ in sys.modules:
            modules[thing.__module__] = sys.modules[thing.__module__]
    for path, held in modules.items():
        if path == "__main__" or path.split(".")[0] in sys.stdlib_module_names:
            continue
        for name, thing in list(vars(held).items()):
            own = name.isupper() and name not in variables
            if own and type(thing) is int and thing == value and _is_mark(name):
                yield name, f"{path}.{name}"


def _is_mark(name: str) -> bool:
    """A name for a special value: "PAD_IDX", "IMAGE_TOKEN_INDEX", "ignore_index"; no count."""
    words = _words(name)
    if name.startswith("_") or _COUNTS & set(words):
        return False
    marks = bool(_MARKS & set(words))
    return (marks or (name.isupper() and len(words) > 1)) and (
        words[-1] in _ENDINGS or (marks and len(words) == 1)
    )


def _kinds(text: str) -> set[int]:
    words = set(_words(text))
    return {i for i, kind in enumerate(_KINDS) if kind & words}


def _words(text: str) -> list[str]:
    """Parts of names in lower case, without the `s` of a plural."""
    parts = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]
    return [w[:-1] if len(w) > 3 and re.search("[^s]s$", w) else w for w in parts]
