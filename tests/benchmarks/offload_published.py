"""Offloading on one V100 of 32 GB beside published figures: `python -m
tests.benchmarks.offload_published`.

TFLOP/s count recomputation, 8 per parameter and token, as the authors do; of their bars neither
batch nor sequence length is printed, and the tutorial's and the paper's (recalled) are taken. A
DGX-2 has PCIe 3.0 x16 and 1.5 TB of host memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.costmodel.frameworks.framework_profile import DEFAULT_FRAMEWORK
from workbench.plan.model.parameter_count import parameters
from workbench.plan.schema import Plan, build_plan
from workbench.planner.estimate import estimate
from workbench.planner.memory_advice import planned_memory

GPU = "v100-sxm2-32gb"
STACKS = (DEFAULT_FRAMEWORK, "deepspeed-zero")
TUTORIAL = "DeepSpeed tutorial ZeRO-Offload: log of a run, screenshot"
BLOG = "DeepSpeed blog of March 2021, figure 3, read off bars"


def gpt2(layers: int, hidden: int) -> dict[str, object]:
    """A GPT-2 of so many layers, heads of 128 wide."""
    return {
        "name": f"gpt2 of {layers} x {hidden}",
        "layers": layers,
        "hidden": hidden,
        "heads": hidden // 128,
        "ffn": 4 * hidden,
        "vocab": 50304,
        "max_positions": 1024,
        "positions": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "biases": "all",
        "tied": True,
    }


def planned(layers: int, hidden: int, batch: int, preset: str, stack: str) -> Plan:
    """A plan of one V100 in fp16, sequences of 1,024 tokens, all recomputed."""
    training = {"sequence_length": 1024, "micro_batch": batch, "global_batch": batch}
    return build_plan(
        {
            "model": gpt2(layers, hidden),
            "cluster": {"gpu": GPU, "gpus": 1},
            "strategy": {
                "preset": preset,
                "recompute": "full",
                "precision": "fp16",
                "stack": stack,
            },
            "training": training,
        }
    )


@dataclass(frozen=True)
class Speed:
    """A published step of ZeRO-Offload."""

    layers: int
    batch: int
    what: str
    """`s a step`, or TFLOP/s."""
    published: float
    source: str

    def estimated(self, stack: str) -> float:
        """The same by the estimate."""
        plan = planned(self.layers, 4096, self.batch, "zero-offload", stack)
        seconds = float(estimate(plan).step_seconds or 0.0)
        count = parameters(plan.resolve().shape).total
        return seconds if self.what == "s a step" else 8e-12 * count * self.batch * 1024 / seconds


SPEEDS = (
    Speed(50, 10, "s a step", 25.68, TUTORIAL),
    Speed(50, 10, "TFLOP/s", 40.0, "2101.06840, abstract"),
    Speed(50, 10, "TFLOP/s", 29.7, BLOG),
    Speed(65, 4, "TFLOP/s", 20.3, BLOG),
)


@dataclass(frozen=True)
class Largest:
    """The largest model published of a strategy, in G parameters, of layers of one width."""

    preset: str
    hidden: int
    published: str
    source: str

    def estimated(self, stack: str) -> float:
        """Of most layers that fit, micro-batch 1."""
        fits, beyond = 1, 2048
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            full = planned(middle, self.hidden, 1, self.preset, stack).resolve()
            fits, beyond = (middle, beyond) if planned_memory(full).fits else (fits, middle)
        plan = planned(fits, self.hidden, 1, self.preset, stack)
        return parameters(plan.resolve().shape).total / 1e9


LARGEST = (
    Largest("ddp", 2048, "1.4", "2101.06840, abstract: PyTorch alone"),
    Largest("zero-offload", 4096, "13", "2101.06840, abstract: over 13 G"),
    Largest("zero-infinity", 8192, "40", "DeepSpeed blog of March 2021: over 40 G, 1.5 TB of host"),
)


def main() -> None:
    """Print both tables."""
    print(f"{'':34}{'published':>10}" + "".join(f"{stack:>16}" for stack in STACKS) + "  source")
    for speed in SPEEDS:
        found = "".join(f"{speed.estimated(stack):16.1f}" for stack in STACKS)
        name = f"{speed.layers} x 4096, batch {speed.batch}, {speed.what}"
        print(f"{name:34}{speed.published:10.1f}{found}  {speed.source}")
    for largest in LARGEST:
        found = "".join(f"{largest.estimated(stack):16.1f}" for stack in STACKS)
        name = f"largest by {largest.preset}, G parameters"
        print(f"{name:34}{largest.published:>10}{found}  {largest.source}")
    print("published: measured by their authors; the other columns are estimated")


if __name__ == "__main__":
    main()
