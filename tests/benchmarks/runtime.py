"""Our runtime beside its peers: `python tests/benchmarks/runtime.py [--hidden 64 256] [--ranks 2 4]
[--only NAME]`.

Each contest trains the same model, weights, batch and optimizer in the same processes: a step of
ours, a step of the peer, in turn, after a warm-up. Ratios above 1 mean that ours is faster: of
median wall time, and of CPU seconds summed over ranks (on a machine with fewer cores than ranks the
wall shows no bubble). Ours also takes the global norm and the whole job's loss in each step; the
peers take neither.

Peers: DTensor's `parallelize_module`, torch's own pipelining of the same schedule,
`DistributedDataParallel`, `fully_shard`. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.models import Transformer
from workbench.models.weight_init import initial_value
from workbench.parallel.apply_strategy import keep_pipeline_stage
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

WARM, ROUNDS = 3, 12
LAYERS, VOCAB, LENGTH, MICRO = 4, 1024, 128, 4
Step = Callable[[Tensor, Tensor], None]
"""One step on tokens and targets [B, T] of the whole job."""


def plan_of(
    hidden: int, ranks: int, strategy: dict[str, Any], microbatches: int = 4
) -> ResolvedPlan:
    """The same small model and global batch, whatever the strategy."""
    data = ranks // max(
        1, strategy.get("tensor", {}).get("size", 1) * strategy.get("pipeline", {}).get("size", 1)
    )
    return Plan.model_validate(
        {
            "model": {
                "layers": LAYERS,
                "hidden": hidden,
                "heads": 4,
                "ffn": 4 * hidden,
                "vocab": VOCAB,
                "norm": "layernorm",
                "mlp": "gelu",
                "positions": "learned",
                "biases": "all",
                "max_positions": LENGTH,
            },
            "cluster": {"gpu": "local", "gpus": ranks},
            "strategy": strategy,
            "training": {
                "sequence_length": LENGTH,
                "micro_batch": MICRO,
                "global_batch": MICRO * microbatches * data,
                "optimizer": {"clip": None, "decay": "constant"},
            },
        }
    ).resolve()


def model_of(plan: ResolvedPlan) -> Transformer:
    """The plain model with the plan's initial weights."""
    model = Transformer(plan.shape)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                initial_value(
                    name, tuple(p.shape), plan.shape.layers, plan.training.seed, torch.float32
                )
            )
    return model


def ours(plan: ResolvedPlan, rank: int) -> Step:
    """The product's own step."""
    session = Session.build(plan, build_mesh(plan, rank), torch.device("cpu"))
    data = session.mesh["data"]
    shape = (plan.num_microbatches, plan.training.micro_batch)
    count = iter(range(10**9))

    def step(tokens: Tensor, targets: Tensor) -> None:
        mine = (x.chunk(data.size)[data.index].unflatten(0, shape) for x in (tokens, targets))
        session.step(next(count), *mine)

    return step


def _optimizer(model: nn.Module, plan: Plan, **how: Any) -> torch.optim.Optimizer:
    o = plan.training.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=o.learning_rate,
        betas=(o.beta1, o.beta2),
        eps=o.epsilon,
        weight_decay=o.weight_decay,
        **(how or {"fused": True}),
    )


def _accumulating(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: ResolvedPlan, rank: int, data: int
) -> Step:
    """A plain loop over microbatches; what reduces gradients is told of the last one."""
    scale = 1 / (plan.training.micro_batch * plan.training.sequence_length * plan.num_microbatches)
    ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None

    def step(tokens: Tensor, targets: Tensor) -> None:
        mine = list(
            zip(
                *(
                    x.chunk(data)[rank % data].split(plan.training.micro_batch)
                    for x in (tokens, targets)
                )
            )
        )
        for i, (x, y) in enumerate(mine):
            if ddp is not None:
                ddp.require_backward_grad_sync = i == len(mine) - 1
            (model(x, y) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(plan: ResolvedPlan, rank: int) -> Step:
    """torch's DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(model_of(plan), gradient_as_bucket_view=True)
    return _accumulating(model, _optimizer(model, plan), plan, rank, plan.world_size)


def fsdp(plan: ResolvedPlan, rank: int) -> Step:
    """torch's fully_shard, a unit a block, resharded after forward."""
    from torch.distributed.fsdp import fully_shard

    model = model_of(plan)
    mesh = dist.init_device_mesh("cpu", (plan.world_size,))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _accumulating(model, _optimizer(model, plan, foreach=True), plan, rank, plan.world_size)


def dtensor(plan: ResolvedPlan, rank: int) -> Step:
    """DTensor's column and row styles on every block."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = model_of(plan)
    mesh = dist.init_device_mesh("cpu", (plan.world_size,))
    column = ("attention.q", "attention.k", "attention.v", "mlp.up")
    for block in model.blocks.values():
        styles = {name: ColwiseParallel() for name in column}
        parallelize_module(
            block, mesh, styles | {n: RowwiseParallel() for n in ("attention.o", "mlp.down")}
        )
    return _accumulating(model, _optimizer(model, plan, foreach=False), plan, rank, 1)


TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def pipelining(plan: ResolvedPlan, rank: int) -> Step:
    """torch.distributed.pipelining with the same schedule and partition."""
    from torch.distributed.pipelining import PipelineStage, schedules

    p = plan.strategy.pipeline
    assert isinstance(p.partition, list)
    stages = len(p.partition)
    v_shaped = p.schedule in ("zb-v", "dualpipe-v")
    mine = (
        [rank]
        if p.chunks == 1
        else [rank, stages - 1 - rank]
        if v_shaped
        else list(range(rank, stages, p.size))
    )
    built = []
    for stage in mine:
        model = model_of(plan)
        keep_pipeline_stage(model, stage, p.partition)
        built.append(PipelineStage(model, stage, stages, torch.device("cpu")))
    t = plan.training
    scale = 1 / (t.global_batch * t.sequence_length)
    made: Any = getattr(schedules, TORCH_SCHEDULES[p.schedule])
    schedule = made(
        built if p.chunks > 1 else built[0],
        plan.num_microbatches,
        loss_fn=lambda loss, _: loss * scale,
        scale_grads=False,
    )
    optimizer = _optimizer(nn.ModuleList([one.submod for one in built]), plan)

    def step(tokens: Tensor, targets: Tensor) -> None:
        last = {"target": targets} if stages - 1 in mine else {}
        schedule.step(
            *((tokens,) if 0 in mine else ()), **last, targets_BT=targets, return_outputs=False
        )
        optimizer.step()
        optimizer.zero_grad()

    return step


def contests(
    hidden: int, ranks: int
) -> dict[str, tuple[ResolvedPlan, Callable[[ResolvedPlan, int], Step]]]:
    """Name -> (plan, peer)."""
    pipeline = {"size": ranks}
    chunked = {**pipeline, "chunks": 2}
    found: dict[str, tuple[ResolvedPlan, Callable[[ResolvedPlan, int], Step]]] = {
        "tensor": (plan_of(hidden, ranks, {"tensor": {"size": ranks}}), dtensor),
        "data": (plan_of(hidden, ranks, {}), ddp),
        "zero-3": (plan_of(hidden, ranks, {"data": {"zero": 3, "reduce": "microbatch"}}, 1), fsdp),
    }
    for schedule in ("gpipe", "1f1b"):
        strategy = {"pipeline": {**pipeline, "schedule": schedule}}
        found[f"pipeline {schedule}"] = (plan_of(hidden, ranks, strategy, 4 * ranks), pipelining)
    if 2 * ranks <= LAYERS:
        for schedule in ("interleaved", "zb-v", "dualpipe-v"):
            strategy = {"pipeline": {**chunked, "schedule": schedule}}
            found[f"pipeline {schedule}"] = (
                plan_of(hidden, ranks, strategy, 4 * ranks),
                pipelining,
            )
    return found


def timed(
    plan: ResolvedPlan, peer: Callable[[Plan, int], Step], rounds: int, rank: int
) -> list[list[tuple[float, float]]]:
    """(wall, CPU) seconds of every round, of ours and of the peer."""
    t = plan.training
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(
        plan.shape.vocab, (t.global_batch, t.sequence_length + 1), generator=generator
    )
    steps = [ours(plan, rank), peer(plan, rank)]
    found: list[list[tuple[float, float]]] = [[], []]
    for index in range(WARM + rounds):
        for which in (0, 1) if index % 2 else (1, 0):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[which](text[:, :-1].contiguous(), text[:, 1:].contiguous())
            dist.barrier()
            if index >= WARM:
                found[which].append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


def contest(name: str, hidden: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Ratios of one contest, and the medians that they are of."""
    plan, peer = contests(hidden, ranks)[name]
    by_rank = run_ranks(ranks, lambda rank: timed(plan, peer, rounds, rank), 600)
    wall = [[max(r[which][i][0] for r in by_rank) for i in range(rounds)] for which in (0, 1)]
    cpu = [[sum(r[which][i][1] for r in by_rank) for i in range(rounds)] for which in (0, 1)]
    medians = {
        key: [statistics.median(x) for x in values]
        for key, values in (("wall", wall), ("cpu", cpu))
    }
    return {
        "contest": name,
        "hidden": hidden,
        "ranks": ranks,
        "peer": peer.__name__,
        "wall_ratio": statistics.median(b / a for a, b in zip(*wall)),
        "cpu_ratio": statistics.median(b / a for a, b in zip(*cpu)),
        "seconds": medians["wall"],
        "cpu_seconds": medians["cpu"],
    }


def main() -> None:
    """Run the contests that were asked for and print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--only", default="", help="Contests whose name contains this.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for ranks in arguments.ranks:
        for hidden in arguments.hidden:
            for name in (name for name in contests(hidden, ranks) if arguments.only in name):
                found.append(contest(name, hidden, ranks, arguments.rounds))
                if not arguments.json:
                    one = found[-1]
                    print(
                        f"{name:22} hidden {hidden:4} ranks {ranks}  wall "
                        f"{one['wall_ratio']:.2f}x  "
                        f"cpu {one['cpu_ratio']:.2f}x of {one['peer']}  "
                        f"({one['seconds'][0] * 1e3:.1f} ms a step)",
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps({"source": "measured", "torch": torch.__version__, "contests": found}))


if __name__ == "__main__":
    main()
