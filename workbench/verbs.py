"""The verbs, one set for shell and notebook: data in, data out.

Each verb is declared here once, with the docstring that `help(wb.estimate)` and `workbench estimate
--help` show, and is imported from its module when it is called: importing this file loads nothing,
and no verb loads torch, which works in child processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from workbench.interop import Format, Imported, Translation
    from workbench.lab.comparison.compare import Comparison
    from workbench.lab.live.dashboard import Dashboard
    from workbench.machine.calibration_file import Calibration
    from workbench.plan.model.layer_profile import LayerProfile
    from workbench.plan.schema import Plan
    from workbench.planner.autoshard import OperatorPlan
    from workbench.planner.explain import Explanation
    from workbench.planner.search import SearchResult
    from workbench.planner.states_on_gpus import StatesAnswer
    from workbench.planner.validation import Validation
    from workbench.profile import Profile
    from workbench.runs.run import Run

__all__ = [
    "attach",
    "calibrate",
    "check_order",
    "compare",
    "estimate",
    "explain",
    "export",
    "import_config",
    "list_runs",
    "operators",
    "profile_layers",
    "rehearse",
    "report",
    "run",
    "search",
    "states",
    "translate",
    "validate",
    "verify",
    "watch",
    "weights",
]


def _plan(plan: Plan | str | Path) -> Plan:
    if not isinstance(plan, str | Path):
        return plan
    from workbench.plan.schema import Plan

    return Plan.load(plan)


def estimate(plan: Plan | str | Path, *, allow_code: bool = False) -> Profile:
    """Estimate memory, step time and communication in closed form.

    Takes milliseconds, on any cluster. Memory is by category and pipeline stage, time by part of
    the step. A model that is given as Python is first traced, in a child process.

    Args:
        plan: A plan, or the path of a plan file.
        allow_code: Run a model that is given as Python, to trace its operators.

    Returns:
        The estimated frames; `fits`, and in `notes` the smallest change that fits.

    Raises:
        PlanError: The plan is illegal, or asks for what the planner does not model.
    """
    from workbench.planner.estimate import estimate

    written = _plan(plan)
    if written.code is None:
        return estimate(written)
    from workbench.runs.launch import subprocess_verbs

    return estimate(written, subprocess_verbs.traced_model(written, allow_code))


def explain(
    plan: Plan | str | Path, *, tokens: float | None = None, price: float | None = None
) -> Explanation:
    """Explain what binds memory and time, and what changes it.

    Cost and energy of the training, what makes the plan fit, and neighbouring plans with their
    step time and memory. Every figure is estimated.

    Args:
        plan: A plan, or the path of a plan file.
        tokens: Tokens to train on; default 20 a parameter.
        price: USD an hour of one GPU; default its list price.

    Raises:
        PlanError: The plan or a number is illegal.
    """
    from workbench.planner.explain import explain

    return explain(_plan(plan), tokens, price)


def operators(
    plan: Plan | str | Path,
    ranks: int | Sequence[int] | None = None,
    *,
    memory_gib: float | None = None,
    sequences: int | None = None,
    mode: str = "dynamic_programming",
    allow_code: bool = False,
) -> OperatorPlan:
    """Choose how each operator is sharded, and say why.

    What is split and communicated, with its cost. Every figure is estimated.

    Args:
        plan: A plan, or the path of a plan file.
        ranks: Ranks to shard over, or a grid of them such as (2, 4); default all of the plan.
        memory_gib: Limit of a rank's peak memory, GiB, as `estimate` counts it; where no strategies
            fit, ZeRO or recompute.
        sequences: Sequences of a microbatch over these ranks; default the plan's.
        mode: dynamic_programming, the optimum; recursive_programming, fast; or
            sharding_propagation, from the strategies that the plan names.
        allow_code: Run a model that is given as Python, to trace its operators.

    Raises:
        PlanError: No choice is legal, or none fits.
    """
    from workbench.runs.launch import subprocess_verbs

    limit = None if memory_gib is None else memory_gib * 2**30
    return subprocess_verbs.operators(_plan(plan), ranks, limit, sequences, mode, allow_code)


def search(
    plan: Plan | str | Path,
    objective: str = "time",
    *,
    space: str | None = None,
    top: int = 10,
    where: Sequence[str] = (),
    deadline_days: float | None = None,
    tokens: float | None = None,
    risk: float = 0.05,
    progress: Callable[[str], None] = lambda words: None,
) -> SearchResult:
    """Search the best strategies for a model on given GPUs.

    Every legal plan of a space is estimated, and ranked by time, cost, energy or GPUs. Model, GPUs
    and batch are those of the plan; its own strategy does not matter.

    Args:
        plan: A plan, or the path of a plan file.
        objective: What is least: time (of a step), cost, energy or gpus.
        space: default (of a layer profile unequal), wide, or vast for kernels, tensor grids and
            buckets too; unequal for stages that are cut and replicated each by itself (DAPPLE,
            2007.01045); operators for stages, submeshes and the strategy of every operator (Alpa,
            2201.12023).
        top: Plans to return.
        where: Conditions such as `strategy.tensor.size<=8` or `peak_gib<60`.
        deadline_days: Keep plans that train `tokens` within so many days.
        tokens: Tokens to train on, for days and cost.
        risk: Largest probability of running out of memory.
        progress: Called with words about what a search of stages is at.

    Raises:
        PlanError: An argument means nothing; a search that finds nothing is no error.
    """
    from workbench.planner.search import search

    of: dict[str, Any] = {"where": where, "deadline_days": deadline_days, "tokens": tokens}
    return search(_plan(plan), objective, space=space, top=top, risk=risk, progress=progress, **of)


def states(
    subject: Plan | str | Path | float,
    *,
    gpu_memory: Sequence[float] = (16, 32, 40, 80),
    gpus: Sequence[str] = (),
    set: Mapping[str, Any] | None = None,
) -> StatesAnswer:
    """Count the GPUs that hold a model's states, or a step of it.

    Bytes a parameter, term by term; then the least GPUs on which a step fits, with activations and
    buffers, under data parallelism, ZeRO-3 and offloading. Every figure is estimated.

    Args:
        subject: A number of parameters (100e9, "100B": a step is that of the nearest dense model
            with other layers), a model of the catalog, a plan file, or a plan.
        gpu_memory: Printed memory of GPUs, GB (1e9 bytes).
        gpus: GPUs of the catalog for the step; default the plan's, V100 and H100.
        set: Fields to override, by dotted path.

    Raises:
        PlanError: The subject is unknown, or a field or number illegal.
    """
    from workbench.planner.states_on_gpus import states

    return states(subject, gpu_memory, gpus, set or {})


def rehearse(
    plan: Plan | str | Path,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    allow_code: bool = False,
    operators: bool = False,
    over_time: bool = False,
) -> Profile:
    """Rehearse a plan on fake tensors: the real code, at any size.

    Counts peak memory and every collective, in a child process.

    Args:
        plan: A plan, or the path of a plan file.
        ranks: Ranks to rehearse; default one of each pipeline stage.
        progress: Called with (actions done, actions in all): forwards and backwards of the ranks.
            What it raises ends the rehearsal.
        allow_code: Run a model that is given as Python.
        operators: Also count every computing operator by shape, and time it on the planned GPU by
            the estimate's roofline: `notes["operators"]`, with the estimate's compute beside it.
        over_time: Also the frame `levels`, memory over a step; in `notes`, by module and action,
            what lives at the peak (`peak_allocations`), and bytes that live after the second step
            and did not after the first (`leaks`).

    Raises:
        PlanError: The plan is illegal, or this version cannot rehearse it.
        ChildError: The rehearsal fails.
    """
    from workbench.runs.launch import subprocess_verbs

    return subprocess_verbs.rehearse(_plan(plan), ranks, progress, allow_code, operators, over_time)


def check_order(
    plan: Plan | str | Path,
    progress: Callable[[int, int], None] | None = None,
    *,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Check that no rank of a plan can hang: the order of every collective and P2P call.

    Ranks' calls are recorded on fake tensors in a child process, and replayed on a transport as
    strict as NCCL may be: every rank gets through, members of a collective agree on kind, count and
    dtype, all ranks of a group make its first call, and no tensor is in host memory.

    Args:
        plan: A plan, or the path of a plan file.
        progress: Called with (ranks traced, ranks to trace). Above 16 ranks one of each class of
            equal ranks is traced, and 32 drawn to compare.
        allow_code: Build a model that is given as Python.

    Returns:
        `problems`, in words, empty where no rank can hang; `world_size`, `traced`, `calls` and
        `microbatches`.

    Raises:
        PlanError: The plan is illegal, or this version cannot rehearse it.
        ChildError: The check fails.
    """
    from workbench.runs.launch import subprocess_verbs

    return subprocess_verbs.check_order(_plan(plan), progress, allow_code)


def run(
    plan: Plan | str | Path,
    *,
    wait: bool = False,
    force: bool = False,
    resume: str | Path | Run | None = None,
    root: str | Path | None = None,
    port: int | None = None,
    allow_code: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Run:
    """Train a plan on this machine through `accelerate launch`.

    Returns at once, and the run goes on when this process ends. What is illegal, what this machine
    does not have, and what by its estimate does not fit is refused before anything starts.

    Args:
        plan: A plan, or the path of a plan file.
        wait: Return when the run is over.
        force: Start what by its estimate does not fit, or finds memory or disk short now.
        resume: A run, its directory, or a checkpoint to go on from.
        root: Folder of run directories; default $WORKBENCH_RUNS, else ./runs.
        port: Port of the rendezvous; default a free one.
        allow_code: Run a model that is given as Python.
        progress: Called with words about the check of a checkpoint's files.

    Raises:
        PlanError: Everything that stands against the run; then nothing has been written.
    """
    from workbench.runs.launch import checked_launch

    of: dict[str, Any] = {"force": force, "resume": resume, "root": root, "port": port}
    started = checked_launch.run(_plan(plan), **of, allow_code=allow_code, progress=progress)
    if wait:
        started.wait()
    return started


def attach(folder: str | Path, *, root: str | Path | None = None) -> Run:
    """Open a run by its directory or its name, from any process, at any time.

    Args:
        folder: A run directory, or the name of a run under `root`.
        root: Folder of run directories; default $WORKBENCH_RUNS, else ./runs.

    Raises:
        PlanError: There is no such run.
    """
    from workbench.runs.run import find_run

    return find_run(folder, root)


def list_runs(root: str | Path | None = None) -> list[Run]:
    """List the runs of this machine, latest first.

    Args:
        root: Folder of run directories; default $WORKBENCH_RUNS, else ./runs.
    """
    from workbench.runs.run import list_runs

    return list_runs(root)


def weights(
    source: Run | str | Path,
    to: str | Path,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Export a checkpoint's weights under Hugging Face's names.

    Bit for bit. For Llama-style models; works in a child process, tensor by tensor. A plan starts
    from the folder where its `model` and `checkpoint.load` name it.

    Args:
        source: A checkpoint, or a run: its latest checkpoint.
        to: New folder to write into.
        progress: Called with (bytes done, bytes in all, what).

    Returns:
        What was written: parameters, tensors, dtype, bytes.

    Raises:
        PlanError: The checkpoint is damaged, its model has no such names, or `to` exists.
    """
    from workbench.runs.launch import subprocess_verbs

    folder = source if isinstance(source, str | Path) else source.dir
    return subprocess_verbs.export_weights(folder, to, progress)


def watch(run: Run | str | Path) -> Dashboard:
    """Show a live dashboard of a run in a notebook; returns at once.

    Args:
        run: A run, its directory, or its name under the folder of runs.
    """
    from workbench.lab.live.dashboard import watch

    return watch(attach(run) if isinstance(run, str | Path) else run)


def compare(
    *items: Any,
    rehearsed: bool = True,
    root: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare plans and runs: estimated, rehearsed, measured.

    Peak memory rank by rank, step time, and the fields in which plans differ.

    Args:
        items: Plans or plan files, runs, their directories or names, profiles.
        rehearsed: Rehearse each plan that can be, which takes seconds.
        root: Folder of run directories; default $WORKBENCH_RUNS, else ./runs.
        progress: Called with what is being rehearsed.

    Raises:
        PlanError: An item is neither a plan nor a run, or a plan is illegal.
    """
    from workbench.lab.comparison.named_items import compare_named

    return compare_named(items, rehearsed, root, progress)


def report(profiles: Sequence[Any] | Comparison, path: str | Path) -> Path:
    """Write a comparison as one HTML page that opens offline.

    Args:
        profiles: A comparison, or what `compare` takes; plans are then not rehearsed.
        path: File to write.

    Returns:
        The path.
    """
    from workbench.lab.comparison.compare import Comparison

    if not isinstance(profiles, Comparison):
        profiles = compare(*profiles, rehearsed=False)
    return profiles.to_html(path)


def verify(
    plan: Plan | str | Path,
    precision: Literal["fp64", "fp32", "bf16", "fp8"] | None = None,
    *,
    on: Literal["cpu", "gpu"] = "cpu",
    allow_code: bool = False,
) -> dict[str, Any]:
    """Verify that a plan computes what one device does.

    Numerical equivalence in a precision that replaces the plan's own: a few steps with the same
    seed on one device and under the plan; then loss, every gradient and every weight are compared.
    On CPU ranks in fp64 or fp32; or on the attached GPUs, which accelerate launches as it does a
    run, in fp32 or bf16.

    Args:
        plan: A plan, or the path of a plan file.
        precision: In place of the plan's own. On CPU fp64 (default) or fp32; on GPUs fp32 (default,
            never TF32) or bf16, each rank against its own GPU in the same precision. All but fp64
            also replace AdamW by SGD. A plan in fp8 is verified in fp8.
        on: cpu, or gpu: the attached GPUs over NCCL, of which the plan must be.
        allow_code: Run a model that is given as Python.

    Returns:
        The precision, the plan fields that it replaced (`replaced`), the largest differences of
        loss, gradients and weights, the worst tensor, and `passed`.

    Raises:
        PlanError: The plan is illegal, cannot run, or is too large for this machine's CPU ranks or
            GPUs; or `on` is gpu, and the plan's GPUs are not attached.
    """
    from workbench.runs.launch import subprocess_verbs

    return subprocess_verbs.verify(_plan(plan), precision, allow_code, on)


def calibrate(
    path: str | Path | None = None,
    *,
    seconds: float = 80.0,
    runs: Sequence[Run | str | Path] = (),
    root: str | Path | None = None,
    progress: Callable[[float, float, str], None] | None = None,
) -> Calibration:
    """Calibrate estimates: measure this machine, or fit to runs.

    Plans use the file through `cluster.calibration`. A calibration that runs correct is the one in
    `path`, else the one that the first run's plan names, else measured now.

    Args:
        path: Calibration file to write; None writes none.
        seconds: How long to measure, beside about a minute of preparing.
        runs: Finished runs, their directories or names; the `scale` of the result holds the error
            of the estimate before and after.
        root: Folder of run directories; default $WORKBENCH_RUNS, else ./runs.
        progress: Called with (seconds done, seconds in all, what).

    Raises:
        PlanError: The file cannot be written, or a run has no measured steps.
        ChildError: Measuring fails.
    """
    from workbench.runs.measure import calibrate

    found = [attach(run, root=root) if isinstance(run, str | Path) else run for run in runs]
    return calibrate.calibrate_file(None if path is None else Path(path), seconds, found, progress)


def profile_layers(
    plan: Plan | str | Path,
    path: str | Path,
    *,
    seconds: float = 20.0,
    allow_code: bool = False,
    progress: Callable[[float, float, str], None] | None = None,
) -> LayerProfile:
    """Measure the layers of a plan's model into a layer profile.

    Forward and backward time, output, kept activations and parameters of each block, on one
    attached device, with the plan's micro-batch, sequence length, precision, kernels and
    recomputation; its parallelism does not matter. The file is a model itself (`model: layers.csv`)
    that can be estimated and searched (DAPPLE, 2007.01045).

    Args:
        plan: A plan, or the path of a plan file.
        path: CSV file to write.
        seconds: How long to repeat passes, beside starting torch and warming up.
        allow_code: Build and run a model that is given as Python. Its blocks are the entries of its
            lists and `nn.Sequential`s, and its other submodules; what runs between two belongs to
            the one before, a block called twice is summed.
        progress: Called with (seconds done, seconds in all, what).

    Returns:
        The layer profile; `source` says on what it was measured.

    Raises:
        PlanError: The plan is illegal, cannot run on one device here, or has a block that cannot be
            timed; or the file cannot be written.
        ChildError: Measuring fails.
    """
    from workbench.runs.measure import profile_layers

    return profile_layers.profile_layers(_plan(plan), Path(path), seconds, allow_code, progress)


def export(plan: Plan | str | Path, folder: str | Path) -> list[Path]:
    """Export a plan with what launches it, by accelerate or Slurm.

    Writes the resolved plan.yaml, accelerate.yaml, launch.sh and job.sbatch.

    Args:
        plan: A plan, or the path of a plan file.
        folder: Folder to write into.

    Returns:
        The files written.

    Raises:
        PlanError: The plan is illegal, or the folder cannot be written.
    """
    from workbench.interop.export import export

    return export(_plan(plan), folder)


def validate(*files: str | Path, profile: str | None = None) -> Validation:
    """Validate the planner against published measurements.

    Errors of memory and time, ranking, and whether plans fit. A row of a file is a configuration
    with what was measured; one that cannot be expressed as a plan is counted with its reason.

    Args:
        files: CSV files.
        profile: Framework profile to predict all rows with, in place of each row's own.

    Raises:
        PlanError: A file cannot be read.
    """
    from workbench.planner.validation import validate

    return validate(files, profile=profile)


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
    """Import a DeepSpeed, Megatron-LM, torchtitan or FSDP config.

    The format is found by the content. What could not be translated is listed key by key.

    Args:
        path: ds_config.json, Megatron-LM arguments or script, torchtitan TOML, accelerate or
            gpt-neox YAML.
        model: Model, where the file does not say it.
        gpu: GPU, where the file does not say it.
        gpus: GPUs of the whole job, where the file does not say it.
        vocab_size: Vocabulary, where Megatron-LM arguments leave it to the tokenizer.
        set: Fields of the plan by dotted path, above what the file says.
        lenient: List keys that the format does not have, instead of refusing them.

    Raises:
        PlanError: The file cannot be read, or no key of it was used.
    """
    from workbench import interop

    given = {"model": model, "gpu": gpu, "gpus": gpus, "vocab_size": vocab_size, "set": set}
    return interop.load(path, **given, lenient=lenient)


def translate(plan: Plan | str | Path, format: Format) -> Translation:
    """Translate a plan into another framework's configuration.

    What that configuration cannot hold is listed field by field.

    Args:
        plan: A plan, or the path of a plan file.
        format: deepspeed, megatron, torchtitan or fsdp.

    Raises:
        PlanError: The plan is illegal, or nothing in that format comes near it.
    """
    from workbench import interop

    return interop.write(_plan(plan), format)
