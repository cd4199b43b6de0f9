"""Gradients that autograd does not accumulate: what is added, and what it takes meanwhile."""

from typing import Any

import pytest
import torch

from workbench.engine.measure.live_memory import LiveBytes
from workbench.parallel.data.flat_buckets import BucketLayout
from workbench.parallel.data.gradient_reduction import AccumulatedGrads, ShardedGrads
from workbench.parallel.mesh import MeshAxis
from workbench.planned_device import HOST, REHEARSED_GPU
from workbench.rehearsal.fake_process_group import fake_tensors

KINDS = [AccumulatedGrads, ShardedGrads]


def bucket() -> BucketLayout:
    alone = MeshAxis("", 1, 0, (0,), None)
    return BucketLayout({"weight": (6, 4), "bias": (6,)}, "replicas", alone, alone, ())


def unsharded(grads: Any) -> Any:
    buffer = grads.flat if isinstance(grads, AccumulatedGrads) else grads._unsharded
    return grads.layout.views(buffer)["weight"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_add_up_as_gradients_do(kind: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    products, gradients = (kind(bucket(), wide, HOST) for _ in range(2))
    for _ in range(3):
        a, b = (torch.randn(6, 5, generator=generator), torch.randn(5, 4, generator=generator))
        products.accumulate_product("weight", a.to(dtype), b.to(dtype))
        gradients.accumulate("weight", a.to(dtype) @ b.to(dtype))
    torch.testing.assert_close(unsharded(products), unsharded(gradients), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_needs_no_memory_to_add_narrow_gradients(kind: Any) -> None:
    with fake_tensors(), LiveBytes(REHEARSED_GPU) as live:
        grads = kind(bucket(), torch.float32, REHEARSED_GPU)
        narrow: dict[str, Any] = {"dtype": torch.bfloat16, "device": REHEARSED_GPU}
        operands = [torch.empty(6, 5, **narrow), torch.empty(5, 4, **narrow)]
        gradient = torch.empty(6, 4, **narrow)
        for _ in range(2):  # the first one of a sharded bucket allocates the unsharded buffer
            live.restart()
            before = sum(live.current.values())
            grads.accumulate_product("weight", *operands)
            grads.accumulate("weight", gradient)
        assert sum(live.peak.values()) == before
