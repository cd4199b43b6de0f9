"""A short real measurement: two ranks, few points. Speeds are the machine's; what is asked is
sense, not numbers.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import pytest
import torch

from workbench.costmodel.rates.measured_curves import MeasuredCurves
from workbench.engine.calibrate import collective_points, measure
from workbench.engine.calibrate.local_points import local_points
from workbench.engine.calibrate.measure import calibrate, judge
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey, survey_of
from workbench.engine.calibrate.rank_visits import PointSample
from workbench.engine.calibrate.timing import Stopwatch
from workbench.engine.calibrate.turns import Turns
from workbench.engine.precision import DTYPES
from workbench.engine.verify.forked_ranks import run_worlds
from workbench.machine.attached import attached
from workbench.machine.calibration_file import (
    KINDS,
    Calibration,
    fingerprint,
    read_calibration,
    write_calibration,
)
from workbench.machine.gpu_catalog import gpus

SMALL = CalibrationSurvey(
    gemm=((16, 16, 16), (256, 256, 256)),
    streams=(12 * 2**10, 12 * 2**20),
    attention=((1, 2, 64, 16),),
    messages=(256, 2**23),
    stepped=(4096, 512),
    operators={"linear": ((4, 16, 16), (48, 96, 96)), "rmsnorm": ((4, 32, 1),)},
    window=0.002,
)
TOLD: list[tuple[float, str]] = []


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrate(
        1.0, lambda spent, words: TOLD.append((spent, words)), survey=SMALL, worlds=(1, 2)
    )


@pytest.mark.slow
def test_every_point_of_the_survey_is_there(found: Calibration) -> None:
    worlds, dtypes = {1, 2}, set(SMALL.dtypes)
    assert {(g.rows, g.dtype, g.ranks) for g in found.gemm} == {
        (s, d, w) for s in (16, 256) for d in dtypes for w in worlds
    }
    assert {(s.bytes, s.ranks) for s in found.memory} == {
        (size, w) for size in SMALL.streams for w in worlds
    }
    assert {(h.parameters, h.bytes, h.ranks) for h in found.host_optimizer} == {
        (4608, 4608 * 32, w) for w in worlds
    }
    assert {(a.dtype, a.kernel, a.ranks) for a in found.attention} == {
        (d, "flash", w) for d in dtypes for w in worlds
    }
    refused = {
        tuple(re.findall(r"kind (\w+),.* bytes (\d+)", d.point)[0])
        for d in found.doubts
        if d.refused
    }
    wanted = {(kind, str(size)) for kind in KINDS for size in SMALL.messages}
    assert {
        (c.kind, str(c.bytes)) for c in found.collectives
    } | refused == wanted  # a busy machine cannot time all
    assert {c.dtype for c in found.collectives} <= set(SMALL.dtypes)
    assert {(c.group, c.ranks) for c in found.collectives} <= {(2, 2)}
    assert [h.ranks for h in found.host] == [w for w in (1, 2) if w <= attached().cores], (
        "others wait for cores"
    )


@pytest.mark.slow
def test_figures_are_finite_positive_seconds(found: Calibration) -> None:
    parts = (found.gemm, found.memory, found.collectives, found.host_optimizer)
    times = [x.seconds for part in parts for x in part]
    times += [x for a in found.attention for x in (a.forward, a.backward)]
    assert all(math.isfinite(x) and 1e-8 < x < 10 for x in times)
    for host in found.host:
        assert host.autograd_us > host.operator_us > 0
        assert (
            host.layer_us + host.microbatch_us + host.step_us + host.layer_step_us
            > host.autograd_us
        )


@pytest.mark.slow
def test_more_work_takes_longer(found: Calibration) -> None:
    """A factor of a thousand in bytes and of four thousand in operations drowns any noise."""
    small, large = (
        sum(c.seconds for c in found.collectives if c.bytes == size) for size in SMALL.messages
    )
    assert small < large, (
        "of all kinds together: one call may wait for a core longer than another takes"
    )
    for ranks in (1, 2):
        stream = {s.bytes: s.seconds for s in found.memory if s.ranks == ranks}
        assert stream[SMALL.streams[0]] < stream[SMALL.streams[1]]
        gemm = {g.rows: g.seconds for g in found.gemm if g.ranks == ranks and g.dtype == "fp32"}
        assert gemm[16] < gemm[256]


@pytest.mark.slow
def test_the_record_says_what_was_measured_and_names_no_host(found: Calibration) -> None:
    here = attached()
    machine = found.machine
    assert machine.fingerprint == fingerprint(here) and machine.cores == here.cores
    assert machine.versions["torch"] == torch.__version__
    assert (machine.device, machine.backend) in (("cpu", "gloo"), ("cuda", "nccl"))


@pytest.mark.slow
def test_it_is_followed_to_its_end(found: Calibration) -> None:
    spent = [seconds for seconds, _ in TOLD]
    assert spent == sorted(spent) and {words for _, words in TOLD} == {
        "1 rank at once",
        "2 ranks at once",
    }


@pytest.mark.slow
def test_the_file_gives_curves(found: Calibration, tmp_path: Path) -> None:
    write_calibration(found, tmp_path / "calibration.yaml")
    assert read_calibration(tmp_path / "calibration.yaml") == found
    curves = MeasuredCurves(found, 2)
    large, small = (
        side**3 / curves.gemm_fit("fp32").seconds(side, side, side) for side in (256, 16)
    )
    assert large > small > 0
    sizes = np.array([256, 2**23, 2**27])
    if any(c.kind == "all_reduce" for c in found.collectives):
        times = curves.collective_seconds("all_reduce", sizes, 2)
        assert times[2] > times[1] >= times[0] > 0


@pytest.mark.slow
def test_points_that_the_backend_refuses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo sums no fp8: those points are skipped on all ranks alike, and the rest is measured."""
    monkeypatch.setattr(collective_points, "DTYPES", {**DTYPES, "bf16": torch.float8_e4m3fn})
    survey = replace(
        SMALL,
        gemm=SMALL.gemm[:1],
        streams=SMALL.streams[:1],
        messages=SMALL.messages[:1],
        attention=(),
    )
    found = calibrate(0.0, survey=survey, worlds=(1, 2))
    assert {c.dtype for c in found.collectives} <= {"fp32"}
    refused = {
        d.point.split(",")[0].removeprefix("collectives kind ") for d in found.doubts if d.refused
    }
    assert {c.kind for c in found.collectives} | refused == set(KINDS)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("v100-sxm2-16gb", {"fp32": "efficient", "fp16": "efficient"}),
        ("t4", {"fp32": "efficient", "fp16": "efficient"}),
        (
            "h100-sxm-80gb",
            dict.fromkeys(("fp32", "tf32"), "efficient")
            | dict.fromkeys(("bf16", "fp16"), "flash, efficient"),
        ),
    ],
)
def test_a_gpu_is_measured_in_its_dtypes_with_its_attention_kernels(
    name: str, kernels: dict[str, str]
) -> None:
    """A dry run: the same points on small CPU tensors, of which every one can be called."""
    whole = survey_of(gpus()[name].gpu)
    assert {dtype: ", ".join(found) for dtype, found in whole.kernels.items()} == kernels
    small = replace(whole, gemm=((8, 16, 32),), attention=((1, 2, 16, 8),), streams=(1200,))
    points = list(local_points(small, torch.device("cpu")))
    for point in points:
        point.call()
    told = [point.labels for point in points if point.section == "attention"]
    assert {(one["dtype"], one["kernel"], one["pass"]) for one in told} == {
        (dtype, kernel, which)
        for dtype, found in whole.kernels.items()
        for kernel in found
        for which in ("forward", "backward")
    }
    assert [p.labels["dtype"] for p in points if p.section == "gemm"] == list(kernels)


def test_tf32_is_measured_as_tf32_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def observed(*operands: torch.Tensor) -> None:
        used.append(torch.get_float32_matmul_precision())

    monkeypatch.setattr(torch.nn.functional, "linear", observed)
    survey = replace(survey_of(gpus()["h100-sxm-80gb"].gpu), gemm=((8, 16, 32),), attention=())
    points = local_points(replace(survey, streams=()), torch.device("cpu"))
    for point in [point for point in points if point.section == "gemm"]:
        point.call()
    assert dict(zip(survey.dtypes, used)) == {
        "fp32": "highest",
        "tf32": "high",
        "bf16": "highest",
        "fp16": "highest",
    }
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_window_is_filled() -> None:
    """By a clock that every call moves on: the first by a lot, as a cold cache would."""
    now = [0.0]

    def call() -> None:
        now[0] += 0.004 if now[0] == 0 else 0.001

    watch = Stopwatch(torch.device("cpu"), lambda: now[0])
    assert watch.window(call, 0.010) == pytest.approx(0.010 / 7)


def test_worlds_measure_in_turn_and_never_at_once() -> None:
    """Three worlds, of which two are prepared late; each stamps its turns."""
    turns = Turns(3, 60.0)

    def stamps(rank: int, place: int) -> list[tuple[float, float]]:
        time.sleep(0.05 * place)
        turns.ready()
        found = []
        for _ in range(3):
            turns.take(place)
            begin = time.monotonic()
            time.sleep(0.01)
            found.append((begin, time.monotonic()))
            turns.pass_on(place)
        return found

    worlds = run_worlds([(1, partial(stamps, place=place)) for place in range(3)], 30.0)
    order = sorted((begin, end, place) for place, (own,) in enumerate(worlds) for begin, end in own)
    assert [place for *_, place in order] == [0, 1, 2] * 3
    assert all(end <= begin for (_, end, _), (begin, *_) in pairwise(order))


def test_one_figure_is_the_median_visit_of_the_mean_or_the_slowest_rank() -> None:
    def figure(how: Any, *ranks: list[float]) -> float:
        (found,) = judge([[PointSample("memory", {"bytes": 1}, how, s)] for s in ranks], 2, 1e9)[
            0
        ].values()
        return found

    assert figure("alone", [1.0, 2.0, 9.0], [3.0, 4.0, 5.0]) == 3.0
    assert figure("together", [1.0, 2.0, 9.0], [3.0, 4.0, 5.0]) == 4.0


def test_a_world_whose_others_hang_ends() -> None:
    turns = Turns(2, 0.05)
    with pytest.raises(BrokenBarrierError):
        turns.ready()
    assert turns.take(0)
    with pytest.raises(TimeoutError, match="no turn for 0 s"):
        turns.take(1)


def test_a_fused_layer_is_the_difference_of_two_fused_steps() -> None:
    """Other costs of a fused step are its own, and fused points change no eager cost."""
    parts = {"step": 900.0, "microbatch": 200.0, "layer": 100.0, "layer_step": 30.0}

    def took(layers: int, microbatches: int, layer: float, fixed: float) -> float:
        each = microbatches * (parts["microbatch"] + layers * layer)
        return 1e-6 * (fixed + each + layers * parts["layer_step"])

    def key(layers: int, microbatches: int, kernels: str) -> Any:
        labels: dict[str, Any] = {
            "layers": layers,
            "microbatches": microbatches,
            "recompute": "none",
        }
        labels |= {"kernels": kernels, "split": False, "precision": "bf16"}
        return "steps", tuple(labels.items())

    grid = [(layers, microbatches) for layers in (1, 3) for microbatches in (1, 3)]
    own = {key(*at, "eager"): took(*at, parts["layer"], parts["step"]) for at in grid}
    own |= {("operator", (("autograd", flag),)): 1e-4 for flag in (False, True)}
    eager = measure._host(1, own)
    own |= {key(at, 3, "fused"): took(at, 3, 40.0, 5000.0) for at in (1, 3)}
    both = measure._host(1, own)
    assert eager.fused_layer_us is None and both.fused_layer_us == pytest.approx(40, abs=0.01)
    assert both.model_copy(update={"fused_layer_us": None}) == eager
    assert both.layer_us == pytest.approx(100, abs=0.01) and both.precision == "bf16"
