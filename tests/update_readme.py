"""Puts what `nb-assertdoc demo` prints into README.md: `python -m tests.update_readme`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- demo:begin -->\n```\n", "\n```\n<!-- demo:end -->"


def demo() -> str:
    """The report that the demo prints, without the paths of the files that it has saved."""
    done = subprocess.run(
        [sys.executable, "-m", "nb_assertdoc", "demo"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        timeout=240,
    )
    if done.returncode:
        raise RuntimeError(f"the demo ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout.partition("\nSaved: ")[0].strip("\n")


def shown(readme: str) -> str:
    """The block between the README's markers."""
    return readme.partition(BEGIN)[2].partition(END)[0]


def normal(text: str) -> str:
    """`text` without what differs between two runs: seconds, and the space after them."""
    return re.sub(r"(N s\.) +", r"\1 ", re.sub(r"\d+(\.\d+)? s\b", "N s", text))


def main() -> None:
    readme = README.read_text()
    before, rest = readme.partition(BEGIN)[0], readme.partition(END)[2]
    README.write_text(before + BEGIN + demo() + END + rest)


if __name__ == "__main__":
    main()
