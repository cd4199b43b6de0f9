"""Fixtures of the training loop: a small text to train on."""

from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 500 short sentences; caches stand beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}. " for n in range(500)))
    return path
