"""How a child process ends: what it was asked wrongly, a rank's failure and success differ in the
status.
"""

from __future__ import annotations

from typing import NoReturn

import pytest

from workbench.engine.exit_codes import exit_status
from workbench.engine.verify.forked_ranks import RankError
from workbench.errors import refuse


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no file"), 2), (refuse("plan", "is odd"), 2), (RankError("rank 3 failed"), 1)],
)
def test_an_error_is_a_line_and_a_status(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> NoReturn:
        raise error

    assert exit_status(fails) == code
    assert capsys.readouterr().err == f"{error}\n"


def test_success_is_zero_and_other_errors_are_not_swallowed() -> None:
    assert exit_status(lambda: None) == 0
    with pytest.raises(TypeError):
        exit_status(lambda: 1 + None)
