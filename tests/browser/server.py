"""JupyterLab of our own on loopback: own port, own home, no token."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.runs.run import list_runs

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
)
ROOT = Path(__file__).resolve().parents[2]


def chromium_path() -> str | None:
    """Path of a Chromium, or None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def launch_options(chromium: str) -> dict[str, Any]:
    """How Playwright starts the browser."""
    return {"executable_path": chromium, "args": list(FLAGS), "headless": True}


@contextlib.contextmanager
def jupyterlab(home: Path) -> Iterator[tuple[str, Path]]:
    """Address and folder of a JupyterLab that keeps all it writes in `home`; its runs are stopped
    at the end.
    """
    folder = home / "notebooks"
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command(port, folder),
            env=environment(home),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/api", process, home / "server.log")
        yield f"http://127.0.0.1:{port}", folder
    finally:
        stop_runs(home / "runs")
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def command(port: int, folder: Path) -> list[str]:
    """What starts the server."""
    settings = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder,
        "ServerApp.open_browser": False,
        "IdentityProvider.token": "",
        "ServerApp.password": "",
        "ServerApp.allow_root": True,
        "ServerApp.disable_check_xsrf": True,
        "LabApp.expose_app_in_browser": True,
        "LabApp.news_url": "",
    }
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        *(f"--{name}={value}" for name, value in settings.items()),
    ]


def environment(home: Path) -> dict[str, str]:
    """The server's environment: nothing of the person's own Jupyter, and runs kept in `home`."""
    quiet = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}
    prefer(home, "apputils-extension/notification", quiet)
    prefer(
        home, "notebook-extension/tracker", {"windowingMode": "none"}
    )  # cells out of sight stay in the page
    own = {
        "HOME": home,
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "IPYTHONDIR": home / "ipython",
        "XDG_CACHE_HOME": home / "cache",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "WORKBENCH_RUNS": home / "runs",
        "PYTHONPATH": ROOT,
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def stop_runs(root: Path) -> None:
    """End what a failed test left running."""
    for run in list_runs(root):
        run.stop(grace_seconds=5)
        run.wait(timeout=60)


def prefer(home: Path, plugin: str, settings: dict[str, Any]) -> None:
    """Set a person's preferences of one part of JupyterLab."""
    path = home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings))


def wait_for(
    address: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 60
) -> None:
    """Until the server answers; fails with its log where it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
