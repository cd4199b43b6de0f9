"""JupyterLab on loopback and a headless Chromium, for tests marked `browser`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.jupyter import Lab
from tests.browser.server import chromium_path, jupyterlab, launch_options, stop_runs


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium, or a skip that says how to get one."""
    found = chromium_path()
    if found is None:
        pytest.skip("no Chromium on PATH; on Debian or Ubuntu: apt-get install -y chromium")
    return found


@pytest.fixture(scope="session")
def browser_type_launch_args(chromium: str) -> dict[str, Any]:
    """How pytest-playwright starts the browser."""
    return launch_options(chromium)


@pytest.fixture(scope="session")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and folder of a JupyterLab of our own."""
    with jupyterlab(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def lab(server: tuple[str, Path], page: Any) -> Iterator[Lab]:
    """A page of JupyterLab; afterwards no kernel is left, no run goes on, even of a test that
    failed, and no request has left the machine.
    """
    address, folder = server
    opened = Lab(page, address, folder)
    yield opened
    stop_runs(folder.parent / "runs")
    opened.close()
    assert opened.elsewhere == [], "requests left the machine"
    assert opened.errors == [], "the browser's console has errors"
