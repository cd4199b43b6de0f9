"""What a terminal shows of a run's end and of an instrument's notes."""

from dataclasses import replace

import pytest

from workbench.cli import tables
from workbench.cli.progress import RunError, finished
from workbench.lab.palette import words
from workbench.profile import Profile
from workbench.runs.run import Run
from workbench.runs.state import Cause, first_state, write_state


@pytest.mark.parametrize(("rank", "message", "says"), [
    (0, "rank 0 raised ValueError: no in step 2", "rank 0 raised ValueError: no in step 2"),
    (1, "out of memory beside rank 10 of 16", "rank 1: out of memory beside rank 10 of 16"),
    (0, "ranks 0, 1 of 16 never said hello", "ranks 0, 1 of 16 never said hello"),
    (None, "the launcher was killed by SIGKILL", "the launcher was killed by SIGKILL"),
])  # fmt: skip
def test_a_failure_names_its_rank_once(tmp_path, rank, message, says):
    cause = Cause(rank, message, "Mend it.", "last line")
    write_state(tmp_path, replace(first_state(16, 20), phase="failed", cause=cause))
    run = Run(tmp_path)
    assert tables.ending(run, run.state).splitlines()[1:] == [says, "Mend it.", "last line"]
    with pytest.raises(RunError) as error:
        finished(run, "1 of 1")
    assert str(error.value) == f"run {run.id} failed: {says}. Mend it.\nlast line"


def test_notes_are_told_in_words_and_kept_by_key():
    time = {"tensor_comm": 0.0163, "bubble": 7e-18}
    found = Profile("tiny", "estimated", 1, notes={"time": time, "model_flops_utilisation": 0.25})
    told = dict(zip(*(column.cells for column in tables.notes(found).columns)))
    assert told == {"time: tensor communication": "16.3 ms", "time: bubble": "0 ms", "model FLOPs utilisation": "25.0%"}
    assert found.summary()["time"] == time and found.summary()["model_flops_utilisation"] == 0.25


@pytest.mark.parametrize(("key", "says"), [
    ("data_comm", "data communication"), ("communication", "communication"), ("compute", "compute"),
    ("timeline_microbatches", "timeline microbatches"),
])  # fmt: skip
def test_keys_in_words(key, says):
    assert words(key) == says


def test_an_interval_is_told_by_its_ends():
    need = {"p50": 2.0**31, "p95": 3.0 * 2**30, "probability_of_running_out": 0.0123}
    found = Profile("tiny", "estimated", 1, notes={"step_seconds_90": [0.1, 0.25], "memory": need})
    told = dict(zip(*(column.cells for column in tables.notes(found).columns)))
    assert told == {
        "a step, in 90 of 100 cases": "100 ms to 250 ms",
        "memory: in half of all cases at most": "2.00 GiB", "memory: in 95 of 100 cases at most": "3.00 GiB",
        "memory: probability of running out": "1.2%",
    }  # fmt: skip
    assert found.summary()["memory"] == {"peak_bytes_by_rank": {}, "by_category": {}, **need}
