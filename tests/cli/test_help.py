"""What `--help` says: every verb in one family, and the options that name a plan where a plan is
taken.
"""

import pytest
import typer

from workbench.cli import answer
from workbench.cli.app import app

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


def test_every_verb_stands_in_one_family(capsys):
    assert answer(["--help"]) == 0
    said = [
        line.split()[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ") and line.split()
    ]
    verbs = list(typer.main.get_command(app).commands)
    assert len(verbs) == 24 and all(said.count(verb) == 1 for verb in verbs)


def test_families_are_headings_and_words_are_whole(capsys):
    answer(["--help"])
    said = capsys.readouterr().out
    assert all(
        f"\n{family}:\n" in said
        for family in ("Plan", "Planner", "Instruments", "Runs", "This machine")
    )
    assert "what\n              could not be translated" in said and "cluster.calibration" in said


@pytest.mark.parametrize("verb", [*TAKES_A_PLAN, "search"])
def test_a_verb_on_a_plan_asks_for_it_first(capsys, verb):
    assert answer([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert "[PLAN]" in said and "Plan file; or choose with the options." in said
    asked = ["--model", "--gpu", "--gpus", *(["--strategy"] if verb != "search" else []), "--set"]
    assert [said.index(f"\n  {option} ") for option in asked] == sorted(
        said.index(f"\n  {o} ") for o in asked
    )
    assert ("--strategy" in said) == (verb != "search") and "**" not in said
