"""`nb-assertdoc check`: is it the hardware, and would nb_assertdoc work here?

It reads versions, logs and counters and says what speaks against the machine. Facts on bad
combinations come from public reports, named by their address.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

from nb_assertdoc import restart

from .readers import GraphicsCard, Readers

WIDTH = 100
_INDENT = 12


class Item(NamedTuple):
    """One line of the answer. `suspicious`: it may be the reason for errors on valid data."""

    section: str
    text: str
    suspicious: bool = False


class Known(NamedTuple):
    """A version on which valid data was reported to fail."""

    pattern: str  # of the whole version
    text: str
    source: str


BAD_DRIVERS = (
    Known(
        r"545\..*",
        "asserts on valid data were reported with NVIDIA driver 545; 535 ended them",
        "github.com/deepseek-ai/DeepSeek-MoE/issues/4",
    ),
)
BAD_TORCH = (
    Known(
        r"1\.8\..*",
        "asserts on valid data were reported with torch 1.8; 1.7 did not have them",
        "github.com/tianweiy/MVP/issues/16",
    ),
    Known(
        r"1\.10\..*",
        "the backward of cross-entropy misreads a target made by expand(); .contiguous() helps",
        "github.com/pytorch/pytorch/issues/71550",
    ),
)
# CUDA's major version -> the oldest driver that runs it (NVIDIA: minor version compatibility).
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}

# Xid numbers that NVIDIA lays at the door of the program, the driver or the card.
XID_OF_PROGRAMS = {
    13: "an exception in a kernel, mostly of the program",
    31: "an access outside memory, mostly of the program",
    43: "a program's fault stopped its work",
    45: "clean-up after an earlier fault",
}
XID_OF_CARDS = {
    48: "an uncorrectable memory error",
    62: "the card's own controller stopped",
    63: "faulty memory was taken out of use",
    64: "faulty memory could not be taken out of use",
    74: "an error on NVLink",
    79: "the card fell off the bus",
    92: "many corrected memory errors",
    94: "a memory error, kept to one program",
    95: "a memory error that was not contained",
    119: "the card's system processor did not answer",
    120: "the card's system processor failed",
}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([\w:.]+)\): (\d+)")
_LOGS = ("/var/log/kern.log", "/var/log/syslog", "/var/log/messages")
_DRIVER_FILE = "/proc/driver/nvidia/version"
_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,ecc.errors.uncorrected.volatile.total,"
    "ecc.errors.uncorrected.aggregate.total",
    "--format=csv,noheader,nounits",
)
# Oldest versions that the extension works with.
FLOORS = {
    "torch": "2.4",
    "ipython": "7.34",
    "ipykernel": "6.17",
    "ipywidgets": "7.7",
    "jupyter_client": "7.4",
    "nbclient": "0.5.13",
}


def check(readers: Readers | None = None) -> tuple[Item, ...]:
    """Everything that can be read here, in the order in which it is shown."""
    readers = readers or Readers()
    cards, how = _cards(readers)
    driver = _driver(readers, cards)
    cuda = _cuda(readers)
    return (
        *_versions(readers, cuda),
        *_gpu(cards, how, driver, cuda),
        *_known_bad(readers, cards, driver),
        *_xid(readers),
        *_ecc(cards, how),
        *_hooks(readers),
        *_here(readers),
        *_autoload(readers),
    )


def suspicious(items: Iterable[Item]) -> list[Item]:
    """What may be the reason for errors on valid data."""
    return [item for item in items if item.suspicious]


def text(items: tuple[Item, ...]) -> str:
    """The answer, in lines of at most 100 columns."""
    lines: list[str] = []
    shown = ""
    for item in (*items, *_verdict(items)):
        head = "" if item.section == shown else item.section
        shown = item.section
        mark = "(!) " if item.suspicious else ""
        lines += textwrap.wrap(
            f"{head:<{_INDENT}}{mark}{item.text}",
            WIDTH,
            subsequent_indent=" " * (_INDENT + len(mark)),
            break_on_hyphens=False,
            drop_whitespace=True,
        )
    return "\n".join(lines)


def _verdict(items: tuple[Item, ...]) -> Iterator[Item]:
    found = len(suspicious(items))
    if found:
        yield Item("ANSWER", f"{found} thing{'s' if found > 1 else ''} to look at, marked (!).")
    else:
        yield Item("ANSWER", "nothing speaks against this machine, as far as it can be read.")
    yield Item(
        "ANSWER",
        "A device-side assert is nearly always an index out of range in the data, not the GPU. If"
        " the replay on the CPU finds none, try another card first, then another driver.",
    )


# ---- versions


def _versions(readers: Readers, cuda: str | None) -> Iterator[Item]:
    yield Item("VERSIONS", f"Python {readers.python}, {readers.system}")
    torch = readers.installed("torch")
    if torch is None:
        yield Item("VERSIONS", "torch is not installed for this Python")
        return
    build = (
        f"built for CUDA {cuda}" if cuda else "without CUDA: this build cannot use an NVIDIA GPU"
    )
    libraries = (
        f"{label} {version}"
        for label, names in (
            ("cuDNN", ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11")),
            ("NCCL", ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")),
        )
        if (version := next(filter(None, map(readers.installed, names)), None))
    )
    yield Item("VERSIONS", ", ".join((f"torch {torch}, {build}", *libraries)))


def _cuda(readers: Readers) -> str | None:
    """CUDA's version that torch was built for; None: none, or not known."""
    try:
        found = re.search(r"^cuda\b.*= '([\d.]+)'", readers.torch_build(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


# ---- driver and cards


def _cards(readers: Readers) -> tuple[tuple[GraphicsCard, ...], str]:
    """The GPUs, and how they were read or, without any, why they could not be."""
    reasons = []
    ways = (("NVML", readers.cards), ("nvidia-smi", lambda: _smi_cards(readers)))
    for how, read in ways:
        try:
            if cards := read():
                return cards, how
            reasons.append(f"{how} lists no card")
        except OSError as error:
            reasons.append(str(error))
    return (), "; ".join(reasons)


def _smi_cards(readers: Readers) -> tuple[GraphicsCard, ...]:
    return tuple(map(_smi_card, readers.command(*_SMI).strip().splitlines()))


def _smi_card(row: str) -> GraphicsCard:
    cells = [cell.strip() for cell in row.rsplit(",", 3)]
    if len(cells) != 4:
        raise OSError(f"nvidia-smi: {row}")
    since_start, ever = (int(cell) if cell.isdigit() else None for cell in cells[2:])
    return GraphicsCard(cells[0], cells[1], since_start, ever)


def _driver(readers: Readers, cards: tuple[GraphicsCard, ...]) -> str | None:
    if cards:
        return cards[0].driver
    try:
        found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)*)\b", readers.file(_DRIVER_FILE))
    except OSError:
        return None
    return found[1] if found else None


def _gpu(
    cards: tuple[GraphicsCard, ...], how: str, driver: str | None, cuda: str | None
) -> Iterator[Item]:
    if driver is None:
        yield Item("GPU", f"no NVIDIA driver was found, so no card to suspect ({how})")
        return
    oldest = OLDEST_DRIVER.get((cuda or "").split(".")[0])
    if oldest is not None and int(driver.split(".")[0]) < oldest:
        yield Item(
            "GPU",
            f"NVIDIA driver {driver} is older than {oldest}, which CUDA {cuda} of this torch needs",
            suspicious=True,
        )
    else:
        yield Item("GPU", f"NVIDIA driver {driver}")
    names = Counter(card.name for card in cards)
    if cards:
        listed = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Item("GPU", f"{listed} (read by {how})")
    else:
        yield Item("GPU", f"the cards cannot be listed: {how}")


def _known_bad(
    readers: Readers, cards: tuple[GraphicsCard, ...], driver: str | None
) -> Iterator[Item]:
    torch = readers.installed("torch") or ""
    reports = [
        *(bad for bad in BAD_DRIVERS if re.fullmatch(bad.pattern, driver or "")),
        *(bad for bad in BAD_TORCH if re.fullmatch(bad.pattern, torch)),
    ]
    for bad in reports:
        yield Item("REPORTS", f"{bad.text} ({bad.source})", suspicious=True)
    if not reports:
        yield Item("REPORTS", "no report of asserts on valid data for these versions is known")
    if len(cards) > 1 and readers.environ.get("NCCL_P2P_DISABLE") != "1":
        yield Item(
            "REPORTS",
            "several cards: if it fails only with more than one, try NCCL_P2P_DISABLE=1, which has"
            " ended it elsewhere (github.com/tloen/alpaca-lora/issues/300), or CUDA_VISIBLE_DEVICES"
            " with one card at a time: a single faulty card was found so",
        )


# ---- logs and counters


def _xid(readers: Readers) -> Iterator[Item]:
    log, where, reasons = _kernel_log(readers)
    if log is None:
        yield Item("XID", f"the system log cannot be read here: {reasons}")
        yield Item("XID", "with more rights: sudo dmesg | grep Xid, or sudo journalctl -k -g Xid")
        return
    found = Counter((int(number), card) for card, number in _XID.findall(log))
    if not found:
        yield Item("XID", f"no Xid error in {where}")
    for (number, card), times in sorted(found.items()):
        program = number in XID_OF_PROGRAMS
        words = XID_OF_PROGRAMS.get(number) or XID_OF_CARDS.get(number)
        words = words or "see docs.nvidia.com/deploy/xid-errors"
        often = "once" if times == 1 else f"{times} times"
        yield Item("XID", f"Xid {number} of {card}, {often} in {where}: {words}", not program)


def _kernel_log(readers: Readers) -> tuple[str | None, str, str]:
    """The kernel's log, where it comes from, and why others could not be read."""
    reasons = []
    for words in (("dmesg",), ("journalctl", "-k", "-b", "--no-pager", "-q")):
        try:
            if log := readers.command(*words).strip():
                return log, words[0], ""
            reasons.append(f"{words[0]} is empty")
        except OSError as error:
            reasons.append(_reason(error, words[0]))
    for path in _LOGS:
        try:
            return readers.file(path), path, ""
        except OSError as error:
            reasons.append(_reason(error, path))
    return None, "", "; ".join(reasons)


def _reason(error: OSError, what: str) -> str:
    said = (error.strerror or str(error)).strip()
    return said if what in said else f"{what}: {said}"


def _ecc(cards: tuple[GraphicsCard, ...], how: str) -> Iterator[Item]:
    if not cards:
        yield Item("ECC", f"the cards' error counters cannot be read here: {how}")
        return
    for index, card in enumerate(cards):
        name = f"card {index} ({card.name})"
        if card.since_start is None and card.ever is None:
            yield Item("ECC", f"{name} does not count memory errors")
            continue
        counts = (f"{card.since_start or 0} since the driver started", f"{card.ever or 0} ever")
        bad = bool(card.since_start or card.ever)
        yield Item("ECC", f"{name}: uncorrected memory errors {', '.join(counts)}", bad)


# ---- whether nb_assertdoc works here


def _hooks(readers: Readers) -> Iterator[Item]:
    old, fine = [], []
    for name, floor in FLOORS.items():
        version = readers.installed(name)
        if version is None:
            old.append(f"{name} is not installed")
        elif _numbers(version) < _numbers(floor):
            old.append(f"{name} {version} is older than {floor}")
        elif name != "torch":
            fine.append(f"{name} {version}")
    yield Item("HOOKS", f"works with {', '.join(fine)}" if fine else "nothing of Jupyter is here")
    yield from (Item("HOOKS", f"{what}: nb_assertdoc needs {_wanted(what)}") for what in old)
    if readers.environ.get("NB_ASSERTDOC", "").lower() == "off":
        yield Item("HOOKS", "NB_ASSERTDOC=off: the extension is switched off")
    try:
        mode = readers.folder_mode()
        private = "private" if not mode & 0o077 else f"open to others (mode {mode:o})"
        yield Item("HOOKS", f"temporary folder: writable, {private}")
    except OSError as error:
        yield Item("HOOKS", f"temporary folder: not writable ({error}); set TMPDIR to another")
    try:
        kernel = readers.kernel()
    except OSError as error:
        yield Item("HOOKS", f"no fresh kernel can be started here, so no replay: {error}")
        return
    yield Item("HOOKS", f"a fresh kernel answers in {kernel.seconds:.1f} s: replays work")
    yield Item("HOOKS", f"errors and cells are seen: {_yes(kernel.error_hook, kernel.cell_events)}")
    yield Item("HOOKS", f"the driver's lines (fd 2) are seen: {_yes(kernel.driver_lines)}")


def _wanted(what: str) -> str:
    name = what.split()[0]
    return f"{name}>={FLOORS[name]}"


def _yes(*facts: bool) -> str:
    return "yes" if all(facts) else "no"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def _here(readers: Readers) -> Iterator[Item]:
    """What a notebook that is started from here would be told to do for a restart."""
    if sys.platform != "linux":
        yield Item("HERE", f"{sys.platform}: nb_assertdoc is made for Linux and tested there only")
    shell = SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=True), user_ns={})
    adapter = restart.adapter(shell, readers.environ, {}, ())
    yield Item("HERE", f"notebooks: {adapter.name}; restart: {adapter.how}")
    yield Item("HERE", "headless: nb-assertdoc run NB.ipynb (the report as text, and an exit code)")


def _autoload(readers: Readers) -> Iterator[Item]:
    files, problems = readers.autoload()
    yield from (Item("AUTOLOAD", f"on, by {file}") for file in files)
    if not files:
        yield Item("AUTOLOAD", "off; nb-assertdoc enable loads the extension in every new kernel")
    yield from (Item("AUTOLOAD", f"IPython leaves out a file: {problem}") for problem in problems)
