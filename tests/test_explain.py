"""`explain` answers for every name that the package uses, and docs/asserts.md holds them all."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from kernels import ROOT, Kernel

import nb_assertdoc
from nb_assertdoc import catalogue, diagnosis
from nb_assertdoc.cli import main, page

IDS = [known.id for known in catalogue.entries()]
NAMES = [*IDS, *diagnosis.cause_keys(), *catalogue.topics()]
PAGE = ROOT / "docs" / "asserts.md"


def words(text: str) -> str:
    return " ".join(text.split())


def check(name: str, answer: str) -> None:
    """The answer is about this name, and fits a terminal."""
    assert "Nothing is known" not in answer
    assert max(map(len, answer.splitlines())) <= 100
    if name in IDS:
        known = catalogue.entry(name)
        assert known.rule in words(answer)
        assert known.explanation in words(answer)
        assert all(cause in words(answer) for cause in known.causes)
        assert known.argument is None or f"`{known.argument}`" in answer
    elif name in diagnosis.cause_keys():
        assert words(answer) == words(diagnosis.explain_cause(name) or "")
    else:
        assert answer.strip() == catalogue.topics()[name]


def test_no_name_has_two_meanings() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_explains_every_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    answer = capsys.readouterr().out
    check(name, answer)
    assert nb_assertdoc.explain(name) == answer.removesuffix("\n")


def test_the_magic_explains_every_name(cpu_kernel: Kernel) -> None:
    end = "----- end"
    lines = (f"%assertdoc explain {name}\nprint({end!r})" for name in NAMES)
    outcome = cpu_kernel.run("\n".join(lines), store_history=False)
    assert outcome.error is None, outcome.text
    answers = outcome.stdout.split(end + "\n")
    assert len(answers) == len(NAMES) + 1
    for name, answer in zip(NAMES, answers, strict=False):
        check(name, answer)


@pytest.mark.parametrize(
    "typed", ["Label starts at 1", "label-starts-at-1", " label_starts_at_1\n"]
)
def test_a_causes_key_may_be_typed_in_several_ways(typed: str) -> None:
    assert nb_assertdoc.explain(typed) == diagnosis.explain_cause("label_starts_at_1")


def test_the_page_is_made_of_the_packages_data() -> None:
    assert PAGE.read_text(encoding="utf-8") == page.page(), "run `python -m nb_assertdoc.cli.page`"


def test_the_page_holds_every_assert_and_every_cause() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|(?:(?:[^|\\\n]|\\.)*\|){5}$", text, re.MULTILINE)
    assert sorted(rows) == sorted(IDS)
    assert re.findall(r"^### `(\w+)`$", text, re.MULTILINE) == list(diagnosis.cause_keys())
    for known in catalogue.entries():
        assert known.explanation in text
        assert all(f"- {cause}\n" in text for cause in known.causes)


def test_the_page_is_made_without_torch() -> None:
    code = "import sys, nb_assertdoc.cli.page as p; p.page(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "srcIndex < srcSelectDimSize",
        "CUBLAS_STATUS_NOT_INITIALIZED",
        "CUDA error: an illegal memory access was encountered",
    ],
)
def test_the_replay_comes_before_the_restart(text: str) -> None:
    answer = words(catalogue.explain(text))
    assert "before its restart, %cpu_replay runs the failing cell" in answer
    assert answer.index("%cpu_replay runs") < answer.index("Then restart the kernel.")
    assert "restart the kernel, then %cpu_replay" not in answer


def test_how_to_verify_names_the_command() -> None:
    assert "%assertdoc verify runs the batch that failed" in words(catalogue.explain("verify"))
