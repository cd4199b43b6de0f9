"""Communication of a step: when gradients are reduced, what rings over nodes pay, what hides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workbench.costmodel.communication.collective_cost import (
    axis_links,
    collective_seconds,
    comm_seconds,
    group_link,
)
from workbench.costmodel.communication.collective_volume import step_collectives
from workbench.costmodel.frameworks.framework_profile import framework_profile
from workbench.costmodel.inputs.rank_workload import Workload, workload
from workbench.costmodel.rates.constants import Constants
from workbench.costmodel.step_time import step_time
from workbench.machine import gpu_catalog
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.calibrated_plan import with_calibration


def setting(
    gpus: int,
    tensor: int,
    pipeline: int,
    zero: int = 0,
    micro_batch: int = 1,
    stack: str = "nanotron",
    sequence: bool = True,
    **changed: Any,
) -> tuple[Workload, Constants]:
    strategy = {
        "tensor": {"size": tensor, "sequence": sequence and tensor > 1},
        "pipeline": {"size": pipeline},
        "data": {"zero": zero},
        "stack": stack,
    }
    description: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "gpus": gpus, "fabric": "aws-p5"},
        "training": {"global_batch": 256, "micro_batch": micro_batch, "sequence_length": 4096},
        "strategy": strategy,
    }
    full, constants = with_calibration(Plan.model_validate(description).resolve())
    return workload(full), replace(constants, **changed)


def test_under_zero_1_gradients_are_reduced_whole_and_hide_behind_nothing() -> None:
    w, c = setting(64, 4, 1, 1)
    chosen = [call for call in step_time(w, c).calls if call.axis == "data"]
    assert [(call.kind, call.action) for call in chosen] == [
        ("all_reduce", "REDUCE_GRAD"),
        ("all_gather", "OPTIMIZER"),
    ]
    wire = axis_links(w, c)["data"]
    took = sum(
        call.count * collective_seconds(call.kind, call.bytes, call.group_size, wire, c)
        for call in chosen
    )
    assert step_time(w, c).after["data_comm"] == pytest.approx(float(np.max(took)))


def test_a_shard_group_inside_a_node_exchanges_over_its_links() -> None:
    """Hybrid sharding (2304.11277, 3.2.2): reduce-scatter and all-gather inside the group, and an
    all-reduce of what a rank then holds between groups, of which the ranks of a node run one each.
    """
    set = {"strategy.data.shard": 8, "strategy.stack": "megatron"}
    plan = Plan.of("llama-3-8b", gpu="a100-sxm-80gb", gpus=64, strategy="zero-1", set=set)
    full, c = with_calibration(plan.resolve())
    w = workload(full)
    links = axis_links(w, c)
    assert links["data.shard"].bandwidth == full.gpu.link_gbs * 1e9 * c.link_share
    assert links["data.shard"].latency == 1e-6 * full.fabric.link_latency_us
    one_of_eight = links["data"].bandwidth / 8
    assert links["data.replicas"].bandwidth == one_of_eight
    used = {(call.kind, call.sub_axis) for call in step_collectives(w) if call.axis == "data"}
    assert ("all_gather", "data.shard") in used
    whole = axis_links(workload(replaced_shard(full, "all")), c)
    assert "data.shard" not in whole


def test_internevo_reduces_whole_and_broadcasts_tensor_by_tensor() -> None:
    """hybrid_zero_optim.py: hooks leave reduce_rank None, so that buckets are all-reduced over all
    data-parallel ranks; _partition_param_list gives a parameter to one rank, and broadcast_params
    broadcasts what each rank holds, in turn. Of 32 layers' wqkv, wo, w1, w2 and w3 and both ends
    1,024 ranks cannot all hold one.
    """
    for gpus, owners in ((64, 64), (1024, 32 * 5 + 2)):
        set = {"strategy.stack": "internevo", "training.global_batch": 4096}
        plan = Plan.of("llama-2-7b", gpu="a100-sxm-80gb", gpus=gpus, strategy="zero-1", set=set)
        full, c = with_calibration(plan.resolve())
        w = workload(full)
        reduce, broadcast = [call for call in step_collectives(w) if call.axis == "data"]
        assert (reduce.kind, float(reduce.group_size)) == ("all_reduce", gpus)
        assert (broadcast.kind, float(np.max(broadcast.count))) == ("broadcast", owners)
        moved = float(np.sum(broadcast.bytes * broadcast.count))
        assert moved == pytest.approx(2 * float(np.sum(w.param_counts.total)))
        # NCCL's broadcast passes from rank to rank (src/graph/tuning.cc).
        wire = axis_links(w, c)["data"]
        start = float(collective_seconds("broadcast", 0.0, gpus, wire, c))
        assert start == pytest.approx((gpus - 1) * float(wire.latency))


def test_a_network_reaches_the_share_that_its_benchmark_reached() -> None:
    """NCCL's bus bandwidth: 192 of 200 GB/s on DGX A100 (NVIDIA/nccl issue 812), 135 of 400 Gb/s
    over Jean Zay's Omni-Path (stas00/ml-engineering network/README.md), 80 % where none is known.
    """
    plan = Plan.of("llama-3-8b", gpu="a100-sxm-80gb", gpus=64, strategy="zero-1").resolve()
    _, c = with_calibration(plan)
    for name, rate in (("dgx-a100", 192.0), ("jean-zay-a100", 135 / 8), ("aws-p4d", 40.0)):
        fabric = gpu_catalog.clusters()[name]
        link = group_link(plan.gpu, fabric, 8, replace(c, nic_in_step=1.0), 64, 1)
        assert float(link.bandwidth) == pytest.approx(rate * 1e9, rel=0.01)


def replaced_shard(full: ResolvedPlan, shard: int | str) -> ResolvedPlan:
    data = full.strategy.data.model_copy(update={"shard": shard})
    return full.model_copy(update={"strategy": full.strategy.model_copy(update={"data": data})})


def test_reductions_of_every_microbatch_hide_behind_its_backward_beside_gathers() -> None:
    """Where ZeRO-3 reduces in every backward, each hides what it exchanges; weights that the same
    backward gathers take their part of the network.
    """

    for reduce, times in (("microbatch", 4), ("step", 1)):
        set = {
            "strategy.stack": "torchtitan",
            "strategy.data.reduce": reduce,
            "training.global_batch": 256,
            "training.micro_batch": 1,
            "training.sequence_length": 1024,
        }
        plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=64, strategy="zero-3", set=set)
        full, c = with_calibration(plan.resolve())
        w, c = workload(full), replace(c, gather_overlap=0.0)
        apart, beside = (step_time(w, replace(c, data_overlap=share)) for share in (0.0, 0.45))
        gathered = apart.after["data_comm"] / times  # 16-bit weights, as the gradients are
        hidden = 0.45 * float(beside.durations.backward[0]) - gathered
        assert hidden > 0
        assert apart.after["data_comm"] - beside.after["data_comm"] == pytest.approx(times * hidden)


def test_interleaved_stages_expose_what_one_chunk_exchanges() -> None:
    """NeMo, Communication Overlap: under a pipeline, data-parallel communication overlaps by
    virtual stage, and one of its exchanges is exposed; of 1F1B's, that of one bucket.
    """

    def exposed(chunks: int, overlap: bool = True, **changed: float) -> float:
        description: dict[str, Any] = {
            "model": "llama-3-70b",
            "cluster": {"gpu": "h100-sxm-80gb", "gpus": 128},
            "training": {"global_batch": 256, "micro_batch": 1, "sequence_length": 4096},
            "strategy": {
                "stack": "megatron-bridge",
                "tensor": {"size": 4},
                "data": {"zero": 1, "overlap": overlap},
                "pipeline": {
                    "size": 4,
                    "chunks": chunks,
                    "schedule": "interleaved" if chunks > 1 else "1f1b",
                },
            },
        }
        full, c = with_calibration(Plan.model_validate(description).resolve())
        return float(np.max(step_time(workload(full), replace(c, **changed)).after["data_comm"]))

    nothing_hides = {"pipeline_overlap": 0.0, "parameter_overlap": 0.0}
    everything_hides = {"pipeline_overlap": 1e9, "parameter_overlap": 1e9}
    whole = exposed(1, **nothing_hides)
    assert exposed(4, **nothing_hides) == pytest.approx(whole)
    assert exposed(4, **everything_hides) == pytest.approx(whole / 4)
    assert exposed(1, **everything_hides) < whole / 100
    switched_off = [exposed(chunks, overlap=False, **everything_hides) for chunks in (1, 4)]
    assert switched_off == pytest.approx([whole, whole])


def test_rings_over_nodes_pay_the_network_for_every_rank_and_only_all_reduce_has_a_tree() -> None:
    w, c = setting(64, 32, 1)
    wire = axis_links(w, c)["tensor"]
    assert float(wire.latency) == pytest.approx(w.fixed.fabric.nic_latency_us * 1e-6)
    nothing = [
        float(collective_seconds(kind, 0.0, 32, wire, c))
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    assert nothing == pytest.approx(
        [31 * float(wire.latency)] * 2 + [2 * c.latency_ranks * float(wire.latency)]
    )


def test_an_all_to_all_pays_one_hop_however_many_ranks_it_has() -> None:
    """NCCL user guide, Point-to-point communication: an all-to-all is a group of sends and recvs,
    and calls within a group progress independently.
    """
    w, c = setting(64, 32, 1)
    wire = axis_links(w, c)["tensor"]
    for ranks in (2, 8, 32):
        found = float(collective_seconds("all_to_all", 0.0, ranks, wire, c))
        assert found == pytest.approx(float(wire.latency))
    assert float(collective_seconds("all_to_all", 1e9, 1, wire, c)) == 0.0


def test_a_late_host_hides_what_moves_but_not_the_latency_of_a_network() -> None:
    inside, over = (setting(64, size, 1, launch_us=500.0) for size in (8, 16))
    exposed = [
        float(np.max(step_time(*one).durations.communication["tensor_comm"]))
        for one in (inside, over)
    ]
    w, c = over
    every = [call for call in step_time(w, c).calls if call.axis == "tensor"]
    calls = [call for call in every if call.action in ("F", "B")]  # of microbatches
    starts = sum(
        np.max(
            call.count
            * collective_seconds(call.kind, 0.0, call.group_size, axis_links(w, c)["tensor"], c)
        )
        for call in calls
    )
    assert exposed[0] == 0.0
    assert exposed[1] == pytest.approx(float(starts / w.microbatches))


def test_boundaries_scattered_over_tensor_ranks_move_their_share() -> None:
    """2104.04473, section 4.1: a tensor rank sends 1/t of a replicated boundary, and what it
    receives is all-gathered inside the node. DeepSpeed's PartitionedTensor is the same.
    """
    w, c = setting(64, 8, 4)
    plain = replace(w, searched=replace(w.searched, sequence=0.0))
    exchange = replace(w.fixed.framework.model_parallel, scatter_gather=True)
    framework = replace(w.fixed.framework, model_parallel=exchange)
    scattered = replace(plain, fixed=replace(w.fixed, framework=framework))
    whole, part = (
        step_time(one, replace(c, launch_us=0.0)).durations.communication["pipeline_comm"]
        for one in (plain, scattered)
    )
    links = axis_links(w, c)
    latency = float(links["pipeline"].latency)
    gather = collective_seconds("all_gather", plain.residual_bytes, 8, links["tensor"], c)
    assert np.all(part < whole)
    received = np.array([0, 1, 1, 1]) + np.array([1, 1, 1, 0])
    sent = part - received * (latency + float(gather))
    assert (whole - received * latency) == pytest.approx(8 * sent)
    assert framework_profile("deepspeed-3d").model_parallel.scatter_gather


def test_blocking_sends_wait_for_what_they_pass_on() -> None:
    """DeepSpeed runtime/pipe/schedule.py: a stage sends and receives by turns, so that one between
    two others waits for four transfers a microbatch, and one at an end for two.
    """
    w, c = setting(64, 8, 4)
    exchange = replace(w.fixed.framework.model_parallel, blocking_sends=True)
    framework = replace(w.fixed.framework, model_parallel=exchange)
    blocking = replace(w, fixed=replace(w.fixed, framework=framework))
    received, all_of_them = (
        step_time(one, c).durations.communication["pipeline_comm"] for one in (w, blocking)
    )
    one = received[0]
    assert received == pytest.approx(one * np.array([1, 2, 2, 1]))
    assert all_of_them == pytest.approx(one * np.array([2, 4, 4, 2]))
    assert framework_profile("deepspeed-3d").model_parallel.blocking_sends
    assert not framework_profile("megatron-2021").model_parallel.blocking_sends


def test_fsdp_reduces_a_unit_at_once_under_zero_2_too() -> None:
    """torch/distributed/fsdp/_runtime_utils.py: a flat parameter's gradient is one reduce-scatter,
    of 32 layers, embedding and head; others pack buckets of 25 MiB.
    """

    def reductions(stack: str) -> float:
        set = {"strategy.stack": stack, "training.global_batch": 8}
        plan = Plan.of("llama-3-8b", gpu="h100-sxm-80gb", gpus=8, strategy="zero-2", set=set)
        calls = step_collectives(workload(plan.resolve()))
        return sum(float(np.max(c.count)) for c in calls if c.kind == "reduce_scatter")

    assert reductions("fsdp") == 34 < reductions("textbook")


@pytest.mark.parametrize(
    ("stack", "model", "calls"),
    [
        ("deepspeed-zero", "gpt3-175b", 96 * 12 + 5),
        ("deepspeed-zero", "llama-3-8b", 32 * 6 + 3),
        ("deepspeed-zero-coalesced", "gpt3-175b", 96 + 2),
        ("fsdp", "gpt3-175b", 96 + 2),
    ],
)
def test_zero_3_of_deepspeed_gathered_tensor_by_tensor(stack: str, model: str, calls: int) -> None:
    """Four matrices with a bias each and two norms of weight and bias are twelve calls, of which
    each waits for the ring's latency.
    """

    def seconds(stack: str) -> tuple[float, float, float]:
        plan = Plan.of(
            model,
            gpu="a100-sxm-80gb",
            gpus=384,
            strategy="zero-3",
            set={"strategy.stack": stack, "training.global_batch": 384, "training.micro_batch": 1},
        )
        full, k = with_calibration(plan.resolve())
        w = workload(full)
        links, every = axis_links(w, k), step_collectives(w)
        own = [c for c in every if (c.axis, c.kind, c.action) == ("data", "all_gather", "F")]
        count, moved = (float(sum(np.max(c.count * x) for c in own)) for x in (1, own[0].bytes))
        return count, moved, float(np.max(comm_seconds(own, links, k, "data", "F")))

    count, moved, took = seconds(stack)
    fewer, same, less = seconds("deepspeed-zero-coalesced")
    assert count == calls and moved == pytest.approx(same)
    hop = 1e-6 * max(5.0, 6.0)  # the slower of network and links inside a node
    assert took - less == pytest.approx((count - fewer) * 383 * hop, rel=0.01, abs=1e-9)


def test_experts_that_other_ranks_hold_are_gathered_over_fewer_ranks() -> None:
    """With as many expert ranks as ranks, no weight of an expert is gathered or reduced; dense
    weights are, over all.
    """

    def gathered(expert: int) -> float:
        plan = Plan.of(
            "mixtral-8x7b",
            gpu="h100-sxm-80gb",
            gpus=8,
            strategy="zero-3",
            set={"strategy.expert.size": expert},
        ).resolve()
        calls = step_collectives(workload(plan))
        moved = (
            np.sum(c.bytes * c.count * (c.group_size > 1))
            for c in calls
            if c.axis == "data" and c.kind == "all_gather"
        )
        return float(sum(moved))

    w = workload(Plan.of("mixtral-8x7b", gpu="h100-sxm-80gb", gpus=8, strategy="zero-3").resolve())
    share = float(w.param_counts.dense.sum() / w.param_counts.total.sum())
    assert gathered(8) == pytest.approx(share * gathered(1))
    assert gathered(8) < gathered(4) < gathered(2) < gathered(1)


@pytest.mark.parametrize("sequence", [False, True])
def test_backward_exchanges_hide_beside_gemms_of_column_parallel_layers(sequence: bool) -> None:
    """tensor_parallel/layers.py: of each layer, two reductions beside weight gradients, and under
    sequence parallelism two all-gathers beside input gradients; as much as GEMMs take at most.
    """

    def exposed(overlap: float, **link: float) -> float:
        w, c = setting(8, 2, 1, stack="megatron-2022", sequence=sequence, **link)
        return float(
            np.max(
                step_time(w, replace(c, backward_overlap=overlap)).durations.communication[
                    "tensor_comm"
                ]
            )
        )

    w, c = setting(8, 2, 1, stack="megatron-2022", sequence=sequence)
    wire, size = axis_links(w, c)["tensor"], w.hidden_activation_bytes
    kinds = ("reduce_scatter", "all_gather") if sequence else ("all_reduce",)
    hidden = 2 * w.layers * sum(collective_seconds(kind, size, 2, wire, c) for kind in kinds)
    assert c.backward_overlap == 0.8
    assert exposed(0.0) - exposed(c.backward_overlap) == pytest.approx(float(np.max(hidden)))
    # On links a hundred times slower, GEMMs end first.
    slow = {"link_share": c.link_share / 100}
    assert 0 < exposed(0.0, **slow) - exposed(0.8, **slow) < 50 * float(np.max(hidden))
    assert exposed(0.4, **slow) > exposed(0.8, **slow)
