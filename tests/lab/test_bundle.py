"""What is shipped is what the sources give, and nothing in it asks the network."""

import re

import pytest

from workbench.lab.live import bundle


def test_the_shipped_script_was_built_from_the_present_sources() -> None:
    assert bundle.is_current(), "run: python -m workbench.lab.live.bundle"


def test_a_change_of_the_sources_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "source", lambda: "export default {}")
    assert not bundle.is_current()


def test_the_script_loads_nothing_from_elsewhere() -> None:
    text = bundle.SHIPPED.read_text(encoding="utf-8")
    assert not re.search(r"""(import|from)\s*\(?["']https?:""", text)
    assert not re.search(r"cdn\.jsdelivr|unpkg\.com", text)
    assert text.rstrip().endswith("};") and "as default" in text[-200:]
