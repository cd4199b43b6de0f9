"""The joint search of stages, submeshes and operator strategies against the best of manual 3-D
plans (tensor, pipeline, data), by the same estimate.
`python -m tests.benchmarks.joint_search [MODEL..]`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from workbench.plan.schema import Plan
from workbench.planner.search import Candidate, search
from workbench.planner.search.results.strategy_summary import strategy_summary
from workbench.units import GIB

MODELS = ("llama-3-8b", "gpt3-13b", "opt-30b", "opt-66b", "llama-3-70b", "gpt3-175b")
CLUSTERS = (("h100-sxm-80gb", 8), ("a100-sxm-80gb", 64), ("h100-sxm-80gb", 128))
MANUAL = ("strategy.data.offload=none", "strategy.context.size=1")
"""Both keep everything on the GPU, and choose among the same schedules."""
WITHOUT_SEQUENCE = (*MANUAL, "strategy.tensor.sequence=false")


def main(models: Sequence[str]) -> None:
    """Print a table of all cases, and the plans where the two differ."""
    for model in models:
        for gpu, gpus in CLUSTERS:
            _case(Plan.of(model, gpu=gpu, gpus=gpus, strategy="ddp"))


def _case(plan: Plan) -> None:
    start = time.process_time()
    joint = _first(plan, space="operators")
    spent = time.process_time() - start
    manual, plain = (_first(plan, where=where) for where in (MANUAL, WITHOUT_SEQUENCE))
    print(f"{plan.model} on {plan.cluster.gpus} {plan.cluster.gpu} ({spent:.0f} CPU s, estimated)")
    for name, one in (("joint", joint), ("manual", manual), ("manual, no sequence", plain)):
        print(f"  {name}: {_text(one, joint)}", flush=True)


def _first(plan: Plan, space: str | None = None, where: Sequence[str] = ()) -> Candidate | None:
    return next(iter(search(plan, space=space, where=where, top=1).top), None)


def _text(one: Candidate | None, joint: Candidate | None) -> str:
    if one is None:
        return "nothing fits"
    against = f", {one.score / joint.score - 1:+.2%}" if joint else ""
    peak = one.peak_bytes / GIB
    return f"{one.score:.4g} s{against}, {peak:.1f} GiB, {strategy_summary(one.plan)}"


if __name__ == "__main__":
    main(sys.argv[1:] or MODELS)
