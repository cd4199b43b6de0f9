"""Set-up shared by all tests."""

import os
import signal
from collections.abc import Callable

import hypothesis
import pytest
import torch

from tests.drawn_cases import leave_others_to_the_sweep

Ask = Callable[..., tuple[int, str, str]]
"""Runs a command line; (exit code, stdout, stderr)."""

# How long a case takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Before any operator runs: ranks may be forked from this process at any time.
torch.set_num_threads(1)
# Tables are as wide as whoever asks says: a terminal above the tests must not decide what they see.
os.environ.pop("COLUMNS", None)
# A shell starts background jobs with Ctrl-C ignored, and programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-browser", action="store_true", help="fail if a browser test is skipped"
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_others_to_the_sweep(items)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command line in this process; (exit code, stdout, stderr)."""
    from workbench.cli import answer

    def run(*words: object) -> tuple[int, str, str]:
        code = answer([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    outcome = yield
    report = outcome.get_result()
    if (
        report.skipped
        and item.get_closest_marker("browser")
        and item.config.getoption("--require-browser")
    ):
        report.outcome = "failed"
