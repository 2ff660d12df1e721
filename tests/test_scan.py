"""`%assertdoc scan`: exact counts over every kind of data, and nothing of the user's is changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels import Kernel
from msgspec.structs import replace
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from nb_assertdoc import report, scan
from nb_assertdoc.errors import UsageError
from nb_assertdoc.magics.arguments import scan_words
from nb_assertdoc.model import Bound, Cause, Environment, Finding, Place, Report, Step
from nb_assertdoc.scan.advice import advised


class Items(Dataset):
    """A map-style data set of the items that a function makes."""

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self.size, self.make = size, make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> Any:
        return self.make(row)


class Stream(IterableDataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def collate(items: list[Any]) -> dict[str, Any]:
    return {"labels": torch.tensor([label for _, label in items])}


def loader_of_its_own(values: list[int]) -> DataLoader:
    pairs = Items(len(values), lambda row: ("text", values[row]))
    return DataLoader(pairs, batch_size=3, collate_fn=collate)


# Each holds the values as the one field of integers; some have others of another kind beside.
CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "tensor": torch.tensor,
    "small integers": lambda v: torch.tensor(v, dtype=torch.int16),
    "array": np.array,
    "array of objects": lambda v: np.array(v, dtype=object),
    "list": list,
    "list of pairs": lambda v: [("text", x) for x in v],
    "list of tensors": lambda v: [torch.tensor([x]) for x in v],
    "dict of columns": lambda v: {"text": ["a"] * len(v), "label": v},
    "tuple of tensors": lambda v: (torch.rand(len(v), 2), torch.tensor(v)),
    "series": pd.Series,
    "frame": lambda v: pd.DataFrame({"text": ["a"] * len(v), "label": v, "price": [0.5] * len(v)}),
    "structured array": lambda v: np.array(list(zip([0.5] * len(v), v)), dtype="f8,i8"),  # noqa: B905
    "tensors": lambda v: TensorDataset(torch.rand(len(v), 2), torch.tensor(v)),
    "map-style": lambda v: Items(len(v), lambda i: {"x": torch.rand(2), "label": v[i]}),
    "map-style of tensors": lambda v: Items(len(v), lambda i: (torch.rand(2), torch.tensor(v[i]))),
    "map-style of lists": lambda v: Items(len(v), lambda i: {"ids": [v[i]]}),
    "subset": lambda v: Subset(TensorDataset(torch.tensor(v)), range(len(v))),
    "stream": lambda v: Stream([(0.5, x) for x in v]),
    "loader": lambda v: DataLoader(TensorDataset(torch.tensor(v)), batch_size=3, shuffle=True),
    "loader of a stream": lambda v: DataLoader(Stream([(0.5, x) for x in v]), batch_size=3),
    "loader with a collate function": loader_of_its_own,
    "data frames by split": lambda v: {"train": pd.DataFrame({"label": v}), "note": "a"},
}


def scanned(thing: Any, bound: Bound, name: str = "data", **options: Any) -> scan.Scan:
    return advised(scan.scan(scan.sources(thing, name), bound, name=name, **options))


def obeys(value: int, bound: Bound) -> bool:
    return bound.low <= value < bound.high or value == bound.ignore


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.integers(-5, 15), min_size=1, max_size=40),
    low=st.integers(-3, 3),
    size=st.integers(1, 9),
    ignore=st.none() | st.sampled_from([-5, 12]),
)
@example(values=[0] * 300 + [99] * 300, low=0, size=1, ignore=None)
def test_every_container_is_counted_exactly(values, low, size, ignore):
    bound = Bound(low=low, high=low + size, ignore=ignore)
    bad = [row for row, value in enumerate(values) if not obeys(value, bound)]
    for kind, make in CONTAINERS.items():
        data = make(values)
        found = scanned(data, bound)
        (column,) = found.columns

        assert (found.rows, found.failed, found.unread, found.stopped) == (
            len(values),
            0,
            (),
            False,
        ), kind
        assert (column.count, column.minimum, column.maximum) == (
            len(values),
            min(values),
            max(values),
        ), kind
        assert (column.bad, column.bad_rows, column.rows) == (
            len(bad),
            len(bad),
            tuple(bad[:256]),
        ), kind
        assert column.values == tuple(sorted({values[row] for row in bad})), kind
        assert column.distinct == len(column.values), kind

        said, *rest = found.code
        space = {"data": data, "torch": torch}
        if bad:
            with pytest.raises(AssertionError, match="outside"):
                exec(said, space)
        else:
            exec(said, space)
            assert rest == [], kind
        for line in rest:
            exec(line, space)
        if len(rest) == 2:  # the last line leaves the bad rows out
            exec(said, space)
        if rest:
            assert space["bad_rows"] == bad, kind
            assert rest[0].endswith("  # rows of the data, counted from 0; not of a batch"), kind


def test_all_bad_rows_are_given_and_of_very_many_the_code_that_finds_them():
    values = [99] * 400
    wide = np.array([[1, 2], [3, 99]] * 300)
    nested = [(0.5, [v, 1]) for v in values]
    for data, bad in (
        (wide, [*range(1, 600, 2)]),
        (nested, [*range(400)]),
        (values, [*range(400)]),
    ):
        line = scanned(data, Bound(low=0, high=10)).code[1]
        space = {"data": data}
        exec(line, space)
        assert len(line) < 200, "code, not a list"
        assert space["bad_rows"] == bad
    listed = scanned([99] * 69, Bound(low=0, high=10)).code[1]
    assert listed.startswith(f"bad_rows = {[*range(69)]}  # rows of the data")
    stream = DataLoader(Stream([("a", 99)] * 300), batch_size=3, collate_fn=collate)
    assert scanned(stream, Bound(low=0, high=10)).code[1].endswith("; the first 256 of 300")


def test_the_lines_that_leave_bad_rows_out():
    bound = Bound(low=0, high=10)
    frame = pd.DataFrame({"label": [1, 12, 3], "text": list("abc")})
    space = {"torch": torch, "frame": frame, "items": Items(3, lambda i: (0.5, [1, 12, 3][i]))}
    for name in ("frame", "items"):
        exec("\n".join(scanned(space[name], bound, name).code[1:]), space)

    assert space["frame"].text.tolist() == ["a", "c"]
    assert [space["items"][row] for row in range(len(space["items"]))] == [(0.5, 1), (0.5, 3)]


def test_the_default_of_ignore_index_is_asserted_where_it_is_used():
    bound = Bound(low=0, high=3, ignore=-100)
    assert scanned([1, -100, 2], bound).code[0].startswith("assert all((0 <= v < 3 or v == -100)")
    assert scanned([1, -1, 2], bound).code[0].startswith("assert all(0 <= v < 3 for v in data)")


def test_rows_of_several_values():
    bound = Bound(low=0, high=10)
    texts = [[1, 2], [30, 4, 50], [], [50]]
    for data in (
        texts,
        {"ids": texts},
        pd.Series(texts),
        [np.array(t, dtype=int) for t in texts],
        [torch.tensor(t, dtype=torch.int64) for t in texts],
        Items(4, lambda row: {"ids": texts[row], "text": "a"}),
    ):
        found = scanned(data, bound)
        (column,) = found.bad
        assert (column.count, column.bad, column.bad_rows) == (6, 3, 2)
        assert (column.rows, column.values) == ((1, 3), (30, 50))
        with pytest.raises(AssertionError):
            exec(found.code[0], {"data": data})


def test_fields_of_integers_count_where_there_are_several():
    rows = {"id": torch.arange(20), "label": torch.ones(20).long(), "price": torch.rand(20) * 99}
    found = scanned(rows, Bound(low=0, high=10))

    assert [(c.name, c.bad) for c in found.columns] == [("data['id']", 10), ("data['label']", 0)]
    chosen = scanned(rows, Bound(low=0, high=10), fields={"data['price']": None})
    assert [c.name for c in chosen.columns] == ["data['price']"]


def test_floats_count_for_a_range_of_values_or_alone():
    values = [0.0, 1.0, 1.5, float("nan"), float("-inf")]
    unit = Bound(low=0, high=1, high_inclusive=True)
    (column,) = scanned({"p": values, "name": list("abcde")}, unit).columns

    assert (column.bad, column.rows) == (3, (2, 3, 4))
    assert column.values == ("-inf", 1.5, "nan")
    missing = pd.Series([1, None, 3])
    (column,) = scanned(missing, Bound(low=0, high=3)).columns
    assert (column.rows, column.values) == ((1, 2), (3.0, "nan"))
    (column,) = scanned(missing.astype("Int64"), Bound(low=0, high=3)).columns
    assert (column.rows, column.values) == ((1, 2), (3.0, "nan"))


def test_integers_of_any_size():
    huge = [2**70, -(2**70), 5]
    (column,) = scanned(huge, Bound(low=0, high=10)).columns
    assert (column.values, column.rows) == ((-(2**70), 2**70), (0, 1))
    (column,) = scanned(np.array([2**64 - 1, 5], dtype=np.uint64), Bound(low=-5, high=10)).columns
    assert (column.values, column.rows) == ((2**64 - 1,), (0,))
    found = scanned(torch.tensor([255, 3], dtype=torch.uint8), Bound(low=0, high=300))
    exec(found.code[0], {"data": torch.tensor([255, 3], dtype=torch.uint8)})  # 300 is 44 in uint8
    (column,) = scanned(torch.tensor([True, False]), Bound(low=0, high=1)).columns
    assert (column.values, column.rows) == ((1,), (0,))


@pytest.mark.parametrize("kind", ["i8", "f8", "list"])
def test_many_different_values_are_counted_exactly(kind):
    """A set of them, or a sort of every block's rows, takes a minute."""
    size = 3_000_000 if kind != "list" else 50_000
    values = np.random.default_rng(0).permutation(size)
    values[1::2] = values[::2]  # each twice
    data = values.tolist() if kind == "list" else values.astype(kind)
    (column,) = scanned(data, Bound(low=0, high=3)).columns
    expected = sorted(set(values.tolist()) - {0, 1, 2})
    assert (column.distinct, column.values) == (len(expected), tuple(expected[:256]))
    bad = np.flatnonzero(values >= 3)
    assert (column.bad, column.bad_rows) == (bad.size, bad.size)
    assert column.rows == tuple(bad[:256].tolist())
    assert column.count == size


def test_categories_are_compared_as_numbers():
    data = pd.DataFrame({"grade": pd.Categorical([1, 2, 9])})
    found = scanned(data, Bound(low=0, high=3))
    assert found.columns[0].values == (9,)
    with pytest.raises(AssertionError, match="grade"):
        exec(found.code[0], {"data": data})
    names = {"data": data}
    exec(found.code[-1], names)
    assert names["data"].grade.tolist() == [1, 2]


@pytest.mark.parametrize(
    "data", [[1, None, 5], [1, "a", 5], [[1], [2, [5]]], [{"a": 1}, {"a": 5}, {"b": "x"}]]
)
def test_no_code_is_offered_where_a_row_lacks_the_field(data):
    found = scanned(data, Bound(low=0, high=3))
    assert [c.values for c in found.bad] in ([(5,)], [])
    assert found.code == ()


def test_an_item_that_raises_is_counted_and_the_scan_goes_on():
    def make(row: int) -> int:
        if row in (2, 17):
            raise KeyError(f"sample {row}")
        return row

    found = scanned(Items(30, make), Bound(low=0, high=29))
    (column,) = found.columns
    assert (found.failed, found.errors[0]) == (2, "row 2: KeyError: 'sample 2'")
    assert (found.rows, column.count, column.rows) == (30, 28, (29,))

    def broken() -> Iterator[int]:
        yield 7
        raise OSError("the disk is gone")

    class Broken(Stream):
        def __iter__(self) -> Iterator[int]:
            return broken()

    found = scanned(Broken([]), Bound(low=0, high=5))
    assert found.errors == ("row 1: OSError: the disk is gone",)
    assert found.columns[0].rows == (0,)
    text = report.scan_bundle(found)["text/plain"]
    assert "1 error in the data's own code: row 1: OSError: the disk is gone" in text


def test_a_batch_that_cannot_be_made():
    def picky(items: list[int]) -> torch.Tensor:
        if 4 in items:
            raise ValueError("four")
        return torch.tensor(items)

    found = scanned(
        DataLoader(list(range(9)), batch_size=3, collate_fn=picky), Bound(low=0, high=8)
    )
    assert found.errors == ("rows 3..5: collate_fn: ValueError: four",)
    assert found.columns[0].rows == (8,)


def test_an_interrupt_gives_what_was_seen():
    def make(row: int) -> int:
        if row == 1000:
            raise KeyboardInterrupt
        return row

    found = scanned(Items(5000, make), Bound(low=0, high=0))
    (column,) = found.columns
    assert found.stopped
    assert 0 < found.rows <= 1000
    assert (column.bad, column.maximum) == (found.rows, found.rows - 1)
    assert "as far as it was scanned" in report.scan_bundle(found)["text/plain"]


def test_random_numbers_and_objects_of_the_user_stay_as_they_are():
    drawing = Items(
        50, lambda row: random.randrange(9) + np.random.randint(9) + int(torch.randint(9, ()))
    )
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(drawing, shuffle=True, generator=generator)
    values = torch.tensor([1, 2, 30])
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    own = generator.get_state().tolist()
    for thing in (drawing, loader, values):
        scanned(thing, Bound(low=0, high=4))

    assert before == (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
    assert generator.get_state().tolist() == own
    assert values.tolist() == [1, 2, 30] and values._version == 0


def test_a_stream_has_a_budget():
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(lambda: 3, None)

    endless = scan.sources(Endless(), "endless", most=1234)
    found = scan.scan(endless, Bound(low=0, high=3), name="endless")
    assert (found.rows, found.total, found.columns[0].bad) == (1234, None, 1234)


REFUSED: dict[str, Any] = {
    "an iterator": iter([1]),
    "None": None,
    "text": "abc",
    "a number": 5,
    "a module": torch.nn.Sequential(torch.nn.Linear(1, 1)),
    "a function": len,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_scanned_is_named(kind):
    with pytest.raises(UsageError, match="thing"):
        scan.sources(REFUSED[kind], "thing")


# ---- which data


def of_finding(**options: Any) -> Report:
    finding = {
        "op": "cross_entropy",
        "aten_op": "aten.nll_loss_forward",
        "argument": "target",
        "bad_values": (10,),
        "distinct_bad": 1,
        "bad_count": 1,
        "total": 32,
        "positions": ((5,),),
        "bound": Bound(low=0, high=10),
        "margin": 1.0,
        "location": Place(line=1, source=""),
        **options,
    }
    return Report(
        confidence="certain",
        headline="",
        environment=Environment(python="", ipython="", platform=""),
        finding=Finding(**finding),
    )


def step(*indices: int, loop: str = "for x, y in loader:") -> Step:
    return Step(loop=loop, iteration=0, batch_rows=(5,), dataset_indices=indices or None)


def chosen(found: Report | None, namespace: dict[str, Any], expr: str = "", **more: Any) -> Any:
    named = scan.evaluated(expr, namespace, False) if expr else None
    return scan.scan_chosen(scan.range_of(found), namespace, named=named, **more)


def test_the_field_is_the_one_that_holds_the_bad_values():
    rows = [{"doc": 100 + i, "label": i % 10} for i in range(30)]
    rows[17]["label"] = rows[29]["label"] = 10
    found = chosen(of_finding(step=step(17)), {"rows": rows}, "rows")

    (column,) = found.columns
    assert (column.name, column.rows) == ("rows[row]['label']", (17, 29))
    assert found.notes == ()
    both = chosen(of_finding(step=step()), {"rows": rows}, "rows")  # the row is not known
    assert [c.name for c in both.bad] == ["rows[row]['doc']", "rows[row]['label']"]


def test_values_that_the_code_computes_are_not_blamed_on_the_data():
    found = chosen(
        of_finding(step=step(3), bad_values=(-1,)), {"labels": list(range(11))}, "labels"
    )

    assert "the code computes" in found.notes[0]


def test_a_range_that_may_change_from_batch_to_batch():
    found = chosen(of_finding(op="gather", step=step(0)), {"spans": [10]}, "spans")
    assert "from batch to batch" in found.notes[0]
    cause = Cause(key="node_index_ge_num_nodes", title="", explanation="")
    with pytest.raises(UsageError, match="each graph has a range of its own"):
        scan.range_of(replace(of_finding(), cause=cause))


def test_one_column_of_a_table():
    table = torch.tensor([[1, 900], [3, 800], [10, 700], [4, 600], [12, 5]])
    finding = of_finding(step=step(2), positions=((5,),))
    for name, data in {
        "table[:, 0]": table,
        "data[row][0][0]": Items(5, lambda row: (table[row], 0.5)),
        "rows[0]": table.tolist(),
    }.items():
        variable = name.partition("[")[0]
        found = chosen(finding, {variable: data}, variable)
        (column,) = found.columns
        assert (column.name, column.rows, column.values) == (name, (2, 4), (10, 12))
        with pytest.raises(AssertionError):
            exec(found.code[0], {variable: data})


def test_the_failing_loop_is_scanned_under_the_names_of_the_user():
    class Trainer:
        def __init__(self) -> None:
            self.train_data = Items(20, lambda row: row)

    labels = torch.arange(20)
    loader = DataLoader(TensorDataset(labels))
    trainer = Trainer()
    namespace = {"labels": labels, "loader": loader, "trainer": trainer, "_": loader}
    asked = of_finding(step=step())

    assert chosen(asked, namespace, loop=scan.FailedLoop(loader)).columns[0].name == "labels"
    found = chosen(asked, namespace, loop=scan.FailedLoop(None, trainer.train_data))
    assert found.name == "trainer.train_data"
    assert chosen(asked, namespace).name == "loader"  # named by the loop's header
    other = of_finding(step=step(loop="for i, batch in enumerate(loader):"))
    assert chosen(other, namespace).name == "loader"


def test_variables_are_searched_where_the_loop_is_not_known():
    namespace = {
        "fine": torch.arange(5),
        "labels": torch.tensor([1, 10]),
        "same": None,
        "frame": pd.DataFrame({"y": [10, 2], "z": [11, 1]}),
        "model": torch.nn.Linear(1, 1),
        "_hidden": torch.tensor([10]),
        "words": ["a"],
    }
    namespace["same"] = namespace["labels"]
    found = chosen(of_finding(), namespace)

    assert [c.name for c in found.columns] == ["labels", "frame['y']"]
    assert "not known" in found.notes[0]
    data = Items(5, lambda row: row)
    with pytest.raises(UsageError, match=r"no variable holds 77; .*there are: numbers, data"):
        chosen(of_finding(bad_values=(77,)), {"numbers": [1, 2], "data": data, "n": 5})
    with pytest.raises(UsageError, match="there is no data set among the variables"):
        chosen(of_finding(), {})


def test_a_range_is_needed():
    with pytest.raises(UsageError, match="there is no report yet: say what is valid, such as --r"):
        scan.range_of(None)
    with pytest.raises(UsageError, match="the last report has no range"):
        scan.range_of(of_finding(bound=None))


def test_texts_that_are_longer_than_the_positions():
    texts = [[1] * n for n in (3, 9, 4, 12)]
    cause = Cause(key="position_ge_max", title="", explanation="")
    asked = of_finding(bad_values=(8, 9, 10, 11), bound=Bound(low=0, high=8))
    asked = replace(asked, cause=cause)

    def padded(items: list[list[int]]) -> torch.Tensor:
        most = max(map(len, items))
        return torch.tensor([text + [0] * (most - len(text)) for text in items])

    for data in (
        texts,
        Items(4, lambda row: {"ids": texts[row], "label": 1}),
        DataLoader(Items(4, lambda row: texts[row]), batch_size=2, collate_fn=padded),
        {"ids": texts},
    ):
        found = chosen(asked, {"data": data}, "data")
        (column,) = found.columns
        assert (column.rows, column.minimum, column.maximum) == ((1, 3), 3, 12)
        with pytest.raises(AssertionError):
            exec(found.code[0], {"data": data})
        assert "at most 8 values in a row" in report.scan_bundle(found)["text/plain"]


# ---- Hugging Face


def test_data_sets_of_hugging_face_are_read_by_columns():
    datasets = pytest.importorskip("datasets")
    labels = [i % 10 for i in range(3000)]
    labels[17] = labels[2500] = 10
    ids = [[i % 7, 50] if i == 40 else [1] * (i % 4) for i in range(3000)]
    made = datasets.Dataset.from_dict({"label": labels, "ids": ids, "text": ["a"] * 3000})
    touched = made.with_transform(lambda rows: {"label": [0] * len(rows["text"])})
    bound = Bound(low=0, high=10)
    for data, rows in (
        (made, (17, 2500)),
        (made.with_format("torch"), (17, 2500)),
        (made.select([2500, 1, 17]), (0, 2)),
    ):
        found = scanned(data, bound)
        by_name = {c.name: c for c in found.columns}
        assert by_name["data['label']"].rows == rows
        with pytest.raises(AssertionError):
            exec(found.code[0], {"data": data})
    (column,) = scanned(made.remove_columns("label"), bound).bad
    assert (column.name, column.rows, column.values) == ("data['ids']", (40,), (50,))
    assert scanned(touched, bound).bad == ()  # what the transform makes is what a model is given
    split = scanned(datasets.DatasetDict(train=made, test=made.select(range(5))), bound)
    assert next((c.name, c.bad) for c in split.bad) == ("data['train']['label']", 2)
    assert split.rows == 3005
    space = {"data": made.remove_columns("ids")}
    exec(scanned(space["data"], bound).code[-1], space)
    assert len(space["data"]) == 2998
    table = scanned(made.data.table, bound)
    assert {c.name: c.bad for c in table.columns} == {"data['label']": 2, "data['ids']": 1}


# ---- the magic


@pytest.mark.parametrize(
    ("line", "expression", "options"),
    [
        ("scan", "", []),
        ('scan df["a  b"]', 'df["a  b"]', []),
        ("scan x[:, -1] --range 0:10", "x[:, -1]", ["--range=0:10"]),
        ("scan --range -1:10 --ignore -100 y", "y", ["--range=-1:10", "--ignore=-100"]),
        ("scan a - b --rows 5", "a - b", ["--rows=5"]),
        ("scan --help", "", ["--help"]),
    ],
)
def test_an_expression_keeps_its_quotes_and_spaces(line, expression, options):
    assert scan_words(line) == (expression, ["scan", *options])


def test_names_are_escaped():
    found = scanned({"<img src=x>": [50]}, Bound(low=0, high=10))
    bundle = report.scan_bundle(found)
    assert "<img" not in bundle["text/html"] and "&lt;img" in bundle["text/html"]
    assert "<img src=x>" in bundle["text/plain"]


CRASH = """
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader, TensorDataset
from nb_assertdoc.simulated_gpu import calls_after_death
torch.manual_seed(0)
images, labels = torch.randn(600, 4), torch.randint(0, 10, (600,))
labels[17], labels[203] = 10, -1
loader = DataLoader(TensorDataset(images, labels), batch_size=100, shuffle=True)
net = nn.Linear(4, 10).cuda()
on_gpu = torch.zeros(4, dtype=torch.long).cuda()
class Held(Dataset):
    def __init__(self): self.rows = on_gpu
    def __len__(self): return 4
    def __getitem__(self, row): return self.rows[row]
class Pairs(Dataset):
    def __len__(self): return 2
    def __getitem__(self, row): return {"mask": on_gpu, "label": 12}
class Uses(Dataset):
    def __init__(self, **parts): self.__dict__.update(parts)
    def __len__(self): return 9
    def __getitem__(self, row): return torch.zeros(1).cuda()
class Makes(Uses):
    def __getitem__(self, row): return torch.zeros(1, device="cuda")
class Ends(Uses):
    def __getitem__(self, row):
        if row == 1: net(torch.zeros(1, 4)) if self.of_net else __import__('sys').exit()
        return 9
for x, y in loader:
    loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
loss.item()
"""


@pytest.fixture(scope="module")
def dead() -> Iterator[Kernel]:
    """A notebook whose GPU context is dead; the report knows the loop and its labels."""
    with Kernel(simulated_gpu=True, extension=True) as kernel:
        assert kernel.run(CRASH).report["finding"]["op"] == "cross_entropy"
        yield kernel


def test_after_the_crash_the_data_of_the_loop_is_scanned(dead):
    outcome = dead.run("%assertdoc scan")

    assert outcome.error is None
    assert len(outcome.displays) == 1
    assert outcome.displays[0]["text/html"].startswith("<div")
    text = outcome.text
    assert text.startswith("loader holds values out of range: 2 values in 2 rows.")
    assert "0 <= index < 10, or -100 (ignored)  (cross_entropy, argument `target`)" in text
    assert "600 of 600 rows" in text
    assert "values  -1, 10\n" in text and "rows    17, 203\n" in text
    said = next(line for line in text.splitlines() if line.strip().startswith("assert"))
    assert said.strip().startswith("assert ((labels >= 0) & (labels < 10)).all()")
    pasted = dead.run(f"{said.strip()}")
    assert pasted.error["ename"] == "AssertionError"
    assert dead.run(f"labels.clamp_(0, 9)\n{said.strip()}").error is None


def test_what_is_on_the_dead_gpu_is_left_out_and_not_touched(dead):
    def lines(code: str) -> str:
        outcome = dead.run(code)
        assert outcome.error is None
        return outcome.text

    assert "on_gpu: on the GPU, which cannot be read" in lines("%assertdoc scan on_gpu")
    text = lines("%assertdoc scan {'a': on_gpu, 'b': [50]} --range 0:10")
    assert "on_gpu: on the GPU" in text and "values  50" in text
    text = lines("%assertdoc scan TensorDataset(on_gpu, torch.arange(4)) --range 0:3")
    assert "on_gpu: on the GPU" in text and "values  3" in text
    text = lines("%assertdoc scan [(on_gpu, 50)] --range 0:10")
    assert "[row][0]: on the GPU" in text and "values  50" in text
    assert "its `rows` is on the GPU" in lines("%assertdoc scan Held()")
    assert "its `rows` is on the GPU" in lines("%assertdoc scan DataLoader(Held())")
    assert "its `net` is on the GPU" in lines("%assertdoc scan Uses(net=net)")
    assert "its `device` is on the GPU" in lines("%assertdoc scan Uses(device='cuda:0')")
    text = lines("%assertdoc scan Pairs() --range 0:10")
    assert "on the GPU" in text and "values  12" in text
    assert "no data set" not in lines("%assertdoc scan --range 0:5")
    assert dead.value("calls_after_death()") == 0
    text = lines("%assertdoc scan Uses()")  # nothing tells that its code moves what it reads
    assert "Uses(): its code uses the GPU" in text and "errors" not in text
    assert "its code uses the GPU" in lines("%assertdoc scan Makes() --range 0:3")
    assert "its code uses the GPU" in lines("%assertdoc scan Ends(of_net=True) --range 0:3")
    text = lines("%assertdoc scan Ends(of_net=False) --range 0:3")
    assert "row 1: SystemExit" in text and "values  9" in text
    assert dead.value("calls_after_death()") == 0
    assert lines("%assertdoc scan nothing").strip() == (
        "nb_assertdoc: nothing: NameError: name 'nothing' is not defined"
    )
    assert "0:x is not LOW:HIGH, such as 0:10" in lines("%assertdoc scan x --range 0:x")
    assert "there are: images" not in lines("%assertdoc scan net")


ON_THE_GPU = (
    "on_gpu - 1|[on_gpu + 1]|on_gpu[1:]|on_gpu[on_gpu > 2]|on_gpu.cpu()|on_gpu.max()|"
    "[int(v) for v in on_gpu]|{'a': labels, 'b': -on_gpu}|labels.cuda()|labels.to('cuda:0')|"
    "torch.zeros(2, device='cuda')|net(images)|net.weight.argmax(1)|torch.stack([on_gpu])|x"
)


def test_an_expression_is_kept_from_the_dead_gpu(dead):
    before = dead.value("calls_after_death()")
    dead.run("x = [on_gpu][0]")
    for expression in ON_THE_GPU.split("|"):
        said = dead.run(f"%assertdoc scan {expression} --range 0:10")
        assert said.error is None
        assert "on the GPU, which" in said.text, expression
    assert dead.value("calls_after_death()") == before
    dead.run("seed = torch.get_rng_state()")
    assert "values  9" in dead.run("%assertdoc scan torch.arange(10) - 0 --range 0:9").text
    assert "is empty" not in dead.run("%assertdoc scan torch.randint(0, 9, (4,))").text
    assert dead.value("torch.equal(seed, torch.get_rng_state())") is True
    assert dead.value("calls_after_death()") == before


def test_after_the_restart_the_range_is_still_known(dead):
    dead.restart()
    dead.run("%load_ext nb_assertdoc")
    dead.run("loader = [[3, 10], [2, -1]]\nlabels = [3, 10]")
    text = dead.run("%assertdoc scan labels").text

    assert "labels holds values out of range: 1 value in 1 row." in text
    assert "(cross_entropy, argument `target`)" in text


SLOW = """
import time
class Slow:
    def __len__(self): return 1_000_000
    def __getitem__(self, row):
        time.sleep(0.001)
        return row
"""


def test_progress_is_shown_in_place_and_an_interrupt_stops_it(cpu_kernel):
    cpu_kernel.run(SLOW, store_history=False)
    seen = []

    def interrupt(message: Any) -> None:
        shown = message["content"].get("data", {}).get("text/plain", "")
        if "Scanning Slow()" in shown and not seen:
            seen.append(shown)
            cpu_kernel.interrupt()

    outcome = cpu_kernel.run("%assertdoc scan Slow() --range 0:1", on_message=interrupt)
    assert outcome.error is None, outcome.text
    assert "of 1,000,000 rows (0%) ..." in seen[0]
    assert len(outcome.displays) == 1
    assert "The scan was interrupted" in outcome.text
    assert "values  1.." in outcome.text
    assert "say what to scan" in cpu_kernel.run("%assertdoc scan --range 0:1").stdout
    assert "there is no report yet" in cpu_kernel.run("%assertdoc scan SLOW").stdout
