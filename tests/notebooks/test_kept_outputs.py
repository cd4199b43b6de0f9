"""Notebooks as they are kept: each with the pictures of its last execution."""

import re
from typing import Any

import nbformat
import pytest

from tests.notebooks.save import KEPT, source_digest
from tests.notebooks.strategy_notebooks import ALL_NOTEBOOKS, NOTEBOOKS, STRATEGY_NOTEBOOKS

MAX_BYTES = 600_000
MACHINE = re.compile(r"/(home|root|tmp|work|Users)/|file://")


def kept(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", ALL_NOTEBOOKS)
def test_what_is_kept_is_of_the_code_that_stands_there(name: str) -> None:
    notebook = kept(name)
    assert notebook.metadata.source_sha256 == source_digest(notebook), (
        f"the code has changed: python -m tests.notebooks.save {name}"
    )
    assert [cell.execution_count for cell in code(notebook)] == list(
        range(1, 1 + len(code(notebook)))
    )


@pytest.mark.parametrize("name", ALL_NOTEBOOKS)
def test_what_is_kept_reads_on_github(name: str) -> None:
    outputs = [output for cell in code(kept(name)) for output in cell.outputs]
    shown = [output.data for output in outputs if output.output_type != "stream"]
    assert all(set(data) <= set(KEPT) for data in shown)
    assert sum("image/png" in data for data in shown) >= 2 + (name in STRATEGY_NOTEBOOKS)
    assert {output.output_type for output in outputs} <= {
        "stream",
        "execute_result",
        "display_data",
    }


@pytest.mark.parametrize("name", ALL_NOTEBOOKS)
def test_what_is_kept_names_no_machine_and_is_small(name: str) -> None:
    text = (NOTEBOOKS / f"{name}.ipynb").read_text()
    assert not MACHINE.search(re.sub(r'"image/png": ".*"', "", text))
    assert len(text) < MAX_BYTES


@pytest.mark.parametrize("name", ALL_NOTEBOOKS)
def test_sections_are_numbered_in_order(name: str) -> None:
    words = "\n".join(cell.source for cell in kept(name).cells if cell.cell_type == "markdown")
    numbers = [int(number) for number in re.findall(r"^## (\d+)\b", words, re.MULTILINE)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
