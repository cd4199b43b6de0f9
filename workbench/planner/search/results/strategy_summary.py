"""A found plan's strategy in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from workbench.plan.schema import Plan, Tensor, axis_sizes


def strategy_summary(plan: Plan) -> str:
    """The strategy of a plan with its sizes written out, in a few words, as people write it on a
    board.
    """
    s, t, sizes = plan.strategy, plan.training, axis_sizes(plan.strategy, plan.world_size)
    replicas = s.pipeline.replicas
    data = f"replicas {by_stage(replicas)}" if replicas else f"d{sizes['data']}"
    words = [f"{_tensor(s.tensor)}{'s' if s.tensor.sequence else ''}", data]
    if sizes["context"] > 1:
        words.insert(1, f"c{sizes['context']}")
    if sizes["pipeline"] > 1:
        chunks = f"x{s.pipeline.chunks}" if s.pipeline.schedule == "interleaved" else ""
        words.append(f"p{sizes['pipeline']} {s.pipeline.schedule}{chunks}")
        words += [f"layers {by_stage(p)}" for p in [s.pipeline.partition] if isinstance(p, list)]
    if held := s.pipeline.in_flight:
        words.append(f"in flight {by_stage([held] if isinstance(held, int) else held)}")
    if s.expert.size > 1:
        words.append(f"e{s.expert.size}")
    words += [f"micro {t.micro_batch}", f"zero {s.data.zero}"]
    if s.data.tile_factor > 1:
        words.append(f"{s.data.tile_factor} tiles")
    kind = s.recompute
    words.append(f"recompute {kind if isinstance(kind, str) else _listed(kind)}")
    if s.data.offload != "none":
        words.append(f"offload {s.data.offload}")
    if s.kernels != "eager":
        words.append(f"{s.kernels} kernels")
    return " · ".join(words)


def _listed(recompute: Sequence[int | str]) -> str:
    """Layers by their number, modules by their patterns."""
    patterns = [one for one in recompute if isinstance(one, str)]
    layers = len(recompute) - len(patterns)
    return ", ".join([*([f"{layers} layers"] if layers or not patterns else []), *patterns])


def by_stage(numbers: Sequence[int]) -> str:
    """A number a stage, `4:8:8`; more than two alike in a row as `8x3`."""
    runs = [(number, len(list(each))) for number, each in groupby(numbers)]
    return ":".join(
        f"{number}x{count}" if count > 2 else ":".join([str(number)] * count)
        for number, count in runs
    )


def _tensor(tensor: Tensor) -> str:
    if isinstance(tensor.size, int):
        return f"t{tensor.size}"
    return f"t{'x'.join(map(str, tensor.size))} {tensor.algorithm}"
