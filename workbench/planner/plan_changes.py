"""The changes of a plan that lower its memory, in the order in which people try them.

One home for what `estimate` advises, `explain` offers and the diagnosis of a failed run suggests:
each caller decides which of them to try, and checks that they are legal and fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.schedules.closed_forms import in_flight
from workbench.schedules.generators import SCHEDULES

Change = dict[str, Any]
"""Field -> value, as `Plan.replace` takes it."""

RECOMPUTE_KINDS = ("none", "selective", "full")
"""Activation checkpointing, each kind saving more memory than the one before."""
OFFLOAD_KINDS = ("none", "optimizer", "parameters")
"""What ZeRO-Offload keeps in host memory, each more than the one before."""
TILE_FACTORS = (1, 2, 4, 8, 16)
"""Tiles of a linear (2104.07857, section 5.1.3). A layer's backward holds a tile, a tile's gradient
and the head's; the head's backward holds its table and gradient. Once two tiles are smaller than
the table, more save nothing but where a layer's activations decide the peak: 1e12 parameters gain
up to 16.
"""
MAX_DOUBLINGS = 6
PRESETS = ("zero-3", "megatron-3d", "zero-infinity")
"""Whole strategies that are tried before more GPUs, as they are and then recomputing all."""


def one_field_changes(full: ResolvedPlan) -> list[Change]:
    """Changes of one field on the same GPUs, and a schedule with the chunks that it takes.

    In order: settings of the same strategy (a schedule with fewer microbatches in flight, sequence
    parallelism, nothing kept gathered, a wider shard group), a smaller micro-batch, more
    recomputation, a higher ZeRO stage, more offloading, linears in tiles, more tensor or pipeline
    ranks, and last a preset.
    """
    s = full.strategy
    changes = [*_thriftier_schedules(full)]
    if s.tensor.ranks > 1 and s.tensor.algorithm == "1d" and not s.tensor.sequence:
        changes.append({"strategy.tensor.sequence": True})
    changes += [{"strategy.data.keep_gathered": False}] if s.data.keep_gathered else []
    changes += [{"strategy.data.shard": "all"}] if s.data.zero and s.data.shard != "all" else []
    changes += ({"training.micro_batch": size} for size in _halves(full.training.micro_batch))
    if isinstance(s.recompute, str):
        changes += ({"strategy.recompute": kind} for kind in _further(RECOMPUTE_KINDS, s.recompute))
    changes += ({"strategy.data.zero": zero} for zero in range(s.data.zero + 1, 4))
    changes += ({"strategy.data.offload": kind} for kind in _further(OFFLOAD_KINDS, s.data.offload))
    changes += _more_tiles(full)
    for field, now in (
        ("strategy.tensor.size", s.tensor.ranks),
        ("strategy.pipeline.size", s.pipeline.size),
    ):
        sizes = (now * 2**n for n in range(1, MAX_DOUBLINGS + 1))
        changes += ({field: size} for size in sizes if size <= full.world_size)
    return changes + [{"strategy.preset": name} for name in PRESETS if name != s.preset]


def _thriftier_schedules(full: ResolvedPlan) -> Iterator[Change]:
    """Schedules on the same ranks, of as many chunks or of one, with the least activations in
    flight, where that is fewer than the plan's own schedule has.
    """
    p, microbatches = full.strategy.pipeline, full.num_microbatches
    if p.size == 1 or p.schedule not in SCHEDULES or p.replicas or p.in_flight:
        return

    def held(name: str, chunks: int) -> float:
        """Microbatches of a rank's layers, on the rank with the most."""
        most = max(in_flight(name, rank, p.size, microbatches, chunks) for rank in range(p.size))
        return float(most / chunks)

    found = {
        (name, chunks): held(name, chunks)
        for name, one in SCHEDULES.items()
        for chunks in dict.fromkeys((p.chunks, 1))
        if one.min_chunks <= chunks <= (one.max_chunks or chunks)
        and one.takes_microbatches(p.size, microbatches)
    }
    for (name, chunks), size in found.items():
        if size == min(found.values()) < held(p.schedule, p.chunks):
            more = {"strategy.pipeline.chunks": chunks} if chunks != p.chunks else {}
            yield {"strategy.pipeline.schedule": name, **more}


def combined_changes(full: Plan) -> Iterator[Change]:
    """Changes of several fields on the same GPUs, each adding to the one before.

    Micro-batch 1 and full recomputation come first, then ZeRO stages and offloading on top, then
    presets that recompute all, the last of them offloading the inputs of recomputed layers too, and
    then with linears in tiles.
    """
    s, change = full.strategy, Change()
    if full.training.micro_batch > 1:
        change["training.micro_batch"] = 1
    if isinstance(s.recompute, str) and s.recompute != "full":
        change["strategy.recompute"] = "full"
        yield dict(change)
    for zero in range(s.data.zero, 4):
        change |= {"strategy.data.zero": zero} if zero != s.data.zero else {}
        yield dict(change)
        for kind in _further(OFFLOAD_KINDS, s.data.offload):
            yield change | {"strategy.data.offload": kind} | _leaving(full, zero)
    yield from _recomputing_presets()
    last, leaving = _recomputing_presets()[-1], {"strategy.offload_activations": True}
    yield last | leaving
    yield from (last | more | tiles for more in ({}, leaving) for tiles in _more_tiles(full))


def _more_tiles(full: Plan) -> Iterator[Change]:
    """Linears in more tiles."""
    now = full.strategy.data.tile_factor
    return ({"strategy.data.tile_factor": tiles} for tiles in TILE_FACTORS if tiles > now)


def _leaving(full: Plan, zero: int) -> Change:
    """What lets gradients leave the GPU as they are made, where a ZeRO stage shards them."""
    stay = zero > 1 and full.strategy.data.reduce == "step"
    return {"strategy.data.reduce": "microbatch"} if stay else {}


def more_gpus(full: Plan) -> list[Change]:
    """The same plan on more GPUs, then presets that recompute all on more GPUs."""
    more = [{"cluster.gpus": full.world_size * 2**n} for n in range(1, 2 * MAX_DOUBLINGS)]
    presets = _recomputing_presets()
    return [*more[:MAX_DOUBLINGS], *(gpus | preset for gpus in more for preset in presets)]


def larger_gpus(full: ResolvedPlan) -> list[Change]:
    """The same plan on a GPU with more memory, then presets that recompute all on as many of the
    largest as it takes: all of that for GPUs of the same vendor before any of another's.
    """
    return [change for gpus in gpus_with_more_memory(full.gpu) for change in _on_gpus(full, gpus)]


def _on_gpus(full: ResolvedPlan, gpus: list[GPU]) -> Iterator[Change]:
    """The same plan on each of them, then presets that recompute all on more and more of the
    last.
    """
    yield from ({"cluster.gpu": gpu.name} for gpu in gpus)
    counts = ({"cluster.gpus": full.world_size * 2**n} for n in range(1, 2 * MAX_DOUBLINGS))
    more: list[Change] = [{}, *counts]
    for count in more:
        for preset in _recomputing_presets():
            yield {"cluster.gpu": gpus[-1].name} | count | preset


def after_out_of_memory(full: ResolvedPlan) -> list[tuple[Change, str]]:
    """(change, how a person writes it) after a rank ran out of memory, cheapest first.

    No estimate weighs them: it had said that the plan fits. They are one step of each field, and
    a narrower precision and a shorter sequence, which change what is trained.
    """
    strategy, micro_batch = full.strategy, full.training.micro_batch
    length = full.training.sequence_length
    changes: list[tuple[Change, str]] = []
    if micro_batch > 1:
        half = micro_batch // 2
        text = f"training.micro_batch: {half} (now {micro_batch})"
        changes.append(({"training.micro_batch": half}, text))
    if strategy.recompute != "full":
        changes.append(({"strategy.recompute": "full"}, "strategy.recompute: full"))
    if strategy.data.zero < 3 and full.sizes["data"] > 1:
        text = f"strategy.data.zero: 3 (now {strategy.data.zero})"
        changes.append(({"strategy.data.zero": 3}, text))
    if strategy.precision == "fp32":
        changes.append(({"strategy.precision": "bf16"}, "strategy.precision: bf16"))
    changes += (_twice_the_axis(full, axis) for axis in ("tensor", "pipeline"))
    text = f"training.sequence_length: {length // 2}"
    return [*changes, ({"training.sequence_length": length // 2}, text)]


def _twice_the_axis(full: ResolvedPlan, axis: str) -> tuple[Change, str]:
    """Twice the ranks along `axis`: taken from the data axis where it is even, else the job
    grows.
    """
    ranks = full.world_size if full.sizes["data"] % 2 == 0 else 2 * full.world_size
    size = 2 * full.sizes[axis]
    change = {
        f"strategy.{axis}.size": size,
        "strategy.pipeline.partition": "balanced",
        "cluster.gpus": ranks,
        "cluster.nodes": None,
    }
    more = f" with cluster.gpus: {ranks}" if ranks != full.world_size else ""
    return change, f"strategy.{axis}.size: {size}{more}"


def _further(kinds: tuple[str, ...], now: str) -> tuple[str, ...]:
    return kinds[kinds.index(now) + 1 :]


def _recomputing_presets() -> list[Change]:
    """The strategies that save the most memory, recomputing all."""
    return [{"strategy.preset": name, "strategy.recompute": "full"} for name in PRESETS]


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size


def gpus_with_more_memory(gpu: GPU) -> list[list[GPU]]:
    """GPUs of the catalog with more memory (all GPUs, where the plan runs on CPU), smallest first:
    those of the same vendor, then those of others; no empty list.
    """
    device = "cuda" if gpu.device == "cpu" else gpu.device
    every = (entry.gpu for entry in gpu_catalog.gpus().values() if entry.gpu.device == device)
    larger = sorted(
        (other for other in every if other.memory_gib > gpu.memory_gib),
        key=lambda other: other.memory_gib,
    )
    own = [other for other in larger if _vendor(other) == _vendor(gpu)]
    others = [other for other in larger if _vendor(other) != _vendor(gpu)]
    return [some for some in (own, others) if some]


def _vendor(gpu: GPU) -> str:
    """The first word of a GPU's title, as the catalog writes it."""
    return gpu.title.partition(" ")[0].lower()
