"""The first card: shown at once after the crash, replaced by the report. It has no buttons."""

from __future__ import annotations

from dataclasses import dataclass

from nb_assertdoc.report import words
from nb_assertdoc.report.layout import COLUMNS, encodable, short, wrap


@dataclass(frozen=True)
class Card:
    """What is known in the first tenth of a second."""

    execution_count: int | None
    how_to_restart: str  # the platform's key or menu; "" if unknown
    messenger: str | None = None
    lines: int = 0  # lines that the driver printed
    progress: str = ""
    will_replay: bool = True
    stops_queue: bool = True  # False: the cell itself goes on to be `ok`
    simulated: bool = False  # the GPU is nb_assertdoc's own
    interrupt: str = "Interrupt (\u25a0)"  # the platform's button or key


def card_lines(card: Card) -> list[str]:
    """The card's sentences, the headline first."""
    cell = words.execution(card.execution_count)
    if card.messenger and not card.lines:
        name = short(card.messenger, 60)
        first = (
            f"{name} failed in {cell}; most likely the GPU was dead already and {name} only met it."
        )
    else:
        first = f"CUDA device-side assert in {cell}: an index or value is out of its valid range."
    said = [first]
    fine = (
        "Your GPU is fine."
        if card.lines or not card.messenger
        else "Your GPU itself is most likely fine."
    )
    if card.simulated:
        fine = "The GPU is simulated."
    elif card.messenger and not card.lines:
        fine += " `nb-assertdoc check` in a terminal looks at the hardware."
    if card.messenger and card.lines:
        said.append(f"{short(card.messenger, 60)} is only the messenger.")
    how = f" ({short(card.how_to_restart)})" if card.how_to_restart else ""
    said.append(
        f"{fine} This kernel's GPU state is dead: the kernel must be restarted{how}."
        " Re-running a cell cannot help."
    )
    if not card.will_replay:
        said.append("%cpu_replay finds the line on the CPU; it can be run before the restart.")
        return said
    progress = f": {short(card.progress)}" if card.progress else " on the CPU"
    said.append(f"Finding the line now{progress} ...")
    queue = " Queued cells will not run." if card.stops_queue else ""
    said.append(f"{short(card.interrupt)} stops this replay.{queue}")
    return said


def card_text(card: Card) -> str:
    """The card as text, 100 columns at most."""
    first, *rest = card_lines(card)
    rows = [*wrap(first, COLUMNS)]
    rows += ["  " + line for said in rest for line in wrap(said, COLUMNS - 2)]
    return encodable("\n".join(rows))
