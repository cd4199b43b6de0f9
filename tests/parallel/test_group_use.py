"""Every communicator is first used by all of its ranks together.

NCCL makes a communicator at its group's first call, in which every rank of the group must then take
part; a send between two of them, while the others do something else, waits for ever. gloo connects
when the group is made.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.small import GPT, plan
from tests.parallel.test_tensor_grids import DEEP, SQUARE, on
from workbench.engine.measure.recorded_collective import process_group_of
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel import mesh
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan

Use = dict[tuple[int, ...], list[str]]
CPU = torch.device("cpu")


class FirstUse(TorchDispatchMode):
    """The operator that a rank first uses each group with, by the group's name and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, tuple[int, ...]], str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and (group := process_group_of(args)) is not None
        ):
            key = group.group_name, tuple(dist.get_process_group_ranks(group))
            self.seen.setdefault(key, func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def first_use(plan: ResolvedPlan, rank: int) -> dict[tuple[str, tuple[int, ...]], str]:
    """Of a rank that joins the mesh and trains a step."""
    with FirstUse() as use:
        session = Session.build(plan, build_mesh(plan, rank, CPU), CPU)
        shape = (plan.num_microbatches, plan.training.micro_batch, plan.training.sequence_length)
        session.step(0, torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long))
    seen: dict[tuple[str, tuple[int, ...]], str] = use.seen
    return seen


PLANS = {
    "2d, tied": on(SQUARE, shape=GPT, tied=True, layers=1, changes={"training.global_batch": 4}),
    "2.5d, tied": on(DEEP, shape=GPT, tied=True, layers=1, changes={"training.global_batch": 4}),
    "three stages, tied": plan(pipeline=3, shape=GPT, tied=True, layers=3, microbatches=3),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_group_is_first_used_by_all_its_ranks(name: str) -> None:
    found = PLANS[name].resolve()
    uses = run_ranks(found.world_size, lambda rank: first_use(found, rank))
    groups = {key for use in uses for key in use}
    assert len(groups) > 1  # the world's, and those of the plan's axes
    for key in groups:
        by_rank = {rank: uses[rank].get(key, "none") for rank in key[1]}
        assert len(set(by_rank.values())) == 1, (key, by_rank)
        assert not {"send", "recv_"} & set(by_rank.values()), (key, by_rank)


def test_a_group_is_named_before_its_ranks_connect() -> None:
    """A rank that waits there for others has said for which group."""
    found = plan(tensor=2, data=2).resolve()

    def work(rank: int) -> list[str]:
        seen: list[str] = []
        connect = mesh._connect

        def noted(group: dist.ProcessGroup, device: torch.device) -> None:
            seen.append("connecting")
            connect(group, device)

        mesh._connect = noted
        build_mesh(found, rank, CPU, seen.append)
        return seen

    seen = run_ranks(4, work)[0]
    assert seen[::2] == ["the data group of ranks 0, 2", "the tensor group of ranks 0, 1"]
    assert set(seen[1::2]) == {"connecting"}
