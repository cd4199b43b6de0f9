"""A rehearsal of few microbatches says what a rehearsal of all would."""

import pytest

from tests.parallel.small import GPT, LLAMA, plan
from workbench.plan.schema import Plan
from workbench.rehearsal import rehearse as module
from workbench.rehearsal.rehearse import rehearse


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 2), (2, 2, 1), (1, 4, 1), (2, 3, 1)], ids=str)
def test_memory_and_traffic_are_those_of_the_whole_step(
    mesh: tuple[int, int, int], shape: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = plan(*mesh, shape=shape, tied=True, microbatches=11)
    assert module.with_fewer_microbatches(many.resolve(), mesh[1] - 1).num_microbatches == 3
    assert_same(many, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 3, [7, 1, 1, 1]], ids=str)
def test_so_they_are_after_other_warm_ups(
    most: int | list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = {"strategy.pipeline.schedule": "eager-1f1b", "strategy.pipeline.in_flight": most}
    assert_same(plan(1, 4, 1, tied=True, microbatches=11, changes=warm_up), monkeypatch)


def assert_same(many: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal of few microbatches of the plan says what one of all says."""
    short = rehearse(many)
    monkeypatch.setattr(module, "with_fewer_microbatches", lambda plan, stage: plan)
    whole = rehearse(many)
    assert short.peak_bytes_by_rank == whole.peak_bytes_by_rank
    assert short.by_category == whole.by_category
    keys = ["rank", "step", "axis", "kind", "group_size", "dtype", "bytes", "action"]
    for profile in (short, whole):
        assert not profile.collectives.duplicated(keys).any()
    ours, theirs = (p.collectives.set_index(keys)["count"].sort_index() for p in (short, whole))
    assert ours.equals(theirs)
