"""The example notebooks fail as they say, are diagnosed right, and run when mended as they say."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from kernels import ROOT, Kernel, Outcome

EXAMPLES = ROOT / "example_notebooks"
MENDED = {
    "labels_from_one": ("y.to(device)", "y.to(device) - 1"),
    "token_added_without_resizing": (
        "Classifier(len(tokenizer))",
        "Classifier(len(tokenizer) + 1)",
    ),
    "loaded_after_the_crash": (
        "torch.tensor(movie_ids)",
        "torch.tensor([sorted(set(movie_ids)).index(movie) for movie in movie_ids])",
    ),
}


def cells(name: str) -> list[str]:
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def run(name: str, folder: Path) -> list[Outcome]:
    """Run the cells in order, going on after the errors that the notebook is about."""
    with Kernel(cwd=folder) as kernel:
        return [kernel.run(source) for source in cells(name)]


def said(report: dict) -> tuple:
    """Operator, argument, bad values, bound and cause."""
    finding, bound = report["finding"], report["finding"]["bound"]
    values = (bound["low"], bound["high"])
    cause = report["cause"]["key"]
    return finding["op"], finding["argument"], finding["bad_values"], values, cause


def source(place: dict) -> str:
    return place["source"].strip()


def test_labels_from_one(tmp_path):
    *before, failed = run("labels_from_one", tmp_path)

    assert [outcome.error for outcome in before] == [None] * len(before)
    assert failed.error is not None
    report = failed.report
    assert said(report) == ("cross_entropy", "target", [5], (0, 5), "label_starts_at_1")
    assert report["confidence"] == "certain"
    assert source(report["finding"]["location"]) == "loss = criterion(logits, y.to(device))"
    assert report["finding"]["step"]["iteration"] == 0
    assert source(report["crash"]["surface"]) != source(report["finding"]["location"])


def test_token_added_without_resizing(tmp_path):
    *before, failed = run("token_added_without_resizing", tmp_path)

    assert [outcome.error for outcome in before] == [None] * len(before)
    assert failed.error is not None
    report = failed.report
    assert said(report) == ("embedding", "input", [300], (0, 300), "token_id_ge_vocab")
    assert report["confidence"] == "certain"
    finding = report["finding"]
    assert (finding["module"], finding["table"]) == ("model.tokens", "num_embeddings=300")
    assert finding["positions"] == [[1, 2], [2, 1], [2, 2]]
    assert source(finding["location"]) == "hidden = self.tokens(ids).mean(1)"


def test_loaded_after_the_crash(tmp_path):
    start, data, failed, load, replay, innocent = run("loaded_after_the_crash", tmp_path)

    assert [start.error, data.error, load.error, replay.error] == [None] * 4
    assert failed.error is not None
    assert not failed.reports
    assert "%cpu_replay" in load.text
    expected = ("embedding", "input", [17, 42, 99], (0, 4), "category_id_ge_table")
    assert said(replay.report) == expected
    finding = replay.report["finding"]
    assert source(finding["location"]) == 'vectors = movies(batch.to("cuda"))'
    assert finding["location"]["execution_count"] == 3
    assert innocent.error is not None
    assert innocent.report["crash"]["stale"] is True
    assert innocent.report["crash"]["first_failed"]["execution_count"] == 3
    assert said(innocent.report) == expected


@pytest.mark.parametrize("name", MENDED)
def test_mended_it_runs_and_gets_no_report(name, tmp_path):
    old, new = MENDED[name]
    assert sum(old in source for source in cells(name)) == 1

    with Kernel(cwd=tmp_path) as kernel:
        for source_ in cells(name):
            if source_ == "%cpu_replay":  # nothing failed, so there is nothing to replay
                continue
            outcome = kernel.run(source_.replace(old, new))
            assert outcome.error is None, outcome.text
            assert not outcome.reports


def test_no_example_is_left_out_and_none_holds_outputs():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(MENDED)
    for path in EXAMPLES.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None
