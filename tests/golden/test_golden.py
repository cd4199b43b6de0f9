"""What scripts rely on stays: answers of every verb, exit codes, the schema, run directories and
checkpoints.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pytest import ParameterSet

from tests.golden import record
from tests.golden.cases import HERE, REFUSED, RUN, Case, cases
from tests.golden.compare import differences
from workbench.plan.schema import Plan


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    record.prepared(folder)
    return folder


SLOW = ("run/", "rehearse/", "operators/llama-3-8b-zero-3")


def marked(case: Case) -> ParameterSet:
    slow = [pytest.mark.slow] if case.name.startswith(SLOW) else []
    return pytest.param(case, marks=slow, id=case.name)


@pytest.mark.parametrize("case", [marked(case) for case in cases()])
def test_answers_are_as_recorded(case: Case, root: Path) -> None:
    recorded = json.loads(record.path_of(case).read_text())
    assert list(differences(recorded, record.outcome(case.words, root), case.exact)) == []


def test_refusals_keep_their_exit_codes_and_fields(root: Path) -> None:
    recorded = json.loads(record.REFUSALS.read_text())
    assert [tuple(row["words"]) for row in recorded] == list(REFUSED)
    now = [{"words": list(words), **record.outcome(words, root)} for words in REFUSED]
    assert list(differences(recorded, now)) == []


def test_the_schema_reads_every_plan_it_has_read() -> None:
    assert list(differences(json.loads(record.SCHEMA.read_text()), record.schema())) == []


@pytest.mark.parametrize("verb", ["estimate", "explain", "search"])
def test_no_answer_was_recorded_where_there_was_none(verb: str) -> None:
    for path in sorted((record.RECORDED / verb).glob("*.json")):
        recorded = json.loads(path.read_text())
        assert recorded["exit_code"] in (0, 1) and recorded["answer"], path.name


def test_every_recorded_answer_has_its_case() -> None:
    files = set(record.RECORDED.rglob("*.json"))
    assert files == {record.path_of(case) for case in cases()} | {record.REFUSALS, record.SCHEMA}


@pytest.mark.parametrize(
    "changed",
    [
        {"a": 1.0, "b": [1, 2]},
        {"a": 1.0, "b": [1, 2, 4]},
        {"a": 1.001, "b": [1, 2, 3]},
        {"b": [1, 2, 3]},
        {"a": "1", "b": [1, 2, 3]},
    ],
)
def test_a_change_of_an_answer_is_seen(changed: dict[str, Any]) -> None:
    assert list(differences({"a": 1.0, "b": [1, 2, 3]}, changed))
    assert not list(
        differences({"a": 1.0, "b": [1, 2, 3]}, {"a": 1.0 + 1e-12, "b": [1, 2, 3], "added": None})
    )


@pytest.mark.slow
def test_a_recorded_checkpoint_resumes(root: Path) -> None:
    """The last three steps again, from the checkpoint of step 3: the losses that were recorded."""
    import workbench as wb

    before = wb.attach(root / "runs" / RUN)
    plan = Plan.load(before.dir / "plan.yaml").replace(
        **{"corpus.source": str(HERE / "corpus.txt")}
    )
    run = wb.run(
        plan, resume=before.dir / "checkpoints/step-00000003", root=root / "resumed", wait=True
    )
    assert run.state.phase == "finished", run.state.cause
    first, again = (one.profile().steps.groupby("step").loss.first() for one in (before, run))
    assert again.index.tolist() == [3, 4, 5]
    assert (first.loc[3:] - again).abs().max() < 1e-6
