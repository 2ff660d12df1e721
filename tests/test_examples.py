"""The example notebooks fail as they say, are diagnosed right, and run when mended as they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from kernels import MIME, ROOT, WIDGET, Kernel, Outcome

EXAMPLES = ROOT / "example_notebooks"


class Example(NamedTuple):
    """What a notebook is about. `cell`: the code cell that makes the report, from 0."""

    cell: int
    said: tuple[Any, ...]  # operator, argument, bad values, bound, cause
    line: str
    mended: tuple[str, str]
    confidence: str = "certain"


EXPECTED = {
    "labels_from_one": Example(
        3,
        ("cross_entropy", "target", [5], (0, 5), "label_starts_at_1"),
        "loss = criterion(logits, y.to(device))",
        ("y.to(device)", "y.to(device) - 1"),
    ),
    "sentinel_label": Example(
        3,
        ("cross_entropy", "target", [-1], (0, 4), "label_negative_sentinel"),
        'loss = criterion(scores.flatten(0, 1), target.flatten().to("cuda"))',
        ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(ignore_index=-1)"),
    ),
    "token_added_without_resizing": Example(
        4,
        ("embedding", "input", [300], (0, 300), "token_id_ge_vocab"),
        "hidden = self.tokens(ids).mean(1)",
        ("Classifier(len(tokenizer))", "Classifier(len(tokenizer) + 1)"),
    ),
    "long_sequence": Example(
        3,
        ("embedding", "input", list(range(64, 80)), (0, 64), "position_ge_max"),
        "hidden = self.words(ids) + self.positions(places)",
        (
            "    longest = max(map(len, rows))",
            "    rows = [row[:64] for row in rows]\n    longest = 64",
        ),
    ),
    "wrong_loss": Example(
        3,
        ("binary_cross_entropy", "input", None, (0, 1), "bce_input_outside_unit"),
        'loss = criterion(scores, ill.to("cuda"))',
        ("nn.BCELoss()", "nn.BCEWithLogitsLoss()"),
        "likely",  # the weights were on the GPU
    ),
    "stale_session": Example(
        2,
        ("embedding", "input", [100], (0, 100), "category_id_ge_table"),
        'users(batch.to("cuda")).sum().item()',
        ("nn.Embedding(100, 8)", "nn.Embedding(101, 8)"),
    ),
    "several_gpus": Example(
        3,
        ("embedding", "input", [500], (0, 500), "category_id_ge_table"),
        "return self.price(self.products(ids)).squeeze(-1)",
        ("Shop(500)", "Shop(501)"),
    ),
    "loaded_after_the_crash": Example(
        4,
        ("embedding", "input", [17, 42, 99], (0, 4), "category_id_ge_table"),
        'vectors = movies(batch.to("cuda"))',
        (
            "torch.tensor(movie_ids)",
            "torch.tensor([sorted(set(movie_ids)).index(movie) for movie in movie_ids])",
        ),
        "likely",  # the cell's start was not recorded
    ),
}
OURS = ("%cpu_replay", "%%cpu_replay", "%assertdoc")  # cells that only ask nb_assertdoc
more: dict[str, Any] = {}  # further assertions about one notebook


def about(check: Any) -> Any:
    more[check.__name__] = check
    return check


def cells(name: str) -> list[Any]:
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(report: dict[str, Any]) -> tuple[Any, ...]:
    """Operator, argument, bad values, bound and cause."""
    finding, bound = report["finding"], report["finding"]["bound"]
    values = (bound["low"], bound["high"])
    return finding["op"], finding["argument"], finding["bad_values"], values, report["cause"]["key"]


def check(report: dict[str, Any], expected: Example) -> None:
    found = list(said(report))
    if expected.said[2] is None:  # floats that differ with each run
        low, high = expected.said[3]
        assert found[2]
        assert all(not low <= value <= high for value in found[2])
        found[2] = None
    assert tuple(found) == expected.said
    assert report["finding"]["location"]["source"].strip() == expected.line
    assert report["confidence"] == expected.confidence


@pytest.mark.parametrize("name", EXPECTED)
def test_it_fails_and_is_diagnosed_right(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    with Kernel(cwd=tmp_path) as kernel:
        outcomes = [kernel.run(cell.source) for cell in cells(name)]

    check(outcomes[expected.cell].report, expected)
    assert not [outcome for outcome in outcomes[: expected.cell] if outcome.reports]
    if name in more:
        more[name](outcomes)
    else:
        assert outcomes[expected.cell].error is not None
        assert [outcome.error for outcome in outcomes[: expected.cell]] == [None] * expected.cell


@about
def labels_from_one(outcomes: list[Outcome]) -> None:
    report = outcomes[3].report
    assert report["finding"]["step"]["iteration"] == 0
    assert report["crash"]["surface"]["source"].strip() == "running += loss.item()"


@about
def token_added_without_resizing(outcomes: list[Outcome]) -> None:
    finding = outcomes[4].report["finding"]
    assert (finding["module"], finding["table"]) == ("model.tokens", "num_embeddings=300")
    assert finding["positions"] == [[1, 2], [2, 1], [2, 2]]


@about
def long_sequence(outcomes: list[Outcome]) -> None:
    finding = outcomes[3].report["finding"]
    assert finding["module"] == "encoder.positions"
    step = finding["step"]
    assert step["iteration"] == 21, "the batch of review 171"
    assert step["dataset_indices"] in (None, [171]), "the ids of other rows look like positions"


@about
def wrong_loss(outcomes: list[Outcome]) -> None:
    other = outcomes[4]
    assert other.error is None
    expected = ("binary_cross_entropy", "target", [2.0], (0, 1), "loss_mismatch")
    assert said(other.report) == expected
    assert other.report["crash"] is None


@about
def stale_session(outcomes: list[Outcome]) -> None:
    caught, innocent, status = outcomes[2:]
    assert caught.error is None
    assert "4 of 6 batches skipped" in caught.stdout
    assert caught.report["finding"]["step"]["iteration"] == 2
    assert innocent.error is not None
    assert innocent.report["crash"]["stale"] is True
    assert innocent.report["crash"]["first_failed"]["execution_count"] == 3
    assert "GPU state is dead since In [3]" in status.stdout


@about
def several_gpus(outcomes: list[Outcome]) -> None:
    report = outcomes[3].report
    assert len(report["environment"]["devices"]) == 2
    assert report["finding"]["total"] == 16, "half of the batch"


@about
def loaded_after_the_crash(outcomes: list[Outcome]) -> None:
    _, _, failed, load, replay, innocent = outcomes
    assert failed.error is not None
    assert not failed.reports
    assert "%cpu_replay" in load.text
    assert [load.error, replay.error] == [None, None]
    assert replay.report["finding"]["location"]["execution_count"] == 3
    assert innocent.error is not None
    assert innocent.report["crash"]["stale"] is True
    assert innocent.report["crash"]["first_failed"]["execution_count"] == 3
    assert said(innocent.report) == said(replay.report)


def test_mended_they_run_and_get_no_report(tmp_path: Path) -> None:
    with Kernel(cwd=tmp_path) as kernel:
        for name, expected in EXPECTED.items():
            old, new = expected.mended
            sources = [cell.source for cell in cells(name)]
            assert sum(old in source for source in sources) == 1
            for source in sources:
                if not source.startswith(OURS):
                    outcome = kernel.run(source.replace(old, new))
                    assert outcome.error is None, outcome.text
                    assert not outcome.reports


@pytest.mark.parametrize("name", EXPECTED)
def test_saved_with_what_it_shows(name: str) -> None:
    """Run `python -m tests.update_examples` after a change of a report or a notebook."""
    path = EXAMPLES / f"{name}.ipynb"
    expected = EXPECTED[name]
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    saved = cells(name)
    assert [cell.execution_count for cell in saved] == list(range(1, len(saved) + 1))
    shown = [output for output in saved[expected.cell].outputs if MIME in output.get("data", {})]
    assert len(shown) == 1
    data = shown[0].data
    check(data[MIME], expected)
    assert data[MIME]["headline"] in " ".join(data["text/plain"].split())
    assert "<div" in data["text/html"]
    text = path.read_text()
    assert WIDGET not in text, "no kernel answers it"
    assert not re.findall(r"/(?:home|root|tmp|usr|opt|Users)/[^\s\"\\]*", text)
    assert path.stat().st_size < 150_000


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(EXPECTED)
