"""Catalog files of the package, read by libyaml, equal what the strict reader of plans reads."""

from pathlib import Path

import pytest

from workbench import data_files
from workbench.errors import PlanError
from workbench.safe_io import yaml_files

FILES = sorted(path.name for path in (data_files.assets() / "data").glob("*.yaml"))


@pytest.mark.parametrize("name", ["strategies.yaml", *(f"data/{name}" for name in FILES)])
def test_both_readers_say_the_same(name: str) -> None:
    text = (data_files.assets() / name).read_text(encoding="utf-8")
    assert data_files.read_data_file(name) == yaml_files.parse(text, where=name)


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "a: [1\n"])
def test_a_broken_catalog_file_is_refused_by_name(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "assets", lambda: tmp_path)
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(PlanError):
        data_files.read_data_file("x.yaml")
