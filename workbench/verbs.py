"""The verbs, one set for shell and notebook: data in, data out.

Importing them loads no torch; what needs it happens in a child process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.errors import refuse
from workbench.plan.schema import Plan
from workbench.profile import Profile

if TYPE_CHECKING:
    from workbench.interop import Format, Imported, Translation
    from workbench.lab.comparison.compare import Comparison
    from workbench.machine.calibration_file import Calibration
    from workbench.planner.autoshard import OperatorPlan
    from workbench.planner.explain import Explanation
    from workbench.planner.search import SearchResult
    from workbench.planner.validation import Validation
    from workbench.runs.run import Run

Planned = Plan | str | Path
"""A plan, or the path of a plan file."""


def as_plan(plan: Planned) -> Plan:
    """The plan itself, or the one in the file named. Raises `PlanError`."""
    return plan if isinstance(plan, Plan) else Plan.load(plan)


def estimate(plan: Planned) -> Profile:
    """What `plan` will cost, in closed form, on any cluster; milliseconds. Raises `PlanError` for
    an illegal plan.
    """
    from workbench.planner import estimate as closed_form

    return closed_form(as_plan(plan))


def explain(
    plan: Planned, *, tokens: float | None = None, price: float | None = None
) -> Explanation:
    """What `plan` costs to train, what binds it, what makes it fit, and what changes of it do; well
    under a second.

    `tokens` to train on, default 20 a parameter; `price` in USD an hour of one card, default its
    list price. Every figure is estimated. Raises `PlanError` for an illegal plan or number.
    """
    from workbench.planner.explain import explain as reasons

    return reasons(as_plan(plan), tokens, price)


def operators(
    plan: Planned,
    ranks: int | Sequence[int] | None = None,
    *,
    memory_gib: float | None = None,
    sequences: int | None = None,
) -> OperatorPlan:
    """How each operator of the model is best split over `ranks`, exactly; default all ranks of the
    plan.

    `ranks` may be a grid, e.g. (2, 4); `memory_gib` of a rank bounds it; `sequences` are those of
    one microbatch. Every figure is estimated. Raises `PlanError` where no choice is legal or fits.
    """
    from workbench.planner.autoshard import choose_for

    room = None if memory_gib is None else memory_gib * 2**30
    return choose_for(as_plan(plan).resolve(), ranks, room, sequences)


def search(
    plan: Planned,
    objective: str = "time",
    *,
    space: str = "default",
    top: int = 10,
    where: Sequence[str] = (),
    deadline_days: float | None = None,
    tokens: float | None = None,
) -> SearchResult:
    """The best strategies for the model, cards and batch of `plan`, whose own strategy does not
    matter.

    `objective`: time of a step, cost, energy or gpus (fewest). `space`: default, or wide for
    millions of plans. `where`: conditions such as `strategy.tensor.size<=8` or `peak_gib<60`.
    `deadline_days` keeps what trains `tokens` in time. Raises `PlanError` for words that mean
    nothing.
    """
    from workbench.planner.search import search as through

    return through(
        as_plan(plan),
        objective,
        space=space,
        top=top,
        where=where,
        deadline_days=deadline_days,
        tokens=tokens,
    )


def rehearse(
    plan: Planned,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    allow_code: bool = False,
) -> Profile:
    """Run the real code of `plan` on fake tensors, in a child process, at any world size.

    `ranks` to rehearse, default one a pipeline stage; `progress(done, of)` is told of each; a model
    that is code runs only with `allow_code`. Raises `PlanError` for a plan that is illegal or that
    this version cannot rehearse, `ChildError` if the rehearsal fails.
    """
    from workbench.runs.launch import subprocess_verbs

    return subprocess_verbs.rehearse(as_plan(plan), ranks, progress, allow_code)


def run(
    plan: Planned,
    *,
    wait: bool = False,
    force: bool = False,
    resume: str | Path | Run | None = None,
    root: str | Path | None = None,
    port: int | None = None,
    allow_code: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Run:
    """Start `plan` on this machine through `accelerate launch`, and return at once (or when it is
    over, with `wait`).

    Refuses (`PlanError`) what is illegal, what this version cannot run, what this machine does not
    have, and what by its estimate does not fit, unless `force`. `resume` is a run, its directory or
    a checkpoint to go on from. `root` holds run directories; `port` is where ranks meet, default a
    free one. A model that is code runs only with `allow_code`; `progress` is told how far the check
    of a checkpoint's files is.
    """
    from workbench.runs.launch import checked_launch

    started = checked_launch.run(
        as_plan(plan),
        force=force,
        resume=resume,
        root=root,
        port=port,
        allow_code=allow_code,
        progress=progress,
    )
    if wait:
        started.wait()
    return started


def attach(folder: str | Path, *, root: str | Path | None = None) -> Run:
    """The run in `folder`, or of that name under `root`; from any process, at any time. Raises
    `PlanError`.
    """
    from workbench import runs
    from workbench.runs.store.run_directory import default_root
    from workbench.runs.store.run_state import is_run

    kept = default_root(root)
    for path in (Path(folder), kept / folder):
        if is_run(path):
            return runs.attach(path)
    known = ", ".join(run.id for run in runs.list_runs(root)[:5])
    raise refuse(
        "run", f"'{folder}' is no run directory, nor a run kept in {kept}; there: {known or 'none'}"
    )


def runs(root: str | Path | None = None) -> list[Run]:
    """Runs kept in `root` (default $WORKBENCH_RUNS, else ./runs), latest first."""
    from workbench.runs import list_runs

    return list_runs(root)


def weights(
    source: Run | str | Path,
    to: str | Path,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Write the parameters of a checkpoint (or of a run's latest) into the new folder `to`, under
    Hugging Face's names.

    For Llama-style models; in a child process, tensor by tensor, to the bit. A plan starts from
    such a folder with `model` and `checkpoint.load` set to it. `progress(done, of, what)` counts
    bytes. Returns what was written. Raises `PlanError` or ValueError where the checkpoint is
    damaged, its model has no such names, or `to` is there already.
    """
    from workbench.runs.launch import export_weights

    return export_weights.export(
        source if isinstance(source, str | Path) else source.dir, to, progress
    )


def watch(run: Run | str | Path) -> Any:
    """A live dashboard of a run, for a notebook; returns at once."""
    from workbench.lab.live.dashboard import watch as follow

    return follow(attach(run) if isinstance(run, str | Path) else run)


def compare(
    *items: Any,
    rehearsed: bool = True,
    root: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Plans, runs and profiles side by side: estimated, rehearsed and measured peaks of each rank
    in one table.

    Items are plans or plan files, runs, their directories or their names under `root`, and
    profiles. `rehearsed` rehearses each plan that can be, which takes seconds; `progress` is told
    whose turn it is. Raises `PlanError`.
    """
    from workbench.lab.comparison.compare import Comparison
    from workbench.lab.comparison.compare import compare as side_by_side
    from workbench.plan.rules.supported import unsupported

    found = side_by_side(*opened(items, root))
    if not rehearsed:
        return found
    for entry in found.entries:
        if (
            entry.plan is None
            or entry.profile_of("rehearsed")
            or unsupported(full := entry.plan.resolve(), "rehearse")
        ):
            continue
        if progress:
            progress(f"rehearsing {entry.name}")
        entry.profiles.append(rehearse(full))
    return Comparison(found.entries)


def opened(items: Sequence[Any], root: str | Path | None = None) -> list[Any]:
    """The items, with the plan or the run in place of each name. Raises `PlanError` for a name that
    is neither.
    """
    return [_opened(item, root) if isinstance(item, str | Path) else item for item in items]


def _opened(name: str | Path, root: str | Path | None) -> Plan | Run:
    if os.path.isfile(name):  # Path.is_file raises for a name that is too long
        plan = Plan.load(name)
        plan.resolve()
        return plan
    if str(name).endswith((".yaml", ".yml")):
        return Plan.load(name)  # says why it cannot be read
    return attach(name, root=root)


def verify(
    plan: Planned, precision: Literal["fp64", "fp32"] = "fp64", *, allow_code: bool = False
) -> dict[str, Any]:
    """Train a few steps with the same seed on one device and under `plan`, on CPU ranks, and
    compare every tensor.

    Returns the largest differences of loss, gradients and weights, the worst tensor, and `passed`.
    Raises `PlanError` for a plan that is illegal, that this version cannot run, or that is too
    large for the CPU ranks of this machine.
    """
    from workbench.runs.launch import subprocess_verbs

    return subprocess_verbs.verify(as_plan(plan), precision, allow_code)


def calibrate(
    path: str | Path | None = None,
    *,
    seconds: float = 60.0,
    runs: Sequence[Run | str | Path] = (),
    root: str | Path | None = None,
    progress: Callable[[float, float, str], None] | None = None,
) -> Calibration:
    """Measure the attached machine for about `seconds`, or correct a calibration from finished
    `runs`; kept in `path`.

    With `runs` (runs, their directories, or names under `root`) the calibration is that in `path`,
    else the one that the first run's plan names, else measured now; its `scale` holds the error
    before and after. Plans use the file by `cluster.calibration`. Raises `PlanError`, and
    `ChildError` where measuring fails.
    """
    from workbench.runs.launch import calibrate

    found = [attach(run, root=root) if isinstance(run, str | Path) else run for run in runs]
    return calibrate.kept(None if path is None else Path(path), seconds, found, progress)


def export(plan: Planned, folder: str | Path) -> list[Path]:
    """Write `plan` resolved, with what launches it (`launch.sh`, `accelerate.yaml`, `job.sbatch`),
    into `folder`.
    """
    from workbench.interop.export import export as write

    return write(as_plan(plan), folder)


def validate(*files: str | Path, profile: str | None = None) -> Validation:
    """Published measurements (CSV, a row a configuration) predicted row by row: errors, ranking,
    and what was left out.

    `profile` is one software stack to predict all rows with, in place of each row's own. Raises
    `PlanError` for a file that cannot be read; a row that cannot be said as a plan is counted with
    its reason.
    """
    from workbench.planner.validation import validate as against

    return against(files, profile=profile)


def import_config(
    path: str | Path,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    vocab_size: int | None = None,
    set: Mapping[str, Any] | None = None,
    lenient: bool = False,
) -> Imported:
    """The plan that a configuration of other software means, and what of the file is not in it, key
    by key.

    Read are DeepSpeed's ds_config.json, Megatron-LM arguments, torchtitan's job TOML and
    accelerate's YAML; which one it is shows in the content. `model`, `gpu`, `gpus` and
    (Megatron-LM) `vocab_size` say what the file lacks; `set` gives fields of the plan by dotted
    path, above what the file says. Keys that the format does not have are refused, or with
    `lenient` told with the others. Raises `PlanError`, also where no key of the file was used.
    """
    from workbench import interop

    given = {"model": model, "gpu": gpu, "gpus": gpus, "vocab_size": vocab_size, "set": set}
    return interop.load(path, **given, lenient=lenient)


def translate(plan: Planned, format: Format) -> Translation:
    """`plan` in the words of other software (deepspeed, megatron, torchtitan, fsdp), and the fields
    that are lost.

    Raises `PlanError` for an illegal plan, and for one that has nothing near it in that format.
    """
    from workbench import interop

    return interop.write(as_plan(plan), format)
