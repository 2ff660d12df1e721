"""What the documents say, compared with the tool, the tests and the notebooks."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import update_docs
from kernels import ROOT

from nb_assertdoc import catalogue, diagnosis
from nb_assertdoc.cli import main

DOCS = ROOT / "docs"
GUIDE = (DOCS / "guide.md").read_text()
README = (ROOT / "README.md").read_text()
TROUBLE = (DOCS / "troubleshooting.md").read_text()


def test_every_point_of_the_guide_has_a_feature_and_tests_that_exist() -> None:
    table = GUIDE.partition("\n## Where each point is\n")[2]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]
    points = [row for row in rows if not row[0].startswith("**")]
    assert len(points) > 30
    for row in points:
        assert len(row) == 3, row
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[2])
        assert named, row
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
        for notebook in re.findall(r"`(\w+\.ipynb)`", row[1]):
            assert (ROOT / "example_notebooks" / notebook).exists(), notebook
        for cause in re.findall(r"causes? ((?:`\w+`(?:, )?)+)", row[1]):
            for key in re.findall(r"`(\w+)`", cause):
                assert key in diagnosis.cause_keys(), key


def test_the_guide_is_read_before_its_table() -> None:
    sections = re.findall(r"^## (.+)$", GUIDE, re.MULTILINE)
    assert sections[0] == "Understand the error"
    assert sections[-1] == "Where each point is"
    assert "| " not in GUIDE.partition("\n## Where each point is\n")[0]


def test_the_readme_leads_from_the_install_to_the_fix() -> None:
    sections = re.findall(r"^## (.+)$", README, re.MULTILINE)
    first = ["Install", "Try it without a GPU", "First use", "What to type next"]
    assert sections[:4] == first
    loop = README.partition("\n## What to type next\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\d\. .*?`(%[^`]+)`", loop, re.MULTILINE) == [
        "%assertdoc verify",
        "%assertdoc scan",
        "%assertdoc restart",
        "%load_ext nb_assertdoc",
    ]
    pictures = README.index("<picture>"), README.index("<!-- demo:begin -->")
    assert pictures[0] < README.index("## Install") < pictures[1]


def test_every_example_is_in_the_guide() -> None:
    for path in (ROOT / "example_notebooks").glob("*.ipynb"):
        assert path.name in GUIDE or path.stem == "loaded_after_the_crash", path.name


def test_the_answers_are_the_tools_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert update_docs.filled(TROUBLE) == TROUBLE, "run `python -m tests.update_docs`"
    asked = update_docs.topics(TROUBLE)
    assert set(asked) == set(catalogue.topics())
    for topic in asked:
        assert main(["explain", topic]) == 0
        assert f"\n{capsys.readouterr().out}```" in TROUBLE


def test_every_command_in_the_documents_is_there() -> None:
    def listed(text: str, start: str) -> set[str]:
        return set(re.findall(rf"^{start}([a-z]\w*)", text, re.MULTILINE))

    done = subprocess.run(
        [sys.executable, "-m", "nb_assertdoc", "--help"], capture_output=True, text=True, check=True
    )
    commands = listed(done.stdout, "    ")
    from nb_assertdoc.magics.arguments import assertdoc_parser

    magics = listed(assertdoc_parser().format_help(), "    ")
    assert {"verify", "scan", "restore"} <= magics
    for page in (*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for program, word in re.findall(r"`(%+|nb-)assertdoc ([a-z]\w*)", page.read_text()):
            assert word in (magics if program.startswith("%") else commands), (page.name, word)


def test_the_versions_of_colab_are_those_that_are_tested() -> None:
    tested = dict(
        line.split("==")
        for line in (ROOT / "tests" / "constraints-colab.txt").read_text().splitlines()
        if "==" in line
    )
    table = re.findall(
        r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", (DOCS / "install.md").read_text(), re.M
    )
    assert len(table) == 5
    assert {name: colab for name, colab, _ in table} == {name: tested[name] for name, _, _ in table}


def test_what_a_newcomer_pastes_is_diagnosed(start_kernel) -> None:
    """README's cell: everything in one, on a machine without a GPU."""
    (cell,) = re.findall(
        r"^```\n(%load_ext nb_assertdoc\.simulated_gpu\n.*?)```", README, re.M | re.S
    )
    kernel = start_kernel(setup="__vsc_ipynb_file__ = 'study.ipynb'")  # a front end's
    failed = kernel.run(cell)
    report = failed.report
    assert report["confidence"] == "certain"
    assert report["finding"]["bad_values"] == [5]
    assert report["cause"]["key"] == "label_starts_at_1"
    assert [fix for fix in report["fixes"] if fix["edit"]], "the edit is shown"
    place = report["finding"]["location"]
    assert (place["execution_count"], place["line"]) == (1, 9)
    assert "simulated" in failed.text
    assert "dead since In [1]" in kernel.run("%assertdoc").stdout
    later = kernel.run("print(features.cuda().sum().item())").report
    assert later["crash"]["stale"] is True
    assert later["crash"]["first_failed"]["execution_count"] == 1
    verified = kernel.run("%assertdoc verify")
    assert verified.error is None
    assert verified.report["confidence"] == "clean", verified.text
