from typing import Any

from workbench.lab.charts import line_series
from workbench.lab.live.live_series import BoundedSeries, LatestSamples

from . import synthetic


def test_few_ranks_get_each_value_once() -> None:
    series = BoundedSeries(2)
    first = series.add([(0, 0, 1.0), (1, 0, 2.0)])
    second = series.add([(0, 1, 3.0)])
    assert first is not None and not first.replace and len(first.rows) == 2
    assert second is not None and [row["value"] for row in second.rows] == [3.0]
    assert series.add([]) is None


def test_a_long_run_is_thinned_and_never_grows_without_end() -> None:
    series = BoundedSeries(1)
    replaced = 0
    for step in range(10 * line_series.MAX_POINTS):
        change = series.add([(0, step, float(step))])
        replaced += bool(change and change.replace)
    kept = series.replacement().rows
    assert replaced >= 3 and len(kept) <= line_series.MAX_POINTS and series.width == 32
    assert all(row["step"] % series.width in (0, series.width - 1) for row in kept[:-1])


def test_many_ranks_are_drawn_at_most_once_a_second() -> None:
    now = [0.0]
    series = BoundedSeries(64, clock=lambda: now[0])
    values = [(rank, 0, float(rank)) for rank in range(64)]
    first = series.add(values)
    assert (
        first is not None
        and first.replace
        and {row["rank"] for row in first.rows} == {"median", "rank 0", "rank 1", "rank 2"}
    )
    assert series.add([(rank, 1, 1.0) for rank in range(64)]) is None
    now[0] = 1.5
    assert series.add([]) is not None
    assert series.add([]) is None


def test_the_last_sample_of_each_rank_is_stored() -> None:
    latest = LatestSamples()
    profile = synthetic.profile("measured", 2)
    rows: list[Any] = profile.memory.to_dict("records")
    latest.add("memory", rows)
    latest.add("memory", [row | {"step": 7} for row in rows if row["rank"] == 0])
    kept = latest.profile("run", 2, None).memory
    assert set(kept[kept["rank"] == 0].step) == {7} and set(kept[kept["rank"] == 1].step) == {2}
    assert len(kept) == len(rows)
