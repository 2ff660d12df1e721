"""What README, docs and packaging promise, compared with the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import typing

import msgspec
import pytest
import update_readme
from kernels import ROOT, Kernel
from traitlets import TraitType

from nb_assertdoc import __version__, explain, model
from nb_assertdoc.settings import AssertDoc

README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
COMMANDS = """
```
python3 -m venv .venv && .venv/bin/pip install "torch==2.13.0" -e ".[test]" && .venv/bin/nb-assertdoc demo
.venv/bin/python -m pytest
```
"""  # noqa: E501


def test_readme_shows_what_the_demo_prints():
    shown = update_readme.shown(README)

    assert shown.strip(), "run `python -m tests.update_readme`"
    assert update_readme.normal(shown) == update_readme.normal(update_readme.demo())


def test_readme_gives_the_two_commands():
    assert README.count(COMMANDS) == 1
    assert "%pip install nb-assertdoc\n%load_ext nb_assertdoc\n" in README


def test_readme_lists_every_setting_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S.*?) \|", README, re.MULTILINE))
    units = {"MiB": 1 << 20, "GiB": 1 << 30}

    def number(text: str) -> object:
        amount, _, unit = text.strip("`").partition(" ")
        return (
            amount == "True" if amount in ("True", "False") else float(amount) * units.get(unit, 1)
        )

    own = AssertDoc.class_own_traits(config=True)
    assert {name: number(rows[name]) for name in own} == {
        name: trait.default_value for name, trait in own.items() if isinstance(trait, TraitType)
    }


def test_readme_lists_every_command_of_the_terminal():
    done = subprocess.run(
        [sys.executable, "-m", "nb_assertdoc", "--help"], capture_output=True, text=True, check=True
    )
    listed = re.findall(r"^    (\w+) ", done.stdout, re.MULTILINE)

    assert listed
    assert set(listed) == set(re.findall(r"^nb-assertdoc (\w+)", README, re.MULTILINE))


def test_readme_lists_every_command_of_the_magic(cpu_kernel):
    outcome = cpu_kernel.run("%assertdoc help", store_history=False)
    listed = set(re.findall(r"^    (\w+)", outcome.text, re.MULTILINE)) - {"status"}  # bare

    assert outcome.error is None, outcome.text
    assert listed
    assert listed == set(re.findall(r"^\| `%assertdoc (\w+)", README, re.MULTILINE))


def records(type_: object) -> set[type[msgspec.Struct]]:
    """All record types that a report is made of."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        fields = typing.get_type_hints(type_).values()
        return {type_}.union(*(records(field) for field in fields))
    return set().union(*(records(part) for part in typing.get_args(type_)))


@pytest.mark.parametrize("record", sorted(records(model.Report), key=lambda r: r.__name__))
def test_the_contract_in_docs_names_every_field(record):
    contract = ARCHITECTURE.partition("<!-- contract:begin -->")[2].partition("<!-- contract:end")[
        0
    ]

    missing = [name for name in record.__struct_fields__ if not re.search(rf"\b{name}\b", contract)]
    assert missing == []


def test_links_between_documents_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    dead = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_changelog_knows_this_version():
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_front_doors_import_neither_torch_nor_widgets():
    code = (
        "import sys, nb_assertdoc.extension, nb_assertdoc.cli; "
        "print(sorted({'torch', 'ipywidgets', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_config_fragment_loads_the_extension_in_every_kernel(tmp_path):
    profile = tmp_path / "profile_default"
    profile.mkdir()
    shutil.copy(ROOT / "jupyter-config" / "ipython_kernel_config.json", profile)

    with Kernel(env={"IPYTHONDIR": str(tmp_path)}) as kernel:
        assert kernel.value("'nb_assertdoc' in get_ipython().extension_manager.loaded") is True


def test_every_topic_that_the_guide_names_is_explained():
    guide = (ROOT / "docs" / "guide.md").read_text()
    topics = re.findall(r"topic `([\w-]+)`", guide)

    assert len(topics) > 5
    assert [topic for topic in topics if explain(topic).startswith("Nothing is known")] == []
    assert explain("no such topic").startswith("Nothing is known"), "what the line above looks for"


def test_no_text_of_the_package_sends_users_to_a_command_that_is_not_there():
    magics = set(re.findall(r"^\| `%assertdoc (\w+)", README, re.MULTILINE))
    commands = set(re.findall(r"^nb-assertdoc (\w+)", README, re.MULTILINE))
    missing = [
        f"{path.relative_to(ROOT)}: {named}"
        for path in (ROOT / "nb_assertdoc").rglob("*")
        if path.suffix in {".py", ".md", ".json", ".jinja"}
        for program, named in re.findall(r"(%|`nb-)assertdoc ([a-z]\w*)", path.read_text())
        if named not in (magics if program == "%" else commands)
    ]
    assert missing == []


def test_settings_of_a_config_file_reach_the_kernel(start_kernel):
    kernel = start_kernel(extension=True, settings={"replay_seconds": 33.0})

    assert kernel.value("get_ipython().config.AssertDoc.replay_seconds") == 33.0, "the file is read"
    outcome = kernel.run("%config AssertDoc.replay_seconds")
    assert outcome.error is None, outcome.text
    assert outcome.displays[-1]["text/plain"] == "33.0"
    kernel.run("%config AssertDoc.replay_seconds = 44.0")
    assert "replay_seconds = 44.0" in kernel.run("%assertdoc settings").text
