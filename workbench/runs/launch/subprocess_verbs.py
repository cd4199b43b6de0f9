"""The verbs that need torch, in a child process: rehearse, verify, export weights, generate.

Shells, notebooks and widgets that ask for it load no torch and hold no CUDA context.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.checkpoint.intact_checkpoints import choose_checkpoint
from workbench.checkpoint.manifest import read_manifest
from workbench.checkpoint.resume_point import ADAPTER_CONFIG, holds_adapters, legal_adapters
from workbench.errors import ChildError, PlanError, refuse
from workbench.machine.attached import attached, host_memory
from workbench.machine.gpu_catalog import local_constants
from workbench.plan.model.parameter_count import parameters
from workbench.plan.operators.traced.graph_placement import unruled
from workbench.plan.operators.traced.node_factors import factor_graph
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.strategy.float8_rules import verified_precision
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.profile import Profile
from workbench.runs.launch import child_process
from workbench.runs.launch.kernel_compilers import missing_compiler, missing_torchao
from workbench.runs.launch.preflight import gpu_problems
from workbench.runs.launch.traced_models import traced_model
from workbench.safe_io.gguf_files import SUFFIX
from workbench.units import GIB
from workbench.untrusted_text import HALF, shown

if TYPE_CHECKING:
    from workbench.planner.autoshard import OperatorPlan

ORDER_FILE = "order.json"
"""What a check of the order of calls writes."""
GENERATION = "workbench.engine.generation"
GPU_CHECK = "workbench.engine.gpu_check"
GPU_CHECK_SECONDS = 90.0
"""When a child that asks the GPUs is ended; it starts torch, and waits for drivers."""
DAY_SECONDS = 86_400
LoadingProgress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and what is loaded."""
VerifiedOn = Literal["cpu", "gpu"]
VerifiedPrecision = Literal["fp64", "fp32", "bf16", "fp8"]
VERIFY_MODULES = {
    "cpu": "workbench.engine.verify.equivalence",
    "gpu": "workbench.engine.verify.launched_ranks",
}
VERIFY_COPIES = 8
"""Copies of the model that one device holds in 8-byte numbers: weights, gradients, moments, work
space.
"""


def rehearse(
    plan: Plan,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    allow_code: bool = False,
    operators: bool = False,
    over_time: bool = False,
) -> Profile:
    """Rehearse `plan` in a child process; see `workbench.rehearse`."""
    chosen = [] if ranks is None else ["--ranks", ",".join(map(str, ranks))]
    chosen += ["--operators"] * operators + ["--over-time"] * over_time
    with tempfile.TemporaryDirectory() as folder:
        return Profile.read(_rehearsed(plan, folder, chosen, progress, allow_code))


def rehearse_within(seconds: float) -> Callable[[Plan, list[int]], Profile]:
    """Rehearses ranks of a plan; `ChildError` where they take longer. Raises `PlanError` for a
    limit that is none.
    """
    if not 0 < seconds <= DAY_SECONDS:
        raise refuse("rehearse", f"is {seconds:g} s; legal: above 0 to {DAY_SECONDS:,}, e.g. 60")

    def rehearse_ranks(plan: Plan, ranks: list[int]) -> Profile:
        with tempfile.TemporaryDirectory() as folder:
            chosen = ["--ranks", ",".join(map(str, ranks))]
            return Profile.read(_rehearsed(plan, folder, chosen, None, False, seconds))

    return rehearse_ranks


def operators(
    plan: Plan,
    ranks: int | Sequence[int] | None,
    limit: float | None,
    sequences: int | None,
    mode: str,
    allow_code: bool,
) -> OperatorPlan:
    """Choose how each operator is sharded, within `limit` bytes; see `workbench.operators`."""
    from workbench.planner.autoshard import microbatch_sequences, searched_plan
    from workbench.planner.operator_plans.fitting_operators import choose_within_memory

    full, model = searched_plan(plan, ranks, sequences), None
    if full.code:
        count = microbatch_sequences(full, ranks, sequences)
        model = traced_model(full, allow_code, count, "run")
    chosen = choose_within_memory(plan, limit, ranks, sequences, mode, model)
    unsharded = [*unruled(factor_graph(model.graph))] if model else []
    return replace(chosen, reason=" ".join([chosen.reason, *unsharded])) if unsharded else chosen


def check_order(
    plan: Plan, progress: Callable[[int, int], None] | None = None, allow_code: bool = False
) -> dict[str, Any]:
    """Check the order of a plan's calls in a child process; see `workbench.check_order`."""
    with tempfile.TemporaryDirectory() as folder:
        found = _rehearsed(plan, folder, ["--check"], progress, allow_code)
        return dict(json.loads((found / ORDER_FILE).read_text()))


def _rehearsed(
    plan: Plan,
    folder: str,
    options: list[str],
    progress: Callable[[int, int], None] | None,
    allow_code: bool,
    seconds: float | None = None,
) -> Path:
    """Run the rehearsal's child with `options`, for so many `seconds` at most; the folder of its
    answer.
    """
    full, out = plan.resolve(), Path(folder, "rehearsed")
    require(full, "rehearse", allow_code)

    def on_line(text: str) -> None:
        if progress and (record := child_process.progress_record(text)):
            progress(record["done"], record["of"])

    arguments = [_plan_file(full, folder), "--to", str(out), *options, *_allow_code(allow_code)]
    child_process.python("workbench.rehearsal", arguments, on_line, deadline_seconds=seconds)
    return out


def verify(
    plan: Plan,
    precision: VerifiedPrecision | None = None,
    allow_code: bool = False,
    on: VerifiedOn = "cpu",
) -> dict[str, Any]:
    """Verify `plan` in a child process; see `workbench.verify`."""
    full = plan.resolve()
    in_precision = verified_precision(full, precision, on)
    require(full, "run", allow_code)
    if on == "gpu":
        _refuse_other_gpus(full)
    else:
        _refuse_what_is_too_large(full)
    if problems := missing_compiler(full.strategy.kernels, "cuda" if on == "gpu" else "cpu"):
        raise PlanError(problems)
    if problems := missing_torchao(full.strategy.precision):
        raise PlanError(problems)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        options = ["--precision", in_precision, *_allow_code(allow_code)]
        child_process.python(VERIFY_MODULES[on], [_plan_file(full, folder), *options], lines.append)
    return dict(json.loads(lines[-1]))


def _refuse_other_gpus(plan: ResolvedPlan) -> None:
    """Refuse to verify on GPUs where the plan's are not attached, or do not hold two models."""
    found = attached()
    if found.device != "cuda":
        why = f"no GPU can be used here ({found.why_not_cuda})"
        raise refuse("--on", f"is gpu, and {why}; legal: cpu")
    if plan.gpu.device != "cuda":
        why = f"; {found.why_not_cuda}" if found.why_not_cuda else ""
        raise refuse(
            "--on",
            f"is gpu, but cluster.gpu is {plan.gpu.name}, whose ranks are {plan.gpu.device} "
            f"ranks{why}; legal: cpu, or a plan of the attached GPUs",
        )
    if problems := gpu_problems(plan, found):
        raise PlanError(problems)
    if plan.code:
        return
    need = 8 * 2 * VERIFY_COPIES * parameters(plan.shape).total
    have = found.least_bytes(plan.world_size)
    if need > have:
        raise refuse(
            "model",
            f"verifying {plan.shape.name} takes about {need / GIB:.1f} GiB of each GPU, which has "
            f"{have / GIB:.1f} GiB; legal: a smaller model with the same strategy, e.g. tiny",
        )


def export_weights(
    source: str | Path,
    to: str | Path,
    merge: bool = False,
    base: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    *options: str,
) -> dict[str, Any]:
    """Export the weights of a checkpoint in a child process; see `workbench.weights`."""
    record: dict[str, Any] = {}

    def on_line(text: str) -> None:
        nonlocal record
        if text.startswith("{"):
            record = json.loads(text)
            if progress and "done" in record:
                progress(record["done"], record["of"], record["what"])

    folder = Path(to).absolute()
    checkpoint, module, skipped = _exported(source, folder, merge)
    if options and module == "export_adapter":
        raise refuse(options[0], "is for weights, and adapters go alone; legal: with --merge")
    command = [str(checkpoint), "--to", str(folder), *options]
    command += [] if base is None else ["--base", str(Path(base).expanduser().absolute())]
    child_process.python(f"workbench.engine.export.{module}", command, on_line)
    found = {"source": str(checkpoint), **record}
    return found | {"skipped": skipped} if skipped else found


def _exported(source: str | Path, to: Path, merge: bool) -> tuple[Path, str, list[str]]:
    """The checkpoint or PEFT folder that `source` names, the module that exports it, and newer
    checkpoints that are damaged.
    """
    merged = "export_gguf" if to.suffix == SUFFIX else "export_weights"
    if (Path(source) / ADAPTER_CONFIG).is_file():
        if not merge:
            raise refuse("--merge", f"is needed: '{source}' is a folder of adapters already")
        return Path(source).absolute(), merged, []
    try:
        checkpoint, skipped = choose_checkpoint(source, "SOURCE", lambda words: None)
    except PlanError:
        if not any(Path(source).glob(f"*/{ADAPTER_CONFIG}")):
            raise
        legal = legal_adapters(Path(source))
        raise refuse("SOURCE", f"'{source}' holds adapters by name; {legal}") from None
    adapters = holds_adapters(read_manifest(checkpoint)["meta"])
    if merge and not adapters:
        raise refuse("--merge", f"is for adapters; '{checkpoint}' holds all weights")
    if adapters and not merge and to.suffix == SUFFIX:
        raise refuse("--merge", f"is needed: '{checkpoint}' holds adapters, which GGUF has not")
    return checkpoint, merged if merge or not adapters else "export_adapter", skipped


def gpu_check(what: Literal["facts", "all-reduce"], *options: str) -> dict[str, Any]:
    """Ask torch of the GPUs, or measure an all-reduce over them, in a child process.

    Args:
        what: `facts` (`engine.gpu_check.facts`) or `all-reduce` (`all_reduce_bandwidth` there).
        options: Its command line.

    Returns:
        Its answer.

    Raises:
        ChildError, ValueError: It died, hung or refused; the last lines are its last words.
    """
    lines: list[str] = []
    try:
        child_process.python(
            GPU_CHECK, [what, *options], lines.append, deadline_seconds=GPU_CHECK_SECONDS
        )
    except ChildError as error:  # NCCL warns on the standard output
        head, _, rest = str(error).partition("\n")
        raise ChildError("\n".join([head, *lines, rest])) from None
    answers = [line for line in lines if line.startswith("{")]
    if not answers:
        raise ChildError("\n".join([f"{GPU_CHECK} gave no answer:", *lines]))
    return dict(json.loads(answers[-1]))


def inspect(plan: Plan) -> None:
    """Build the Python model of a resolved plan, and check that its operators name modules of it.

    Raises:
        ValueError: What does not match.
    """
    with tempfile.TemporaryDirectory() as folder:
        child_process.python(
            "workbench.engine.python_model.check_python_model",
            [_plan_file(plan, folder), *_allow_code(True)],
            lambda line: None,
        )


def _allow_code(allow_code: bool) -> list[str]:
    return ["--allow-code"] if allow_code else []


def _plan_file(plan: Plan, folder: str) -> str:
    path = Path(folder, "plan.yaml")
    path.write_text(plan.to_yaml(), encoding="utf-8")
    return str(path)


def _refuse_what_is_too_large(plan: ResolvedPlan) -> None:
    """Verifying forks every rank on this machine, each with unsharded copies of the model."""
    most = attached().cores * int(local_constants()["ranks_per_core"])
    if plan.world_size > most:
        raise refuse(
            "cluster.gpus",
            f"is {plan.world_size}; verify runs on CPU ranks, of which this machine starts "
            f"up to {most}; legal: 1 to {most}, with the same strategy",
        )
    if plan.code:  # its size is known only when it is built
        return
    copies = VERIFY_COPIES * (1 + plan.most_replicas)
    need, have = 8 * copies * parameters(plan.shape).total, host_memory()
    if need > have:
        raise refuse(
            "model",
            f"verifying {plan.shape.name} takes about {need / GIB:.1f} GiB, this machine has "
            f"{have / GIB:.1f} GiB; legal: a smaller model with the same strategy, e.g. tiny",
        )


def generate(
    model: str | Path,
    prompt: str,
    tokens: int,
    tensor: int,
    chat: bool,
    adapter: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    loading: LoadingProgress | None = None,
) -> dict[str, Any]:
    """Generate in a child process; see `workbench.generate`."""
    if half := HALF.search(prompt):
        raise refuse("prompt", f"is no UTF-8 text at character {half.start()}")
    options = [
        *_whole_numbers(tokens=tokens, tensor=tensor),
        *["--chat"] * chat,
        *_adapter(adapter),
    ]
    with tempfile.TemporaryDirectory() as folder:
        # A command line holds 128 KiB of an argument.
        path = Path(folder, "prompt.txt")
        path.write_bytes(prompt.encode())
        return _generated(["generate", *options, "--", str(model), str(path)], progress, loading)


def perplexity(
    model: str | Path,
    texts: Sequence[str | Path],
    tensor: int,
    pipeline: int,
    data: int,
    length: int,
    adapter: str | Path | None = None,
    loading: LoadingProgress | None = None,
) -> dict[str, Any]:
    """Measure perplexity in a child process; see `workbench.perplexity`."""
    if not texts:
        raise refuse("texts", "are none; give at least one file")
    options = _whole_numbers(tensor=tensor, pipeline=pipeline, data=data, length=length) + _adapter(
        adapter
    )
    return _generated(["perplexity", *options, "--", str(model), *map(str, texts)], None, loading)


def _adapter(folder: str | Path | None) -> list[str]:
    return [] if folder is None else [f"--adapter={folder}"]


def _whole_numbers(**options: int) -> list[str]:
    """Options of a command line, each 1 or more."""
    for name, value in options.items():
        if not isinstance(value, int) or value < 1:
            raise refuse(name, f"is {shown(value)}; legal: whole numbers from 1")
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _generated(
    words: list[str], progress: Callable[[str], None] | None, loading: LoadingProgress | None
) -> dict[str, Any]:
    """The answer of `GENERATION`; the text of its other lines goes to `progress`, and how much of
    the weights is loaded to `loading`.
    """
    record: dict[str, Any] = {}

    def on_line(text: str) -> None:
        nonlocal record
        if text.startswith("{"):
            record = json.loads(text)
            if progress and "more" in record:
                progress(record["more"])
            if loading and "done" in record:
                loading(record["done"], record["of"], record["what"])

    child_process.python(GENERATION, words, on_line)
    return record
