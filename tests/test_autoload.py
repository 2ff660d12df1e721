"""`nb-assertdoc enable | disable`: merging, undoing to the byte, and what real kernels then do."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from kernels import Kernel

from nb_assertdoc.cli import autoload, main
from nb_assertdoc.errors import UsageError

LOADED = "sorted(n for n in get_ipython().extension_manager.loaded if n in NAMES)"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with this environment's packages and a `sys.prefix` of its own."""
    prefix = tmp_path_factory.mktemp("prefix")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    executable = str(prefix / "bin" / "python")
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.check_output([executable, "-c", ask], text=True).strip()
    packages = sysconfig.get_paths()["purelib"]
    Path(site, "all.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    for name in ("own_extension", "other_extension"):
        Path(site, f"{name}.py").write_text("def load_ipython_extension(shell): pass\n")
    return executable


@pytest.fixture
def ipython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An IPython folder that does not exist yet."""
    folder = tmp_path / "ipython"
    monkeypatch.setenv("IPYTHONDIR", str(folder))
    return folder


def tree(folder: Path) -> dict[str, bytes | None]:
    """All files with their bytes, all folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def command(python: str, *words: str) -> str:
    done = subprocess.run(
        [python, "-m", "nb_assertdoc", *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def loaded(kernel: Kernel) -> list[str]:
    names = ["nb_assertdoc", "own_extension", "other_extension"]
    kernel.run(f"NAMES = {names}", store_history=False)
    value: list[str] = kernel.value(LOADED)
    return value


def test_new_kernels_of_the_environment_load_it_beside_other_extensions(python, ipython):
    etc = Path(python).parent.parent / "etc" / "ipython"
    etc.mkdir(parents=True)
    others = '{"InteractiveShellApp":\n\t{"extra_extensions": ["other_extension"]}, "Zeta": {}}'
    (etc / autoload.FILE).write_text(others)
    (ipython / "profile_default").mkdir(parents=True)
    own = "c.InteractiveShellApp.extensions = ['own_extension']"  # all that the user wants
    (ipython / "profile_default" / "ipython_config.py").write_text(own)
    before = tree(etc.parent)

    assert str(etc / autoload.FILE) in command(python, "enable")
    with Kernel(python=python, env={"IPYTHONDIR": str(ipython)}) as kernel:
        assert loaded(kernel) == ["nb_assertdoc", "other_extension", "own_extension"]
        assert "watches this kernel" in kernel.run("%assertdoc").stdout

        assert "Off: " in command(python, "disable")
        assert tree(etc.parent) == before
        kernel.restart()
        assert loaded(kernel) == ["other_extension", "own_extension"]


def test_the_users_own_kernels_and_a_profile(python, ipython, tmp_path):
    others = Path(python).parent.parent / "etc" / "ipython" / autoload.FILE
    others.unlink(missing_ok=True)  # its list would be lost, and that is refused
    assert "--user" in command(python, "enable", "--user")
    with Kernel(python=python, env={"IPYTHONDIR": str(ipython)}) as kernel:
        assert loaded(kernel) == ["nb_assertdoc"]
    command(python, "disable", "--user")
    assert "nb_assertdoc" not in "".join(tree(ipython)), "the rest is IPython's own"
    assert not (ipython / "profile_default" / autoload.FILE).exists()

    with pytest.raises(subprocess.CalledProcessError) as caught:
        command(python, "enable", "--profile", "lab")
    assert caught.value.returncode == 2
    assert f"--profile lab: there is no such profile in {ipython}" in caught.value.stderr
    assert "(there: default)" in caught.value.stderr
    (ipython / "profile_lab").mkdir()
    command(python, "enable", "--profile", "lab")
    entries = json.loads((ipython / "profile_lab" / autoload.FILE).read_text())
    assert entries == autoload.fragment()


def test_folders_made_for_it_go_with_it(ipython, tmp_path, capsys):
    assert main(["enable", "--user"]) == 0
    path = ipython / "profile_default" / autoload.FILE
    assert json.loads(path.read_text()) == autoload.fragment()
    assert f"On: new kernels that read {path} load" in " ".join(capsys.readouterr().out.split())
    once = tree(tmp_path)

    assert main(["enable", "--user"]) == 0
    assert "On already" in capsys.readouterr().out
    assert tree(tmp_path) == once

    assert main(["disable", "--user"]) == 0
    assert tree(tmp_path) == {}
    assert main(["disable", "--user"]) == 0
    assert f"Off already: {path}" in capsys.readouterr().out
    assert tree(tmp_path) == {}


LAYOUTS = {
    "four spaces": '{\n    "Zeta": {"b": 1, "a": [1, 2]},\n    "Alpha": null\n}\n\n',
    "tabs, no last line end": '{\n\t"IPKernelApp": {\n\t\t"quiet": true\n\t}\n}',
    "one line": '{"InteractiveShellApp": {"extensions": ["autoreload"]}}\n',
    "Windows line ends": '{\r\n  "Alpha": {"x": "é"}\r\n}\r\n',
    "empty object": "{}",
    "our section, the user's value": '{\n "AssertDoc": {"enabled": true, "replay": false}\n}\n',
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_that_was_there(name, tmp_path):
    path = tmp_path / autoload.FILE
    path.write_bytes(LAYOUTS[name].encode())
    path.chmod(0o640)
    before = json.loads(LAYOUTS[name])

    assert autoload.enable(path)
    text = path.read_bytes().decode()
    after = json.loads(text)
    assert list(after)[: len(before)] == list(before), "the order is kept"
    for key, value in before.items():
        assert after[key] == value or {**after[key], **value} == after[key], "nothing is changed"
    assert after["InteractiveShellApp"]["extra_extensions"] == ["nb_assertdoc"]
    assert after["AssertDoc"]["enabled"] is True
    assert ("\r\n" in text) == ("\r\n" in LAYOUTS[name])
    assert text.endswith(LAYOUTS[name][len(LAYOUTS[name].rstrip()) :])
    if name == "four spaces":
        assert '\n    "Zeta": {\n        "b": 1' in text
    if name == "tabs, no last line end":
        assert '\n\t"IPKernelApp": {\n\t\t"quiet": true' in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o640

    assert autoload.disable(path)
    assert tree(tmp_path) == {autoload.FILE: LAYOUTS[name].encode()}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_changed_since_loses_only_our_entries(tmp_path):
    path = tmp_path / autoload.FILE
    path.write_text('{\n  "AssertDoc": {"enabled": true}\n}\n')
    autoload.enable(path)
    entries = json.loads(path.read_text())
    entries["InteractiveShellApp"]["extra_extensions"].append("other_extension")
    entries["AssertDoc"]["replay_seconds"] = 30.0
    path.write_text(json.dumps(entries, indent=2))

    assert autoload.disable(path)
    assert json.loads(path.read_text()) == {
        "AssertDoc": {"enabled": True, "replay_seconds": 30.0},  # both the user's own
        "InteractiveShellApp": {"extra_extensions": ["other_extension"]},
    }
    assert list(tree(tmp_path)) == [autoload.FILE]
    assert not autoload.disable(path)


def test_entries_made_by_hand(tmp_path):
    path = tmp_path / autoload.FILE
    path.write_text(json.dumps(autoload.fragment()))
    assert not autoload.enable(path), "on already"
    assert autoload.disable(path)
    assert tree(tmp_path) == {}, "there was nothing else in it"

    path.write_text('{"InteractiveShellApp": {"extensions": ["nb_assertdoc", "autoreload"]}}')
    assert autoload.is_on(path)
    assert autoload.disable(path)
    assert json.loads(path.read_text()) == {"InteractiveShellApp": {"extensions": ["autoreload"]}}


def test_a_file_that_switches_it_off_is_told(ipython, capsys):
    path = ipython / "profile_default" / autoload.FILE
    path.parent.mkdir(parents=True)
    path.write_text('{"AssertDoc": {"enabled": false}}')
    assert main(["enable", "--user"]) == 0
    assert "AssertDoc.enabled is false in that file" in capsys.readouterr().out
    assert json.loads(path.read_text())["AssertDoc"] == {"enabled": False}


def test_a_file_that_somebody_removed(tmp_path):
    path = tmp_path / "a" / "b" / autoload.FILE
    autoload.enable(path)
    path.unlink()
    assert not autoload.disable(path)
    assert tree(tmp_path) == {}


def test_a_link_to_the_users_own_file_stays_a_link(tmp_path):
    (tmp_path / "dotfiles").mkdir()
    own = tmp_path / "dotfiles" / "kernel.json"
    own.write_text("{}\n")
    link = tmp_path / autoload.FILE
    link.symlink_to(own)
    autoload.enable(link)
    assert link.is_symlink()
    assert autoload.is_on(own)
    autoload.disable(link)
    assert link.is_symlink()
    assert own.read_text() == "{}\n"


RIVALS = {
    "ipython_config.py": "c.InteractiveShellApp.extra_extensions.append('own_extension')\n",
    "ipython_kernel_config.py": "c = get_config()\nc.IPKernelApp.extra_extensions = ['autoreload']",
    "ipython_config.json": '{"InteractiveShellApp": {"extra_extensions": ["own_extension"]}}',
}
HARMLESS = {
    "ipython_config.py": "# c.InteractiveShellApp.extra_extensions = []\n",
    "ipython_kernel_config.py": "c.InteractiveShellApp.extensions = ['autoreload']\n",
    "ipython_config.json": '{"InteractiveShellApp": {"extra_extensions": ["nb_assertdoc"]}}',
}


@pytest.mark.parametrize("name", RIVALS)
def test_a_list_that_would_be_lost_is_named(name, ipython, tmp_path):
    folder = ipython / "profile_default"
    folder.mkdir(parents=True)
    (folder / name).write_text(RIVALS[name])
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=rf"{name} sets .* add 'nb_assertdoc' to that list"):
        autoload.enable(folder / autoload.FILE)
    assert tree(tmp_path) == before
    if name.endswith("json"):  # what kernels of the whole environment read, the user's list hides
        with pytest.raises(UsageError, match=name):
            autoload.enable(tmp_path / "etc" / autoload.FILE)
    (folder / name).write_text(HARMLESS[name])
    assert autoload.enable(folder / autoload.FILE)


def test_without_a_home_folder(monkeypatch, capsys):
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("IPYTHONDIR", raising=False)
    assert main(["enable", "--user"]) == 2
    assert "set HOME or IPYTHONDIR" in capsys.readouterr().err
    assert [place.option for place in autoload.places()] == ["--sys-prefix", "--system"]


BROKEN = {
    "{oops": "is not valid JSON (Expecting property name",
    '{"a": 1} // why': "is not valid JSON (Extra data",
    "[]": "holds no JSON object",
    "\xff": "is not UTF-8 text",
    '{"InteractiveShellApp": {"extra_extensions": "one"}}': "extra_extensions must be a list",
    '{"AssertDoc": []}': "AssertDoc must be an object",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_refused_by_name_and_left_alone(text, ipython, tmp_path, capsys):
    path = ipython / "profile_default" / autoload.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    before = tree(tmp_path)

    assert main(["enable", "--user"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"nb-assertdoc: error: {path}" in said.err
    assert BROKEN[text] in said.err
    assert tree(tmp_path) == before


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "etc").write_text("a file, no folder")
    with pytest.raises(UsageError, match=r"cannot (read|write) .*etc/ipython_kernel_config.json: "):
        autoload.enable(tmp_path / "etc" / autoload.FILE)
    assert list(tree(tmp_path)) == ["etc"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        autoload.enable(tmp_path / autoload.FILE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["enable", "--user", "--system"], "not allowed with argument"),
        (["enabel"], "Did you mean enable?"),
        (["explian"], "Did you mean explain?"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["disable", "--profile"], "expected one argument"),
    ],
)
def test_wrong_options_are_answered(words, said, ipython, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert ("Did you mean" in err) == ("Did you mean" in said)


def test_check_says_where_it_is_on_and_what_is_broken(ipython, capsys):
    from nb_assertdoc.cli.readers import autoload as read

    path = ipython / "profile_default" / autoload.FILE
    main(["enable", "--user"])
    (ipython / "profile_lab").mkdir()
    (ipython / "profile_lab" / autoload.FILE).write_text("{oops")

    files, problems = read()
    assert f"{path} (--user)" in files
    assert [problem for problem in problems if "profile_lab" in problem and "JSON" in problem]

    from nb_assertdoc.cli import check
    from nb_assertdoc.cli.readers import Kernel as Probe
    from nb_assertdoc.cli.readers import Readers

    quick = Readers(kernel=lambda: Probe(1.0, True, True, True), command=lambda *_: "")
    lines = [item.text for item in check.check(quick) if item.section == "AUTOLOAD"]
    assert f"on, by {path} (--user)" in lines
    main(["disable", "--user"])
    assert f"{path} (--user)" not in read()[0]
