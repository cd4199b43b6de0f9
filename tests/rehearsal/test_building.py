"""The first step's peak in a rehearsal includes the building of the session."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.measure.live_memory import LiveBytes
from workbench.engine.measure.step_sampler import persistent_tensors
from workbench.engine.session import Session
from workbench.parallel.mesh import build_mesh
from workbench.plan.schema import Plan
from workbench.rehearsal import building
from workbench.rehearsal.building import ScratchOnly, build_session, with_building
from workbench.rehearsal.fake_process_group import fake_tensors, fake_world, without_cached_results
from workbench.rehearsal.rehearse import rehearse

ROWS = [
    {"stage": 1, "moment": moment, "tier": tier, "category": category, "bytes": size}
    for moment, tier, category, size in (
        ("initialised", "device", "parameters", 10),
        ("peak", "device", "parameters", 10),
        ("peak", "device", "activations", 20),
        ("peak", "host", "optimizer", 500),
        ("maximum", "device", "parameters", 11),
        ("maximum", "device", "activations", 21),
    )
]


def table(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], int]:
    found = {(r["moment"], r["tier"], r["category"]): r["bytes"] for r in rows}
    assert len(found) == len(rows)
    return found


def test_the_larger_peak_counts() -> None:
    assert with_building(ROWS, {"parameters": 10, "temporary": 20}, 1) == ROWS
    before, after = table(ROWS), table(with_building(ROWS, {"parameters": 9, "temporary": 22}, 1))
    assert after == {
        **{key: size for key, size in before.items() if key[:2] != ("peak", "device")},
        ("peak", "device", "parameters"): 9,
        ("peak", "device", "temporary"): 22,
        ("maximum", "device", "temporary"): 22,
    }


def test_a_building_that_holds_more_than_a_step_is_in_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = plan(1, 1, 2, changes={"strategy.data.zero": 3})
    honest = rehearse(made).memory
    scratch = ScratchOnly.scratch

    def wasteful(self: ScratchOnly, rows: int, columns: int) -> torch.Tensor:
        return scratch(self, rows, columns + 2**24)

    monkeypatch.setattr(building.ScratchOnly, "scratch", wasteful)
    greedy = rehearse(made).memory
    for step, more in ((0, True), (1, False)):
        peaks = [
            int(rows[(rows.step == step) & (rows.moment == "peak")].bytes.sum())
            for rows in (honest, greedy)
        ]
        assert (peaks[1] > peaks[0] + 2**24) == more, (step, peaks)


@pytest.mark.parametrize(
    "made",
    [
        plan(2, 1, 2, changes={"strategy.data.zero": 1}, vocab=4096),
        plan(2, 1, 2, changes={"strategy.data.zero": 3}, vocab=4096),
        plan(4, shape=GPT, vocab=4096),
    ],
    ids=["zero-1", "zero-3", "tensor"],
)
def test_it_is_what_a_rank_holds_while_it_draws(made: Plan) -> None:
    """Within the counters and keys of a chunk, which a rehearsal leaves out."""
    full = made.resolve()
    with fake_world(1, full.world_size):
        mesh = build_mesh(full, 1)
        with fake_tensors() as mode, without_cached_results(mode):
            _, rehearsed = build_session(full, mesh, None)
        with LiveBytes() as live:
            session = Session.build(full, mesh, torch.device("cpu"))
            for category, tensors in persistent_tensors(session).items():
                live.register(tensors, category)
            measured = live.peak
    assert rehearsed.keys() == measured.keys()
    assert sum(rehearsed.values()) == pytest.approx(sum(measured.values()), rel=0.02)


@pytest.mark.parametrize("gpu, numel", [("local", 2**18), ("h100-sxm-80gb", 2**21)])
def test_chunks_are_those_of_the_plan_s_device(
    gpu: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk for a GPU is larger, though a rehearsal's tensors are on the CPU."""
    chunks, scratch = [], ScratchOnly.scratch

    def recorded(self: ScratchOnly, rows: int, columns: int) -> torch.Tensor:
        chunks.append(rows * columns)
        return scratch(self, rows, columns)

    monkeypatch.setattr(ScratchOnly, "scratch", recorded)
    model = {**LLAMA, "vocab": 65536, "hidden": 64}
    full = Plan.of("tiny", gpu=gpu, gpus=2, strategy="zero-3", set={"model": model}).resolve()
    with fake_world(0, 2):
        mesh = build_mesh(full, 0)
        with fake_tensors():
            build_session(full, mesh, None)
    assert max(chunks) == numel, "half of the embedding, or a chunk"
