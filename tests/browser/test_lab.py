"""The whole way of a person through the lab, in JupyterLab and a real browser."""

import json
import shutil
from pathlib import Path

import nbformat
import psutil
import pytest

from tests.browser.jupyter import Lab
from tests.browser.server import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(280)]

HEADLINE = ".wb-headline"
NUMBER = "document.querySelector('.wb-board')?.dataset.number"

ROWS = (
    "Number(document.querySelectorAll('.jp-CodeCell')[cell]"
    ".querySelector(`[data-name=${name}]`)?.dataset.rows ?? 0)"
)


def board_number(lab: Lab) -> int:
    """How many changes the first board has drawn."""
    return int(lab.page.evaluate(NUMBER) or 0)


def drawn_rows(lab: Lab, cell: int, name: str) -> int:
    """Rows that a chart of a cell shows."""
    return int(lab.page.evaluate(f"([cell, name]) => {ROWS}", [cell, name]) or 0)


def wait_for_rows(lab: Lab, cell: int, name: str, more_than: int) -> int:
    """Wait until a chart of a cell shows more rows than that; how many it shows then."""
    lab.until(f"([cell, name, least]) => {ROWS} > least", [cell, name, more_than])
    return drawn_rows(lab, cell, name)


def live_runs(folder: Path) -> list[int]:
    """Processes of runs kept under `folder`."""
    found = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return [
        process.pid
        for process in found
        if any(str(folder) in word for word in process.info["cmdline"])
    ]


def test_the_planner_redraws_as_a_slider_moves_and_follows_the_theme(lab: Lab) -> None:
    lab.notebook(
        "plan",
        [
            "import workbench as wb\nplanner = wb.Planner()\nplanner",
            "print(planner.plan.to_yaml())",
        ],
    )
    lab.open("plan")
    lab.run_all()
    lab.page.wait_for_selector(".wb-board[data-number]")
    assert lab.page.locator(HEADLINE).inner_text().startswith("Fits")
    lab.page.wait_for_timeout(1000)
    words, before = lab.page.locator(HEADLINE).inner_text(), board_number(lab)
    slider = lab.page.get_by_label("Tensor parallel")
    slider.focus()
    lab.page.keyboard.press("ArrowRight")
    lab.until("words => document.querySelector('.wb-headline').textContent !== words", words)
    lab.until(f"before => Number({NUMBER}) > before", before)
    assert slider.get_attribute("aria-valuetext") == "2"
    lab.run_cell(1)
    lab.until("() => document.body.innerText.includes('tensor:\\n    size: 2')")

    dark = "() => document.body.dataset.jpThemeLight === 'false'"
    lab.command("apputils:change-theme", theme="JupyterLab Dark")
    lab.until(dark)
    lab.page.wait_for_timeout(2000)
    assert lab.page.locator(".wb-chart canvas").count() == 4
    scheme = "element => getComputedStyle(element).colorScheme"
    assert (
        lab.page.get_by_label("Strategy").evaluate(scheme) == "dark"
    )  # else the arrow is black on black
    lab.command("apputils:change-theme", theme="JupyterLab Light")

    lab.page.set_viewport_size({"width": 768, "height": 900})
    width = "document.querySelector('{}').clientWidth"
    lab.until(f"() => {width.format('.wb-words')} > 0.8 * {width.format('.wb-banner')}")


def test_numbers_typed_key_by_key_are_read_on_enter_and_go_back_to_the_same_plan(lab: Lab) -> None:
    plan = "wb.Plan.of('llama-3-8b', gpu='h100-sxm-80gb', gpus=64, strategy='megatron-3d')"
    lab.notebook(
        "keys",
        [
            f"import workbench as wb\nplanner = wb.Planner({plan})\nplanner",
            f"planner.plan == {plan}",
        ],
    )
    lab.open("keys")
    lab.run_cell(0)
    lab.page.wait_for_selector(".wb-board[data-number]")
    number = lab.page.get_by_label("Number of GPUs")

    def typed(text: str) -> None:
        number.press("Control+a")
        number.press_sequentially(text, delay=30)
        number.press("Enter")

    for text in ("96", "7", "64", "96", "64"):  # each before the last is answered
        typed(text)
    typed("abc")
    lab.until(
        "() => document.querySelector('.wb-headline').textContent.includes('fix Number of GPUs')"
    )
    assert number.get_attribute("aria-invalid") == "true" and number.input_value() == "abc"
    assert lab.page.locator("[data-action=run]").is_disabled()
    typed("1e3")
    lab.until("() => document.querySelector('.wb-headline').textContent.startsWith('Fits')")
    lab.until(
        "() => [...document.querySelectorAll('.wb-field input')].some(e => e.value === '1000')"
    )
    typed("64")
    # Cells run in another thread of the kernel than edits do, and do not wait for them.
    lab.until(
        "() => document.querySelector('.wb-banner').innerText.includes('Number of GPUs 64 also')"
    )
    lab.run_cell(1)
    lab.until("() => document.querySelectorAll('.jp-CodeCell')[1].innerText.includes('True')")
    number.press("Tab")
    assert lab.page.evaluate("document.activeElement.labels[0].textContent") == "Strategy"


def test_a_run_is_launched_watched_reloaded_attached_and_stopped(lab: Lab) -> None:
    steps = {"training.steps": 5000, "training.sequence_length": 64, "telemetry.memory_every": 20}
    path = lab.notebook(
        "run",
        [
            f'import workbench as wb\nplan = wb.Plan.of("tiny", gpus=2, strategy="dapple", '
            f"set={steps})\n"
            "planner = wb.Planner(plan)\nplanner",
            "import pathlib, workbench as wb\nfrom workbench.runs.run import list_runs\n"
            "dashboard = wb.watch(wb.attach(list_runs()[0].dir))\ndashboard",
        ],
    )
    lab.page.set_viewport_size({"width": 1280, "height": 900})
    lab.open("run")
    lab.run_cell(0)
    lab.page.wait_for_selector("[data-action=run]")

    lab.page.locator("[data-action=run]").click()
    lab.page.wait_for_selector("[data-action=stop]")
    in_sight = (
        "() => { const all = document.querySelectorAll('.wb-headline'); if (all.length < 2) return "
        "false; const { top, bottom } = all[1].getBoundingClientRect(); return top >= 0 && bottom "
        "<= innerHeight / 2; }"
    )
    lab.until(in_sight)
    lab.page.locator("[data-action=run]").scroll_into_view_if_needed()
    lab.until(f"() => !({in_sight})()")
    lab.page.locator("[data-action=show]").click()
    lab.until(in_sight)
    training = (
        "() => [...document.querySelectorAll('.wb-headline')].some(e => "
        "e.textContent.startsWith('Training'))"
    )
    lab.until(training)
    runs = lab.folder.parent / "runs"
    folder = max(runs.iterdir(), key=lambda found: found.stat().st_mtime)
    assert json.loads((folder / "state.json").read_text())["phase"] == "running"
    seen = wait_for_rows(lab, 0, "loss", 3)
    seen = wait_for_rows(lab, 0, "loss", seen)

    lab.reload()
    seen = wait_for_rows(lab, 0, "loss", seen)  # the snapshot, and what came since
    wait_for_rows(lab, 0, "loss", seen)

    lab.restart_kernel()
    lab.until(
        "() => [...document.querySelectorAll('.wb-headline')].every(e => "
        "e.textContent.startsWith('Not connected'))"
    )
    assert lab.page.locator("[data-action=stop]").count() == 0
    assert "wb.watch(wb.attach(" in lab.page.locator(".wb-banner").last.inner_text()
    assert json.loads((folder / "state.json").read_text())["phase"] == "running"
    lab.run_cell(1)
    seen = wait_for_rows(lab, 1, "loss", seen)
    wait_for_rows(lab, 1, "loss", seen)
    assert drawn_rows(lab, 1, "memory") > 0 and drawn_rows(lab, 1, "timeline") > 0

    cell = lab.page.locator(".jp-CodeCell").nth(1)
    cell.locator("[data-action=stop]").click()
    cell.locator(".wb-board").wait_for(state="detached")
    cell.locator(".vega-embed").wait_for()
    assert json.loads((folder / "state.json").read_text())["phase"] == "stopped"
    lab.command("docmanager:save")
    lab.page.wait_for_timeout(2000)
    output = nbformat.read(path, 4).cells[1].outputs[-1]
    assert (
        "application/vnd.vegalite.v5+json" in output.data
        and "Stopped after step" in output.data["text/plain"]
    )
    assert live_runs(folder) == []


def test_the_quickstart_runs_to_its_end(lab: Lab) -> None:
    shutil.copy(ROOT / "notebooks" / "00_quickstart.ipynb", lab.folder)
    lab.open("00_quickstart")
    lab.run_all()
    lab.page.wait_for_function(
        "() => /\\d/.test([...document.querySelectorAll('.jp-CodeCell "
        ".jp-InputPrompt')].at(-1).textContent)",
        timeout=150_000,
    )
    assert lab.page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    text = lab.page.locator(".jp-Notebook").inner_text()
    assert "finished · " in text and "rehearsed − measured" in text
    assert (
        lab.page.locator(".jp-RenderedVegaCommon5 canvas, .jp-RenderedVegaCommon5 svg").count() >= 5
    )
    assert (lab.folder / "report.html").stat().st_size > 50_000
