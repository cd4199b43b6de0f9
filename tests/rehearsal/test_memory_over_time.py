"""Memory over a step of a rehearsal: its peaks, what lives there, and what a step leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.small import LLAMA, plan
from workbench.engine.session import Session
from workbench.lab.charts import memory_over_time
from workbench.profile import Profile
from workbench.rehearsal.memory_curve import Stretch
from workbench.rehearsal.rehearse import rehearse
from workbench.vocabulary import TENSOR_CATEGORIES

FULL = {"strategy.recompute": "full"}


@pytest.fixture(scope="module")
def found() -> Profile:
    return rehearse(plan(1, 2, 1, microbatches=6, changes=FULL), over_time=True)


def totals(profile: Profile) -> Any:
    levels = profile.levels
    return levels.assign(total=levels[list(TENSOR_CATEGORIES)].sum(axis=1))


def test_the_curve_reaches_the_peak_of_its_step(found: Profile) -> None:
    rows = found.memory
    peak = rows[(rows.moment == "peak") & (rows.tier == "device") & (rows.step == 1)]
    highest = totals(found).groupby("rank").total.max()
    assert highest.to_dict() == peak.groupby("rank").bytes.sum().to_dict()


def test_every_microbatch_is_on_it_in_the_order_of_the_schedule(found: Profile) -> None:
    levels = found.levels[found.levels["rank"] == 1]
    assert levels.event.is_monotonic_increasing
    actions = [name for name in dict.fromkeys(levels.action) if name.startswith(("1F", "1B"))]
    assert actions == [f"1{kind}{m}" for m in range(6) for kind in "FB"]


def test_recomputation_and_backward_peak_once_a_layer(found: Profile) -> None:
    """Within one backward: each layer is recomputed, then differentiated."""
    levels = totals(found)
    own = levels[(levels["rank"] == 0) & (levels.action == "0B2")].total.tolist()
    highs = [b for a, b, c in zip(own, own[1:], own[2:]) if a < b > c]
    assert len([size for size in highs if size > 0.99 * max(highs)]) >= 2


def test_one_microbatch_is_drawn_by_itself(found: Profile) -> None:
    figure = memory_over_time(found, rank=0, microbatch=2)
    assert list(dict.fromkeys(row["action"] for row in figure.rows)) == ["0F2", "0B2"]
    with pytest.raises(ValueError, match="microbatch is 6; legal: 0 to 5"):
        memory_over_time(found, rank=0, microbatch=6)


def test_what_lives_at_the_peak_has_its_module_and_action(found: Profile) -> None:
    rows = [row for row in found.notes["peak_allocations"] if row["rank"] == 0]
    assert rows == sorted(rows, key=lambda row: -row["bytes"])
    kept = {(row["module"], row["action"]) for row in rows if row["category"] == "activations"}
    assert ("embedding.tokens", "0F") in kept
    working = {row["module"] for row in rows if row["category"] == "temporary"}
    assert working and all(module.startswith("blocks.") for module in working)


def test_a_step_leaves_nothing_behind(found: Profile) -> None:
    assert found.notes["leaks"] == []


def test_what_it_leaves_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    build = Session.build

    def leaking(*arguments: Any, **more: Any) -> Session:
        session = build(*arguments, **more)
        down = session.part.stages[0].get_submodule("blocks.0.mlp.down")
        down.register_forward_hook(lambda module, inputs, output: kept.append(output.detach()))
        return session

    monkeypatch.setattr(Session, "build", leaking)
    profile = rehearse(plan(1, 1, 1, shape=LLAMA, microbatches=1), over_time=True)
    (leak,) = profile.notes["leaks"]
    assert (leak["module"], leak["action"]) == ("blocks.0.mlp.down", "0F")
    assert leak["bytes"] == kept[-1].untyped_storage().nbytes()


def test_a_stretch_is_the_sum_of_its_changes() -> None:
    changes = [
        ("a", 5, ("m", "F")),
        ("b", 7, ("n", "F")),
        ("a", -5, ("m", "F")),
        ("b", 1, ("", "")),
    ]
    stretch = Stretch.of(changes)
    assert (stretch.rise, stretch.at_rise) == (12, {"a": 5, "b": 7})
    assert (stretch.net, stretch.most) == ({"a": 0, "b": 8}, {"a": 5, "b": 8})
    assert stretch.held == {("b", ("n", "F")): 7, ("b", ("", "")): 1}
    assert [index for index, _ in stretch.points] == [2, 3, 4]


def test_the_chart_draws_the_rank_with_the_largest_peak(found: Profile) -> None:
    figure = memory_over_time(found)
    assert "rank 0" in figure.subtitle and "rehearsed" in figure.subtitle
    drawn = max(row["total"] for row in figure.rows)
    assert drawn == pytest.approx(max(found.peak_bytes_by_rank.values()) / 1024)
    assert not memory_over_time(Profile("p", "rehearsed", 1)).rows
