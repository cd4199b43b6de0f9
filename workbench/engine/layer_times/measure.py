"""Measures the blocks of a plan's model: medians of repeated real passes on one device."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engine.layer_times.backward_memory import backward_bytes
from workbench.engine.layer_times.block_clock import BlockClock, DeviceClock
from workbench.engine.layer_times.block_trace import BlockTrace
from workbench.engine.layer_times.model_blocks import Block, block_parameters, model_blocks
from workbench.engine.layer_times.users_code import blamed, refuse_untrained
from workbench.engine.precision import plan_dtypes, set_determinism, set_matmul_precision
from workbench.errors import refuse
from workbench.machine.attached import attached
from workbench.models import Transformer
from workbench.parallel.apply_strategy import parallelize
from workbench.parallel.mesh import build_mesh
from workbench.parallel.parallel_model import ParallelModel, StagePlacement
from workbench.plan.model.layer_profile import Layer, LayerProfile
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schedule_table import executed

WARM_UP = 3
"""Passes that compile, fill caches and are not counted."""
LEAST_PASSES = 5
Progress = Callable[[float, str], None]
Passes = list[tuple[list[float], list[float]]]


def measure_layers(plan: ResolvedPlan, seconds: float, progress: Progress) -> LayerProfile:
    """The layer profile of the model of `plan`, a complete plan of one device.

    Args:
        plan: Its kernels, precision and recomputation are measured, one microbatch at a time.
        seconds: About how long passes are repeated.
        progress: Called with (seconds elapsed, what is done).

    Raises:
        PlanError: A block cannot be timed.
    """
    device = torch.device("cuda" if plan.gpu.device == "cuda" else "cpu")
    set_matmul_precision(plan)
    set_determinism(plan)
    progress(0.0, "building the model")
    with blamed("building it", bool(plan.code)):
        part = _built(plan, device)
    model = part.stages[0]
    blocks = model_blocks(model)
    forward = _forward(plan, part, device)
    trace = BlockTrace(blocks, model)
    loss = trace.run(forward)
    _refuse_uncalled(blocks, trace)
    if plan.code:
        refuse_untrained(blocks, loss)
    del loss
    clock = DeviceClock(device)
    with blamed("its backward", bool(plan.code)):
        timed, alone = _passes(BlockClock(blocks, clock), forward, part, seconds, progress)
        sizes = _sizes(plan, part, blocks, trace, forward)
    return _profile(plan, blocks, trace, timed, sizes, _source(plan, timed, alone))


class _Sizes(NamedTuple):
    """Bytes by block; of the first two, by place in the order of calls."""

    parameters: list[int]
    tied: list[dict[int, int]]
    outputs: list[int]
    backward: list[int] | None
    """None where a device does not show it."""


def _sizes(
    plan: ResolvedPlan,
    part: ParallelModel,
    blocks: list[Block],
    trace: BlockTrace,
    forward: Callable[[], Tensor],
) -> _Sizes:
    model, outputs, backward = part.stages[0], trace.output_bytes, None
    parameters, tied = block_parameters(model, [blocks[i] for i in trace.order])
    if isinstance(model, Transformer):
        outputs = [_boundary_bytes(plan) for _ in blocks]
    device = next(model.parameters()).device
    if device.type == "cuda" or plan.strategy.kernels == "eager":
        part.store.zero_grads()
        persistent = [x for some in part.store.persistent().values() for x in some]
        persistent += model.buffers()
        backward = backward_bytes(blocks, trace, forward, persistent, device, tied)
    return _Sizes(parameters, tied, outputs, backward)


def _built(plan: ResolvedPlan, device: torch.device) -> ParallelModel:
    mesh, (_, partition) = build_mesh(plan, 0, device), executed(plan)
    part = parallelize(
        plan, mesh, StagePlacement([0], partition, False, device, *plan_dtypes(plan))
    )
    part.samples.start_step(0, plan.training.micro_batch)
    return part


def _forward(plan: ResolvedPlan, part: ParallelModel, device: torch.device) -> Callable[[], Tensor]:
    """A forward of one microbatch of random tokens, to the mean loss."""
    t, generator = plan.training, torch.Generator().manual_seed(plan.training.seed)
    size = (2, t.micro_batch, t.sequence_length)
    tokens, targets = torch.randint(plan.vocab, size, generator=generator).to(device)

    def forward() -> Tensor:
        with blamed("its forward", bool(plan.code)):
            loss: Tensor = part.stages[0](tokens, targets) / targets.numel()
        return loss

    return forward


def _refuse_uncalled(blocks: list[Block], trace: BlockTrace) -> None:
    for index, block in enumerate(blocks):
        trained = any(True for module in block.modules for _ in module.parameters())
        if trained and index not in trace.order:
            raise refuse(
                "model.python",
                f"has the submodule '{block.name}', which its forward does not call, so that its "
                "time cannot be separated; legal: a model that calls its blocks as modules",
            )


def _passes(
    clock: BlockClock,
    forward: Callable[[], Tensor],
    part: ParallelModel,
    seconds: float,
    progress: Progress,
) -> tuple[Passes, list[float]]:
    """Times of blocks in passes with hooks; seconds of passes without, in turn with those."""
    timed, alone = Passes(), list[float]()
    begin, count = time.monotonic(), -WARM_UP
    while count < LEAST_PASSES or time.monotonic() - begin < seconds:
        part.store.zero_grads()
        with clock.watching():
            found = clock.times(forward)
        part.store.zero_grads()
        without = _pass_seconds(clock.clock, forward)
        if count >= 0:
            timed.append(found)
            alone.append(without)
        count += 1
        if count == 0:
            begin = time.monotonic()
        done = "warming up" if count <= 0 else f"pass {count}"
        progress(time.monotonic() - begin, done)
    return timed, alone


def _pass_seconds(clock: DeviceClock, forward: Callable[[], Tensor]) -> float:
    begin = clock.stamp()
    forward().backward()
    end = clock.stamp()
    clock.wait()
    return clock.seconds(begin, end)


def _profile(
    plan: ResolvedPlan,
    blocks: list[Block],
    trace: BlockTrace,
    timed: Passes,
    sizes: _Sizes,
    source: str,
) -> LayerProfile:
    """Rows in the order of the blocks' first calls."""
    t = plan.training
    layers = [
        Layer(
            f"node{i}",
            blocks[i].name,
            median(forward[i] for forward, _ in timed),
            median(backward[i] for _, backward in timed),
            sizes.outputs[i],
            sizes.parameters[place],
            tuple(f"node{at}" for at in sorted(trace.reads[i])),
            trace.kept_bytes[i],
            tuple((f"node{trace.order[at]}", size) for at, size in sizes.tied[place].items()),
            sizes.backward[i] if sizes.backward else None,
        )
        for place, i in enumerate(trace.order)
    ]
    return LayerProfile(
        plan.model_name,
        t.micro_batch,
        tuple(layers),
        t.sequence_length,
        plan.strategy.precision,
        source,
    )


def _boundary_bytes(plan: ResolvedPlan) -> int:
    """Of what crosses a cut between our layers, which put out a branch and the residual stream:
    their sum.
    """
    numel = plan.training.micro_batch * plan.training.sequence_length * plan.shape.hidden
    return numel * plan_dtypes(plan)[0].itemsize


def _source(plan: ResolvedPlan, timed: Passes, alone: list[float]) -> str:
    """On what was measured, how, and a pass without hooks beside the layers."""
    s = plan.strategy
    together = sum(median(block) for times in zip(*timed) for block in zip(*times))
    how = f"{s.kernels} kernels, {s.attention} attention, recompute {s.recompute}"
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count > 1)}" if plan.gpu.device == "cpu" else ""
    return (
        f"measured {datetime.date.today().isoformat()} on {attached().name}{threads}, torch "
        f"{torch.__version__}, Python {platform.python_version()}: medians of {len(timed)} passes "
        f"with {how}; all layers {together * 1e3:.4g} ms, a pass without hooks "
        f"{median(alone) * 1e3:.4g} ms"
    )
