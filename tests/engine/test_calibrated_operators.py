"""What `calibrate` times beside kernels: collectives between work, split backward, MoE layers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.engine.calibrate.call_stamps import added, added_by_calls
from workbench.engine.calibrate.collective_points import collective_points
from workbench.engine.calibrate.measured_sizes import CalibrationSurvey
from workbench.engine.calibrate.operator_points import CHOICES, GROUPS, operator_points
from workbench.engine.calibrate.whole_steps import with_split_backward
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.probe_plan import TINY, TINY_SEQUENCE, probe_plan


def moments(work: list[list[float]], call: float) -> np.ndarray:
    """Ranks that compute `work[rank]` seconds before each call, which takes `call` from when the
    last rank is there.
    """
    found, now = np.zeros((len(work), len(work[0]), 2)), 0.0
    for index, each in enumerate(zip(*work)):
        found[:, index, 0] = now + np.array(each)
        now = float(found[:, index, 0].max()) + call
        found[:, index, 1] = now
    return found


def test_a_call_adds_its_own_time_and_the_wait_for_the_later_rank() -> None:
    same = added_by_calls(moments([[2.0] * 6, [2.0] * 6], 0.5))
    assert same == pytest.approx([0.5] * 5)
    late = added_by_calls(moments([[2.0] * 6, [2.0, 2.0, 3.0, 2.0, 2.0, 2.0]], 0.5))
    assert late == pytest.approx([0.5, 1.5, 0.5, 0.5, 0.5]), "one disturbance stays one call's"


def _late_by(rank: int, seconds: float) -> list[float]:
    def call() -> None:
        time.sleep(seconds * rank)
        dist.barrier()

    return list(map(float, added(lambda: time.sleep(0.002), call, 4).seconds))


def test_all_ranks_agree_what_a_call_adds() -> None:
    first, second = run_ranks(2, lambda rank: _late_by(rank, 0.05))
    assert first == second and len(first) == 4
    assert min(first) > 0.049


def _cpu_of_waiting_and_working(rank: int) -> tuple[float, float]:
    """CPU seconds of a call that sleeps, and of one that works for as long on two threads."""

    def spin() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.02:
            pass

    def work() -> None:
        thread = threading.Thread(target=spin)
        thread.start()
        spin()
        thread.join()

    waiting, working = added(spin, lambda: time.sleep(0.04), 3), added(spin, work, 3)
    return waiting.cpu_seconds, working.cpu_seconds


def test_waiting_in_a_call_uses_no_cpu_and_every_thread_that_works_does() -> None:
    ((waiting, working),) = run_ranks(1, _cpu_of_waiting_and_working)
    assert waiting < 0.004
    assert working == pytest.approx(0.04, rel=0.1)


class _Copies(TorchDispatchMode):
    """Counts copies of one tensor to another."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def _copies_by_kind(rank: int) -> dict[str, int]:
    survey = CalibrationSurvey(messages=(2**16,), dtypes=("fp32",))
    found = {}
    for point in collective_points(survey, torch.device("cpu")):
        with _Copies() as copies:
            point.call()
        found[point.labels["kind"]] = copies.count
    return found


def test_gradients_are_reduced_in_place_and_parameters_gathered_from_shards() -> None:
    """As flat buckets do: a reduce-scatter that copied its shard would seem slower than it is."""
    for found in run_ranks(2, _copies_by_kind):
        assert (found["reduce_scatter"], found["all_reduce"], found["all_gather"]) == (0, 0, 1)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_with_split_backward_is_the_same_step(recompute: str) -> None:
    def trained(rank: int) -> list[float]:
        device = torch.device("cpu")
        plan = probe_plan("cpu", TINY_SEQUENCE, 3, recompute, layers=2, **TINY)
        session = Session.build(plan, build_mesh(plan, 0, device), device)
        whole = replace(session, executor=with_split_backward(session.executor))
        kinds = {action.kind for action in whole.executor.row}
        assert {"I", "W"} <= kinds and "B" not in kinds
        tokens = torch.arange(3 * TINY_SEQUENCE).view(3, 1, TINY_SEQUENCE)
        steps = [each.step(0, tokens, tokens) for each in (session, whole)]
        # The second step starts from the first's weights: run it again, whole, from the same.
        other = Session.build(plan, build_mesh(plan, 0, device), device)
        other.step(0, tokens, tokens)
        again = other.step(0, tokens, tokens)
        return [float(x) for r in (steps[1], again) for x in (r.loss, r.gradient_norm)]

    ((loss, norm, loss_again, norm_again),) = run_ranks(1, trained)
    assert (loss, norm) == pytest.approx((loss_again, norm_again), rel=1e-5)


def test_an_moe_layers_points_compute_every_gradient_and_count_each_group() -> None:
    def shapes(rank: int) -> dict[tuple[str, str], tuple[int, list[tuple[int, ...]]]]:
        survey = CalibrationSurvey(
            operators={"grouped_linear": ((8, 16, 24),), "routing": ((16, 12, 4),)}
        )
        found = {}
        for point in operator_points(survey):
            outputs = point.call()
            listed = outputs if isinstance(outputs, list) else []
            assert all(x.requires_grad for x in listed)
            which = point.labels["kind"], point.labels["pass"]
            found[which] = point.repeats, [tuple(x.shape) for x in listed]
        return found

    (found,) = run_ranks(1, shapes)
    linear, routed = found["grouped_linear", "forward"], found["routing", "forward"]
    assert set(linear[1]) == {(GROUPS * 8, 16)} and linear[0] == GROUPS * len(linear[1])
    assert routed[1] == [(1, 16 // CHOICES, 12), ()] * routed[0], "rows and the balancing loss"
    assert {name for _, name in found} == {"forward", "both"}
