"""Copies between host and GPU on a stream of their own, without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.copy_stream import CopyStream


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append(f"{self.name} waits for {event.recorded}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")

    def __enter__(self) -> "FakeStream":
        self.log.append(f"on {self.name}")
        return self

    def __exit__(self, *_: Any) -> None:
        self.log.append("on compute")


class FakeEvent:
    recorded = ""

    def record(self, stream: FakeStream) -> None:
        self.recorded = f"what {stream.name} has copied"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    compute = FakeStream("compute", found)
    fake = SimpleNamespace(
        Stream=lambda device: FakeStream("copies", found),
        Event=FakeEvent,
        current_stream=lambda: compute,
        stream=lambda stream: stream,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    return found


def test_copies_follow_compute_and_compute_waits_for_those_it_needs(log: list[str]) -> None:
    copies = CopyStream(torch.device("cuda", 0))
    with copies.copying():
        wait = copies.copied()
    assert log == ["copies waits for compute", "on copies", "on compute"]
    log.clear()
    wait()
    copies.synchronize()
    assert log == ["compute waits for what copies has copied", "host waits for copies"]


def test_on_cpu_copies_are_made_at_once() -> None:
    copies = CopyStream(torch.device("cpu"))
    with copies.copying():
        wait = copies.copied()
    wait()
    copies.synchronize()
