"""The host runs a step ahead of the device: same records, checkpoints and stops; and its stubs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.test_loop import Records, refusal, steps, trained
from workbench.engine import loop
from workbench.engine.data.batch_feed import BatchFeed
from workbench.engine.data.batch_sampler import Batch, BatchContents
from workbench.engine.measure import step_under_way
from workbench.engine.measure.step_under_way import HostCopy, StepUnderWay
from workbench.engine.session import Session, StepResult
from workbench.runs.store.stop_request import Stop, request_stop


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the loop run ahead, as on CUDA."""
    return lambda: monkeypatch.setattr(loop, "runs_ahead", lambda session: True)


def told(records: Records) -> list[tuple[Any, ...]]:
    """What steps, evaluations and checkpoints say, but for times."""
    names = ("kind", "step", "loss", "gradient_norm", "learning_rate", "skipped")
    kinds = ("step", "evaluation", "checkpoint", "bye")
    # The thread that writes checkpoints reports them whenever it is done.
    found = sorted((r for r in records if r["kind"] in kinds), key=lambda r: r["kind"])
    return [tuple(r.get(name) for name in names) for r in found]


def test_records_and_checkpoints_are_those_of_a_host_that_waits(
    tmp_path: Path, text: Path, ahead: Callable[[], None]
) -> None:
    changes = {"training__steps": 9, "checkpoint__every": 4, "training__evaluation__every": 5}
    code, plain = trained(tmp_path / "plain", text, **changes)
    ahead()
    again, records = trained(tmp_path / "ahead", text, **changes)
    assert code == again == 0 and told(records) == told(plain)
    assert steps(records, "checkpoint") == [4, 8, 9]
    code, resumed = trained(
        tmp_path / "resumed",
        text,
        training__steps=9,
        checkpoint__load=str(tmp_path / "ahead" / "checkpoints" / "step-00000008"),
    )
    last = [r["loss"] for r in resumed if r["kind"] == "step"]
    assert code == 0 and last == [r["loss"] for r in plain if r["kind"] == "step"][8:]


def test_the_next_step_is_enqueued_before_the_last_ones_scalars_are_read(
    tmp_path: Path, text: Path, ahead: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, finish = Session.step, loop.TrainingLoop._finish
    log = tmp_path / "log"

    def enqueue(self: Session, index: int, *rest: Any) -> StepResult:
        log.write_text(f"{log.read_text() if log.exists() else ''}+{index} ")
        return run(self, index, *rest)

    def read(self: loop.TrainingLoop, step: StepUnderWay) -> int:
        log.write_text(f"{log.read_text()}-{step.index} ")
        return finish(self, step)

    monkeypatch.setattr(Session, "step", enqueue)
    monkeypatch.setattr(loop.TrainingLoop, "_finish", read)
    ahead()
    changes = {"training__steps": 8, "checkpoint__every": 6}
    code, _ = trained(tmp_path / "run", text, **changes)
    # Steps 0 to 2 are measured; a checkpoint after 6, and the end, wait for what they save.
    order = "+0 -0 +1 -1 +2 -2 +3 +4 -3 +5 -4 -5 +6 +7 -6 -7 "
    assert (code, log.read_text()) == (0, order)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_stop_takes_effect_a_step_later_and_saves_what_was_done(
    tmp_path: Path,
    text: Path,
    ahead: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: bool,
) -> None:
    run = Session.step

    def ask(self: Session, index: int, *rest: Any) -> StepResult:
        if index == 3:  # seen when step 4 is enqueued
            request_stop(tmp_path / "run", Stop(checkpoint))
        return run(self, index, *rest)

    monkeypatch.setattr(Session, "step", ask)
    ahead()
    code, records = trained(tmp_path / "run", text, training__steps=20)
    assert code == 0 and steps(records, "step") == [0, 1, 2, 3, 4, 5]
    assert steps(records, "bye") == [6]
    assert steps(records, "checkpoint") == ([6] if checkpoint else [])


def test_a_loss_that_is_not_finite_is_reported_with_its_own_step(
    tmp_path: Path, text: Path, ahead: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Session.step

    def broken(self: Session, index: int, *rest: Any) -> StepResult:
        result = run(self, index, *rest)
        return result._replace(loss=result.loss * float("nan")) if index == 4 else result

    monkeypatch.setattr(Session, "step", broken)
    ahead()
    code, records = trained(tmp_path / "run", text, training__steps=20, checkpoint__every=5)
    error = refusal(tmp_path / "run")
    assert code != 0 and error["step"] == 4 and "the loss of step 4 is nan" in error["message"]
    assert steps(records, "step") == [0, 1, 2, 3] and not steps(records, "checkpoint")


class Text:
    """Batches that count themselves."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.prepared: list[int] = []
        self.seconds = seconds

    def batch(self, step: int) -> Batch:
        time.sleep(self.seconds)
        self.prepared.append(step)
        return Batch(torch.full((1, 1, 4), step), torch.full((1, 1, 4), step + 1), None)

    def contents(self, step: int) -> BatchContents:
        return BatchContents(np.array([4]), np.array([[0]]))


def feed(text: Any, seconds: float = 10.0) -> BatchFeed:
    """A feed that prepares ahead, as on CUDA."""
    found = BatchFeed(text, (1, 1, 4), torch.device("cpu"), seconds)
    found._thread = ThreadPoolExecutor(1)
    return found


def test_the_next_batch_is_prepared_in_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        locked.append(int(self.flatten()[0]))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    text = Text()
    batches = feed(text)
    batches._page_locked = True
    for step in (5, 6, 9):  # an evaluation or a resumption may jump
        tokens, targets, _ = batches.load(step)
        assert (int(tokens[0, 0, 0]), int(targets[0, 0, 0])) == (step, step + 1)
        assert tokens is batches.tokens
    assert batches._next is not None and batches._next[0] == 10
    batches._next[1].result(10)
    assert text.prepared == [5, 6, 7, 9, 10] and locked[:2] == [5, 6]
    batches.close()


def test_a_batch_that_does_not_come_is_an_error_with_its_deadline() -> None:
    batches = feed(Text(seconds=0.5), seconds=0.01)
    with pytest.raises(TimeoutError, match=r"corpus\.source: the batch of step 3 .* 0\.01 s"):
        batches.load(3)
    batches.close()


def test_scalars_are_read_behind_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Event:
        def record(self) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("synchronize")

    class OnGpu:
        device = torch.device("cuda", 0)

    class PageLocked:
        def copy_(self, x: object, non_blocking: bool) -> None:
            assert non_blocking
            order.append("copy")

        def tolist(self) -> list[float]:
            order.append("read")
            return [1.5, 2.0]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(step_under_way, "page_locked_like", lambda x: PageLocked())
    on_gpu: Any = OnGpu()
    copy = HostCopy(on_gpu)
    assert order == ["copy", "record"]
    assert copy.tolist() == [1.5, 2.0] and order[2:] == ["synchronize", "read"]
    assert HostCopy(torch.tensor([3.0])).tolist() == [3.0] and len(order) == 4
