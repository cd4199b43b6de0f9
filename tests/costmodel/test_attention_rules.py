"""Memory of attention with a window, ALiBi, soft-caps and packed documents: the estimate of every
rank's peak is the rehearsal's within 1 %, by every kernel and beside every axis.
"""

from typing import Any

import pytest

from tests.costmodel.test_operator_plans import peaks
from workbench.plan.schema import Plan
from workbench.planner import estimate
from workbench.rehearsal.rehearse import rehearse

LLAMA = {"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 128, "vocab": 300}
GPT = {"norm": "layernorm", "mlp": "gelu", "biases": "all", "kv_heads": 8, "ffn": 256}
MISTRAL = LLAMA | {"window": 48}
BLOOM = LLAMA | GPT | {"positions": "alibi", "embedding_norm": True, "tied": True}
GEMMA = LLAMA | {
    **{"window": 48, "full_attention_every": 2, "tied": True, "mlp": "geglu"},
    **{"attention_softcap": 0.8, "logit_softcap": 1.2, "attention_scale": 0.3},
}
GPT2 = LLAMA | GPT | {"positions": "learned", "max_positions": 256}
SHAPES = {"mistral": MISTRAL, "bloom": BLOOM, "gemma": GEMMA}
MESHES: dict[str, dict[str, Any]] = {
    "data": {"cluster.gpus": 2},
    "tensor": {"cluster.gpus": 2, "strategy.tensor.size": 2},
    "pipeline": {"cluster.gpus": 2, "strategy.pipeline.size": 2},
    "tensor and pipeline": {
        **{"cluster.gpus": 4, "strategy.tensor.size": 2},
        "strategy.pipeline.size": 2,
    },
    "ring": {"cluster.gpus": 2, "strategy.context.size": 2},
    "sequence": {
        **{"cluster.gpus": 2, "strategy.tensor.size": 2},
        "strategy.tensor.sequence": True,
    },
    "ulysses": {"cluster.gpus": 2, "strategy.context": {"size": 2, "algorithm": "ulysses"}},
}
FEW = [
    ("mistral", "flash", "tensor"),
    ("mistral", "math", "pipeline"),
    ("mistral", "flash", "ring"),
    ("bloom", "flash", "data"),
    ("bloom", "math", "tensor and pipeline"),
    ("bloom", "flash", "ring"),
    ("gemma", "blockwise", "ring"),
    ("gemma", "math", "data"),
]
MORE = [
    (name, kernel, mesh)
    for name in SHAPES
    for kernel in ("flash", "blockwise", "math")
    for mesh in MESHES
    if (name, kernel) != ("gemma", "flash") and (kernel, mesh) != ("math", "ring")
    if (name, kernel, mesh) not in FEW
]


def assert_estimate_is_rehearsed(
    name: str, kernel: str, mesh: str, rel: float = 0.01, **corpus: Any
) -> None:
    written = {
        "model": {**SHAPES, "llama": LLAMA, "gpt2": GPT2}[name],
        "corpus": corpus,
        "cluster": {"gpu": "local", "gpus": 1},
        "training": {"sequence_length": 256, "micro_batch": 2, "global_batch": 8},
    }
    changes = {"strategy.attention": kernel, **MESHES[mesh]}
    plan = Plan.model_validate(written).replace(**changes)
    found, there = peaks(estimate(plan), 0), peaks(rehearse(plan), 1)
    assert found == pytest.approx(there, rel=rel)


@pytest.mark.parametrize(("name", "kernel", "mesh"), FEW, ids=str)
def test_an_estimate_is_what_every_rank_needs(name: str, kernel: str, mesh: str) -> None:
    assert_estimate_is_rehearsed(name, kernel, mesh)


def test_an_estimate_counts_the_mask_of_packed_documents() -> None:
    assert_estimate_is_rehearsed("gpt2", "flash", "data", rel=0.007, separate_documents=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel", "mesh"),
    [("llama", "blockwise", "ulysses"), ("bloom", "flash", "ring")],
    ids=str,
)
def test_an_estimate_counts_it_elsewhere(name: str, kernel: str, mesh: str) -> None:
    assert_estimate_is_rehearsed(name, kernel, mesh, rel=0.007, separate_documents=True)


@pytest.mark.slow
@pytest.mark.drawn(8)
@pytest.mark.parametrize(("name", "kernel", "mesh"), MORE, ids=str)
def test_an_estimate_is_what_every_rank_needs_elsewhere(name: str, kernel: str, mesh: str) -> None:
    assert_estimate_is_rehearsed(name, kernel, mesh)
