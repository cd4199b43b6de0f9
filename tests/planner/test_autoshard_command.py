"""Operator strategies of a plan: the command, its JSON, a plan written and read back, refusals,
links by topology.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ask
from workbench.costmodel.rates.constants import constants
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan
from workbench.planner.autoshard import (
    TensorBytes,
    choose_for_plan,
    choose_strategies,
    read_strategies,
)
from workbench.planner.autoshard.for_plans.plan_machine import machine_model

H100 = ["--model", "llama-3-8b", "--gpu", "h100-sxm-80gb"]


def plan(gpus: int = 8, **fields: Any) -> ResolvedPlan:
    return Plan.of(
        "llama-3-8b", gpu="h100-sxm-80gb", gpus=gpus, strategy="ddp", set=fields
    ).resolve()


def test_json_holds_the_rows_the_mapping_and_the_reason(ask: Ask) -> None:
    code, out, _ = ask("operators", *H100, "--gpus", 4, "--strategy", "megatron-tp", "--json")
    found = json.loads(out)
    assert code == 0 and found["source"] == "estimated" and found["ranks"] == [4]
    rows = {row["operator"]: row for row in found["rows"]}
    assert rows["mlp.up"]["strategy"] == "((1,2,1),(1,2))"  # by tokens and by columns
    total = sum(r["seconds"] * r["times"] for r in found["rows"] + found["redistributions"])
    assert found["seconds"] == pytest.approx(total, rel=1e-12)
    assert (
        found["operators"]["blocks.*.mlp.gate"] == "((1,2,1),(1,2))"
        and "mlp.up by columns" in found["reason"]
    )


def test_tables_say_estimated_and_give_the_reason(ask: Ask) -> None:
    code, out, _ = ask(
        "operators", *H100, "--gpus", 16, "--strategy", "ddp", "--ranks", "2x8", "--memory", 70
    )
    assert (
        code == 0 and "Operators over 2 x 8 ranks (estimated)" in out and "Total (estimated)" in out
    )
    assert "limit" in out and "70.0 GiB" in out and "peak memory of a rank" in out


def test_a_plan_written_with_its_operators_is_read_back_and_kept(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    code, out, _ = ask("operators", *H100, "--gpus", 4, "--strategy", "ddp", "-o", path, "--json")
    first = json.loads(out)
    assert code == 0 and first["path"] == str(path)
    kept = Plan.load(path)
    assert kept.strategy.operators == first["operators"] and read_strategies(
        kept.strategy.operators
    )
    code, out, _ = ask("operators", path, "--json")
    second = json.loads(out)
    assert code == 0 and second["operators"] == first["operators"]
    assert second["seconds"] == pytest.approx(first["seconds"], rel=1e-12)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--memory", "1"], "--memory: is 1 GiB a rank, but the least that was found takes"),
        (["--ranks", "11"], "--ranks: is 11, which"),
        (["--ranks", "x8"], "--ranks: is 'x8'; legal"),
        (["--ranks", "-1"], "--ranks: is '-1'"),
        (["--memory", "-1"], "--memory: is -"),
        (["--sequences", "0"], "--sequences: is 0"),
        (
            ["--set", "strategy.operators={head: column}"],
            "operators.head: is 'column'; legal: a tuple",
        ),
        (["--memory", "nan"], "--memory: is nan"),
        (
            ["--sequences", "99999999"],
            "sequences: is 99999999; legal: 1 to 16,777,216 (ten times the largest batch",
        ),
    ],
)
def test_what_is_impossible_is_said_in_a_line(ask: Ask, words: list[str], message: str) -> None:
    code, out, err = ask(
        "operators", *H100, "--gpus", 8, "--strategy", "megatron-tp", *words, "--json"
    )
    assert code == 2 and message in err and "Traceback" not in err
    assert json.loads(out)["exit_code"] == 2


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ranks", "3"], "cluster.gpus: is 4, which tensor 3 x"),
        (["--sequences", "7"], "training.global_batch: is 16, not a multiple of micro-batch 7 x"),
    ],
)
def test_only_a_legal_plan_is_written(
    ask: Ask, tmp_path: Path, words: list[str], message: str
) -> None:
    path = tmp_path / "plan.yaml"
    asked = ("operators", "--model", "tiny", "--gpu", "local", "--gpus", 4, *words)
    assert ask(*asked)[0] == 0
    code, _, err = ask(*asked, "-o", path)
    assert code == 2 and message in err and not path.exists()


def test_more_sequences_turn_tensor_parallel_into_data_parallel(ask: Ask) -> None:
    few, many = (
        json.loads(
            ask(
                "operators",
                *H100,
                "--gpus",
                8,
                "--strategy",
                "megatron-tp",
                "--sequences",
                n,
                "--json",
            )[1]
        )["operators"]
        for n in (1, 64)
    )
    assert few["blocks.*.mlp.up"] == "((1,4,1),(1,2))"
    assert many["blocks.*.attention.q"].startswith(("((4,1)", "((8,1)"))


def test_one_rank_splits_nothing(ask: Ask) -> None:
    code, out, _ = ask("operators", "--model", "tiny", "--gpu", "local", "--gpus", 1, "--json")
    found = json.loads(out)
    assert (
        code == 0
        and not found["redistributions"]
        and all(row["splits"] == "unsharded" for row in found["rows"])
    )


def test_ranks_of_several_nodes_have_the_network_outside() -> None:
    two = plan(16)
    assert choose_for_plan(two).ranks == (16,)
    assert choose_for_plan(plan(128)).ranks == (16, 8)
    known = constants(two.gpu, two.strategy.kernels)
    found = machine_model(two, (2, 8))
    reached = known.nic_in_step * (two.fabric.nic_share or known.nic_share)
    network = two.fabric.nic_gbs * 1e9 * reached / 8
    bandwidths: tuple[Any, ...] = tuple(link.bandwidth for link in found.links)
    assert bandwidths == (
        pytest.approx(network),
        pytest.approx(two.gpu.link_gbs * 1e9 * known.link_share),
    )
    # A ring goes at the pace of its slowest hop, and NVLink's latency is the larger one here.
    slowest = max(two.fabric.nic_latency_us, two.fabric.link_latency_us)
    assert tuple(link.latency for link in found.links) == (
        slowest * 1e-6,
        two.fabric.link_latency_us * 1e-6,
    )


def test_the_batch_is_the_plan_s_microbatch_over_all_data_ranks() -> None:
    one = plan(
        8,
        **{
            "training.micro_batch": 2,
            "training.global_batch": 64,
            "training.sequence_length": 1024,
        },
    )
    sizes = TensorBytes(
        element=2, gradient=4, state=2 + 4 + 8 + 4
    )  # bf16, fp32 gradients that add up, Adam, master
    direct = choose_strategies(
        one.shape,
        16 * 1024,
        8,
        machine_model(one, 8),
        sequence_length=1024,
        fused=True,
        microbatches=4,
        sizes=sizes,
    )
    assert math.isclose(choose_for_plan(one).seconds, direct.seconds, rel_tol=1e-12)
    assert choose_for_plan(one).bytes == pytest.approx(direct.bytes, rel=1e-12)
