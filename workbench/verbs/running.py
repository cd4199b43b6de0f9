"""Verbs that run and measure: runs, their weights and charts, equality, calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.errors import refuse
from workbench.verbs.planning import base_notes, given_plan

if TYPE_CHECKING:
    from workbench.lab.comparison.compare import Comparison
    from workbench.lab.live.dashboard import Dashboard
    from workbench.machine.calibration_file import Calibration
    from workbench.plan.model.layer_profile import LayerProfile
    from workbench.plan.schema import Plan
    from workbench.runs.run import Run


def run(
    plan: Plan | str | Path,
    *,
    wait: bool = False,
    force: bool = False,
    resume: str | Path | Run | None = None,
    root: str | Path | None = None,
    port: int | None = None,
    allow_code: bool = False,
    new_corpus: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Run:
    """Train a plan on this machine through `accelerate launch`.

    Returns at once, and the run goes on when this process ends. What is illegal, what this machine
    does not have, and what by its estimate does not fit is refused before anything starts.

    Args:
        plan: A plan, or the path of a plan file.
        wait: Return when the run is over.
        force: Start what by its estimate does not fit, or finds memory or disk short now.
        resume: A run, its directory, or a checkpoint to go on from; of a run its newest intact
            checkpoint. What was skipped, and which fields of batches and schedule are other than
            the checkpoint's, stands on stderr and in the run's `state.notes`.
        root: Folder of run directories; default $WORKBENCH_RUNS, else ./runs.
        port: Port of the rendezvous; default a free one.
        allow_code: Run a model that is given as Python.
        new_corpus: Go on from a checkpoint that was trained on another corpus, which is otherwise
            refused: sets `checkpoint.new_corpus`.
        progress: Called with words about the check of a checkpoint's files.

    Raises:
        PlanError: Everything that stands against the run; then nothing has been written.
    """
    from workbench.runs.launch import checked_launch

    started = checked_launch.run(
        given_plan(plan),
        force=force,
        resume=resume,
        root=root,
        port=port,
        allow_code=allow_code,
        new_corpus=new_corpus,
        progress=progress,
    )
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


def runs(root: str | Path | None = None) -> list[Run]:
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
    *,
    type: Literal["f32", "f16", "bf16", "q8_0"] | None = None,
    tokenizer: str | Path | None = None,
    merge: bool = False,
    base: str | Path | None = None,
) -> dict[str, Any]:
    """Export a checkpoint's weights for Hugging Face, PEFT or GGUF.

    Under Hugging Face's names bit for bit. Works in a child process, tensor by tensor. A plan
    starts from what is written where its `model` and `checkpoint.load` name it.

    Of a run that trained adapters these are written, as `peft.PeftModel.from_pretrained` loads
    them; those named by `finetune.adapter` into a folder of that name. Merged, W + s B A is
    computed in fp32 and rounded once to the base's dtype.

    Args:
        source: A checkpoint, or a run: its latest checkpoint; merging, also a PEFT folder.
        to: New folder to write into, or new file that ends in .gguf.
        progress: Called with (bytes done, bytes in all, what).
        type: Of a GGUF file's matrices; default f16.
        tokenizer: A GGUF file, a tokenizer.json or a folder with one, whose tokenizer and chat
            template the weights get; default the base's, else the run's own.
        merge: Merge adapters into their base.
        base: The weights that were fine-tuned; default those that the run's plan names.

    Returns:
        What was written: parameters, tensors, dtype, bytes.

    Raises:
        PlanError: The checkpoint is damaged, its model has no such names, the base is not the one
            that was fine-tuned, or `to` exists.
    """
    from workbench.runs.launch import subprocess_verbs

    folder = source if isinstance(source, str | Path) else source.dir
    if type is not None and Path(to).suffix != ".gguf":
        raise refuse("--type", f"is for a GGUF file; '{to}' is to end in .gguf")
    given = {"--type": type, "--tokenizer": tokenizer}
    options = [word for name, it in given.items() if it is not None for word in (name, str(it))]
    return subprocess_verbs.export_weights(folder, to, merge, base, progress, *options)


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

    written = given_plan(plan)
    notes = base_notes(written)
    return subprocess_verbs.verify(written, precision, allow_code, on) | notes


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

    return profile_layers.profile_layers(
        given_plan(plan), Path(path), seconds, allow_code, progress
    )
