"""The first step has a longer deadline than those that follow."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.small import plan
from workbench.corpora import tokenized_corpus
from workbench.engine import loop
from workbench.engine.measure.own_time import OwnClock
from workbench.engine.process_group.collective_deadlines import extend_deadlines, restore_deadlines
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import CPU, build_mesh

SECONDS = 1.0


def waited(rank: int) -> list[bool]:
    """Whether rank 1's lateness of 1.5 deadlines is too much, in the first step and afterwards, on
    the tensor group and among all.
    """
    mesh = build_mesh(plan(tensor=2).resolve(), rank)
    group, found = mesh["tensor"].group, []
    extend_deadlines(mesh, SECONDS)
    for each in (group, None):
        found.append(late(rank, each))
    restore_deadlines(mesh, SECONDS, CPU)
    found.append(late(rank, group))
    return found


def late(rank: int, group: dist.ProcessGroup | None) -> bool:
    if rank == 1:
        time.sleep(1.5 * SECONDS)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return True
    return False


@pytest.mark.slow
def test_collectives_wait_longer_in_the_first_step() -> None:
    assert run_ranks(2, waited)[0] == [False, False, True]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a loop on a GPU calls of those that set deadlines, and of `saver`."""
    found: list[str] = []
    for name in ("extend_deadlines", "restore_deadlines"):
        monkeypatch.setattr(loop, name, lambda *_, name=name: found.append(name))
    return found


def loop_on_gpu(calls: list[str]) -> Any:
    """A loop of which only what is before the first step and what saves can run."""

    def called(name: str) -> Any:
        def call(*_: Any) -> int:
            calls.append(name)
            return 10**9

        return call

    training: Any = loop.TrainingLoop.__new__(loop.TrainingLoop)
    training.plan, training.mesh, training.index = plan(), None, 2
    training.session = SimpleNamespace(device=torch.device("cuda"), warm_up=lambda: [])
    training.saver = SimpleNamespace(
        check=lambda: None, load=called("load"), wait=called("wait"), save=called("save")
    )
    training._phase = lambda *_: None
    training._clock = OwnClock()
    training._end_window = lambda: None
    training._finish_saving = lambda: None
    training.feed = training.trackers = SimpleNamespace(close=lambda: None)
    training.telemetry = SimpleNamespace(record=lambda *_, **__: None)
    return training


def test_a_checkpoint_has_the_deadline_of_the_first_step(calls: list[str]) -> None:
    loop_on_gpu(calls)._save(asked=True)
    assert calls == ["extend_deadlines", "wait", "save", "restore_deadlines"]


def test_ranks_that_build_have_it_too(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: Any, **kinds: Any) -> Any:
        calls.append(f"encode within {kinds['deadline']:g} s")
        raise ValueError("enough")

    monkeypatch.setattr(tokenized_corpus, "load_corpus", load)
    telemetry: Any = SimpleNamespace(record=lambda *_, **__: None)
    accelerator: Any = SimpleNamespace(device=CPU)
    full = plan().replace(**{"telemetry.timeout_seconds": 7}).resolve()
    with pytest.raises(ValueError, match="enough"):
        loop.TrainingLoop(full, tmp_path, build_mesh(full, 0), accelerator, telemetry)
    assert calls == ["extend_deadlines", "encode within 70 s"]


@pytest.mark.parametrize(("device", "before"), [("cuda", []), ("cpu", ["restore_deadlines"])])
def test_ranks_that_load_a_checkpoint_have_it_too(
    calls: list[str], device: str, before: list[str]
) -> None:
    """On GPUs the first step has it as well."""
    training = loop_on_gpu(calls)
    training.session.device = torch.device(device)
    training.run()
    assert calls == ["load", *before, "extend_deadlines"]


def test_an_evaluation_has_it_too(calls: list[str]) -> None:
    training = loop_on_gpu(calls)
    evaluation = {"training.evaluation.every": 1, "training.evaluation.batches": 1}
    training.plan = plan().replace(**evaluation).resolve()
    training.mesh = build_mesh(plan().resolve(), 0)
    training.session.device = CPU
    training.session.preference = None
    training.session.evaluate = lambda *_: calls.append("evaluate")
    training.feed.load_evaluation = lambda *_: ()
    training.text = SimpleNamespace(evaluated_tokens=lambda *_: 1)
    training.trackers.log = lambda *_: None
    training._evaluate()
    assert calls == ["extend_deadlines", "evaluate", "restore_deadlines"]
