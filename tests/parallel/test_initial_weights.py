"""Initial weights on every mesh: each rank draws its own slices only, and they are one device's."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parallel.small import GPT, LLAMA, plan
from tests.parallel.sweep import draw_choice, plan_of
from workbench.engine.measure.live_memory import LiveBytes
from workbench.engine.measure.step_sampler import host_tensors, persistent_tensors
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.models import Transformer, counter_normal
from workbench.models.counter_normal import SCRATCH_TENSORS, NormalDrawer
from workbench.models.weight_init import WeightInit, initial_value
from workbench.parallel import python_model_stage
from workbench.parallel.data.sharded_params import ShardedParams
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.rehearsal.fake_process_group import fake_world

CPU = torch.device("cpu")
MOE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn": 32}}
UNEVEN = {**GPT, "heads": 6, "kv_heads": 3, "head_dim": 6, "ffn": 45}


class CountingDrawer(NormalDrawer):
    """Counts the numbers drawn."""

    drawn = 0

    def fill_matrix(self, into_RC: Tensor, *rest: Any) -> None:
        CountingDrawer.drawn += into_RC.numel()
        super().fill_matrix(into_RC, *rest)


def sessions(made: ResolvedPlan, drawer: Any = NormalDrawer) -> Iterator[Session]:
    """The session of every rank in turn, alone: its collectives do nothing."""
    for rank in range(made.world_size):
        with fake_world(rank, made.world_size):
            yield Session.build(made, build_mesh(made, rank), CPU, drawer=drawer)


one_device = lru_cache(1000)(initial_value)


def check_shards(made: ResolvedPlan) -> None:
    """Every rank's shards are slices of one device's tensors, and cover each exactly once."""
    owned: Counter[str] = Counter()
    shapes: dict[str, tuple[int, ...]] = {}
    for session in sessions(made):
        store = session.part.store
        for name, layout in store.layouts.items():
            mine = store.values[name].detach()
            whole = one_device(
                layout.name, layout.shape, made.shape.layers, made.training.seed, mine.dtype
            )
            assert torch.equal(mine, layout.take(whole)), (session.mesh.rank, layout)
            shapes[layout.name] = layout.shape
            if layout.is_owner(session.mesh):
                owned[layout.name] += layout.num_elements()
    assert owned == {name: math.prod(shape) for name, shape in shapes.items()}


MESHES: dict[str, Plan] = {
    "tensor": plan(4),
    "padded tensor": plan(4, shape=UNEVEN),
    "zero-1, tied": plan(2, 1, 2, tied=True, changes={"strategy.data.zero": 1}),
    "zero-2, pipeline, tied": plan(
        1, 2, 2, tied=True, changes={"strategy.data.zero": 2, "strategy.data.reduce": "microbatch"}
    ),
    "zero-3, tensor": plan(2, 1, 4, changes={"strategy.data.zero": 3}),
    "zero-3, padded": plan(4, 1, 2, shape=UNEVEN, changes={"strategy.data.zero": 3}),
    "hybrid shard": plan(1, 1, 4, changes={"strategy.data.zero": 3, "strategy.data.shard": 2}),
    "offload": plan(
        1, 1, 2, changes={"strategy.data.zero": 3, "strategy.data.offload": "parameters"}
    ),
    "experts": plan(1, 1, 4, shape=MOE, changes={"strategy.expert.size": 4}),
    "experts, tensor, zero-1": plan(
        2, 1, 2, shape=MOE, changes={"strategy.expert.size": 2, "strategy.data.zero": 1}
    ),
    "interleaved": plan(
        1, 2, changes={"strategy.pipeline.schedule": "interleaved", "strategy.pipeline.chunks": 2}
    ),
    **{
        algorithm: plan(
            math.prod(grid),
            changes={
                "strategy.tensor.algorithm": algorithm,
                "strategy.tensor.size": grid,
                "training.micro_batch": 4,
            },
        )
        for algorithm, grid in (("2d", [2, 2]), ("2.5d", [2, 2, 2]), ("3d", [2, 2, 2]))
    },
    "operators": plan(
        4,
        changes={
            "strategy.operators": {
                "embedding.tokens": "((2,1),(2,))",
                "blocks.*.attention.[qkv]": "((2,1),(1,2))",
                "blocks.*.attention.o": "((2,2),(2,1))",
                "blocks.*.mlp.down": "((1,4),(4,1))",
                "head": "((2,1),(1,2))",
            }
        },
    ),
    "bf16": plan(2, 1, 2, changes={"strategy.precision": "bf16", "strategy.data.zero": 1}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_shards_are_slices_of_one_device_s_weights(mesh: str) -> None:
    check_shards(MESHES[mesh].resolve())


def drawn_choices(number: int, seed: int) -> Iterator[ResolvedPlan]:
    generator = random.Random(seed)
    while number:
        made = plan_of(draw_choice(generator, {}))
        if made is not None:
            number -= 1
            yield made.resolve()


@pytest.mark.parametrize(
    "number, seed", [(4, 0), pytest.param(60, 1, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_so_they_are_on_meshes_drawn_by_seed(number: int, seed: int) -> None:
    for made in drawn_choices(number, seed):
        check_shards(made)


def parameters(made: ResolvedPlan, rank: int) -> list[tuple[Layout, np.ndarray]]:
    """What forward computes with on a rank: sharded by tensor parallelism, gathered by ZeRO."""
    session = Session.build(made, build_mesh(made, rank), CPU)
    store, found = session.part.store, []
    for bucket in store._all_buckets():
        if isinstance(bucket.params, ShardedParams):
            bucket.params.unshard()
        for name, parameter in bucket.params.parameters.items():
            layout = replace(store.layouts[name], flat=None) if name in store.layouts else None
            if layout is not None:
                found.append((layout, parameter.detach().numpy().copy()))
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_other_ranks_have_drawn_is_gathered(zero: int) -> None:
    made = plan(1, 1, 2, changes={"strategy.data.zero": zero}).resolve()
    found = run_ranks(2, partial(parameters, made))
    assert {layout.name for of_rank in found for layout, _ in of_rank} > {"embedding.tokens.weight"}
    for layout, mine in (each for of_rank in found for each in of_rank):
        whole = initial_value(layout.name, layout.shape, made.shape.layers, 0, torch.float32)
        assert np.array_equal(mine, whole.numpy()), layout


@pytest.mark.parametrize(
    "tensor, pipeline, data, zero", [(4, 1, 1, 0), (1, 1, 4, 1), (2, 1, 4, 3), (2, 2, 2, 2)]
)
def test_ranks_divide_the_drawing(tensor: int, pipeline: int, data: int, zero: int) -> None:
    """By tensor, pipeline and ZeRO's degree: together they draw each number once, each its share
    but for what buckets' bounds and stages' ends leave over.
    """
    made = plan(tensor, pipeline, data, changes={"strategy.data.zero": zero}, vocab=256).resolve()
    drawn = []
    for _ in sessions(made, CountingDrawer):
        drawn.append(CountingDrawer.drawn)
        CountingDrawer.drawn = 0
    whole = sum(
        math.prod(shape)
        for name, shape in weight_shapes(made)
        if "norm" not in name and not name.endswith("bias")
    )
    kv_copies = sum(math.prod(s) for n, s in weight_shapes(made) if n.split(".")[-2] in "kv")
    copies = max(1, tensor // LLAMA["kv_heads"]) - 1
    assert sum(drawn) == whole + copies * kv_copies
    assert max(drawn) < 1.5 * sum(drawn) / made.world_size


def weight_shapes(made: ResolvedPlan) -> list[tuple[str, tuple[int, ...]]]:
    with torch.device("meta"):
        return [(n, tuple(p.shape)) for n, p in Transformer(made.shape).named_parameters()]


def temporary_bytes(made: ResolvedPlan, rank: int) -> int:
    """The most bytes live at once, while a rank's session is built, of what does not stay."""
    with fake_world(rank, made.world_size):
        mesh = build_mesh(made, rank)
        with LiveBytes() as live:
            session = Session.build(made, mesh, CPU)
            # Nothing is summed before: all that stays is then known.
            for tensors in (persistent_tensors(session), host_tensors(session)):
                for category, each in tensors.items():
                    live.register(each, category)
            found = live.maximum
        assert min(found[category] for category in ("parameters", "gradients", "optimizer")) > 0
        return int(found["temporary"])


CHUNK = 512
WIDE = {"hidden": 64, "ffn": 256, "vocab": 2048, "layers": 2}
BOUNDED = {
    "zero-3": plan(1, 1, 8, changes={"strategy.data.zero": 3}, **WIDE),
    "tensor, zero-3": plan(2, 1, 4, changes={"strategy.data.zero": 3}, **WIDE),
    "tensor, zero-1": plan(4, 1, 2, changes={"strategy.data.zero": 1}, **WIDE),
    "vocabulary": plan(8, shape={**LLAMA, "heads": 8}, **WIDE),
    "offload": plan(
        1, 1, 8, changes={"strategy.data.zero": 3, "strategy.data.offload": "parameters"}, **WIDE
    ),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks that are small beside the model; returns the bytes that drawing one needs."""
    monkeypatch.setattr(counter_normal, "CPU_CHUNK_NUMEL", CHUNK)
    operands = 2 * CHUNK * 8
    """Counters, keys and their temporaries of 64 bits."""
    return SCRATCH_TENSORS * (CHUNK // 2 + CHUNK) * 4 + operands


@pytest.mark.parametrize("mesh", BOUNDED)
def test_building_needs_its_own_pieces_and_one_chunk(mesh: str, small_chunks: int) -> None:
    made = BOUNDED[mesh].resolve()
    largest = max(math.prod(shape) * 4 for _, shape in weight_shapes(made))
    assert small_chunks < largest / 8, "a tensor of another rank would not be noticed"
    for rank in (0, made.world_size - 1):
        assert 0 < temporary_bytes(made, rank) <= small_chunks


def test_a_rank_that_draws_whole_tensors_is_noticed(
    monkeypatch: pytest.MonkeyPatch, small_chunks: int
) -> None:
    fill = WeightInit.fill

    def whole_first(self: WeightInit, into: Tensor, slices: Any, name: str, shape: Any) -> None:
        whole = torch.empty(shape)
        fill(self, whole, [(0, length) for length in shape], name, shape)
        into.copy_(whole[tuple(slice(*bounds) for bounds in slices)])

    monkeypatch.setattr(WeightInit, "fill", whole_first)
    assert temporary_bytes(BOUNDED["zero-3"].resolve(), 0) > 8 * small_chunks


def test_a_rank_that_draws_from_its_own_first_row_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill = WeightInit.fill

    def local(self: WeightInit, into: Tensor, slices: Any, name: str, shape: Any) -> None:
        fill(self, into, [(0, stop - start) for start, stop in slices], name, shape)

    monkeypatch.setattr(WeightInit, "fill", local)
    with pytest.raises(AssertionError, match="Layout"):
        check_shards(MESHES["tensor"].resolve())


PLAIN = {"width": 64, "layers": 4, "vocab": 2048}
OPERATORS = {"blocks.*": "((1,1),(1,2))", "output": "((1,1),(1,2))", "tokens": "((1,2),(1,))"}


def users(tensor: int, data: int, operators: dict[str, str], **changes: Any) -> ResolvedPlan:
    """A user's model on tensor x data ranks."""
    code = {"python": "tests.parallel.users_model:build_plain", "vocab": 2048, "args": PLAIN}
    written = plan(tensor, 1, data, changes=changes).model_dump()
    written["model"] = code
    written["strategy"]["operators"] = operators
    return Plan.model_validate(written).resolve()


PYTHON = {
    "ddp": users(1, 2, {}),
    "zero-2": users(1, 4, {}, **{"strategy.data.zero": 2}),
    "zero-3": users(1, 8, {}, **{"strategy.data.zero": 3}),
    "operators, zero-3": users(2, 4, OPERATORS, **{"strategy.data.zero": 3}),
}


@pytest.mark.parametrize("mesh", PYTHON)
def test_a_user_s_model_starts_alike_on_every_mesh(mesh: str) -> None:
    (one,) = sessions(users(1, 1, {}))
    wholes = one.part.store.values
    assert all(
        float(whole.detach().std()) > 0 for name, whole in wholes.items() if "blocks" in name
    )
    owned: Counter[str] = Counter()
    for session in sessions(PYTHON[mesh]):
        store = session.part.store
        for name, layout in store.layouts.items():
            expected = layout.take(wholes[layout.name].detach())
            assert torch.equal(store.values[name].detach(), expected), (session.mesh.rank, layout)
            if layout.is_owner(session.mesh):
                owned[layout.name] += layout.num_elements()
    assert owned == {name: whole.numel() for name, whole in wholes.items()}


@pytest.mark.parametrize("mesh", ["zero-3", "operators, zero-3"])
def test_a_user_s_model_is_never_whole(
    mesh: str, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PYTHON[mesh]
    assert temporary_bytes(made, 1) <= small_chunks
    monkeypatch.setattr(python_model_stage, "build_deferred", lambda build: None)
    assert temporary_bytes(made, 1) > 8 * small_chunks, "a model built as it is is not noticed"
