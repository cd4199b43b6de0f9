"""What ranks with several stages hold: counted from the schedule's table, and against rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.costmodel.test_against_rehearsal import ODD
from workbench.costmodel.inputs import held_counts as held_counts_module
from workbench.costmodel.inputs.config import fixed_config
from workbench.costmodel.inputs.held_counts import (
    _largest,
    held_counts,
    read_kept_counts,
    write_kept_counts,
)
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.memory.live_sets.live_by_phase import live_by_phase
from workbench.costmodel.memory.live_sets.stage_phases import total_bytes
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.profile import Profile
from workbench.rehearsal.rehearse import rehearse
from workbench.schedules import generate, in_flight
from workbench.vocabulary import NOT_ALLOCATED

SCHEDULES = [("interleaved", 2), ("interleaved", 3), ("zb-v", 2), ("dualpipe-v", 2)]
RECOMPUTE = ["none", "full", "selective", [0, 2, 5]]


def piped(model: Any, schedule: str, chunks: int, ranks: int, **changes: Any) -> Plan:
    """Of microbatches enough to fill the pipeline."""
    setting = {
        "model": model,
        "strategy.pipeline.size": ranks,
        "strategy.pipeline.schedule": schedule,
        "strategy.pipeline.chunks": chunks,
        "training.sequence_length": 128,
        "training.micro_batch": 2,
        "training.global_batch": 8 * ranks,
    }
    gpus = ranks * changes.get("strategy.tensor.size", 1)
    return Plan.of("tiny", gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp", set=setting | changes)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_counts_are_those_of_the_table(schedule: str, chunks: int, ranks: int) -> None:
    full = piped(ODD | {"layers": 36}, schedule, chunks, ranks).resolve()
    s, microbatches = fixed_config(full), 4 * ranks
    table = generate(schedule, ranks, microbatches, chunks)
    for rank, most in enumerate(in_flight(table)):
        counts = held_counts(s, microbatches, (rank,))
        after_forward = [held for (_, kind), all_ in counts.items() if kind == "F" for held in all_]
        assert max(sum(held.whole) + sum(held.deferred) for held in after_forward) == most


def test_a_rank_of_a_v_may_hold_more_of_one_stage() -> None:
    """Zero bubble V on four ranks: the first rank holds eight microbatches of its first stage when
    it has none of its last, the last rank as many of both.
    """
    s = fixed_config(piped(ODD | {"layers": 8}, "zb-v", 2, 4).resolve())
    first, last = (held_counts(s, 16, (rank,)) for rank in (0, 3))
    assert {held[:2] for held in first[0, "I"]} == {((8, 0), (0, 0))}
    assert ((4, 4), (0, 0)) in {held[:2] for held in last[1, "I"]}


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_are_all_that_are_not_at_most_another(seed: int) -> None:
    choose = np.random.default_rng(seed)
    at = choose.integers(8, size=300)
    held = np.concatenate([choose.integers(6, size=(300, 5)), np.zeros((300, 1), int)], axis=1)
    found = dict(_largest(at, held))
    for number in range(8):
        own = np.unique(held[at == number], axis=0)
        beyond = (own[:, None] <= own).all(axis=2).sum(axis=1) > 1  # each is at most itself
        assert found[number] == own[~beyond].tolist()


@pytest.mark.parametrize("damage", [None, "cut", "changed", "other code"])
def test_counts_are_kept_for_the_next_process(
    damage: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the user alone; a file that is damaged, or of other code, does not count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(held_counts_module, "_KEPT", {})
    monkeypatch.setattr(held_counts_module, "_WRITTEN", set())
    count = held_counts_module._of_schedule.__wrapped__
    first = count("zb-v", 4, 8, 2, None, (1, 2))
    write_kept_counts()
    file = tmp_path / "workbench" / "schedules" / "held_counts"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    text = file.read_text()
    if damage:
        digest = text[:64] if damage != "other code" else "0" * 64
        body = text[64:-9] if damage == "cut" else text[64:].replace("[0,", "[1,")
        file.write_text(digest + (text[64:] if damage == "other code" else body))
    held_counts_module._KEPT.clear()
    read_kept_counts.__wrapped__()
    assert bool(held_counts_module._KEPT) == (damage is None)
    assert count("zb-v", 4, 8, 2, None, (1, 2)) == first


@pytest.mark.parametrize("seed", range(8))
def test_a_search_sums_the_same_live_sets(seed: int) -> None:
    """Compare sums over categories alone with those of the categories: every phase, by rank."""
    w = workload(drawn(seed).resolve())
    each, sums = live_by_phase(w), live_by_phase(w, by_category=False)
    assert each.keys() == sums.keys()
    for name in each.keys() - {"first_forward", "recomputed_layer"}:  # may not be there
        assert total_bytes(sums[name]).tolist() == total_bytes(each[name]).tolist()
    most = [np.max([total_bytes(x) for x in live.values()], axis=0) for live in (each, sums)]
    assert most[0].tolist() == most[1].tolist()


def drawn(seed: int) -> Plan:
    choose = np.random.default_rng(seed)
    schedule, chunks = SCHEDULES[choose.integers(len(SCHEDULES))]
    ranks = int(choose.choice([2, 3]))
    layers = int(choose.integers(ranks * chunks, 3 * ranks * chunks))
    model = ODD | {"layers": layers, "hidden": 192, "ffn": 640}
    if choose.integers(2):
        model |= {"norm": "rmsnorm", "mlp": "swiglu", "tied": False}
    recompute = RECOMPUTE[choose.integers(len(RECOMPUTE))]
    if isinstance(recompute, list):
        recompute = [layer for layer in recompute if layer < layers]
    changes = {
        "strategy.tensor.size": int(choose.choice([1, 2])),
        "strategy.precision": str(choose.choice(["fp32", "bf16"])),
        "strategy.data.bucket_mib": 1.0,
        "strategy.recompute": recompute,
    }
    return piped(model, schedule, chunks, ranks, **changes)


@pytest.mark.parametrize(
    "seed", [2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1))]
)
def test_memory_is_what_the_engine_allocates(seed: int) -> None:
    """The largest rank's within 1 %; recomputed small layers make others of a few tensors off."""
    plan = drawn(seed)
    estimated, rehearsed = live_by_rank(estimate(plan)), live_by_rank(rehearse(plan))
    assert max(estimated.values()) == pytest.approx(max(rehearsed.values()), rel=0.01)
    assert estimated == pytest.approx(rehearsed, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0, 1])
def test_an_moe_layer_defers_its_attention_and_shared_experts(shared: int) -> None:
    experts = {"experts": 4, "top_k": 2, "ffn": 640, "shared": shared}
    model = ODD | {"layers": 4, "moe": experts}
    plan = piped(model, "zb-v", 2, 2, **{"strategy.recompute": "full"})
    estimated, rehearsed = live_by_rank(estimate(plan)), live_by_rank(rehearse(plan))
    assert max(estimated.values()) == pytest.approx(max(rehearsed.values()), rel=0.01)
    assert estimated == pytest.approx(rehearsed, rel=0.03)


def live_by_rank(profile: Profile) -> dict[int, float]:
    """Bytes of the last step's peak that are of the plan's tensors."""
    m = profile.memory
    m = m[(m.step == m.step.max()) & (m.moment == "peak") & (m.tier == "device")]
    own = m[~m.category.isin([*NOT_ALLOCATED, "overhead"])]
    return dict(own.groupby("rank").bytes.sum())
