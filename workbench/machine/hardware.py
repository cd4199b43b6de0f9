"""What a GPU and the network between nodes are to a plan: physical constants, with units and
source.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.fields.bounds import (
    Count,
    Gibibytes,
    GigabytesPerSecond,
    Microseconds,
    Price,
    Ranks,
    Teraflops,
    UnitShare,
    Watts,
)
from workbench.fields.frozen import Frozen
from workbench.units import GIB


class GPU(Frozen):
    """One accelerator: physical constants with their source in data/gpus.yaml."""

    name: str = Field(description="Catalog name.")
    title: str = Field("", description="Name in full.")
    device: Literal["cuda", "npu", "cpu"] = Field("cuda", description="torch device type.")
    architecture: str = Field(
        "", description="Generation of its matrix units, as data/planner.yaml names them."
    )
    multiprocessors: Count | None = Field(
        None, description="Streaming multiprocessors that share the peak."
    )
    memory_gib: Gibibytes = Field(description="Usable device memory, GiB.")
    bandwidth_gbs: GigabytesPerSecond = Field(description="Memory bandwidth, GB/s.")
    tflops: dict[str, Teraflops] = Field(
        description="Dense peak by dtype (fp32, tf32, fp16, bf16, fp8, mxfp8, nvfp4), TFLOP/s."
    )
    fp8_gemm_layouts: Literal["tn", "all"] | None = Field(
        None,
        description="Layouts that its fp8 GEMMs take: all, or tn (transposed copies are kept).",
    )
    link_gbs: GigabytesPerSecond = Field(
        description="Bandwidth to peers in the node, one direction, GB/s."
    )
    pcie_gbs: GigabytesPerSecond = Field(description="Bandwidth to the host, one direction, GB/s.")
    watts: Watts | None = Field(None, description="Board power, W.")
    price_per_hour: Price | None = Field(
        None, description="On-demand price of one GPU, USD an hour."
    )
    price_source: str = Field("", description="Whose price it is, and when it was read.")
    source: str = Field("", description="Where the figures come from.")


class Fabric(Frozen):
    """The network between nodes, and how many GPUs share a node."""

    name: str = Field(description="Catalog name.")
    gpus_per_node: Ranks = Field(description="GPUs in a node.")
    nic_gbs: GigabytesPerSecond = Field(
        description="Network bandwidth of one node, one direction, GB/s."
    )
    nic_share: UnitShare | None = Field(
        None,
        description="Share of that rate which a benchmark of large collectives reaches; null: that "
        "of other networks.",
    )
    link_latency_us: Microseconds = Field(
        description="Latency of a hop inside the node, microseconds."
    )
    nic_latency_us: Microseconds = Field(
        description="Latency of a hop between nodes, microseconds."
    )
    host_memory_gib: Gibibytes | None = Field(
        None, description="Memory of a node's host, GiB; null: not known, nothing is refused by it."
    )
    host_gbs: GigabytesPerSecond | None = Field(
        None,
        description="Bandwidth of a node's host memory, all sockets, GB/s; null: that of a usual "
        "server.",
    )
    rack_nodes: Ranks | None = Field(
        None, description="Nodes of a rack or pod; null: one network joins all."
    )
    rack_gbs: GigabytesPerSecond | None = Field(
        None, description="Bandwidth of a node out of its rack, GB/s; null: nic_gbs."
    )
    rack_latency_us: Microseconds | None = Field(
        None, description="Latency of a hop between racks, microseconds."
    )
    source: str = Field("", description="Where the figures come from.")

    def host_bytes_per_rank(self, ranks: int) -> int | None:
        """Host memory of one of the ranks of a node; None where it is not known."""
        size = self.host_memory_gib
        return None if size is None else int(size * GIB / ranks)
