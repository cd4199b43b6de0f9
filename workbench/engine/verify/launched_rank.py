"""Entry point of a rank that verifies, which `accelerate launch` starts.

`python -m workbench.engine.verify.launched_rank FOLDER/plan.yaml [--allow-code]`
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workbench.interop.launch_environment import allocator_environment
from workbench.runs.launch.parent_death import die_with_parent


def main() -> int:
    """Compare this rank's part of the plan with one device; the answer is left in the plan's
    folder.
    """
    die_with_parent()
    if os.environ.get("ACCELERATE_USE_CPU") != "true":  # torch reads them when it is imported
        os.environ.update(allocator_environment(version("torch"), os.environ))
    # Imported only now: torch takes seconds, in which a launcher may already have died.
    from workbench.engine.verify.rank_answer import write_answer, write_failure

    plan_path, allow_code = Path(sys.argv[1]).resolve(), "--allow-code" in sys.argv[2:]
    folder, rank = plan_path.parent, int(os.environ.get("RANK", "0"))
    try:
        write_answer(folder, rank, _compare(plan_path, rank, allow_code))
        _leave_together()
    except Exception as error:
        write_failure(folder, rank, error, traceback.format_exc())
        return 1
    return 0


def _compare(plan_path: Path, rank: int, allow_code: bool) -> dict[str, Any]:
    from dataclasses import asdict

    from workbench.engine.precision import set_determinism, set_matmul_precision
    from workbench.engine.python_model.check_python_model import check_python_model
    from workbench.engine.verify.drawn_batches import random_batches
    from workbench.engine.verify.equivalence import (
        GPU_TOLERANCE,
        compare_with_reference,
        reference_and_scale,
        verified_dtype,
    )
    from workbench.engine.verify.rank_answer import PRECISION
    from workbench.engine.worker_lifecycle import join_launch
    from workbench.parallel.mesh import build_mesh
    from workbench.plan.schema import Plan

    plan = Plan.load(plan_path).resolve()
    precision = (plan_path.parent / PRECISION).read_text()
    check_python_model(plan, allow_code)
    set_matmul_precision(plan)
    set_determinism(plan)
    device = join_launch(plan, plan_path.parent).device
    mesh, batches = build_mesh(plan, rank, device), list(random_batches(plan))
    tolerance = GPU_TOLERANCE[precision]
    reference, scale = reference_and_scale(plan, batches, precision, tolerance, device)
    dtype = None if precision == "bf16" else verified_dtype(precision, device)
    found = compare_with_reference(plan, mesh, device, batches, reference, scale, dtype)
    differences, owned = [asdict(each) for each in found[0]], found[1]
    return {"differences": differences, "owned": owned, "numel": reference.numel()}


def _leave_together() -> None:
    """No rank may exit while another still receives from it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # An interpreter's regular end would race the threads of gloo or NCCL.
    os._exit(status)
