"""Whether a plan may use the calibration file that it names."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.errors import PlanError, Problem
from workbench.machine.attached import attached
from workbench.machine.calibration_file import AGAIN, FIELD, Measured, fingerprint, read_with_digest
from workbench.plan.resolved_plan import ResolvedPlan


def calibration_problems(plan: ResolvedPlan, local: bool) -> Iterator[Problem]:
    """Why a complete `plan` may not use the calibration that it names; `local`: it asks for what is
    attached here.
    """
    cluster, path = plan.cluster, plan.cluster.calibration
    if path is None:
        if cluster.calibration_sha256 is not None:
            yield Problem(
                f"{FIELD}_sha256", f"is set, but {FIELD} names no file; name it, or remove the hash"
            )
        return
    try:
        found, sha256 = read_with_digest(path)
    except PlanError as error:
        yield from error.problems
        return
    if cluster.calibration_sha256 not in (None, sha256):
        yield Problem(
            f"{FIELD}_sha256",
            f"is {cluster.calibration_sha256}, but '{path}' now has {sha256}; "
            "remove the field to use what is there",
        )
    yield from _other_machine(plan, found.machine, path, local)


def _other_machine(
    plan: ResolvedPlan, machine: Measured, path: str, local: bool
) -> Iterator[Problem]:
    gpu = plan.gpu
    same_title = gpu.device != "cpu" or gpu.title in ("", machine.title)
    if (machine.device, machine.card) != (gpu.device, gpu.name) or not same_title:
        yield Problem(
            FIELD,
            f"'{path}' was measured on {machine.card} ({machine.title}), the plan's GPU is "
            f"{gpu.name} ({gpu.title}); measure that one, set cluster.gpu to {machine.card}, "
            "or remove the field",
        )
    elif local and machine.fingerprint != (here := fingerprint(attached())):
        yield Problem(
            FIELD,
            f"'{path}' was measured on another machine ({machine.title}, {machine.fingerprint}; "
            f"this is {here}); {AGAIN}",
        )
