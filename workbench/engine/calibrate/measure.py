"""Calibration of the attached machine: worlds of 1 to 8 ranks in turn, one figure per point."""

from __future__ import annotations

import datetime
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from workbench.costmodel.rates.measured_curves import fit_nonnegative
from workbench.engine.calibrate import believable_figures
from workbench.engine.calibrate.local_points import NUM_CHAINED_OPERATORS
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey, survey_of
from workbench.engine.calibrate.rank_visits import CPU_SECTION, PointSample, measure_points
from workbench.engine.calibrate.turns import Turns
from workbench.engine.verify.forked_ranks import run_worlds
from workbench.machine.attached import Attached, attached, local_cluster
from workbench.machine.calibration_file import (
    AttentionRate,
    Calibration,
    Collective,
    Doubt,
    Gemm,
    Host,
    HostOptimizer,
    Measured,
    Operator,
    Probe,
    Stream,
    fingerprint,
)

WORLDS = (1, 2, 4, 8)
SMALLEST_SHARE = 0.1
"""Share of a rotation's time that is left to it, whatever its copies took."""
SPARE_SECONDS = 120.0
"""Time beyond its share that a world may take to prepare and to visit every point once."""
Key = tuple[str, tuple[tuple[str, Any], ...]]


def calibrate(
    seconds: float = 80.0,
    progress: Callable[[float, str], None] = lambda spent, words: None,
    survey: CalibrationSurvey | None = None,
    worlds: Sequence[int] | None = None,
) -> Calibration:
    """Measure the attached machine. The caller must be single-threaded, see `run_ranks`.

    Args:
        seconds: About how long to measure, beside preparing every point once.
        progress: Called with (seconds elapsed, a description).
        survey: Points to measure; default: those for the device.
        worlds: World sizes; default: up to the number of GPUs, or twice the cores.

    Returns:
        The calibration, with conditions and doubts.

    Raises:
        PlanError: The catalog does not know the GPU.
        RankError: A rank failed or hangs.
    """
    found = attached()
    points = survey or survey_of(local_cluster(found, 1)[0])
    sizes = worlds or _worlds(found)
    machine, busy = _machine(found), believable_figures.conditions()
    begin = time.monotonic()
    samples: dict[int, list[list[PointSample]]] = {}
    # Worlds of CPU ranks take turns; several of GPU ranks at once might not fit its memory.
    for group in [sizes] if found.device == "cpu" else [[world] for world in sizes]:
        spent = time.monotonic() - begin
        left = [world for world in sizes if world not in samples]
        share = max(0.0, seconds - spent) * sum(map(_cost, group)) / sum(map(_cost, left))
        samples |= _worlds_in_turn(found, points, group, share, partial(_at, progress, spent))
        for world in group:
            progress(time.monotonic() - begin, _world_label(world))
    memory = believable_figures.memory_rate(_reduced(samples[sizes[0]]))
    results = {world: judge(samples[world], world, memory) for world in samples}
    doubts = tuple(doubt for _, found_doubts in results.values() for doubt in found_doubts)
    figures = {
        world: believable_figures.believable(own, against, world)
        for world, (own, against) in results.items()
    }
    return _calibration(machine, figures).model_copy(update={"conditions": busy, "doubts": doubts})


def judge(
    samples: list[list[PointSample]], world: int, memory: float
) -> tuple[dict[Key, float], list[Doubt]]:
    """(point -> seconds, doubts about them), from all visits of a world's ranks."""
    figures = _reduced(samples)
    # rank 0's: all ranks share its conditions
    repeats = {(s.section, tuple(s.labels.items())): s.seconds for s in samples[0]}
    return figures, believable_figures.find_doubts(figures, repeats, world, memory)


def _at(progress: Callable[[float, str], None], before: float, world: int, spent: float) -> None:
    progress(before + spent, _world_label(world))


def _world_label(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''} at once"


def _cost(world: int) -> float:
    """Relative time of a world: several ranks also measure collectives, and each point slower."""
    return 1.0 if world == 1 else 2.0


def _worlds(found: Attached) -> list[int]:
    """World sizes up to the number of GPUs, or twice the cores: more ranks only queue for a
    core.
    """
    most = found.count if found.device == "cuda" else min(found.count, 2 * found.cores)
    return [world for world in WORLDS if world <= most]


def _crowded(found: Attached, world: int) -> bool:
    return found.device == "cpu" and world > found.cores


def _worlds_in_turn(
    found: Attached,
    survey: CalibrationSurvey,
    worlds: Sequence[int],
    seconds: float,
    progress: Callable[[int, float], None],
) -> dict[int, list[list[PointSample]]]:
    """Samples of each rank of each world."""
    limit = seconds + SPARE_SECONDS * len(worlds)
    turns = Turns(len(worlds), limit)

    def work(rank: int, place: int, world: int) -> list[PointSample]:
        return measure_points(
            rank,
            survey,
            found.device,
            threads=max(1, found.cores // world),
            crowded=_crowded(found, world),
            seconds=seconds,
            turns=turns,
            place=place,
            progress=partial(progress, world),
        )

    each = [(world, partial(work, place=place, world=world)) for place, world in enumerate(worlds)]
    return dict(zip(worlds, run_worlds(each, limit)))


def _machine(found: Attached) -> Measured:
    gpu, _ = local_cluster(found, 1)
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    return Measured(
        device=gpu.device,
        card=gpu.name,
        title=found.name,
        count=found.count,
        cores=found.cores,
        fingerprint=fingerprint(found),
        backend="gloo" if found.device == "cpu" else "nccl",
        versions=versions,
        date=datetime.date.today().isoformat(),
    )


def _reduced(ranks: Iterable[list[PointSample]]) -> dict[Key, float]:
    """Point -> seconds of one call, from all visits of all ranks."""
    by_point: dict[Key, list[PointSample]] = defaultdict(list)
    for own in ranks:
        for sample in own:
            by_point[sample.section, tuple(sample.labels.items())].append(sample)
    return {key: _one(samples) for key, samples in by_point.items()}


def _one(samples: list[PointSample]) -> float:
    """One figure of a point: the median visit, of ranks the mean, of a collective the slowest.

    Medians, as those of steps that the figures are to predict: rounds lie apart, and a burst of
    other work meets few of them.
    """
    visits = np.array([sample.seconds for sample in samples])
    if samples[0].how == "together":
        visits = visits.max(axis=0, keepdims=True)
    return float(np.median(visits, axis=1).mean())


def _calibration(machine: Measured, found: dict[int, dict[Key, float]]) -> Calibration:
    def of(section: str) -> list[tuple[int, dict[str, Any], float]]:
        return [
            (w, dict(labels), s)
            for w, own in found.items()
            for (name, labels), s in own.items()
            if name == section
        ]

    cpu = {(w, *labels.values()): s for w, labels, s in of(CPU_SECTION)}
    attention: dict[tuple[Any, ...], dict[str, Any]] = defaultdict(dict)
    for world, labels, seconds in of("attention"):
        which = labels.pop("pass")
        attention[(world, *labels.values())] |= {**labels, "ranks": world, which: _seconds(seconds)}
    return Calibration(
        machine=machine,
        host=tuple(
            _host(world, own)
            for world, own in found.items()
            if any(key[0] == "steps" for key in own)
        ),
        gemm=tuple(Gemm(**labels, ranks=w, seconds=_seconds(s)) for w, labels, s in of("gemm")),
        memory=tuple(
            Stream(**labels, ranks=w, seconds=_seconds(s)) for w, labels, s in of("memory")
        ),
        attention=tuple(AttentionRate(**row) for row in attention.values()),
        probes=tuple(
            Probe(**labels, ranks=w, seconds=_seconds(s)) for w, labels, s in of("probes")
        ),
        collectives=tuple(
            Collective(
                **labels,
                ranks=w,
                seconds=_one_way_seconds(labels, s),
                cpu_seconds=_cpu_seconds(cpu.get((w, *labels.values()))),
            )
            for w, labels, s in of("collectives")
        ),
        operators=tuple(each for w, own in found.items() for each in _operators(w, own)),
        host_optimizer=tuple(
            HostOptimizer(**labels, ranks=w, seconds=_seconds(s))
            for w, labels, s in of("host_optimizer")
        ),
    )


def _operators(world: int, own: dict[Key, float]) -> Iterator[Operator]:
    """Operators of a world: backward is what forward and backward take beyond forward; rope worked
    on copies, whose time is taken off.
    """
    passes: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for (section, labels), seconds in own.items():
        if section == "operators":
            kind, code, *shape, name = (value for _, value in labels)
            passes[kind, code, *shape][name] = seconds
    for (kind, code, *shape), times in passes.items():
        if kind == "copies":
            continue
        copies = passes["copies", "eager", *shape] if kind == "rope" else {}
        forward, both = (
            times[name] - copies.get(name, 0.0) if name in times else 0.0
            for name in ("forward", "both")
        )
        forward = max(forward, SMALLEST_SHARE * times["forward"])
        yield Operator(
            kind=kind,
            kernels=code,
            **dict(zip(("rows", "columns", "inner"), shape)),
            ranks=world,
            forward=_seconds(forward),
            backward=_seconds(max(0.0, both - forward)) if both else 0.0,
            weight=_seconds(times.get("weight", 0.0)),
        )


def _one_way_seconds(labels: dict[str, Any], seconds: float) -> float:
    """Seconds of a collective; a send was timed as a round trip."""
    return _seconds(seconds / 2 if labels["kind"] == "send" else seconds)


def _cpu_seconds(value: float | None) -> float | None:
    return None if value is None else _seconds(value)


def _host(world: int, own: dict[Key, float]) -> Host:
    operator, autograd = (
        own["operator", (("autograd", flag),)] / NUM_CHAINED_OPERATORS * 1e6
        for flag in (False, True)
    )
    steps = [(dict(labels), s * 1e6) for (section, labels), s in own.items() if section == "steps"]
    rows = [(labels, s) for labels, s in steps if labels["kernels"] != "fused"]
    cells = [
        [
            1.0,
            r["microbatches"],
            r["microbatches"] * r["layers"],
            r["layers"],
            *(
                r["microbatches"] * r["layers"] * (r["recompute"] == w)
                for w in ("full", "selective")
            ),
            r["microbatches"] * r["layers"] * (r["kernels"] == "compiled"),
            r["microbatches"] * (r["kernels"] == "compiled"),
            r["microbatches"] * r["layers"] * r["split"],
        ]
        for r, _ in rows
    ]
    times = np.array([s for _, s in rows])
    parts = fit_nonnegative(np.array(cells, float), times)
    names = (
        "step_us",
        "microbatch_us",
        "layer_us",
        "layer_step_us",
        "full_us",
        "selective_us",
        "compiled_layer_us",
        "compiled_microbatch_us",
        "split_us",
    )
    costs = {name: round(float(value), 2) for name, value in zip(names, parts)}
    return Host(
        ranks=world,
        precision=rows[0][0]["precision"],
        operator_us=round(operator, 3),
        autograd_us=round(autograd, 3),
        fused_layer_us=_fused_layer_us(steps, costs["layer_step_us"]),
        **costs,
    )


def _fused_layer_us(
    steps: list[tuple[dict[str, Any], float]], layer_step_us: float
) -> float | None:
    """What a layer and microbatch takes with fused kernels: the difference of two steps that differ
    by their layers. Other costs of a fused step are not an eager one's.
    """
    fused = sorted((r["layers"], s, r["microbatches"]) for r, s in steps if r["kernels"] == "fused")
    if len(fused) < 2:
        return None
    (few, short, microbatches), (most, long, _) = fused
    each = (long - short) / (most - few) - layer_step_us
    return round(float(max(0.0, each / microbatches)), 2)


def _seconds(value: float) -> float:
    return float(f"{value:.4g}")
