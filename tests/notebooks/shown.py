"""What an executed notebook shows: outputs of a cell, found by words of its source."""

import re
from typing import Any

from workbench.lab.live.figure import VEGA_MIME


class Shown:
    """Outputs of a notebook's code cells.

    Args:
        outputs_by_source: Source of each code cell -> its outputs.
    """

    def __init__(self, outputs_by_source: dict[str, list[Any]]) -> None:
        self.outputs_by_source = outputs_by_source

    def of(self, words: str) -> list[Any]:
        """Outputs of the one cell that has the words."""
        found = [out for source, out in self.outputs_by_source.items() if words in source]
        assert len(found) == 1, f"{len(found)} cells have {words!r}"
        return found[0]

    def table(self, words: str) -> dict[str, list[float]]:
        """The last table of the cell: name of a row -> its figures."""
        body = self.of(words)[-1].data["text/html"].partition("<tbody>")[2]
        rows = {
            " ".join(re.findall(r"<th[^>]*>(.*?)</th>", row)): re.findall(r"<td>(.*?)</td>", row)
            for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
        }
        assert rows, words
        return {name: [float(cell) for cell in cells] for name, cells in rows.items()}

    def chart(self, words: str) -> list[dict[str, Any]]:
        """Rows of the chart that the cell shows."""
        (figure,) = (o for o in self.of(words) if VEGA_MIME in o.get("data", {}))
        rows: list[dict[str, Any]] = figure.data[VEGA_MIME]["data"]["values"]
        return rows

    def peaks(self, words: str) -> dict[str, dict[str, float]]:
        """Of a chart of memory by plan: plan -> source -> total in the chart's unit."""
        found: dict[str, dict[str, float]] = {}
        for row in self.chart(words):
            found.setdefault(row["label"], {})[row["bar"]] = row["total"]
        return found

    def values(self, words: str) -> dict[str, dict[str, float]]:
        """Of a chart of values by source: name -> source -> value."""
        found: dict[str, dict[str, float]] = {}
        for row in self.chart(words):
            found.setdefault(row["name"], {})[row["source"]] = row["value"]
        return found


def assert_sources_agree(
    found: dict[str, dict[str, float]], estimated: float, rehearsed: float
) -> None:
    """Measured numbers are the rehearsed and the estimated ones within these shares."""
    measured = {name: numbers for name, numbers in found.items() if "measured" in numbers}
    assert measured
    for name, numbers in measured.items():
        for source, share in (("estimated", estimated), ("rehearsed", rehearsed)):
            assert abs(numbers[source] / numbers["measured"] - 1) <= share, (name, numbers)
