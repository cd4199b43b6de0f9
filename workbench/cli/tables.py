"""Answers as tables of a terminal: the catalog, a plan, a profile, runs, a verification."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from workbench.cli.terminal import Grid, as_text
from workbench.lab.palette import key_label
from workbench.profile import ALLOCATED, MEANINGS
from workbench.units import (
    bytes_text,
    count_text,
    counted,
    digits,
    interval_text,
    loss_text,
    percent_text,
    risk_text,
    seconds_text,
)
from workbench.untrusted_text import visible
from workbench.vocabulary import SHOWN_NAMES

if TYPE_CHECKING:
    from workbench.plan.resolved_plan import ResolvedPlan
    from workbench.plan.schema import Finetune
    from workbench.profile import Profile
    from workbench.runs.run import Run
    from workbench.runs.store.run_state import Cause, State
    from workbench.verbs.catalog import Listing

ROUNDING_SECONDS = 1e-12
"""What a difference of two times leaves where there is nothing."""
NOTE_LABELS = {
    "cannot": "the framework cannot do this",
    "step_seconds_90": "step time, 90 % interval",
    "simulated_step_seconds": "step time, simulated",
    "closed_form_seconds": "step time, closed form",
    "one_device_seconds": "step on one device",
    "speed_up": "speed-up over one device",
    "activation_communication_ratio": "activation-communication ratio (ACR)",
    "uncalibrated": "times are from",
    "host_optimizer": "the host's optimizer step",
    "assumed_hardware": "not known of the hardware",
    "timeline_microbatches": "microbatches drawn in the timeline",
    "overhead": "fixed overhead per step",
    "p50": "median",
    "expected_slowdown": "allocator thrashing, expected slow-down",
    "probability_of_running_out": "out-of-memory risk",
    "p95": "95th percentile",
    "highest_mfu": "best MFU on this GPU near this scale",
    "highest_mfu_of": "which is of",
    "nearest": "nearest measured step",
    "extrapolates": "error may be larger",
    "four_bit_base": "4-bit base",
}
"""Labels of notes whose key says too little."""
OWN_UNITS = ("memory", "published", "four_bit_base")
"""Notes whose figures have units of their own, by their names."""


def table(
    title: str, columns: Iterable[str], right: Iterable[str] = (), optional: Iterable[str] = ()
) -> Grid:
    """An empty table; columns named in `right` are aligned to the right, `optional` ones left out
    first where narrow.

    What is left out is in the `--json` of the same command.
    """
    built = Grid(title, map(visible, optional))
    numbers = set(right)
    for name in columns:
        built.add_column(as_text(name), justify="right" if name in numbers else "left")
    return built


def listing_table(found: Listing) -> Grid:
    """Entries of the catalog."""
    built = table(found.title, found.columns, found.figures, found.optional)
    for cells in found.cells():
        built.add_row(*cells)
    return built


def plan_table(full: ResolvedPlan) -> Grid:
    """A resolved plan, by what decides its cost."""
    built = table(full.name, ("field", "value"))
    s, t, c = full.strategy, full.training, full.cluster
    rows = {
        "model": _model_text(full),
        "cluster": f"{c.nodes} node(s) x {c.gpus_per_node} {full.gpu.name}, fabric "
        f"{full.fabric.name}",
        "axes": _axes_text(full),
        "ZeRO": f"{s.data.zero}, offload {s.data.offload}",
        "pipeline": _pipeline_text(full),
        "precision": f"{s.precision}, gradients {s.gradient_dtype}, "
        + (
            "recompute, attention and kernels as measured"
            if full.profiled
            else f"recompute {s.recompute}, attention {s.attention}, kernels {s.kernels}"
        ),
        "batch": f"{t.global_batch} x {t.sequence_length} tokens, micro-batch {t.micro_batch}, "
        f"{counted(full.num_microbatches, 'microbatch')} per step",
        full.task_section: f"{t.steps} steps of {t.optimizer.name}, learning rate "
        f"{t.optimizer.learning_rate:g}",
    }
    if full.finetune:
        rows["trained"] = _trained_text(full.finetune)
    if not (full.code or full.profiled) and full.shape.unmodelled:
        rows["not modelled"] = f"{full.shape.unmodelled}: planned without, and refused by run"
    for field, value in rows.items():
        built.add_row(field, value)
    return built


def _trained_text(tune: Finetune) -> str:
    """What fine-tuning trains, of which base, and on what."""
    trained, lora = "all weights", tune.lora
    if lora:
        targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
        trained = f"LoRA of rank {lora.rank} on {targets}"
    bits = f" in {tune.quantize.format}, groups of {tune.quantize.group}" if tune.quantize else ""
    base = f"{tune.base or 'drawn by the seed'}{bits}"
    pairs = f", preference pairs (DPO, beta {tune.preference.beta:g})" if tune.preference else ""
    return f"{trained}, base {base}{pairs}"


def _axes_text(full: ResolvedPlan) -> str:
    """The sizes whose product is the GPUs; of stages with replicas of their own, these add up."""
    sizes = full.sizes
    if replicas := full.strategy.pipeline.replicas:
        own = " + ".join(map(str, replicas))
        total = f" = {sum(replicas)}" if len(replicas) > 1 else ""
        return f"tensor {sizes['tensor']} x context {sizes['context']} x replicas {own}{total}"
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def _pipeline_text(full: ResolvedPlan) -> str:
    p = full.strategy.pipeline
    if p.size == 1:
        return "–"
    words = [p.schedule, f"layers per stage {p.partition}"]
    if p.replicas:
        how = (
            "that take whole microbatches in turn (round_robin)"
            if p.is_round_robin
            else "that share each microbatch (split)"
        )
        words.append(f"replicas of each {p.replicas}, {how}")
    if p.in_flight:
        words.append(f"at most {p.in_flight} microbatches in flight on each")
    return ", ".join(words)


def _model_text(full: ResolvedPlan) -> str:
    if full.code:
        return f"{full.model_name} (code), vocabulary {full.vocab}"
    if full.profiled:
        profile = full.layer_profile
        layers, batch = len(profile.layers), counted(profile.profile_batch, "sequence")
        return (
            f"{full.model_name} (layer profile {full.profiled.layer_profile}), "
            f"{counted(layers, 'layer')}, measured with {batch}"
        )
    return f"{full.model_name}, {counted(full.shape.layers, 'layer')}, hidden {full.shape.hidden}"


def estimate_table(full: ResolvedPlan, found: Profile) -> list[Grid | None]:
    """What `workbench estimate` shows."""
    return [plan_table(full), profile_table(found), stages_table(found), notes_table(found)]


def rehearsal_table(full: ResolvedPlan, found: Profile) -> list[Grid | None]:
    """What `workbench rehearse` shows."""
    return [plan_table(full), profile_table(found), stages_table(found), collectives_table(found)]


def profile_table(found: Profile) -> Grid:
    """A profile: peak memory, its categories on the rank with the largest peak, step time."""
    columns = ("what", "value", "which is")
    built = table(f"{found.run} ({found.source})", columns, ("value",), ("which is",))
    for row in (*_memory_rows(found), *_time_rows(found)):
        built.add_row(*row)
    return built


def _memory_rows(found: Profile) -> Iterator[tuple[str, ...]]:
    if peaks := found.peak_bytes_by_rank:
        most = max(peaks, key=lambda rank: (peaks[rank], -rank))
        least = min(peaks, key=lambda rank: peaks[rank])
        which = f"rank {most} of {found.world_size}"
        yield "peak memory (max rank)", bytes_text(peaks[most]), which
        if peaks[least] < peaks[most]:
            yield "peak memory (min rank)", bytes_text(peaks[least]), f"rank {least}"
        yield from _allocator_rows(found)
    if host := found.host_bytes:
        yield "host memory (max rank)", bytes_text(host)
        if share := found.host_capacity_bytes:
            yield "  a rank's share of the node's", bytes_text(share)
    if found.capacity_bytes:
        yield "GPU memory", bytes_text(found.capacity_bytes)
    for category, size in found.by_category.items():
        yield (
            f"  {SHOWN_NAMES.get(category, category)}, peak",
            bytes_text(size),
            MEANINGS.get(category, ""),
        )


def _allocator_rows(found: Profile) -> Iterator[tuple[str, ...]]:
    """What torch's allocator counts, where a GPU holds more than that."""
    allocated, reserved = found.peak_allocated_by_rank, found.peak_reserved_by_rank
    if allocated and max(reserved.values()) > max(allocated.values()):
        yield "  allocated (max rank)", bytes_text(max(allocated.values())), "torch's allocator"
        yield "  reserved (max rank)", bytes_text(max(reserved.values())), "torch's allocator"


def _time_rows(found: Profile) -> Iterator[tuple[str, ...]]:
    if found.step_seconds is not None:
        yield "step time", seconds_text(found.step_seconds), found.unfit_words
    if found.data_share is not None:
        yield "  data loading", percent_text(found.data_share)
    if kernels := found.notes.get("kernels"):
        yield "kernel costs", kernels
    if found.tokens_per_second is not None:
        yield "tokens/s", count_text(found.tokens_per_second), found.unfit_words
    if found.loss:
        yield "loss, first and last", f"{loss_text(found.loss[0])}  {loss_text(found.loss[-1])}"
    if found.skipped_text:
        yield "steps skipped", found.skipped_text, "gradients not finite in fp16"
    for one in found.notes.get("loss_by_source", []):
        yield f"  of {one['source']}", f"{one['loss']:.4f}", "a token of its last steps"
    if rewards := found.notes.get("rewards"):
        yield "preferred answers", percent_text(rewards["accuracy"]), "of the last steps' pairs"
        yield "reward margin", f"{rewards['reward_margin']:.4f}", "mean of the last steps"
    if found.fits is not None:
        yield "fits", "yes" if found.fits else "NO", found.risk_words
    for what in found.notes.get("left_out", []):
        yield "left out", "", what


def stages_table(found: Profile) -> Grid | None:
    """Peak memory by category of each pipeline stage, on its rank with the most; None where there
    is one stage.
    """
    names = ("step", "stage", "rank", "category", "bytes")
    rows = list(found.rows("memory", *names, moment="peak", tier="device"))
    last = max((step for step, *_ in rows), default=None)
    of_ranks: dict[tuple[int, int], dict[str, float]] = {}
    for step, stage, rank, category, size in rows:
        if step == last and stage is not None and stage == stage and category != ALLOCATED:
            of_ranks.setdefault((int(stage), int(rank)), {})[category] = size
    sizes: dict[int, dict[str, float]] = {}
    for (stage, _), own in sorted(of_ranks.items()):
        sizes[stage] = max(sizes.get(stage, {}), own, key=lambda x: sum(x.values()))
    if len(sizes) < 2:
        return None
    largest: dict[str, float] = {}
    for of_stage in sizes.values():
        for category, size in of_stage.items():
            largest[category] = max(largest.get(category, 0), size)
    called = {category: SHOWN_NAMES.get(category, category) for category in largest}
    built = table(
        "Peak memory by pipeline stage",
        ("stage", "sum", *called.values()),
        ("sum", *called.values()),
        [called[category] for category in sorted(largest, key=largest.__getitem__)],
    )
    for stage, of_stage in sorted(sizes.items()):
        cells = (bytes_text(of_stage[name]) if of_stage.get(name) else "–" for name in largest)
        built.add_row(str(stage), bytes_text(sum(of_stage.values())), *cells)
    return built


def collectives_table(found: Profile, limit: int = 12) -> Grid | None:
    """Collectives of one rank in a step, by axis and kind; None where nothing is communicated."""
    names = ("rank", "step", "axis", "kind", "group_size", "dtype", "count", "bytes")
    rows = list(found.rows("collectives", *names))
    if not rows:
        return None
    first = min(row[0] for row in rows)
    last = max(row[1] for row in rows if row[0] == first)
    sums: dict[tuple[str, ...], tuple[float, float]] = {}
    for rank, step, *call, count, size in rows:
        if (rank, step) == (first, last):
            key = tuple(map(str, call))
            calls, total = sums.get(key, (0, 0))
            sums[key] = calls + count, total + size * count
    columns = ("axis", "collective", "ranks", "dtype", "calls per step", "bytes per step")
    right = columns[2:3] + columns[4:]
    built = table(f"Collectives of rank {first}", columns, right, ("dtype",))
    for key, (calls, total) in sorted(sums.items())[:limit]:
        axis, *call = key
        built.add_row(SHOWN_NAMES.get(axis, axis), *call, str(int(calls)), bytes_text(total))
    return built


def runs_table(found: list[Run]) -> Grid:
    """Runs of this machine, and their state."""
    built = table(
        "Runs",
        ("run", "phase", "ranks", "steps", "started", "cause"),
        ("ranks", "steps"),
        ("started", "steps", "ranks"),
    )
    for run in found:
        state = run.state
        started = (
            time.strftime("%Y-%m-%d %H:%M", time.localtime(state.started)) if state.started else "–"
        )
        cause = state.cause.message if state.cause else state.warning
        built.add_row(run.id, state.phase, str(state.world_size), str(state.steps), started, cause)
    return built


def verification_table(found: Mapping[str, Any]) -> Grid:
    """Largest differences from one device that `verify` found, and at which precision."""
    word = "PASSED" if found["passed"] else "FAILED"
    built = table(
        f"{word}: verified in {found['precision']}, tolerance {found['tolerance']:g}",
        ("what", "absolute", "relative"),
    )
    for kind in ("loss", "gradients", "weights"):
        built.add_row(
            kind, f"{found['max_abs_diff'][kind]:.3g}", f"{found['max_relative_diff'][kind]:.3g}"
        )
    worst = found["worst"]
    built.add_row(
        f"worst: {worst['kind']} of {worst['tensor']}, rank {worst['rank']}",
        f"{worst['absolute']:.3g}",
        f"{worst['relative']:.3g}",
    )
    return built


def replaced_choices(found: Mapping[str, Any]) -> str | None:
    """The plan fields that a verification replaced, in words; None where the plan's own stood."""
    fields = [
        f"{name} {pair['plan']} → {pair['verified']}" for name, pair in found["replaced"].items()
    ]
    if not fields:
        return None
    other = ", not at the plan's own precision" if "strategy.precision" in found["replaced"] else ""
    return f"Verified in {found['precision']}{other}. Replaced: {', '.join(fields)}."


def differences_table(rows: list[tuple[str, Any, Any]], other: str) -> Grid:
    """Fields in which two plans differ."""
    built = table("Differences" if rows else "No difference", ("field", other, "this"))
    for field, theirs, ours in rows:
        built.add_row(field, str(theirs), str(ours))
    return built


def ending(run: Run, state: State) -> str:
    """How a run ended, in words: what failed first, what to change, the last lines of that rank."""
    text = "\n".join(
        part
        for part in (f"{run.id}: {state.phase}, {run.dir}", *state.notes, state.warning)
        if part
    )
    if state.cause is None:
        return text
    cause = state.cause
    return "\n".join(
        part for part in (text, cause_text(cause), cause.advice, cause.log_tail) if part
    )


def cause_text(cause: Cause) -> str:
    """What failed, and on which rank; most messages name the rank themselves."""
    if cause.rank is None or cause.message.startswith(("rank ", "ranks ")):
        return cause.message
    return f"rank {cause.rank}: {cause.message}"


def notes_table(found: Profile) -> Grid | None:
    """Notes of the instrument: times by part, the smallest change that fits; None without any."""
    flat = {key: value for key, value in found.notes.items() if value not in (None, {}, [])}
    if not flat:
        return None
    built = table(f"Notes {found.unfit_words}".rstrip(), ("what", "value"))
    for key, value in flat.items():
        if key == "advice":
            built.add_row("smallest change that fits", found.advice)
        elif isinstance(value, Mapping):
            for inner, size in value.items():
                if size is not None:
                    about = NOTE_LABELS.get(key, key_label(key))
                    built.add_row(
                        f"{about}: {NOTE_LABELS.get(inner, key_label(inner))}",
                        _value(inner if key in OWN_UNITS else key, size),
                    )
        else:
            built.add_row(NOTE_LABELS.get(key, key_label(key)), _value(key, value))
    return built


def _value(name: str, value: object) -> str:
    if isinstance(value, list | tuple) and name == "step_seconds_90":
        return interval_text((value[0], value[1]))
    if isinstance(value, int) and name in ("bytes", "unquantized_bytes"):
        return bytes_text(value)
    if isinstance(value, float) and name in ("p50", "p95"):
        return bytes_text(value)
    if isinstance(value, float) and (name == "time" or name.endswith("seconds")):
        return seconds_text(value if value > ROUNDING_SECONDS else 0.0)
    if isinstance(value, float) and name.startswith("probability"):
        return risk_text(value)
    if isinstance(value, float) and (
        name.endswith(("utilisation", "mfu")) or name.startswith("unquantized_share")
    ):
        return f"{value:.1%}"
    return digits(value) if isinstance(value, float) else str(value)
