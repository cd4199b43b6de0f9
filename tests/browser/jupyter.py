"""Driving JupyterLab by what a person sees, with the waits that its start needs."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import nbformat
from playwright.sync_api import TimeoutError

ACCEPT = ".jp-Dialog-button.jp-mod-accept"
READY = """() => {
  const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
  const kernel = context?.session?.kernel;
  const connected = kernel?.connectionStatus === 'connected';
  return Boolean(context?.isReady && connected && kernel?.status === 'idle');
}"""
HARMLESS = (
    "favicon",
    "closed before the connection is established",
    "Failed to load resource",
    "Canceled future for",
    "Could not restore the debugger state",
)
"""Messages of JupyterLab itself that say nothing about us: what it had asked of a kernel that a
page then left.
"""


class Lab:
    """One page with one notebook."""

    def __init__(self, page: Any, address: str, folder: Path) -> None:
        self.page, self.address, self.folder = page, address, folder
        self.elsewhere: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(90_000)
        page.on("request", lambda request: self._see(request.url))
        page.on("websocket", lambda socket: self._see(socket.url))
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self._hear("error", str(error)))

    def notebook(self, name: str, cells: Sequence[str]) -> Path:
        """Write a notebook of code cells."""
        found = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        found.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        path = self.folder / f"{name}.ipynb"
        path.write_text(nbformat.writes(found))
        return path

    def open(self, name: str) -> None:
        """Open a notebook and wait until its kernel is idle."""
        self.page.goto(f"{self.address}/doc/tree/{name}.ipynb", wait_until="domcontentloaded")
        self.settle()

    def settle(self) -> None:
        """Wait until the notebook is there and its kernel idle; take the kernel that a dialog
        offers.
        """
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        for _ in range(60):
            self.page.wait_for_timeout(500)
            if self.page.locator(ACCEPT).count():
                self.page.locator(ACCEPT).first.click()
            elif self.page.evaluate(READY):
                return
        raise AssertionError("the kernel did not become idle")

    def command(self, name: str, **arguments: Any) -> None:
        """Start a command of JupyterLab, without waiting for what it promises."""
        script = "([name, args]) => { window.jupyterapp.commands.execute(name, args); }"
        self.page.evaluate(script, [name, arguments])

    def run_all(self) -> None:
        """Run every cell; asks again until the last one has begun or waits for its turn."""
        last = self.page.locator(".jp-CodeCell").count() - 1
        for _ in range(5):
            self.command("notebook:run-all-cells")
            for _ in range(10):
                self.page.wait_for_timeout(500)
                if self.prompt(last):
                    return
        raise AssertionError("the notebook did not start")

    def run_cell(self, index: int) -> None:
        """Run one cell; asks again until it has begun."""
        before = self.prompt(index)
        self.page.locator(".jp-CodeCell").nth(index).locator(".jp-InputArea-editor").click()
        for _ in range(10):
            self.command("notebook:run-cell")
            for _ in range(6):
                self.page.wait_for_timeout(500)
                if self.prompt(index) != before:
                    return
        raise AssertionError(f"cell {index} did not start")

    def prompt(self, index: int) -> str:
        """Between the brackets of a cell's prompt: a number, an asterisk, or nothing."""
        return str(self.page.locator(".jp-CodeCell .jp-InputPrompt").nth(index).inner_text()).strip(
            "[]: \n"
        )

    def restart_kernel(self) -> None:
        """Restart the kernel and confirm it."""
        self.command("notebook:restart-kernel")
        self.page.locator(ACCEPT).first.click()
        self.settle()

    def reload(self) -> None:
        """Load the page again, as a person would; what is open is saved first."""
        self.command("docmanager:save")
        self.page.wait_for_timeout(1500)
        self.page.reload(wait_until="domcontentloaded")
        self.settle()

    def until(self, condition: str, argument: Any = None) -> None:
        """Wait until a JavaScript function of `argument` gives true; fails with what the boards
        say.
        """
        try:
            self.page.wait_for_function(condition, arg=argument)
        except TimeoutError as error:
            boards = self.page.locator(
                ".wb-banner, .jp-RenderedText[data-mime-type*=error]"
            ).all_inner_texts()
            raise AssertionError(f"{condition} stayed false; on the page: {boards}") from error

    def close(self) -> None:
        """Leave no kernel behind."""
        self.page.goto("about:blank")
        for session in self._api("sessions"):
            self._api(f"sessions/{session['id']}", "DELETE")

    def _api(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"{self.address}/api/{path}", method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def _see(self, url: str) -> None:
        parts = urlparse(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in (
            "127.0.0.1",
            "localhost",
        ):
            self.elsewhere.append(url)

    def _hear(self, kind: str, text: str) -> None:
        if kind == "error" and not any(word in text for word in HARMLESS):
            self.errors.append(text)
