"""Preflight: whether this machine can run a plan now, by GPUs, memory, port, corpus and disk.

After legality it is the only place that may refuse a run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from workbench.checkpoint.checksums import another_checkpoint, damage
from workbench.checkpoint.gguf.gguf_metadata import check_gguf
from workbench.checkpoint.huggingface.huggingface_folder import check_config
from workbench.checkpoint.manifest import MANIFEST, read_manifest
from workbench.checkpoint.resume_point import (
    ADAPTER_CONFIG,
    CONFIG,
    LOAD,
    STEP,
    checkpoint_shape,
    finished_checkpoints,
    holds_adapters,
    is_gguf,
    is_huggingface_folder,
    legal_adapters,
    nothing_left,
    refuse_other_model,
    steps_done,
    with_field,
)
from workbench.errors import PlanError, Problem, refuse
from workbench.machine.attached import CPU_RANKS, Attached, attached, is_another_model
from workbench.plan import corpus_files
from workbench.plan.model.block_linears import adapter_parameters
from workbench.plan.model.parameter_count import parameters
from workbench.plan.optimizer_state import state_bytes
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.runs.launch.free_memory import memory_problem
from workbench.runs.launch.kernel_compilers import (
    missing_compiler,
    missing_four_bit_kernel,
    missing_torchao,
)
from workbench.runs.launch.rendezvous_ports import port_problem
from workbench.runs.store.run_directory import default_root, unwritable
from workbench.runtime_facts.conversation_fields import FIELDS
from workbench.units import GIB

BASE = "finetune.base"
SPARE_BYTES = 64 * 2**20
"""Disk that logs and telemetry of a run may take."""
SAME_MEMORY = 0.9
"""An attached GPU with less than this share of the planned GPU's memory is another model."""


def preflight(
    plan: Plan,
    *,
    root: str | Path | None = None,
    port: int | None = None,
    force: bool = False,
    allow_code: bool = False,
) -> list[Problem]:
    """Check that this machine can run `plan` now.

    Whether the plan fits its GPUs is not asked here; that takes an estimate.

    Args:
        plan: A plan; a resolved one is not resolved again.
        root: Folder of run directories; default $WORKBENCH_RUNS, else ./runs.
        port: Port of the rendezvous; None: a free one.
        force: Leave out what might still work: memory or disk that are short now.
        allow_code: Whether the user allows a model that is given as Python.

    Returns:
        Everything that stands against the run; empty where it can start.

    Raises:
        PlanError: The plan is illegal.
    """
    full = plan.resolve()
    found, cannot = attached(), unsupported(full, "run", allow_code)
    asked = [*gpu_problems(full, found), *missing_compiler(full.strategy.kernels, full.gpu.device)]
    asked += missing_torchao(full.strategy.precision)
    quantize = None if full.finetune is None else full.finetune.quantize
    asked += missing_four_bit_kernel(quantize, full.strategy.kernels, full.gpu.device)
    asked += [
        *_corpus(full),
        *checkpoint_problems(full),
        *base_problems(full),
        *_initial_adapters(full),
        *_root(default_root(root)),
        *_port(port),
    ]
    if not cannot and not asked:
        asked += _encoding(full)
    if not cannot and not asked and not force:
        asked += [*_memory(full, found), *_disk(full, default_root(root))]
    return [*cannot, *asked]


def gpu_problems(plan: ResolvedPlan, found: Attached) -> list[Problem]:
    """The plan's GPUs against those attached: kind, machines, number, memory, model."""
    gpu, ranks, nodes = plan.gpu, plan.world_size, plan.cluster.nodes or 1
    here = (
        f"here: {found.count} x {found.name}" if found.device == "cuda" else f"here: {found.name}"
    )
    legal = f"`cluster.gpu: local` with `cluster.gpus` from 1 to {found.count} runs on it"
    gib = found.least_bytes(ranks) / GIB
    if gpu.device != found.device and found.unusable:
        return [Problem("cluster.gpu", f"is {gpu.name}, and {found.why_not_cuda}; {CPU_RANKS}")]
    if gpu.device != found.device:
        why = f" ({found.why_not_cuda})" if found.why_not_cuda else ""
        field, message = (
            "gpu",
            f"{ranks} x {gpu.name} needs {gpu.device} devices; {here}{why}; {legal}",
        )
    elif nodes > 1:
        field, message = (
            "nodes",
            f"is {nodes}; runs start on one machine; `workbench export` makes a launch for each",
        )
    elif ranks > found.count:
        field, message = (
            "gpus",
            f"is {ranks}, more than is attached ({here}, {found.count} ranks at most); {legal}",
        )
    elif gpu.device == "cuda" and gib < SAME_MEMORY * gpu.memory_gib:
        field, message = (
            "gpu",
            f"{gpu.name} has {gpu.memory_gib:.1f} GiB, {found.name} {gib:.1f} GiB; {legal}",
        )
    elif gpu.device == "cuda" and any(is_another_model(gpu, name) for name in found.names(ranks)):
        here = f"here: {', '.join(found.names(ranks))}"
        field, message = "gpu", f"is {gpu.name}, another model than is attached ({here}); {legal}"
    else:
        return []
    return [Problem(f"cluster.{field}", message)]


def _corpus(plan: Plan) -> list[Problem]:
    """Text there is, and enough of it for one sequence: a token is a byte or more, and each
    document has an end token. What a Parquet file holds is not known before it is read, and a
    conversation may be shorter.
    """
    try:
        sources = corpus_files.source_files(plan.corpus)
    except PlanError as error:
        return error.problems
    problems = []
    length = plan.training.sequence_length
    for one in sources:
        tokens = sum(path.stat().st_size + 1 for path in one.paths)
        tokens -= int(tokens * plan.corpus.holdout)
        if one.format in ("parquet", *FIELDS) or tokens > length:
            continue
        problems.append(
            Problem(
                f"{one.where}.source",
                f"'{one.source}' has at most {tokens} tokens to train on, a sequence of "
                f"{length} needs {length + 1}; take a larger one, or lower "
                "training.sequence_length",
            )
        )
    return problems


def _encoding(plan: ResolvedPlan) -> list[Problem]:
    """A tokenizer that the model takes, and a chat template where messages need one."""
    from workbench.corpora.tokenized_corpus import check_encoding  # loads jinja2

    try:
        check_encoding(plan.corpus, plan.vocab)
    except PlanError as error:
        return error.problems
    return []


def checkpoint_problems(plan: ResolvedPlan) -> list[Problem]:
    """Whether what the plan starts from is of the plan's model, and whole by its manifest and its
    files' sizes.

    Their checksums are verified when the run starts (`whole`), of large ones by the ranks that read
    them.
    """
    load = plan.checkpoint.load
    if load is None:
        return []
    if plan.finetune and (is_gguf(Path(load)) or is_huggingface_folder(Path(load))):
        what = "holds weights, and no state of fine-tuning to go on from"
        legal = "a checkpoint of a run, or null with the weights as finetune.base"
        return [Problem("checkpoint.load", f"'{load}' {what}; legal: {legal}")]
    return _weights(plan, load, resumes=True)


def base_problems(plan: ResolvedPlan) -> list[Problem]:
    """The same of the weights that are fine-tuned."""
    base = None if plan.finetune is None else plan.finetune.base
    if base is None:
        return []
    return [with_field(one, BASE) for one in _weights(plan, base, resumes=False)]


def base_notes(plan: ResolvedPlan) -> dict[str, str]:
    """`base`: that the weights which a plan fine-tunes are not on this machine; empty where they
    are, or it names none.

    What costs nothing to predict without them is not refused: a plan is often made elsewhere.

    Raises:
        PlanError: They are here, and are of another model or damaged.
    """
    tune = plan.finetune
    if tune is None or tune.base is None:
        return {}
    if not os.path.exists(os.path.expanduser(tune.base)):
        words = "is not on this machine: not compared with the model, and a run needs it"
        return {"base": f"{BASE} '{tune.base}' {words}"}
    if problems := base_problems(plan):
        raise PlanError(problems)
    return {}


def _initial_adapters(plan: ResolvedPlan) -> list[Problem]:
    """Whether the adapters that training goes on from are there; the ranks read them."""
    initial = None if plan.lora is None else plan.lora.initial
    if initial is None or (Path(initial).expanduser() / ADAPTER_CONFIG).is_file():
        return []
    legal = f"{legal_adapters(Path(initial).expanduser())}, or null"
    return [Problem("finetune.lora.initial", f"'{initial}' holds no adapters; {legal}")]


def _weights(plan: ResolvedPlan, load: str, resumes: bool) -> list[Problem]:
    load = os.path.expanduser(load)
    weights = is_gguf(Path(load)) or is_huggingface_folder(Path(load))
    if not weights and not (Path(load) / MANIFEST).is_file():
        return [Problem(LOAD, f"'{load}' {_why_no_weights(Path(load))}")]
    if not weights and (why := damage(Path(load))):
        return [Problem(LOAD, f"{why}; {another_checkpoint(Path(load))}")]
    try:
        if is_gguf(Path(load)):
            check_gguf(Path(load), plan.shape)
        elif is_huggingface_folder(Path(load)):
            check_config(Path(load), plan.shape)
        else:
            body = read_manifest(Path(load))
            if resumes:
                steps = steps_done(Path(load), body["meta"], plan)
                return nothing_left(f"'{load}'", steps, plan)
            else:
                if holds_adapters(body["meta"]):
                    legal = "their base, or both merged (`workbench weights --merge`)"
                    raise refuse(LOAD, f"'{load}' holds adapters alone; legal: {legal}")
                other = checkpoint_shape(Path(load), body["meta"])
                refuse_other_model("model", Path(load), other, plan.shape)
    except PlanError as error:
        return error.problems
    except ValueError as error:
        return [Problem("checkpoint.load", str(error))]
    return []


def _why_no_weights(load: Path) -> str:
    """What is at a path that holds no weights, and what would be legal."""
    if found := finished_checkpoints(load / "checkpoints"):
        return f"is a run, not one of its checkpoints; legal: '{found[-1]}'"
    if STEP.fullmatch(load.name) and load.is_dir():
        return f"is no finished checkpoint: it has no {MANIFEST}; {another_checkpoint(load)}"
    why = "is no checkpoint" if load.exists() else "does not exist"
    return (
        f"{why}; legal: a folder that holds {MANIFEST}, one of Hugging Face weights with "
        f"{CONFIG}, a GGUF file, or null"
    )


def _root(root: Path) -> list[Problem]:
    """Whether runs can be written in `root`, or in the nearest folder above it that exists."""
    nearest = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    if not nearest.is_dir():
        return unwritable(root, NotADirectoryError(0, f"{nearest} is not a folder")).problems
    if not os.access(nearest, os.W_OK | os.X_OK):
        return unwritable(root, PermissionError(0, f"no permission to write in {nearest}")).problems
    return []


def _port(port: int | None) -> list[Problem]:
    problem = port_problem(port) if port is not None else None
    return [problem] if problem else []


def _memory(plan: ResolvedPlan, found: Attached) -> list[Problem]:
    problem = memory_problem(plan, found)
    return [problem] if problem else []


def _disk(plan: ResolvedPlan, root: Path) -> list[Problem]:
    """Free space against logs, and the checkpoints that stand at once (one is written before an old
    one goes).
    """
    each = state_bytes(plan)
    num_checkpoints = plan.checkpoint.keep + 1 if plan.checkpoint.every else plan.saves_at_end
    count = 0 if plan.code else parameters(plan.shape).total  # of code nobody knows before it runs
    if plan.lora:  # and nothing of what is frozen
        count = adapter_parameters(plan.shape, plan.lora)
    need = SPARE_BYTES + num_checkpoints * (each.parameter + each.optimizer) * count
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(nearest).free
    if need <= free:
        return []
    space = f"take about {need / GIB:.2f} GiB, {free / GIB:.2f} GiB are free in {root}"
    if not num_checkpoints:
        return [Problem("root", f"the logs of a run {space}; keep runs elsewhere (--root)")]
    message = (
        f"{num_checkpoints} checkpoints and the logs {space}; lower it, or keep runs "
        f"elsewhere (--root)"
    )
    return [Problem("checkpoint.keep", message)]
