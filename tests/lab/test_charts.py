import html
import json
import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import vl_convert

from workbench.lab import charts, palette, prediction
from workbench.lab.charts import chart_data
from workbench.lab.charts.traced_ranks import LAST_TRACED, TracedSteps
from workbench.lab.comparison import report
from workbench.lab.comparison.comparison_charts import comparison_figures
from workbench.lab.comparison.entries import ComparisonEntry
from workbench.lab.live.figure import VEGA_MIME, VEGA_SCHEMA, Figure
from workbench.lab.pictures import snapshot
from workbench.profile import Profile

from . import synthetic


def all_figures() -> list[Figure]:
    e, r, m = (
        synthetic.profile(s, steps=30 if s == "measured" else 0)
        for s in ("estimated", "rehearsed", "measured")
    )
    many = synthetic.profile("measured", 64, steps=5, pipeline=False)
    return [
        charts.memory(e, r, m),
        charts.memory(many),
        charts.memory_map(many),
        charts.memory_steps(m),
        charts.loss(m),
        charts.loss(m, replace(m, run="other")),
        charts.throughput(m),
        charts.throughput(many),
        charts.timeline(e),
        charts.timeline(e, m),
        charts.collectives(e, m),
        charts.step_time_parts(e, m),
        charts.pareto_front(synthetic.found()),
        charts.roofline(with_operators(r)),
        prediction.memory_by_plan({"plan": [e, r, m]}, {"plan": 2**28}),
        prediction.values_by_source("Sent", "MiB", {"a": {"estimated": 1}, "b": {"measured": 2}}),
    ]


def with_operators(profile: Profile) -> Profile:
    """A profile with the operators of two ranks; the second computes longer."""
    shape = {"shape": [1, 4096, 4096, 4096], "dtype": "bf16", "bound": "compute", "share": 0.2}
    rows = [
        {
            "rank": rank,
            "phase": phase,
            "operator": name,
            "flops": flops,
            "intensity": intensity,
            "seconds": 1e-3 * (rank + 1),
        }
        | shape
        for rank in (0, 1)
        for phase, name, flops, intensity in (
            ("forward", "mm", 10**12, 1300.0),
            ("recompute", "flash_attention", 10**11, 900.0),
            ("backward", "mm", 10**9, 30.0),
            ("backward", "add", 0, 0.0),
        )
    ]
    ranks = [{"rank": rank, "compute_seconds": 1.0 + rank} for rank in (0, 1)]
    reached = {"flops": 7e14, "bytes": 2.7e12}
    found = {"gpu": "h100-sxm-80gb", "reached": reached, "ranks": ranks, "rows": rows}
    return replace(profile, notes={"operators": found})


def test_a_roofline_shows_the_busiest_rank_under_its_roof() -> None:
    rows = charts.roofline(with_operators(synthetic.profile("rehearsed"))).rows
    points = [row for row in rows if "intensity" in row]
    assert [row["reached"] for row in points] == [500.0, 50.0, 0.5]
    roof = [row for row in rows if "roof" in row]
    assert [row["height"] for row in roof] == pytest.approx([30 * 2.7, 700.0, 700.0])
    assert not charts.roofline(synthetic.profile("rehearsed")).rows


def test_the_legend_of_a_roofline_lists_only_phases_that_there_are() -> None:
    def domain(profile: Profile) -> list[str]:
        points = charts.roofline(profile).spec["layer"][1]
        found: list[str] = points["encoding"]["color"]["scale"]["domain"]
        return found

    whole = with_operators(synthetic.profile("rehearsed"))
    assert domain(whole) == ["forward", "recompute", "backward"]
    noted = whole.notes["operators"]
    kept = [row for row in noted["rows"] if row["phase"] != "recompute"]
    without = replace(whole, notes={"operators": noted | {"rows": kept}})
    assert domain(without) == ["forward", "backward"]


@pytest.mark.parametrize("figure", all_figures(), ids=lambda figure: figure.name)
def test_every_chart_draws_with_the_oldest_vega_lite_at_hand(
    figure: Figure, capfd: pytest.CaptureFixture[str]
) -> None:
    json.dumps(figure.static())
    drawn = vl_convert.vegalite_to_svg(figure.static(), vl_version="5.8")
    assert drawn.count("<path") > 5 and "NaN" not in drawn
    assert "WARN" not in capfd.readouterr().err


@pytest.mark.parametrize("figure", all_figures(), ids=lambda figure: figure.name)
def test_a_chart_without_rows_says_why_and_has_a_size(figure: Figure) -> None:
    empty = replace(figure, rows=[])
    drawn = empty.svg()
    assert "NaN" not in drawn and "Infinity" not in drawn
    assert float(re.findall(r'<svg[^>]* width="([\d.]+)"', drawn)[0]) > 100
    assert figure.empty.split()[0] in drawn


@pytest.mark.parametrize("figure", all_figures(), ids=lambda figure: figure.name)
def test_scales_of_one_field_have_one_legend(figure: Figure) -> None:
    """Vega merges the legends of a field, and warns in the page where one of them is none."""
    legends: dict[str, list[Any]] = {}
    for layer in figure.spec.get("layer", [figure.spec]):
        for channel in ("color", "strokeDash", "fill", "shape"):
            encoding = layer["encoding"].get(channel, {})
            if "field" in encoding:
                legends.setdefault(encoding["field"], []).append(encoding.get("legend"))
    assert all(found == [found[0]] * len(found) for found in legends.values()), legends


@pytest.mark.parametrize("figure", all_figures(), ids=lambda figure: figure.name)
def test_every_chart_names_its_source_and_its_unit(figure: Figure) -> None:
    assert any(word in figure.subtitle for word in ("estimated", "rehearsed", "measured"))
    assert ("(" in figure.title and figure.title.endswith(")")) or "ranks" in figure.title


def test_bars_of_step_times_can_be_named() -> None:
    profiles = [synthetic.profile("estimated", run=run) for run in ("a", "b")]
    rows = charts.step_time_parts(*profiles, names=["first", "second"]).rows
    assert {row["bar"] for row in rows} == {"first", "second"}


def test_notebooks_get_a_mime_that_jupyterlab_draws_and_two_to_fall_back_on() -> None:
    data = charts.memory(synthetic.profile())._repr_mimebundle_()
    assert data[VEGA_MIME]["$schema"] == VEGA_SCHEMA and VEGA_MIME.endswith("v5+json")
    assert data["image/svg+xml"].startswith("<svg") and "Peak memory" in data["text/plain"]


def test_a_measured_bar_is_as_long_as_the_allocators_count() -> None:
    measured = synthetic.profile("measured", 2)
    rows = charts.memory(measured).rows
    for rank, peak in measured.peak_bytes_by_rank.items():
        bar = [row for row in rows if row["label"].startswith(f"rank {rank}")]
        assert sum(row["value"] for row in bar) * 2**20 == pytest.approx(peak)
        assert any(row["category"] == "unattributed" for row in bar)


def test_a_category_whose_name_says_too_little_is_explained() -> None:
    measured = synthetic.profile("measured", 1)
    counted = measured.memory.category == "allocated"
    rest = next(r for r in charts.memory(measured).rows if r["category"] == "unattributed")
    assert (
        "allocator's count" in rest["meaning"]
        and "unattributed" not in charts.memory(measured).subtitle
    )
    measured.memory.loc[counted, "bytes"] *= 2
    assert f"unattributed: {rest['meaning']}" in charts.memory(measured).subtitle
    measured.memory.loc[measured.memory.category == "activations", "category"] = "overhead"
    words = charts.memory(measured).subtitle.split("overhead: ")[1].split(" · ")[0]
    assert "tokens and targets" in words and words in measured._repr_html_()


def test_the_three_sources_stand_side_by_side_with_their_steps() -> None:
    profiles = [synthetic.profile(s, 2) for s in ("estimated", "rehearsed", "measured")]
    rows = charts.memory(*profiles).rows
    assert {(row["label"], row["source"]) for row in rows} == {
        (f"rank {rank} · stage {rank}", source)
        for rank in (0, 1)
        for source in ("estimated", "rehearsed", "measured")
    }
    assert {row["step"] for row in rows if row["source"] == "measured"} == {2}


def test_gpu_memory_is_drawn_where_it_is_near_and_stated_where_it_is_far() -> None:
    near = synthetic.profile("estimated")
    far = synthetic.profile("estimated", scale=2**20)
    assert (
        charts.memory(near).rows[0]["capacity_text"] == "GPU memory: 1,024 MiB"
        and "%" not in charts.memory(near).subtitle
    )
    assert (
        "capacity" not in charts.memory(far).rows[0]
        and "% of 1.00 GiB" in charts.memory(far).subtitle
    )


def test_units_follow_the_size() -> None:
    assert "(GiB)" in charts.memory(synthetic.profile(scale=2**31)).title
    assert "(MiB)" in charts.memory(synthetic.profile(scale=2**24)).title


def test_beyond_sixteen_ranks_the_extremes_stand_for_all() -> None:
    many = synthetic.profile("measured", 64, steps=4, pipeline=False)
    labels = {row["label"] for row in charts.memory(many).rows}
    peaks = many.peak_bytes_by_rank
    assert (
        f"rank {max(peaks, key=peaks.__getitem__)}" in labels
        and f"rank {min(peaks, key=peaks.__getitem__)}" in labels
    )
    assert len(labels) <= 10
    band = [row for row in charts.throughput(many).rows if row["rank"] == "median"]
    assert len(band) == 4 and all(row["low"] <= row["value"] <= row["high"] for row in band)
    assert len({row["rank"] for row in charts.throughput(many).rows}) == 4


def test_ranks_that_are_alike_are_drawn_once() -> None:
    many = synthetic.profile("estimated", 64)
    many.representative = {rank: rank // 16 * 16 for rank in range(64)}
    assert {row["label"].split(" · ")[-1] for row in charts.memory(many).rows} == {"×16"}


def test_loss_is_one_line_a_run_and_long_runs_stay_small() -> None:
    runs = [synthetic.profile("measured", 2, run=name, steps=2000) for name in ("a", "b")]
    rows = charts.loss(*runs).rows
    assert {row["run"] for row in rows} == {"a", "b"}
    assert len(rows) <= 1000 and max(row["step"] for row in rows) == 1999


def test_a_timeline_shows_each_action_where_it_was() -> None:
    profile = synthetic.profile("estimated", 4)
    rows = charts.timeline(profile).rows
    assert len(rows) == len(profile.timeline)
    first = min(rows, key=lambda row: row["start"])
    assert (first["lane"], first["action"], first["microbatch"]) == (
        "rank 0 · stage 0",
        "forward",
        0,
    )
    assert first["end"] - first["start"] == pytest.approx(10)  # ms


def test_communication_is_the_busiest_rank_s_payload() -> None:
    rows = charts.collectives(synthetic.profile("estimated", 2)).rows
    assert {(row["axis"], row["kind"], round(row["value"])) for row in rows} == {
        ("data", "all-reduce", 100),
        ("pipeline", "send", 16),
        ("tensor", "all-reduce", 32),
    }


def test_empty_profiles_give_empty_charts_with_words() -> None:
    empty = synthetic.profile("measured", 2)
    for kind in ("memory", "timeline", "collectives", "steps"):
        setattr(empty, kind, getattr(empty, kind).iloc[:0])
    for chart in (
        charts.memory,
        charts.memory_steps,
        charts.loss,
        charts.throughput,
        charts.timeline,
        charts.collectives,
    ):
        figure = chart(empty)
        assert figure.rows == [] and figure.empty and figure.svg()


def test_two_estimates_have_a_bar_each_and_one_needs_no_words() -> None:
    pair = [synthetic.profile(run=name) for name in ("a", "b")]
    for chart in (charts.memory, charts.collectives, charts.step_time_parts):
        assert {row["bar"] for row in chart(*pair).rows} == {"estimated · a", "estimated · b"}
    assert charts.memory(pair[0]).rows[0]["text"] == "680"


def test_a_map_marks_what_does_not_fit() -> None:
    many = synthetic.profile(world=64, scale=2**30)
    assert "datum.value > " in json.dumps(charts.memory_map(many).spec)
    assert (
        "more than the GPU's 1.00 GiB" in charts.memory_map(many).svg()
    )  # the legend says what red is


@pytest.mark.parametrize(("scale", "align"), [(2**26, "right"), (2**29, "left")])
def test_the_line_at_the_gpus_memory_is_seen_on_any_bar_and_its_label_has_room(
    scale: int, align: str
) -> None:
    layers = charts.memory(synthetic.profile(scale=scale)).spec["layer"]
    edge, rule = (layer["mark"] for layer in layers if layer["mark"]["type"] == "rule")
    assert (edge["color"], rule["color"]) == ("white", palette.LIMIT_COLOUR) and edge[
        "strokeWidth"
    ] > rule["strokeWidth"]
    words = next(
        layer["mark"]
        for layer in layers
        if layer["encoding"].get("text", {}).get("field") == "capacity_text"
    )
    assert words["align"] == align


def parts_by_bar(figure: Figure) -> dict[str, dict[str, float]]:
    """Bar -> part -> value."""
    found: dict[str, dict[str, float]] = {}
    for row in figure.rows:
        found.setdefault(row["bar"], {})[row["part"]] = row["value"]
    return found


def test_a_measured_step_is_split_by_its_timeline() -> None:
    measured = synthetic.profile("measured", 4)
    figure = charts.step_time_parts(measured)
    span = measured.timeline.end.max() * 1000
    for parts in parts_by_bar(figure).values():
        assert parts["compute"] == pytest.approx(120)  # 4 microbatches of 10, 20 ms
        assert parts["bubble, send / receive"] == pytest.approx(span - 120)
    assert figure.rows[0]["detail"] == "forward 40.0 ms, backward 80.0 ms"


EVERY_ACTION = [
    *("F", "B", "WAIT_ALL_REDUCE", "REDUCE_GRAD", "RECV_F", "WAIT_RECV"),
    *("OPTIMIZER", "CLIP", "REFERENCE", "OTHER"),
]


@pytest.mark.parametrize("pipeline", [False, True])
def test_estimated_and_measured_steps_have_the_same_parts(pipeline: bool) -> None:
    estimated = synthetic.profile("estimated", 2, pipeline=pipeline)
    names = ("compute", "tensor_comm", "data_comm", "stall", "optimizer", "overhead", "reference")
    estimated.notes["time"] = dict.fromkeys((*names, *(("bubble",) if pipeline else ())), 1.0)
    measured = synthetic.profile("measured", 2, pipeline=pipeline)
    frame = measured.timeline.iloc[[0] * len(EVERY_ACTION)]
    ends = [(i + 1) * 0.01 for i in range(len(frame))]
    spans: dict[str, Any] = {"action": EVERY_ACTION, "start": [0.0, *ends[:-1]], "end": ends}
    ranks: list[pd.DataFrame] = [
        frame.assign(**spans, rank=rank, stage=rank if pipeline else 0) for rank in (0, 1)
    ]
    measured.timeline = pd.concat(ranks)
    bars = parts_by_bar(charts.step_time_parts(estimated, measured))
    expected = {"compute", "exposed communication", "optimizer", "other", "reference"}
    expected |= {"bubble, send / receive"} if pipeline else set()
    assert len(bars) >= 2 and all(set(parts) == expected for parts in bars.values())
    alone = parts_by_bar(charts.step_time_parts(estimated))["estimated"]
    assert "exposed tensor communication" in alone, "an estimate alone is drawn in its own parts"


def test_the_slowest_rank_is_drawn_with_its_factor() -> None:
    measured = synthetic.profile("measured", 8, pipeline=False)
    rows = []
    for rank in range(8):
        ahead = 0.4 if rank == 5 else 0.1
        cells = {"run": "plan", "source": "measured", "rank": rank, "step": 2, "stage": 0}
        spans = [("F", 0.0, ahead), ("WAIT_ALL_REDUCE", ahead, 0.4), ("B", 0.4, 0.5)]
        rows += [cells | {"action": a, "start": start, "end": end} for a, start, end in spans]
    measured.timeline = pd.DataFrame(rows)
    bars = parts_by_bar(charts.step_time_parts(measured))
    slow = bars["measured, slowest rank 5 (2.5×)"]
    usual = next(parts for name, parts in bars.items() if "median rank" in name)
    assert slow == pytest.approx({"compute": 500})
    assert usual == pytest.approx({"compute": 200, "exposed communication": 300})


def test_a_history_that_comes_rank_after_rank_keeps_whole_steps_and_the_slowest() -> None:
    def rows(rank: int) -> list[dict[str, Any]]:
        cells = {"rank": rank, "stage": 0, "action": "F", "start": 0.0}
        slow = [2.0 if rank == 1 or (rank == 0 and step == 200) else 1.0 for step in range(300)]
        return [cells | {"step": step, "end": end} for step, end in enumerate(slow)]

    traced = TracedSteps()
    for rank in range(4):
        for start in range(0, 300, 50):
            traced.add(rows(rank)[start : start + 50])
    assert traced.number == LAST_TRACED and {len(r) for r in traced.steps.values()} == {4}
    assert min(step or 0 for step in traced.steps) == 200
    assert [words for words, _ in traced.shown_ranks()][1] == ", slowest rank 1 (2.0×)"


def test_a_category_keeps_its_colour_whatever_stands_beside_it() -> None:
    def colours(*names: str) -> dict[str, str]:
        profile = synthetic.profile()
        profile.notes["time"] = dict.fromkeys(names, 1.0)
        scale = charts.step_time_parts(profile).spec["layer"][0]["encoding"]["color"]["scale"]
        return dict(zip(scale["domain"], scale["range"]))

    assert (
        colours("compute", "optimizer", "overhead").items()
        <= colours("bubble", "compute", "overhead", "optimizer").items()
    )


def test_a_rank_keeps_its_colour_whichever_ranks_stand_out() -> None:
    def colours(world: int, slow: int) -> dict[str, str]:
        profile = synthetic.profile("measured", world, steps=3, pipeline=False)
        profile.steps.loc[profile.steps["rank"] == slow, "seconds"] *= 9
        scale = charts.throughput(profile).spec["layer"][-1]["encoding"]["color"]["scale"]
        return dict(zip(scale["domain"], scale["range"]))

    assert colours(64, 5)["rank 5"] == colours(32, 5)["rank 5"] == colours(8, 0)["rank 5"]


def test_a_line_of_one_step_is_drawn() -> None:
    for chart in (charts.loss, charts.throughput):
        drawn = chart(synthetic.profile("measured", 2, steps=1)).svg()
        assert 'aria-roledescription="point"' in drawn


@pytest.mark.parametrize(
    "categories", [("optimizer", "overhead", "communication"), tuple("abcdefgh")]
)
def test_a_legend_is_no_wider_than_its_chart(categories: tuple[str, ...]) -> None:
    names = ["rank 48 · stage 3 · ×16"]
    legend = chart_data.bottom_legend(categories, beside=names)
    column = chart_data.SYMBOL_WIDTH + chart_data.LETTER_WIDTH * max(map(len, categories))
    assert (
        legend.columns * column <= chart_data.NARROW_WIDTH - 5 * len(names[0])
        or legend.columns == 1
    )


def test_a_picture_of_a_whole_run_fits_a_cell_and_cuts_no_title() -> None:
    e, m = synthetic.profile(), synthetic.profile("measured", steps=30)
    figures = [
        charts.loss(m),
        charts.collectives(e, m),
        charts.memory(e, m),
        charts.step_time_parts(e, m),
        charts.timeline(m),
    ]
    drawn = snapshot.snapshot_bundle(figures, "Finished: 30 steps")
    width_of = re.search(r'<svg[^>]*? width="(\d+)', drawn["image/svg+xml"])
    assert width_of is not None
    width = int(width_of[1])
    assert width <= 830 and "…" not in drawn["image/svg+xml"]
    assert all(figure.title in html.unescape(drawn["image/svg+xml"]) for figure in figures)
    assert "labelColor" not in str(drawn[VEGA_MIME]["config"]), (
        "words take the colour of the page's theme"
    )


@pytest.mark.parametrize(
    ("old", "new"), [("front", charts.pareto_front), ("parts", charts.step_time_parts)]
)
def test_a_renamed_chart_keeps_its_old_name_with_a_warning(old: str, new: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"charts.{old} is now charts."):
        assert getattr(charts, old) is new


LONG = "llama-3-8b on 8 h100-sxm-80gb of the cluster in the basement"


@pytest.mark.parametrize(
    "runs",
    [
        (f"{LONG}, zero-1", f"{LONG}, zero-3"),
        (f"zero-1 of {LONG}", f"zero-3 of {LONG}"),
        (f"{LONG} zero-1 {LONG}", f"{LONG} zero-3 {LONG}"),
        (LONG, LONG),
        (LONG, f"{LONG} again"),
        (f"{LONG} (1)", f"{LONG} (2)", "short"),
        (f"{LONG} a {LONG}", f"{LONG} b {LONG}", "short"),
    ],
)
def test_no_two_bars_carry_the_same_label(runs: tuple[str, ...]) -> None:
    profiles = [synthetic.profile("estimated", run=run) for run in runs]
    names = chart_data.bar_names(profiles)
    assert len(set(names)) == len(runs) and all(name.startswith("estimated") for name in names[:1])
    svg = html.unescape(charts.step_time_parts(*profiles).svg())
    assert all(f">{name}<" in svg for name in names)  # not cut by the axis


@pytest.mark.parametrize("run", ["plan", LONG, f"{LONG} and {LONG} and {LONG}"])
def test_charts_of_a_report_are_not_shrunk(run: str) -> None:
    profiles = [synthetic.profile(s, run=run, steps=5) for s in ("estimated", "rehearsed")]
    for figure in comparison_figures([ComparisonEntry(run, profiles)]):
        (picture,), left_out = report.draw_figures([figure])
        width = float(re.findall(r'<svg[^>]* width="([\d.]+)"', picture)[0])
        column = 1120 if figure.wide else (1120 - 22) / 2
        assert not left_out and 11 * min(1, column / width) > 10, figure.name


@pytest.mark.parametrize("tiny", [1, 2**10])
def test_a_legend_lists_what_can_be_seen(tiny: int) -> None:
    def entries(figure: Figure) -> set[str]:
        drawn = re.findall(r"role-legend-label[^>]*>.*?</g>", figure.svg())
        return {text for part in drawn for text in re.findall(r">([^<>]+)</text>", part)}

    profile = synthetic.profile("estimated", 2)
    profile.memory.loc[profile.memory.category == "logits", "bytes"] = tiny
    profile.notes["time"] |= {"overhead": 1e-9 * tiny}
    called = profile.collectives.kind == "send"
    profile.collectives.loc[called, "bytes"] = tiny
    memory, parts, calls = (
        charts.memory(profile),
        charts.step_time_parts(profile),
        charts.collectives(profile),
    )
    planned = prediction.memory_by_plan({"plan": [profile]})
    shown = {palette.category_label(name) for name in synthetic.PARTS}
    assert entries(memory) == entries(planned) == shown - {"logits"}
    assert entries(parts) == {"compute", "exposed data communication", "bubble"}
    assert entries(calls) == {"all-reduce"}
    brief = profile.timeline.assign(action="optimizer", end=profile.timeline.start + 1e-9 * tiny)
    profile.timeline = pd.concat([profile.timeline, brief.head(1)])
    assert entries(charts.timeline(profile)) == {"forward", "backward"}
    assert any(row["category"] == "logits" for row in memory.rows)


def words_of(figure: Figure) -> str:
    """All that a chart says, without its keys."""
    return f"{figure.title} {figure.subtitle} {html.unescape(figure.svg())}"


def test_charts_say_what_people_say_for_the_keys_of_frames() -> None:
    profile = synthetic.profile("estimated", 64, pipeline=False)
    memory = profile.memory
    memory.loc[memory.category == "logits", "category"] = "outside_allocator"
    profile.collectives.loc[profile.collectives.axis == "data", "axis"] = "world"
    names = list(memory.category.unique())
    levels = {"rank": [0], "event": [0], "action": ["0F0"]} | {name: [2**20] for name in names}
    profile.levels = pd.DataFrame(levels)
    measured = synthetic.profile("measured", 64, steps=9, pipeline=False)
    figures = {
        "memory": charts.memory(profile),
        "over time": charts.memory_over_time(profile),
        "by plan": prediction.memory_by_plan({"plan": [profile]}),
        "map": charts.memory_map(profile),
        "collectives": charts.collectives(profile),
        "steps": charts.memory_steps(measured, [profile]),
        "timeline": charts.timeline(synthetic.profile("estimated", 2)),
    }
    said = {name: words_of(figure) for name, figure in figures.items()}
    for words in said.values():
        assert not re.search("outside_allocator|temporary|all ranks|rank offset|the most", words)
    for name in ("memory", "over time", "by plan"):
        assert "CUDA context + NCCL" in said[name] and "workspace" in said[name]
    assert "rank (mod 16)" in said["map"] and "max over ranks" in said["by plan"]
    assert "by parallel dimension" in said["collectives"]
    assert "world (grad norm, loss)" in said["collectives"]
    assert "max over ranks" in said["steps"] and "numbers: microbatches" in said["timeline"]
