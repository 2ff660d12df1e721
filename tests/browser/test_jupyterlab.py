"""What a person sees in JupyterLab: error, card, report, controls, restart, and what is left.

`SCREENSHOTS=docs/images pytest -n 0 tests/browser` saves the pictures of the README.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import ROOT
from test_report import FINDING, REPORT, replace

from nb_assertdoc import model, report

NEEDS = "not installed: pip install -e '.[browser]'"
pytest.importorskip("jupyterlab", minversion="4", reason=NEEDS)
pytest.importorskip("playwright", reason=NEEDS)

from lab import CHROMIUM, CONTRAST, PATIENCE, Lab, Notebook, browser  # noqa: E402
from playwright.sync_api import Browser, Locator, expect  # noqa: E402

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

FAILING = 4  # the cell of the example that fails
HEADLINE = "Label 5 does not exist: the loss has 5 classes, 0..4."
PICTURE = "valid 0 <= index < 5, or -100 (ignored); found 5"
VALID = "rgba(46, 158, 91, 0.2)"  # the colour of the picture's valid part
READABLE = 4.5  # WCAG 2, level AA
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


def save(what: Locator, name: str) -> None:
    """A picture for the README, where one is asked for."""
    if folder := os.environ.get("SCREENSHOTS"):
        what.screenshot(path=Path(folder) / f"{name}.png")


def report_in(cell: Locator) -> Locator:
    """The report among a cell's outputs."""
    return cell.locator(".jp-OutputArea-output", has_text="TRUST").first


def test_from_the_error_to_the_restored_variables(chromium: Browser, tmp_path: Path) -> None:
    example = ROOT / "example_notebooks" / "labels_from_one.ipynb"
    shutil.copy(example, tmp_path / "labels.ipynb")
    with Lab(tmp_path) as lab:
        page = chromium.new_page(viewport={"width": 1000, "height": 1700}, color_scheme="light")
        page.set_default_timeout(PATIENCE)
        notebook = lab.open(page, "labels.ipynb")
        notebook.command("application:toggle-left-area")
        notebook.start("notebook:run-all-cells")
        cell = notebook.cell(FAILING)
        sees_the_card(cell)
        sees_the_report(cell)
        scans_and_verifies(cell)
        reads_it_in_the_dark(cell)
        restarts(notebook, cell)
        gets_the_variables_back(notebook)
        notebook.command("docmanager:save")

        page.reload()
        reopened = Notebook(page)
        expect(report_in(reopened.cell(FAILING))).to_contain_text(HEADLINE)
        assert background(report_in(reopened.cell(FAILING))) == VALID

        from_somebody_else(tmp_path)
        untrusted = lab.open(page, "untrusted.ipynb")
        shown = report_in(untrusted.cell(FAILING))
        expect(shown).to_contain_text(HEADLINE)
        expect(shown.get_by_role("img")).to_have_count(0)  # what the sanitizer drops
        assert background(shown) == VALID
        expect(shown.get_by_text("found 5")).to_be_visible()
        shown.get_by_text("details: driver").click()
        expect(shown.get_by_role("row", name="driver Loss.cu")).to_be_visible()
    as_a_page(chromium, tmp_path)


def sees_the_card(cell: Locator) -> None:
    card = cell.locator(".jp-OutputArea-output", has_text="Finding the line now")
    expect(card).to_contain_text("CUDA device-side assert in In [4]")
    expect(card).to_contain_text("the kernel must be restarted (Kernel > Restart Kernel")
    expect(card).to_contain_text("The GPU is simulated.")
    save(card.locator("div[style]").first, "card-light")


def sees_the_report(cell: Locator) -> None:
    shown = report_in(cell)
    expect(shown).to_contain_text(HEADLINE)
    expect(shown).to_contain_text("gives back")  # its last form: the variables are kept
    expect(cell).not_to_contain_text("Finding the line now")  # the report has taken its place
    expect(shown.get_by_role("img", name=PICTURE)).to_be_visible()
    marked = shown.locator("mark")
    expect(marked).to_have_text("criterion(logits, y.to(device))")
    headings = shown.get_by_role("heading").all_inner_texts()
    assert headings[0].startswith("CERTAIN") and "CUDA device-side assert in In [4]" in headings[0]
    assert headings[1:] == ["WHERE", "WHAT", "WHY", "FIX", "NEXT", "TRUST"]
    for column in ("value", "position", "batch row", "dataset index"):
        expect(shown.get_by_role("columnheader", name=column)).to_be_visible()
    expect(shown.get_by_role("rowheader", name="how many")).to_be_visible()
    expect(shown.get_by_text("+ loss = criterion(logits, y.to(device) - 1)")).to_be_visible()
    assert shown.evaluate(CONTRAST) >= READABLE
    save(shown, "report-light")
    details = shown.get_by_role("row", name="versions")
    expect(details).to_be_hidden()
    summary = shown.get_by_text("details: driver")
    summary.press("Enter")  # by the keyboard
    expect(details).to_contain_text("Simulated GPU")
    summary.press("Enter")


def scans_and_verifies(cell: Locator) -> None:
    controls = cell.locator(".nb-assertdoc")
    editor = controls.get_by_role("textbox", name="Cell")
    suggested = editor.input_value()
    assert "criterion(logits, y.to(device) - 1)" in suggested
    verify = controls.get_by_role("button", name="Verify on the CPU")

    controls.get_by_role("button", name="Scan the data").click()
    expect(controls).to_contain_text("64 of 320 values, in 64 rows")
    assert controls.evaluate("box => box.scrollWidth <= box.clientWidth")
    editor.fill("# nothing")
    verify.press("Enter")
    expect(controls).to_contain_text("verify: the cell holds no Python code")
    editor.fill(suggested)
    verify.click()
    expect(controls).to_contain_text("running ...")
    expect(controls).to_contain_text(
        re.compile(r"failing \w+ passes on the CPU, \d+ calls? checked")
    )
    expect(verify).to_be_enabled()
    save(controls, "controls-light")


def reads_it_in_the_dark(cell: Locator) -> None:
    page = cell.page
    page.emulate_media(color_scheme="dark")
    expect(page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    dark = "window.getComputedStyle(document.body).getPropertyValue('--jp-layout-color0')"
    page.wait_for_function(f"{dark}.trim().startsWith('#1')")  # its style sheet has arrived
    assert report_in(cell).evaluate(CONTRAST) >= READABLE
    save(report_in(cell), "report-dark")
    save(cell.locator(".nb-assertdoc"), "controls-dark")


def restarts(notebook: Notebook, cell: Locator) -> None:
    controls = cell.locator(".nb-assertdoc")
    restart = controls.get_by_role("button", name="Restart the kernel")
    restart.click()
    expect(controls).to_contain_text("Lost: model, optimizer, logits, loss.")
    expect(controls).to_contain_text("After it %assertdoc restore gives back features, stars")
    expect(controls).to_contain_text('will say that the kernel "appears to have died"')
    controls.get_by_role("button", name="Cancel").click()
    expect(controls).not_to_contain_text("Lost: model")
    restart.click()
    controls.get_by_role("button", name="Yes, restart now").click()
    dialog = notebook.page.get_by_role("dialog")
    expect(dialog).to_contain_text("appears to have died")  # as forewarned
    dialog.get_by_role("button", name="Ok").click()
    expect(controls).to_contain_text("Restarting.")
    expect(restart).to_be_disabled()
    notebook.wait_for_kernel()


def gets_the_variables_back(notebook: Notebook) -> None:
    loaded = notebook.append("%load_ext nb_assertdoc")
    expect(loaded).to_contain_text("%assertdoc restore")
    again = notebook.append("%assertdoc report")
    expect(report_in(again)).to_contain_text("this kernel and its GPU state are fresh")
    expect(again).not_to_contain_text("state is dead")
    notebook.append("%assertdoc restore")
    values = notebook.append("print(stars.shape, int(stars.max()), 'model' in globals())")
    expect(values).to_contain_text("torch.Size([320]) 5 False")


def background(report: Locator) -> str:
    """The computed colour of the picture's valid part."""
    part = report.get_by_text("valid 0 … 4").locator("..")
    return str(part.evaluate("part => getComputedStyle(part).backgroundColor"))


def from_somebody_else(folder: Path) -> None:
    """The saved notebook as one that this server has not signed."""
    content = json.loads((folder / "labels.ipynb").read_text())
    content["cells"][0]["source"] = "# From somebody else"
    (folder / "untrusted.ipynb").write_text(json.dumps(content))


def as_a_page(chromium: Browser, folder: Path) -> None:
    """The saved notebook as nbconvert renders it, without scripts and network."""
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter().from_filename(str(folder / "labels.ipynb"))
    (folder / "labels.html").write_text(body)
    context = chromium.new_context(
        java_script_enabled=False, viewport={"width": 400, "height": 800}
    )
    context.route(re.compile("^https?:"), lambda route: route.abort())
    page = context.new_page()
    page.goto((folder / "labels.html").as_uri(), wait_until="domcontentloaded")
    shown = page.locator(".jp-OutputArea-output", has_text="TRUST").first
    expect(shown).to_contain_text(HEADLINE)
    expect(shown.get_by_role("img", name=PICTURE)).to_be_visible()
    expect(page.get_by_text("run %assertdoc report")).to_be_visible()  # in the controls' place
    context.close()


def test_a_report_fits_a_narrow_screen(chromium: Browser) -> None:
    long = "a_name_without_any_blank_" * 8
    examples = tuple(
        model.Example(value=v, position=(3, v), batch_row=3, dataset_index=643, meaning=long[:100])
        for v in range(512, 530)
    )
    finding = replace(FINDING, examples=examples, module=long)
    cause = replace(REPORT.cause, because=(f"`{long}` is long",))
    page = chromium.new_page(viewport={"width": 400, "height": 800})
    page.set_content(report.html(replace(REPORT, finding=finding, cause=cause), "Kernel > Restart"))
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.get_by_text("and 110 more").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.close()
