"""What `--help` says: every verb in one family, and the options that name a plan where a plan is
taken.
"""

import pytest

from workbench.cli import answer
from workbench.cli.app import COMMANDS, help_text

TAKES_A_PLAN = (
    "plan",
    "estimate",
    "explain",
    "operators",
    "rehearse",
    "run",
    "verify",
    "export",
    "translate",
)


def test_every_verb_stands_in_one_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["--help"]) == 0
    said = [
        line.split()[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ") and line.split()
    ]
    verbs = [name for family in COMMANDS.values() for name in family]
    assert len(verbs) == 29 and all(said.count(verb) == 1 for verb in verbs)


def test_families_are_headings_and_words_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    answer(["--help"])
    said = capsys.readouterr().out
    assert all(
        f"\n{family}:\n" in said
        for family in ("Plan", "Planner", "Instruments", "Runs", "This machine")
    )
    assert not [line for line in said.splitlines() if line.startswith("    ")], "one line each"


@pytest.mark.parametrize("verb", [*TAKES_A_PLAN, "search"])
def test_a_verb_on_a_plan_asks_for_it_first(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert answer([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert "[PLAN]" in said and "Plan file; or choose with the options." in said
    asked = ["--model", "--gpu", "--gpus", *(["--strategy"] if verb != "search" else []), "--set"]
    assert [said.index(f"\n  {option} ") for option in asked] == sorted(
        said.index(f"\n  {o} ") for o in asked
    )
    assert ("--strategy" in said) == (verb != "search") and "**" not in said


def test_help_of_a_verb_is_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["verify", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Verify that a plan computes what one device does." in said
    assert "Numerical equivalence in a precision that replaces" in said and "Args:" not in said


def test_every_command_has_a_text_and_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (name for family in COMMANDS.values() for name in family):
        assert answer([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: workbench {name} ")
        assert help_text(name).partition("\n")[0].endswith(".")


def test_a_wrong_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["estmate"]) == 2
    assert "Did you mean 'estimate'" in capsys.readouterr().err
