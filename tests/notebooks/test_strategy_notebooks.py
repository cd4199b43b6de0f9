"""Notebooks on strategies, headless: what each shows, by equalities and orders, never by times.

`NN_name.ipynb` is checked by `tests/notebooks/name.py`.
"""

from importlib import import_module
from pathlib import Path

import pytest

from tests.lab.notebooks import executed
from tests.notebooks.shown import Shown
from tests.notebooks.strategy_notebooks import STRATEGY_NOTEBOOKS

TIMEOUT = 600


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("name", STRATEGY_NOTEBOOKS)
def test_a_notebook_shows_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    checks = import_module(f"tests.notebooks.{name.partition('_')[2]}")
    checks.check(Shown(executed(f"{name}.ipynb", tmp_path, monkeypatch, timeout=TIMEOUT)))
