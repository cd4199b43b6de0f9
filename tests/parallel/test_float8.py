"""fp8 GEMMs against torchao's `Float8Linear` on one device, and scales that no mesh changes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.parallel.small import GPT, LLAMA, plan
from workbench.engine.verify.drawn_batches import random_batches
from workbench.engine.verify.equivalence import _share, _verification_session, verify
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.engine.verify.tensor_difference import DifferenceScale, tensor_difference
from workbench.errors import PlanError
from workbench.parallel.float8.float8_linear import Float8Layer, Role
from workbench.parallel.layout import Layout
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.rules.supported import require
from workbench.plan.schema import Plan
from workbench.runs.launch import subprocess_verbs

torchao = pytest.importorskip("torchao.float8")
WIDE: dict[str, Any] = {**LLAMA, "hidden": 64, "ffn": 96, "kv_heads": 4, "layers": 2}
FP8 = {"cluster.gpu": "h100-sxm-80gb", "strategy.precision": "fp8"}


def fp8_plan(
    tensor: int = 1, pipeline: int = 1, data: int = 1, shape: dict[str, Any] = WIDE, **changes: Any
) -> Plan:
    by_path = {name.replace("__", "."): value for name, value in changes.items()}
    return plan(tensor, pipeline, data, shape=shape, microbatches=2, changes=FP8 | by_path)


def on_context(**changes: Any) -> Plan:
    return fp8_plan(strategy__context__size=2, cluster__gpus=2, **changes)


OPERATORS = {
    "blocks.*.attention.[qkv]": "((1,1),(1,2))",
    "blocks.*.attention.o": "((1,2),(2,1))",
    "blocks.0.mlp.up": "((2,1),(1,1))",
    "blocks.*.mlp.down": "((1,2),(2,1))",
}
"""Each dimension of a GEMM sharded somewhere; what it does not name is replicated."""
TOKENS = {"blocks.*.mlp.up": "((1,2,1),(1,1))", "blocks.*.attention.q": "((1,2,1),(1,1))"}
MESHES: dict[str, Callable[[], Plan]] = {
    "ddp": partial(fp8_plan, data=2),
    "zero-3": partial(fp8_plan, data=2, strategy__data__zero=3),
    "tensor": partial(fp8_plan, 2),
    "sequence": partial(fp8_plan, 2, strategy__tensor__sequence=True),
    "pipeline": partial(fp8_plan, pipeline=2),
    "ring": on_context,
    "ulysses": partial(on_context, strategy__context__algorithm="ulysses"),
    "operators": partial(fp8_plan, 2, strategy__operators=OPERATORS),
    "tokens": partial(fp8_plan, 2, strategy__operators=TOKENS),
}
MORE: dict[str, Callable[[], Plan]] = {
    "gpt": partial(fp8_plan, 2, shape={**GPT, "hidden": 64}),
    "two axes": partial(fp8_plan, 2, strategy__context__size=2, cluster__gpus=4, training__seed=1),
    "recomputed": partial(fp8_plan, 2, strategy__recompute="full"),
    "three axes": partial(
        fp8_plan, 2, 2, strategy__tensor__sequence=True, strategy__context__size=2, cluster__gpus=8
    ),
}


def passes(mesh: Plan) -> dict[str, Any]:
    answer = verify(mesh, "fp8", 100)
    assert answer["passed"] and answer["tolerance"] == 1e-2, answer["worst"]
    return answer


def slowly(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    "mesh", ["tensor", *slowly(*(name for name in (*MESHES, *MORE) if name != "tensor"))]
)
def test_equals_torchaos_layers_on_one_device(mesh: str) -> None:
    passes((MESHES | MORE)[mesh]())


Scales = dict[tuple[str, Role], list[float]]


def scales_of(plan: Plan) -> list[Scales]:
    """By rank: the scales of a step's casts, by layer and operand, in order of microbatch."""
    return run_ranks(plan.resolve().world_size, partial(_scales_of_rank, plan.resolve()), 100)


def _scales_of_rank(plan: ResolvedPlan, rank: int) -> Scales:
    found: Scales = {}
    computed = Float8Layer.scale_of

    def recorded(self: Float8Layer, role: Role, amax: torch.Tensor) -> torch.Tensor:
        scale = computed(self, role, amax)
        found.setdefault((self.name, role), []).append(scale.item())
        return scale

    Float8Layer.scale_of = recorded  # type: ignore[method-assign]
    device = torch.device("cpu")
    session = _verification_session(plan, build_mesh(plan, rank), device, torch.float64)
    session.step(0, *_share(session, next(random_batches(plan)), device)[:2])
    return found


@pytest.mark.parametrize(
    "mesh", ["sequence", "operators", "tokens", *slowly("tensor", "ring", "pipeline")]
)
def test_scales_are_those_of_one_device(mesh: str) -> None:
    (alone,) = scales_of(fp8_plan())
    assert len(alone) == 2 * 7 * 3 and all(len(found) == 2 for found in alone.values())
    for rank in scales_of(MESHES[mesh]()):
        assert rank and all(found == alone[key] for key, found in rank.items())


@pytest.mark.parametrize("mesh", ["tensor", *slowly("ring", "operators")])
def test_scales_of_each_ranks_own_part_differ(monkeypatch: pytest.MonkeyPatch, mesh: str) -> None:
    """The planted fault: the largest entry is not all-reduced."""
    (alone,) = scales_of(fp8_plan())
    monkeypatch.setattr("workbench.parallel.float8.float8_linear.all_reduce", lambda x, *_: x)
    ranks = scales_of(MESHES[mesh]())
    wrong = {key for rank in ranks for key, found in rank.items() if found != alone[key]}
    assert {role for _, role in wrong} >= {"input", "gradient"}
    assert ("weight" in {role for _, role in wrong}) is (mesh != "ring")


REFUSED = {
    "model.moe": {"model.moe": {"experts": 4, "top_k": 2, "ffn": 32}},
    "strategy.tensor.algorithm": {
        "strategy.tensor": {"size": [2, 2], "algorithm": "2d"},
        "cluster.gpus": 4,
    },
    "strategy.operators": {
        "strategy.operators": {"blocks.*.mlp.up": "((1,1),(1,2))"},
        "model.ffn": 48,
        "strategy.tensor.size": 2,
        "cluster.gpus": 2,
    },
    "strategy.pipeline.schedule": {
        "strategy.pipeline": {"size": 2, "schedule": "zb-h1"},
        "cluster.gpus": 2,
    },
    "model.ffn": {"model.ffn": 100},
    "training.micro_batch": {"training.sequence_length": 12},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_fp8_is_refused_by_name(field: str) -> None:
    asked = fp8_plan().replace(**REFUSED[field]).resolve()
    with pytest.raises(PlanError, match=r"legal.* fp8") as caught:
        require(asked, "run")
    assert field in [problem.field for problem in caught.value.problems]


def test_a_gpu_without_fp8_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"strategy\.precision: is fp8, which a100-sxm-80gb does not have; legal"
    ):
        fp8_plan(cluster__gpu="a100-sxm-80gb").resolve()


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_verifying_in_another_precision_is_refused(precision: Any) -> None:
    words = f"--precision: is '{precision}', but strategy.precision is fp8, whose scales"
    for run in (verify, subprocess_verbs.verify):
        with pytest.raises(PlanError, match=words):
            run(fp8_plan(2), precision)
    with pytest.raises(PlanError, match=r"--precision: is 'fp8'; legal: fp64, fp32"):
        verify(plan(2), "fp8")


@pytest.mark.parametrize("mean_square", [False, True])
def test_nan_is_an_infinitetensor_difference(mean_square: bool) -> None:
    scale = DifferenceScale(1e-2, 1e-7, 1.0, set(), plan().training.optimizer, 3, mean_square)
    layout = Layout.unsharded("w", (2,))
    mine = torch.tensor([1.0, math.nan])
    found = tensor_difference("weights", layout, 0, mine, {"w": torch.ones(2)}, scale)
    assert found.relative == math.inf
    parts = [torch.ones(1), torch.tensor([math.nan])]
    assert not scale.size(parts, 2) <= 1e300
