"""What a terminal shows: the catalog, a plan, a profile, runs, a proof, as rich tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.cli.terminal import Grid, as_text
from workbench.lab.palette import key_label
from workbench.profile import ALLOCATED, MEANINGS
from workbench.runs.launch.checked_launch import advice
from workbench.units import bytes_text, count_text, digits, seconds_text
from workbench.untrusted_text import visible

if TYPE_CHECKING:
    from workbench.cli.commands.doctor import Finding
    from workbench.plan.resolved_plan import ResolvedPlan
    from workbench.profile import Profile
    from workbench.runs.run import Run
    from workbench.runs.store.run_state import Cause, State

ROUNDING_SECONDS = 1e-12
"""What a difference of two times leaves where there is nothing."""
TOLD = {
    "step_seconds_90": "a step, in 90 of 100 cases",
    "simulated_step_seconds": "a step, simulated",
    "uncalibrated": "these times are",
    "overhead": "overhead, fixed a step",
    "p50": "in half of all cases at most",
    "p95": "in 95 of 100 cases at most",
}
"""Notes whose key says too little."""


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


def models(rows: list[dict[str, Any]]) -> Grid:
    """The models of the catalog."""
    columns = (
        "model",
        "parameters",
        "layers",
        "hidden",
        "heads",
        "kv",
        "vocab",
        "positions",
        "source",
    )
    built = table("Models", columns, columns[1:7], ("source", "positions"))
    for row in rows:
        numbers = [str(row[key]) for key in ("layers", "hidden", "heads", "kv_heads", "vocab")]
        built.add_row(
            row["name"], count_text(row["parameters"]), *numbers, row["positions"], row["source"]
        )
    return built


def gpus(rows: list[dict[str, Any]]) -> Grid:
    """The cards of the catalog."""
    columns = ("card", "GiB", "GB/s", "16-bit TFLOP/s", "link GB/s", "W", "fabric", "source")
    built = table("Cards", columns, columns[1:6], ("source", "fabric"))
    for row in rows:
        peak = row["tflops"].get("bf16") or row["tflops"].get("fp16") or row["tflops"].get("fp32")
        figures = (row["memory_gib"], row["bandwidth_gbs"], peak, row["link_gbs"])
        built.add_row(
            row["name"],
            *(digits(f) for f in figures),
            digits(row["watts"]) if row["watts"] else "–",
            row["fabric"],
            row["source"],
        )
    return built


def strategies(rows: list[dict[str, Any]]) -> Grid:
    """The presets, and which can run."""
    built = table("Strategies", ("strategy", "runs", "title", "source"), optional=("source",))
    for row in rows:
        built.add_row(
            row["name"], "yes" if row["runnable"] else "planned", row["title"], row["source"]
        )
    return built


def plan(full: ResolvedPlan) -> Grid:
    """A complete plan, by what decides its cost."""
    built = table(full.name, ("field", "value"))
    s, t, c = full.strategy, full.training, full.cluster
    rows = {
        "model": f"{full.model_name}, {full.shape.layers} layers, hidden {full.shape.hidden}"
        if not full.code
        else f"{full.model_name} (code), vocabulary {full.vocab}",
        "cluster": f"{c.nodes} node(s) x {c.gpus_per_node} {full.gpu.name}, fabric "
        f"{full.fabric.name}",
        "axes": " x ".join(f"{axis} {size}" for axis, size in full.sizes.items()),
        "ZeRO": f"{s.data.zero}, offload {s.data.offload}",
        "pipeline": f"{s.pipeline.schedule}, layers a stage {s.pipeline.partition}"
        if s.pipeline.size > 1
        else "–",
        "precision": f"{s.precision}, gradients {s.gradient_dtype}, recompute {s.recompute}, "
        f"kernels {s.kernels}",
        "batch": f"{t.global_batch} x {t.sequence_length} tokens, micro-batch {t.micro_batch}, "
        f"{full.num_microbatches} microbatches a step",
        "training": f"{t.steps} steps of {t.optimizer.name}, learning rate "
        f"{t.optimizer.learning_rate:g}",
    }
    if not full.code and full.shape.unmodelled:
        rows["not modelled"] = f"{full.shape.unmodelled}: planned without, and refused by run"
    for field, value in rows.items():
        built.add_row(field, value)
    return built


def profile(found: Profile) -> Grid:
    """A profile: time, whether it fits, memory by category on the fullest rank."""
    built = table(
        f"{found.run} ({found.source})", ("what", "value", "which is"), ("value",), ("which is",)
    )
    peaks = found.peak_bytes_by_rank
    if peaks:
        worst = max(peaks, key=lambda rank: (peaks[rank], -rank))
        built.add_row(
            f"peak of rank {worst}, the fullest of {found.world_size}", bytes_text(peaks[worst])
        )
        least = min(peaks, key=lambda rank: peaks[rank])
        if peaks[least] < peaks[worst]:
            built.add_row(f"peak of rank {least}, the emptiest", bytes_text(peaks[least]))
    if host := _host_bytes(found):
        built.add_row("host memory of a rank, at most", bytes_text(host))
    if found.capacity_bytes:
        built.add_row("memory of one card", bytes_text(found.capacity_bytes))
    for category, size in found.by_category.items():
        built.add_row(f"  {category}, at most", bytes_text(size), MEANINGS.get(category, ""))
    if found.step_seconds is not None:
        built.add_row("a step", seconds_text(found.step_seconds))
    if kernels := found.notes.get("kernels"):
        built.add_row("cost of its kernels", kernels)
    if found.tokens_per_second is not None:
        built.add_row("tokens a second", count_text(found.tokens_per_second))
    if found.loss:
        built.add_row("loss, first and last", f"{found.loss[0]:.4f}  {found.loss[-1]:.4f}")
    if found.fits is not None:
        built.add_row("fits", "yes" if found.fits else "NO")
    for what in found.notes.get("left_out", []):
        built.add_row("left out", what)
    return built


def _host_bytes(found: Profile) -> float:
    rows = found.memory[(found.memory.tier == "host") & (found.memory.moment == "maximum")]
    return float(rows.groupby(["rank", "step"]).bytes.sum().max()) if len(rows) else 0.0


def stages(found: Profile) -> Grid | None:
    """Memory of each pipeline stage at its fullest instant, by category; None where there is one
    stage.
    """
    rows = found.memory[(found.memory.moment == "peak") & (found.memory.tier == "device")]
    rows = rows[(rows.step == rows.step.max()) & rows.stage.notna() & (rows.category != ALLOCATED)]
    if rows.stage.nunique() < 2:
        return None
    sums = rows.pivot_table(
        index="stage", columns="category", values="bytes", aggfunc="max", fill_value=0, sort=False
    )
    categories = sums.columns
    built = table(
        "Each stage at its fullest instant",
        ("stage", "sum", *categories),
        ("sum", *categories),
        sums.max().sort_values().index,
    )
    for stage, sizes in sums.sort_index().iterrows():
        built.add_row(
            str(int(str(stage))),
            bytes_text(sizes.sum()),
            *(bytes_text(size) if size else "–" for size in sizes),
        )
    return built


def collectives(found: Profile, limit: int = 12) -> Grid | None:
    """What ranks send in a step: by axis and kind, bytes of one rank; None where nothing is
    sent.
    """
    rows = found.collectives
    if rows.empty:
        return None
    rows = rows[(rows["rank"] == rows["rank"].min()) & (rows.step == rows.step.max())]
    rows = rows.assign(total=rows.bytes * rows["count"])
    sums = rows.groupby(["axis", "kind", "group_size", "dtype"], dropna=False).agg(
        {"count": "sum", "total": "sum"}
    )
    columns = ("axis", "collective", "ranks", "dtype", "calls a step", "bytes a step")
    built = table(
        f"Collectives of rank {rows['rank'].min()}", columns, columns[2:3] + columns[4:], ("dtype",)
    )
    for (axis, kind, size, dtype), row in list(sums.iterrows())[:limit]:
        built.add_row(
            str(axis),
            str(kind),
            str(size),
            str(dtype),
            str(int(row["count"])),
            bytes_text(row["total"]),
        )
    return built


def runs(found: list[Run]) -> Grid:
    """Runs on this machine, with what they are doing."""
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


def proof(found: Mapping[str, Any]) -> Grid:
    """What `verify` found."""
    word = "PASSED" if found["passed"] else "FAILED"
    built = table(
        f"{word}: {found['precision']}, tolerance {found['tolerance']:g}",
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


def differences(rows: list[tuple[str, Any, Any]], other: str) -> Grid:
    """What two plans disagree about."""
    built = table("Differences" if rows else "No difference", ("field", other, "this"))
    for field, theirs, ours in rows:
        built.add_row(field, str(theirs), str(ours))
    return built


def findings(found: list[Finding]) -> Grid:
    """What `doctor` found."""
    built = table("Doctor", ("what", "", "found", "to mend it"))
    for finding in found:
        mark = {True: "ok", False: "MISSING", None: "optional"}[finding.ok]
        built.add_row(finding.what, mark, finding.found, "" if finding.ok else finding.mend)
    return built


def ending(run: Run, state: State) -> str:
    """How a run ended, in words: what failed first, what to change, the last lines of that rank."""
    text = "\n".join(
        part for part in (f"{run.id}: {state.phase}, {run.dir}", state.warning) if part
    )
    if state.cause is None:
        return text
    cause = state.cause
    return "\n".join(part for part in (text, culprit(cause), cause.advice, cause.log_tail) if part)


def culprit(cause: Cause) -> str:
    """What failed, and on which rank: most messages name it themselves."""
    if cause.rank is None or cause.message.startswith(("rank ", "ranks ")):
        return cause.message
    return f"rank {cause.rank}: {cause.message}"


def notes(found: Profile) -> Grid | None:
    """What else the instrument says: times by part, the smallest change that fits; None where it
    says nothing.
    """
    flat = {key: value for key, value in found.notes.items() if value not in (None, {}, [])}
    if not flat:
        return None
    built = table("Notes", ("what", "value"))
    for key, value in flat.items():
        if key == "advice":
            built.add_row("smallest change that fits", advice(found))
        elif isinstance(value, Mapping):
            for inner, size in value.items():
                built.add_row(
                    f"{key_label(key)}: {TOLD.get(inner, key_label(inner))}",
                    _value(inner if key == "memory" else key, size),
                )
        else:
            built.add_row(TOLD.get(key, key_label(key)), _value(key, value))
    return built


def _value(name: str, value: object) -> str:
    if isinstance(value, list | tuple) and "seconds" in name:
        return " to ".join(seconds_text(one) for one in value)
    if isinstance(value, float) and name in ("p50", "p95"):
        return bytes_text(value)
    if isinstance(value, float) and (name == "time" or name.endswith("seconds")):
        return seconds_text(value if value > ROUNDING_SECONDS else 0.0)
    if isinstance(value, float) and (
        name.endswith("utilisation") or name.startswith("probability")
    ):
        return f"{value:.1%}"
    return digits(value) if isinstance(value, float) else str(value)
