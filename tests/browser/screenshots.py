"""Pictures of the planner and of a dashboard, as JupyterLab shows them.

`python -m tests.browser.screenshots --to docs/` writes `planner.png` and `dashboard.png`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.browser.jupyter import Lab
from tests.browser.server import chromium_path, jupyterlab, launch_options

WIDTH, HEIGHT = 1384, 2200
"""Pixels of the page: an output is 1280 wide, and drawn completely without scrolling."""
SETTLE_MS = 2000
PLANNER = """import workbench as wb
plan = wb.Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy="megatron-3d")
wb.Planner(plan)"""
DASHBOARD = """import workbench as wb
plan = wb.Plan.of(
    "tiny",
    gpus=2,
    strategy="dapple",
    set={"training.steps": 30, "training.sequence_length": 128, "telemetry.memory_every": 5,
         "training.evaluation.every": 10},
)
run = wb.run(plan)
dashboard = wb.watch(run)
run.wait(timeout=200), dashboard.wait(timeout=60)
dashboard.board"""
PICTURES = {"planner": PLANNER, "dashboard": DASHBOARD}
"""Name of the picture -> the notebook's cell whose output is photographed."""
HIDE_JUPYTERLAB = """
#jp-top-panel, #jp-menu-panel, #jp-bottom-panel, .jp-NotebookPanel-toolbar, .jp-SideBar,
.lm-DockPanel-tabBar, .jp-InputArea, .jp-OutputPrompt, .jp-OutputArea-promptOverlay,
.jp-Notebook-footer, .jp-SidePanel, .jp-cell-toolbar { display: none !important; }
.jp-OutputArea { padding: 12px; box-sizing: border-box; }
"""


def photograph(browser: Browser, address: str, folder: Path, name: str, to: Path) -> Path:
    """Run a notebook of one cell, and save what it shows as `NAME.png`.

    Args:
        browser: A Chromium.
        address: Address of JupyterLab.
        folder: Its folder of notebooks.
        name: Key of `PICTURES`.
        to: Folder of the picture.
    """
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    lab = Lab(page, address, folder)
    page.set_default_timeout(240_000)
    lab.notebook(name, [PICTURES[name]])
    lab.open(name)
    lab.run_cell(0)
    page.wait_for_selector(".wb-board[data-number]")
    page.add_style_tag(content=HIDE_JUPYTERLAB)
    page.wait_for_timeout(SETTLE_MS)  # charts take their new width
    path = to / f"{name}.png"
    output = page.locator(".jp-CodeCell .jp-OutputArea").first
    output.screenshot(path=path)
    lab.close()
    page.close()
    return path


def main() -> None:
    """Write every picture into the folder that `--to` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("docs"), help="folder of the pictures")
    to = parser.parse_args().to
    to.mkdir(parents=True, exist_ok=True)
    chromium = chromium_path()
    if chromium is None:
        sys.exit("no Chromium on PATH; on Debian or Ubuntu: apt-get install -y chromium")
    with (
        tempfile.TemporaryDirectory() as home,
        jupyterlab(Path(home)) as (address, folder),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(**launch_options(chromium))
        for name in PICTURES:
            path = photograph(browser, address, folder, name, to)
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
