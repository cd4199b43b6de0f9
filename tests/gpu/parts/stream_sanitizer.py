"""Sanitizers on two steps: of streams (`torch.cuda._sanitizer`), and of collectives in flight."""

from __future__ import annotations

from functools import partial

import torch

from tests.gpu.checks import Check, Evidence
from tests.gpu.parts.staged_ranks import PLANS
from tests.gpu.ranks import gpu_name
from tests.sanitizer.sanitized_ranks import violations
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import RankError, run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan

STEPS = 2
SANITIZED = ("zero-3 offload parameters", "ring", "pipeline 1f1b", "megatron-tp with sequence")


def sanitized(name: str, evidence: Evidence) -> None:
    """No tensor is touched that a stream or a collective still uses."""
    in_flight, races = "collectives in flight are left alone", "streams do not race"
    if not evidence.on_gpu("a CPU has no streams", races):
        found = [str(each) for each in violations(PLANS[name])]
        return evidence.expect(in_flight, not found, found=found[:3])
    evidence.left_out("CPU ranks show it, in a dry run and in `make test`", in_flight)
    plan = PLANS[name].replace(**{"cluster.gpu": gpu_name(evidence)}).resolve()
    error = ""
    try:
        run_ranks(plan.world_size, partial(_steps, plan), 100, "staged")
    except RankError as failure:
        error = str(failure)
    evidence.expect(races, not error, error=error[-2000:])


def _steps(plan: ResolvedPlan, rank: int) -> None:
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()
    device, t = torch.device("cuda", 0), plan.training
    session = Session.build(plan, build_mesh(plan, rank, device), device)
    shape = (plan.num_microbatches, t.micro_batch, t.sequence_length)
    tokens, targets = (torch.randint(plan.vocab, shape, device=device) for _ in range(2))
    for step in range(STEPS):
        session.step(step, tokens, targets)
    torch.cuda.synchronize()


FORKS = True
CHECKS = [Check(name, partial(sanitized, name), 120) for name in SANITIZED]
