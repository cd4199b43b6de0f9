"""The benchmark of the kernels: what it counts is what the planner counts, and what it would not
time.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.benchmarks import kernels, kernels_cases, kernels_timing
from tests.benchmarks.kernels import Bench, file_of, machine, smallest
from tests.benchmarks.kernels_goals import summary
from tests.benchmarks.kernels_models import Size
from tests.benchmarks.kernels_traffic import textbook_bytes
from workbench.costmodel.compute.kernel_rates import device_rates as card
from workbench.costmodel.compute.memory_bound import memory_bound_pass
from workbench.costmodel.inputs.rank_workload import workload
from workbench.costmodel.rates.constants import constants
from workbench.plan.schema import Plan

CPU = torch.device("cpu")
FP32 = torch.float32


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2-xl"])
def test_textbook_bytes_are_the_planners(model: str) -> None:
    sets: dict[str, Any] = {"training.sequence_length": 512, "training.micro_batch": 2}
    sets |= {"strategy.stack": "textbook", "strategy.kernels": "eager"}
    w = workload(Plan.of(model, gpu="h100-sxm-80gb", gpus=1, strategy="single", set=sets).resolve())
    own = replace(constants(w.fixed.gpu, "eager", "textbook"), traffic=1.0)
    m = card(w.fixed.gpu, "bf16", own)
    planned = memory_bound_pass(w, m, False)
    counted = textbook_bytes(Size(w.shape, 2, 512), torch.bfloat16)
    assert float(planned.forward) * m.bandwidth == pytest.approx(counted["forward"])
    assert float(planned.backward) * m.bandwidth == pytest.approx(counted["backward"])


def contest(fused: Any) -> kernels_timing.Contest:
    one = kernels_cases.dropped(16, 32, FP32, CPU, "bias and residual")
    return replace(one, contestants=one.contestants | {"fused": kernels_cases.plain(fused)})


def test_a_wrong_kernel_is_not_timed() -> None:
    right = kernels_cases.dropped(16, 32, FP32, CPU, "bias and residual")
    seconds, off = kernels_timing.race(right, CPU)
    assert off["fused"] < 1e-6 and all(
        seconds["fused"][name] > 0 for name in ("forward", "backward")
    )

    def wrong(x: Tensor, bias: Tensor, residual: Tensor, rows: Tensor) -> Tensor:
        made = right.contestants["fused"](x, bias, residual, rows)()[0]
        return made + 1e-3 * x * (torch.arange(16) == 3)  # one column, off by a thousandth

    with pytest.raises(ArithmeticError, match=r"dropout bias and residual \[32, 16\] float32"):
        kernels_timing.race(contest(wrong), CPU)


def test_in_place_operators_start_from_the_same_inputs_each_time() -> None:
    seen: list[float] = []

    def in_place(x: Tensor, bias: Tensor, residual: Tensor, rows: Tensor) -> Tensor:
        seen.append(x.detach().sum().item())
        return x.mul_(0.0) + 0.0 * bias + 0.0 * residual

    one = contest(in_place)
    runner = kernels_timing.Runner(
        one, one.contestants["fused"], [one.inputs(torch.Generator().manual_seed(0))]
    )
    for _ in range(3):
        runner.restore()
        runner.first()
    assert seen == [seen[0]] * 3 and seen[0] != 0


@pytest.mark.slow
def test_rows_are_labelled_and_failures_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(
        sizes: Any, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device
    ) -> list[Any]:
        found = [
            kernels_cases.dropped(hidden, 16, dtype, device, case)
            for case in kernels_cases.DROPOUTS
        ]
        missing: Any = None
        broken = replace(
            found[0],
            kernel="broken",
            contestants={"eager": found[0].contestants["eager"], "fused": missing},
        )
        return [*found, broken]

    monkeypatch.setattr(kernels, "contests", of)
    monkeypatch.setattr(
        kernels,
        "SIZES",
        {"cpu": replace(kernels.SIZES["cpu"], hidden=(8, 16), vocab=(8, 8), sweep=(4,))},
    )
    bench = Bench(CPU, "float32")
    bench.found |= machine(CPU) | {"copy_bandwidth_gbs": 10.0}
    bench.kernels()
    bench.below()
    rows = bench.found["kernels"]
    assert len(rows) == 2 * 2 * 2 and {row["pass"] for row in rows} == {"forward", "backward"}
    for row in rows:
        assert row["kernel"] == "dropout" and row["seconds"]["liger"] is None
        least = {("alone", "forward"): 2, ("bias and residual", "forward"): 3}.get(
            (row["case"], row["pass"]), 2
        )
        assert row["bytes"] == least * 16 * row["shape"][1] * 4
        assert row["share_of_copy"] == pytest.approx(row["bytes"] / row["seconds"]["fused"] / 10e9)
    assert set(bench.found["below"]) == {"dropout"} and len(bench.failed) == 3
    assert sorted((one["case"], one["width"]) for one in bench.found["sweep"]) == [
        (case, width) for case in ("alone", "bias and residual") for width in (4, 8, 16)
    ]
    assert all(words.startswith("broken alone") for words in bench.failed)
    assert json.loads(json.dumps(bench.found)) == bench.found
    assert file_of(bench.found).name == "kernels-cpu.json"
    assert (
        file_of({"kind": "cuda", "device": "NVIDIA H100 80GB HBM3"}).name
        == "kernels-h100-80gb-hbm3.json"
    )


def test_the_shape_below_which_eager_is_to_be_taken() -> None:
    def sweep(*ratios: float) -> list[dict[str, Any]]:
        shapes = [[512, 1024 >> i] for i in range(len(ratios))]
        return [
            {"shape": s, "width": s[1], "eager_over_fused": ratio}
            for s, ratio in zip(shapes, ratios)
        ][::-1]

    assert smallest(sweep(2.0, 1.5, 1.1)) is None
    assert smallest(sweep(2.0, 0.9, 1.1)) == [512, 512]
    assert smallest(sweep(0.8, 0.7)) == [512, 1024]


def test_goals_are_judged_by_the_figures() -> None:
    def row(name: str, fused: float, share: float, width: int) -> dict[str, Any]:
        seconds = {"eager": 1.0, "compiled": 1.0, "fused": fused, "liger": None}
        return {
            "kernel": "add_norm",
            "case": "",
            "shape": [8, width],
            "width": width,
            "dtype": "bfloat16",
            "pass": name,
            "bytes": 1,
            "seconds": seconds,
            "share_of_copy": share,
        }

    head = {
        "kernel": "linear_cross_entropy",
        "shape": [8, 8, 32768],
        "dtype": "bfloat16",
        "pass": "step",
        "seconds": {"eager": 2.0, "compiled_chunked": 1.0, "fused": 1.1},
        "peak_bytes": {"eager": 100, "compiled_chunked": 30, "fused": 26},
    }
    rows = [
        row("forward", 0.9, 0.95, 4096),
        row("backward", 1.2, 0.89, 4096),
        row("forward", 1.0, 0.1, 512),
    ]
    found = {
        "kind": "cuda",
        "kernels": rows,
        "linear_cross_entropy": [head],
        "step": {"seconds": {"eager": 1.3, "fused": 1}},
    }
    told = {goal["goal"]: (goal["met"], goal["of"], goal["missed"]) for goal in summary(found)}
    assert told == {
        "at least 90% of the copy bandwidth at width 4096 or more": (
            1,
            2,
            ["add_norm [8, 4096] bfloat16 backward: 0.89"],
        ),
        "no slower than eager, forward and backward": (1, 2, ["add_norm [8, 4096] bfloat16: 0.95"]),
        "head: at least 0.95 times the speed of compiled chunks": (
            0,
            1,
            ["linear_cross_entropy [8, 8, 32768] bfloat16 step: 0.91"],
        ),
        "head: no higher a peak than compiled chunks": (1, 1, []),
        "head: at most 25% of eager's peak": (
            0,
            1,
            ["linear_cross_entropy [8, 8, 32768] bfloat16 step: 0.26"],
        ),
        "a step at least 1.2 times as fast as eager": (1, 1, []),
    }
    assert "a step" not in " ".join(goal["goal"] for goal in summary(found | {"kind": "cpu"}))


def test_committed_figures_are_of_every_part() -> None:
    for path in Path(kernels.FOLDER).glob("kernels-*.json"):
        found = json.loads(path.read_text())
        # A GPU's may lack what neither estimates nor the table of kernels read.
        parts = kernels.PARTS if found["kind"] == "cpu" else ("kernels", "block", "step", "traffic")
        assert not {*parts, "loss_bytes", "date", "device", "versions"} - set(found), path
        assert set(found["traffic"]) == set(found["loss_bytes"]) == {"eager", "compiled", "fused"}
        assert found["traffic"]["eager"] > 0 and found["loss_bytes"]["eager"] > 0
        assert path == file_of(found)
