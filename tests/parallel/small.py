"""Small plans of both model styles for proofs on forked ranks."""

from typing import Any

from workbench.plan.schema import Plan

LLAMA: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 257,
}
GPT: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "ffn": 64,
    "vocab": 257,
    "norm": "layernorm",
    "mlp": "gelu",
    "positions": "learned",
    "biases": "all",
    "max_positions": 64,
}
CHUNKS = {
    **{"gpipe": 1, "1f1b": 1, "eager-1f1b": 1, "interleaved": 2},
    **{"zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2},
}
"""Pipeline schedule -> chunks of a rank."""


def plan(
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    *,
    shape: dict[str, Any] = LLAMA,
    microbatches: int = 4,
    changes: dict[str, Any] | None = None,
    **more: Any,
) -> Plan:
    """A plan on tensor x pipeline x data ranks; `more` adds to the shape, `changes` are by dotted
    path.
    """
    written = {
        "model": {**shape, **more},
        "cluster": {"gpu": "local", "gpus": tensor * pipeline * data},
        "strategy": {
            "tensor": {"size": tensor},
            "pipeline": {"size": pipeline},
            "data": {"bucket_mib": 0.01},
        },
        "training": {
            "sequence_length": 16,
            "global_batch": data * microbatches * 2,
            "micro_batch": 2,
            "steps": 3,
            "optimizer": {"clip": 0.5, "learning_rate": 1e-2},
        },
    }
    return Plan.model_validate(written).replace(**(changes or {}))
