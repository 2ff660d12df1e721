"""A replay changes no file and starts no command, and sees its own writes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import replays

from nb_assertdoc.replay import run as replay_cell

START = """
import sys
from pathlib import Path
from os import remove as early_remove
import IPython
import bz2, gzip, io, json, os, pathlib, shutil, sqlite3, subprocess, tempfile, zipfile
from nb_assertdoc.worker.sandbox import Sandbox
home, scratch = Path(sys.argv[1]), Path(sys.argv[2])
sandbox = Sandbox(scratch, home)
sandbox.install()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder as users have them."""
    home = tmp_path / "home"
    (home / "data" / "deep").mkdir(parents=True)
    (home / "runs").mkdir()
    for name in ("a.txt", "b.txt", "c.txt", "data/x.csv", "data/deep/y.csv", "runs/best.pt"):
        (home / name).write_text(f"old {name}\n")
    (home / "link").symlink_to("data")
    (home / "b.txt").chmod(0o640)
    return home


def snapshot(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = os.readlink(path) if path.is_symlink() else b""
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
        found[str(path)] = about.st_mode, about.st_mtime_ns, about.st_ino, content
    return found


def replay(home: Path, code: str) -> str:
    """Run code in a sandbox; the folder must be the same afterwards. Gives what it printed."""
    before = snapshot(home)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            START + textwrap.dedent(code),
            str(home),
            str(home.parent / "scratch"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert snapshot(home) == before
    return done.stdout


def test_files(home: Path) -> None:
    replay(
        home,
        """
        assert os.getcwd() == str(home) and Path.cwd() == home
        # reading
        assert open("a.txt").read() == "old a.txt\\n" == Path("a.txt").read_text()
        # overwriting, appending, changing in place
        with open("a.txt", "w") as file:
            file.write("new")
            assert file.name == "a.txt"
        assert open("a.txt").read() == "new" and os.path.getsize("a.txt") == 3
        with io.open(home / "b.txt", "a") as file: file.write("more")
        assert Path("b.txt").read_text() == "old b.txt\\nmore"
        assert os.stat("b.txt").st_mode & 0o777 == 0o640
        with open("c.txt", "r+b") as file: file.write(b"OLD")
        assert open(b"c.txt").read() == "OLD c.txt\\n"
        fd = os.open("data/x.csv", os.O_WRONLY | os.O_TRUNC)
        os.write(fd, b"1"); os.close(fd)
        assert (home / "link" / "x.csv").read_text() == "1"      # the same file by its link
        Path("link/fresh.txt").write_text("fresh")
        assert Path("data/fresh.txt").read_text() == "fresh"
        # making, listing
        os.makedirs("new/deep", exist_ok=True)
        Path("new/deep/z.txt").write_text("z")
        assert [str(p) for p in Path("new").rglob("*.txt")] == ["new/deep/z.txt"]
        assert sorted(os.listdir("data")) == ["deep", "fresh.txt", "x.csv"]
        assert sorted(e.name for e in os.scandir("data") if e.is_dir()) == ["deep"]
        assert not os.path.exists("") and Path("").exists()
        for make, error in [(lambda: os.mkdir("data"), FileExistsError),
                            (lambda: open("a.txt", "x"), FileExistsError),
                            (lambda: open("no/where.txt", "w"), FileNotFoundError),
                            (lambda: open("nothing.txt"), FileNotFoundError),
                            (lambda: os.rmdir("data"), OSError),
                            (lambda: os.remove("nothing"), FileNotFoundError)]:
            try: make()
            except error: pass
            else: raise AssertionError(error)
        # renaming, deleting
        os.rename("b.txt", "moved.txt")
        assert not os.path.exists("b.txt") and Path("moved.txt").read_text().endswith("more")
        os.replace("moved.txt", "c.txt")
        assert Path("c.txt").read_text().endswith("more") and not Path("moved.txt").exists()
        early_remove("a.txt")
        assert not Path("a.txt").exists() and "a.txt" not in os.listdir()
        Path("a.txt").write_text("again")
        assert Path("a.txt").read_text() == "again" and "a.txt" in os.listdir(".")
        os.rename("data", "data2")
        assert sorted(p.name for p in Path("data2").rglob("*")) == [
            "deep", "fresh.txt", "x.csv", "y.csv"]
        assert not Path("data").exists() and not Path("data/deep/y.csv").exists()
        Path("data2/deep/y.csv").unlink()
        os.rmdir("data2/deep")
        shutil.rmtree(home / "runs")
        assert not os.path.isdir("runs")
        os.mkdir("runs")
        assert os.listdir("runs") == []                          # not the old content
        # the rest
        os.chmod("a.txt", 0o600); os.utime("a.txt", (5, 5)); os.truncate("a.txt", 2)
        assert Path("a.txt").read_text() == "ag" and os.stat("a.txt").st_mode & 0o777 == 0o600
        os.symlink(home / "c.txt", "to_c")
        Path("to_c").write_text("through the link")
        assert Path("c.txt").read_text() == "through the link" and os.path.islink("to_c")
        os.link("c.txt", "hard"); Path("hard").write_text("x")
        shutil.copytree("data2", "copy"); shutil.copy("a.txt", "copy/a.txt")
        shutil.move("copy", "elsewhere")
        assert Path("elsewhere/a.txt").read_text() == "ag"
        os.chdir("elsewhere")
        assert os.getcwd() == str(home / "elsewhere") and open("a.txt").read() == "ag"
        open("../up.txt", "w").write("up")
        os.chdir("..")
        assert open("up.txt").read() == "up" and not (Path("/") / "up.txt").exists()
        for module in (gzip, bz2):
            with module.open("packed", "wt") as file: file.write("packed")
            assert module.open("packed", "rt").read() == "packed"
        with zipfile.ZipFile("z.zip", "w") as z: z.writestr("n", "1")
        assert zipfile.ZipFile("z.zip").namelist() == ["n"]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "t").write_text("t")
            assert os.listdir(folder) == ["t"]
        assert not os.path.exists(folder)
        with tempfile.NamedTemporaryFile() as file: file.write(b"1")
        connection = sqlite3.connect("data.db"); connection.execute("create table t (x)")
        connection.execute("insert into t values (1)"); connection.commit()
        assert sqlite3.connect("data.db").execute("select * from t").fetchall() == [(1,)]
        assert not [note for note in sandbox.notes if "skipped" in note]
        """,
    )


def test_existing_database(home: Path) -> None:
    import sqlite3

    with sqlite3.connect(home / "d.db") as old:
        old.execute("create table t (x)")
        old.execute("insert into t values (7)")
    old.close()
    replay(
        home,
        """
        connection = sqlite3.connect(home / "d.db")
        connection.execute("delete from t"); connection.commit()
        assert sqlite3.connect("d.db").execute("select count(*) from t").fetchone() == (0,)
        """,
    )


def test_commands_are_skipped(home: Path) -> None:
    replay(
        home,
        """
        assert os.system("rm a.txt") == 0
        done = subprocess.run(["rm", "b.txt"], capture_output=True, text=True, cwd="/", check=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert subprocess.check_output("rm c.txt", shell=True) == b""
        assert subprocess.run("cat", input=b"x", stdout=subprocess.PIPE).stdout == b""
        assert os.popen("rm c.txt").read() == ""
        assert [note for note in sandbox.notes if "skipped" in note] == [
            "skipped: the command 'rm a.txt'", "skipped: the command 'rm b.txt'",
            "skipped: the command 'rm c.txt'", "skipped: the command 'cat'"]
        assert os.environ["WANDB_MODE"] == "disabled" and os.environ["HF_HUB_OFFLINE"] == "1"
        """,
    )


def test_shell(home: Path) -> None:
    """`!` and `%pip` in the IPython that is installed, and the `open` of its namespace."""
    replay(
        home,
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_cell("!rm a.txt\\n%pip install nothing\\nout = !rm b.txt", store_history=False)
        assert shell.run_cell("%%bash\\nrm b.txt", store_history=False).success
        shell.run_cell("with open('c.txt', 'w') as f: f.write('1')")
        assert Path("a.txt").exists() and Path("c.txt").read_text() == "1"
        assert any("rm a.txt" in note for note in sandbox.notes)
        """,
    )


def test_a_library_in_c_is_stopped_by_the_kernel(home: Path) -> None:
    """Where the kernel has Landlock; elsewhere the sandbox says that it has not."""
    printed = replay(
        home,
        """
        import ctypes, threading
        c = ctypes.CDLL(None)
        refused = []
        def write_in_c():
            refused.append(c.creat(b"a.txt", 0o600) < 0 and c.unlink(b"b.txt") < 0)
        if sandbox.notes:
            print(sandbox.notes)
        else:
            write_in_c()
            thread = threading.Thread(target=write_in_c)
            thread.start(); thread.join()
            assert refused == [True, True]
            assert c.creat(str(scratch / "free.txt").encode(), 0o600) > 0
            os.close(os.open("/dev/null", os.O_WRONLY))
        """,
    )
    assert printed == "" or "Landlock" in printed


def test_libraries(home: Path) -> None:
    pytest.importorskip("pandas")
    replay(
        home,
        """
        import numpy as np, pandas as pd, torch
        np.save("a.txt.npy", np.arange(3)); np.savetxt("a.txt", np.arange(3))
        assert np.load("a.txt.npy").tolist() == [0, 1, 2] and np.loadtxt("a.txt")[2] == 2
        np.arange(4).tofile("c.txt")
        assert np.fromfile("c.txt", dtype=int).tolist() == [0, 1, 2, 3]
        np.memmap("b.txt", mode="r+")[0] = 65
        pd.DataFrame({"x": [1]}).to_csv("data/x.csv", index=False)
        assert pd.read_csv("data/x.csv")["x"].tolist() == [1]
        state = {"w": torch.ones(2)}
        torch.save(state, "runs/best.pt"); torch.save(state, home / "runs" / "new.pt")
        os.replace("runs/new.pt", "runs/best.pt")                # as atomic saving does
        assert torch.load("runs/best.pt") is state and not os.path.exists("runs/new.pt")
        buffer = io.BytesIO(); torch.save(5, buffer); buffer.seek(0)
        assert torch.load(buffer) == 5 and "skipped: torch.save" in sandbox.notes
        """,
    )


HARM = """
import csv, json, logging, mmap, os, pickle, shutil, sqlite3, subprocess, tempfile, zipfile
from pathlib import Path
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

# open, in all its modes
with open("a.txt", "w") as file: file.write("new")
with open("b.txt", "a") as file: file.write("more")
with open("c.txt", "r+") as file: file.write("X")
json.dump([1], open("data/x.csv", "w"))
csv.writer(open("data/deep/y.csv", "w")).writerow([1, 2])
pickle.dump(1, open("runs/best.pt", "wb"))
# os
os.rename("one.bin", "two.bin"); os.remove("d.txt"); os.chmod("e.txt", 0o600)
os.truncate("f.txt", 1); os.utime("g.txt", (1, 1)); os.symlink("g.txt", "shortcut")
os.makedirs("new/folder"); os.replace("a.txt", "b.txt"); os.chmod("data", 0o700)
descriptor = os.open("h.txt", os.O_RDWR); os.write(descriptor, b"!!"); os.fchmod(descriptor, 0o600)
os.ftruncate(descriptor, 1); os.close(descriptor)
# shutil, pathlib
shutil.copy("c.txt", "i.txt"); shutil.move("j.txt", "data"); shutil.rmtree("data/deep")
shutil.copymode("e.txt", "k.txt"); shutil.copystat("e.txt", "l.txt")
Path("k.txt").write_text("new"); Path("l.txt").unlink(); Path("m.txt").rename("n.txt")
Path("o.txt").chmod(0o777); Path("runs/best.pt").touch()
# libraries
np.save("array.npy", np.zeros(3)); np.savez("more.npz", x=np.zeros(1)); np.zeros(2).tofile("p.txt")
np.memmap("one_more.bin", mode="r+")[0] = 65
pd.DataFrame({"x": [1]}).to_csv("q.txt"); pd.DataFrame({"x": [1]}).to_pickle("r.txt")
with sqlite3.connect("data.db") as base: base.execute("delete from t")
base.close()
plt.plot([1, 2]); plt.savefig("plot.png"); plt.close()
torch.save({"w": 1}, "runs/best.pt"); torch.save([2], "s.txt")
with zipfile.ZipFile("z.zip", "a") as z: z.writestr("n", "1")
with zipfile.ZipFile("z.zip") as z: z.extractall(".")
with open("mapped.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as view: view[0] = 65
logger = logging.getLogger("harm"); logger.addHandler(logging.FileHandler("run.log"))
logger.error("one line")
tempfile.NamedTemporaryFile(dir=".", delete=False).close()
# commands
subprocess.run("rm -rf data; echo > t.txt", shell=True)
os.system("chmod 000 u.txt")
!rm v.txt
assert open("b.txt").read() == "new" and not os.path.exists("d.txt")  # the replay sees its own
"""


def test_a_replayed_cell_harms_no_file(tmp_path: Path) -> None:
    """Every byte, mode, time and inode is as before."""
    import sqlite3
    import zipfile

    home, folder = tmp_path / "home", tmp_path / "order"
    (home / "data" / "deep").mkdir(parents=True)
    (home / "runs").mkdir()
    folder.mkdir()
    names = [f"{letter}.txt" for letter in "abcdefghijklmopqrstuv"]
    names += ["data/x.csv", "data/deep/y.csv", "runs/best.pt", "array.npy", "more.npz", "plot.png"]
    names += ["run.log", "one.bin", "one_more.bin", "mapped.bin"]
    for name in names:
        (home / name).write_text(f"old {name}\n")
    (home / "e.txt").chmod(0o640)
    with zipfile.ZipFile(home / "z.zip", "w") as packed:
        packed.writestr("c.txt", "packed")
    with sqlite3.connect(home / "data.db") as base:
        base.execute("create table t (x)")
        base.execute("insert into t values (7)")
    base.close()
    before = snapshot(home)

    evidence = replay_cell(replays.order(HARM, cwd=str(home)), folder)
    assert evidence.outcome == "clean", evidence.error
    assert snapshot(home) == before
