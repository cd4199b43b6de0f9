"""What a cell of a notebook shows of an error that a person can act on."""

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell


class Shell(InteractiveShell):
    """A shell that keeps what it would print of errors."""

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.seen = "\n".join(stb)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("wb.Plan.of('no-such-model')", "PlanError: model: 'no-such-model' is not known"),
        ("wb.estimate('absent.yaml')", "PlanError: absent.yaml: cannot be read"),
        (
            "from workbench.errors import RunError\nraise RunError('rank 1 was killed')",
            "RunError: rank 1 was killed",
        ),
    ],
)
def test_a_cell_shows_the_sentence_and_its_origin_on_request(code: str, sentence: str) -> None:
    shell = Shell()
    shell.run_cell("import workbench as wb")
    shell.run_cell(code)
    assert shell.seen.startswith(sentence)
    assert "Traceback" not in shell.seen and ".py" not in shell.seen
    shell.run_line_magic("tb", "")
    assert "Traceback" in shell.seen and sentence in shell.seen
