"""Verbs that predict: an estimate, a search, a rehearsal, and what they rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.plan.schema import Plan
    from workbench.planner.autoshard import OperatorPlan
    from workbench.planner.explain import Explanation
    from workbench.planner.methods.method_comparison import MethodComparison
    from workbench.planner.search import SearchResult
    from workbench.planner.states_on_gpus import StatesAnswer
    from workbench.planner.validation import Validation
    from workbench.profile import Profile


def given_plan(plan: Plan | str | Path) -> Plan:
    """A plan, loaded where its file is given. Raises `PlanError`."""
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

    written = given_plan(plan)
    if written.code is None:
        return _with_notes(estimate(written), written)
    from workbench.runs.launch.traced_models import traced_model

    return estimate(written, traced_model(written, allow_code))


def _with_notes(found: Profile, plan: Plan) -> Profile:
    """`found` with what is to be said of the weights that the plan fine-tunes."""
    found.notes.update(base_notes(plan))
    return found


def base_notes(plan: Plan, *, any_strategy: bool = False) -> dict[str, str]:
    """What is to be said of the weights that a plan fine-tunes. Raises `PlanError` where they are
    of another model. With `any_strategy` the plan's own, which may be illegal, does not count.
    """
    if plan.finetune is None or plan.finetune.base is None:
        return {}
    from workbench.planner.search.search_space import neutral_plan
    from workbench.runs.launch import preflight

    full = neutral_plan(plan, plan.cluster.gpus) if any_strategy else plan.resolve()
    return preflight.base_notes(full)


def explain(
    plan: Plan | str | Path,
    *,
    tokens: float | None = None,
    price: float | None = None,
    risk: float = 0.05,
    without_each: bool = False,
    rehearse_seconds: float | None = None,
    placements: bool = False,
) -> Explanation:
    """Explain what binds memory and time, and what changes it.

    Cost and energy of the training, what makes the plan fit, and neighbouring plans with their
    step time and memory. Every figure is estimated, but for those that are rehearsed.

    Args:
        plan: A plan, or the path of a plan file.
        tokens: Tokens to train on; default 20 a parameter.
        price: USD an hour of one GPU; default its list price.
        risk: Largest probability of running out of memory of what is said to fit.
        without_each: Also memory without each dimension of the parallelism (tensor, context,
            pipeline, expert and data parallelism, sharding, offload, recomputation), one by one.
        rehearse_seconds: Rehearse each of those too, on the rank with the most memory, for so
            many seconds at most.
        placements: Also every order of the axes over nodes and racks, best first, with optimizer
            shards within and across racks.

    Raises:
        PlanError: The plan or a number is illegal.
    """
    from workbench.planner.explain import explain

    rehearsed = None
    if rehearse_seconds is not None:
        from workbench.runs.launch.subprocess_verbs import rehearse_within

        rehearsed = rehearse_within(rehearse_seconds)
    written = given_plan(plan)
    base_notes(written)
    return explain(
        written,
        tokens,
        price,
        risk=risk,
        without=without_each or rehearsed is not None,
        placements=placements,
        rehearse=rehearsed,
    )


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
    return subprocess_verbs.operators(given_plan(plan), ranks, limit, sequences, mode, allow_code)


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

    Every legal plan of a space is estimated, and ranked by time, cost, energy or GPUs; within the
    interval of the best the simplest comes first. Model, GPUs and batch are those of the plan; its
    own strategy does not matter.

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
    from workbench.planner.search.results.presented_result import LOOKED_AT, presented

    written = given_plan(plan)
    base_notes(written, any_strategy=True)
    found = search(
        written,
        objective,
        space=space,
        top=max(top, LOOKED_AT) if top > 0 else top,
        where=where,
        deadline_days=deadline_days,
        tokens=tokens,
        risk=risk,
        progress=progress,
    )
    return presented(found, top, kernels_tried=space == "vast")


def search_methods(
    plan: Plan | str | Path,
    *,
    space: str | None = None,
    where: Sequence[str] = (),
    deadline_days: float | None = None,
    tokens: float | None = None,
    risk: float = 0.05,
    progress: Callable[[str], None] = lambda words: None,
) -> MethodComparison:
    """Search the cheapest way to fine-tune: all weights, adapters, or adapters on a 4-bit base.

    Of each method the plans on the fewest GPUs, of the lowest cost and of the shortest time, and
    what they save of full fine-tuning. GPUs are those of the plan, half of them, and so on.

    Args:
        plan: A plan with `finetune`, or the path of its file; its strategy does not matter.
        space: default, wide or vast, as `search` has them.
        where: Conditions such as `strategy.data.offload=none` on every plan.
        deadline_days: Keep plans that train `tokens` within so many days.
        tokens: Tokens to train on; default those of the plan's steps.
        risk: Largest probability of running out of memory.
        progress: Called with what is searched.

    Raises:
        PlanError: The plan does not fine-tune, or an argument means nothing; a method without a
            plan that fits is no error.
    """
    from workbench.planner.methods.method_search import search_methods

    written = given_plan(plan)
    base_notes(written, any_strategy=True)
    return search_methods(
        written,
        space=space,
        where=where,
        deadline_days=deadline_days,
        tokens=tokens,
        risk=risk,
        progress=progress,
    )


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

    written = given_plan(plan)
    notes = base_notes(written)
    found = subprocess_verbs.rehearse(written, ranks, progress, allow_code, operators, over_time)
    found.notes.update(notes)
    return found


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

    return subprocess_verbs.check_order(given_plan(plan), progress, allow_code)


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
