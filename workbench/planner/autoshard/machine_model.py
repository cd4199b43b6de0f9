"""The machine that operators are priced on: one GPU, and the link of each mesh axis, as the cost
model has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from workbench.costmodel.communication.collective_cost import AxisLink
from workbench.costmodel.compute.kernel_rates import DeviceRates
from workbench.costmodel.frameworks.framework_profile import (
    DEFAULT_FRAMEWORK,
    FrameworkProfile,
    framework_profile,
)
from workbench.costmodel.rates.constants import ideal_constants
from workbench.errors import refuse


@dataclass(frozen=True)
class ExpertRates:
    """How layers with experts run where it is not as other operators do."""

    router: DeviceRates | None
    """Of a router's GEMMs, where they run in fp32 and the others do not."""
    counts_operators: bool
    """Whether routing is this engine's, whose operators are counted one by one."""
    is_grouped: bool
    """Whether the GEMMs of all experts are one kernel."""
    exchange: AxisLink | None = None
    """The link between ranks that experts are spread over; None: each rank has all."""


@dataclass(frozen=True)
class MachineModel:
    """What a rank computes and communicates with (a machine model in the sense of FlexFlow)."""

    device: DeviceRates
    """Rates of the GPU and the constants of the cost model."""
    links: tuple[AxisLink, ...]
    """One for all axes, or one per axis of a grid, outermost first."""
    framework: FrameworkProfile = field(
        default_factory=lambda: framework_profile(DEFAULT_FRAMEWORK)
    )
    fp8: bool = False
    """Whether the layers' GEMMs run in fp8."""
    experts: ExpertRates | None = None
    """How layers with experts run; None: at the rates of other operators."""

    def __post_init__(self) -> None:
        rates = {
            "flops": (float(self.device.flops),),
            "memory_bandwidth": (float(self.device.bandwidth),),
            "bandwidth": tuple(float(link.bandwidth) for link in self.links),
        }
        for name, values in rates.items():
            if not all(value > 0 for value in values):
                raise refuse(f"machine.{name}", f"is {_shown(values)}; legal: numbers above 0")
        latencies = tuple(float(link.latency) for link in self.links)
        if not all(0 <= value < math.inf for value in latencies):
            raise refuse(
                "machine.latency", f"is {_shown(latencies)}; legal: finite seconds, 0 or more"
            )


def ideal_machine(
    flops: float,
    bandwidth: float | tuple[float, ...],
    latency: float | tuple[float, ...],
    memory_bandwidth: float = math.inf,
) -> MachineModel:
    """A machine that reaches its rates at every size, for questions that no plan asks.

    Args:
        flops: FLOP/s of GEMMs and attention.
        bandwidth: Bytes/s that a rank sends; one, or one per axis of a grid, outermost first.
        latency: Seconds per hop; as `bandwidth`.
        memory_bandwidth: Bytes/s of memory-bound operators.

    Raises:
        PlanError: A rate is not above 0, or a latency is negative or infinite.
    """
    pairs = zip(_several(bandwidth, latency), _several(latency, bandwidth), strict=True)
    device = DeviceRates(flops, flops, flops, memory_bandwidth, ideal_constants(), True)
    return MachineModel(device, tuple(AxisLink(*pair) for pair in pairs))


def _several(
    value: float | tuple[float, ...], other: float | tuple[float, ...]
) -> tuple[float, ...]:
    if isinstance(value, tuple):
        return value
    return (value,) * (len(other) if isinstance(other, tuple) else 1)


def _shown(values: tuple[float, ...]) -> float | tuple[float, ...]:
    return values[0] if len(values) == 1 else values
