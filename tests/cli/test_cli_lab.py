"""`workbench lab`: the command that it becomes, and the server that comes of it."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ask
from workbench.runs.launch.rendezvous_ports import free_port


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    path = tmp_path / "a notebook.ipynb"
    path.write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_options_after_two_dashes_are_jupyters(ask: Ask, notebook: Path) -> None:
    for words in ([notebook], []):
        code, out, _ = ask(
            "lab",
            "--json",
            "--no-browser",
            *words,
            "--",
            "--allow-root",
            "--ServerApp.ip=127.0.0.1",
        )
        command = json.loads(out)["command"]
        assert code == 0 and command[:4] == [sys.executable, "-P", "-m", "jupyterlab"]
        assert command[-3:] == ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    assert "--LabApp.news_url=None" in command


def test_a_folder_is_opened_as_such(ask: Ask, notebook: Path) -> None:
    command = json.loads(ask("lab", "--json", notebook.parent)[1])["command"]
    assert f"--ServerApp.root_dir={notebook.parent}" in command and not any(
        "default_url" in word for word in command
    )


def test_root_is_told_what_to_say(
    ask: Ask, notebook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    code, _, err = ask("lab", notebook)
    assert code == 2 and "as root" in err and "-- --allow-root" in err


def test_what_does_not_exist_is_refused(ask: Ask, tmp_path: Path) -> None:
    code, _, err = ask("lab", tmp_path / "none.ipynb")
    assert code == 2 and "none.ipynb' does not exist" in err


def fetched(address: str, seconds: float = 20.0) -> Any:
    """What the server answers, which prints its address a moment before it listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return urllib.request.urlopen(address, timeout=seconds).read().decode()
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.slow
def test_the_address_that_is_printed_opens_the_notebook(notebook: Path, tmp_path: Path) -> None:
    """And no pop-up asks about news."""
    own = {
        name: str(tmp_path / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    words = ["lab", str(notebook), "--no-browser", "--port", str(free_port()), "--", "--allow-root"]
    server = subprocess.Popen(
        [sys.executable, "-m", "workbench", *words],
        env={**os.environ, **own},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        printed = (re.search(r"http://localhost:\S+token=\S+", line) for line in server.stderr)
        address = next(found[0] for found in printed if found)
        assert "/lab/tree/a%20notebook.ipynb?" in address
        page = fetched(address.replace("localhost", "127.0.0.1"))
        assert '"news": {"disabled": true}' in page
    finally:
        server.terminate()
        server.communicate(timeout=30)
