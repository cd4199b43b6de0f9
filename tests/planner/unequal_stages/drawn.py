"""Layer profiles, topologies and plans of unequal stages drawn at random."""

from __future__ import annotations

import random

from workbench.plan.model.layer_profile import Layer, LayerProfile
from workbench.planner.unequal_stages.placements import POLICIES, place
from workbench.planner.unequal_stages.stage_times import Batch, Stage
from workbench.planner.unequal_stages.topology import Topology


def profile(draw: random.Random, layers: int, batch: int = 1) -> LayerProfile:
    """A chain of layers whose times and sizes differ up to tenfold, some with a skip connection."""
    found: list[Layer] = []
    for i in range(layers):
        forward = 1e-3 * 10 ** draw.uniform(-0.5, 0.5)
        backward = forward * draw.uniform(1.0, 3.0)
        activation, parameter = (10 ** draw.uniform(6, 7), 10 ** draw.uniform(6, 8))
        inputs = {f"n{i - 1}"} if i else set()
        if i > 2 and draw.random() < 0.2:
            inputs.add(f"n{draw.randrange(i)}")
        found.append(
            Layer(f"n{i}", f"l{i}", forward, backward, activation, parameter, tuple(sorted(inputs)))
        )
    return LayerProfile("drawn", batch, tuple(found))


def topology(draw: random.Random, devices: int) -> Topology:
    """Nodes whose network is 1 to 20 times slower than their own links."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    each = draw.choice(sizes)
    device_rate = 10 ** draw.uniform(10, 11)
    network = device_rate / 10 ** draw.uniform(0, 1.3)
    return Topology(
        devices // each, each, device_rate, network, network * draw.uniform(1, 3), each // 2 or 1
    )


def stages(draw: random.Random, layers: int, topology: Topology, most: int) -> tuple[Stage, ...]:
    """A cut, replicas and placement of 2 to `most` stages on all devices."""
    count = draw.randint(2, min(most, layers, topology.world_size))
    cuts = [0, *sorted(draw.sample(range(1, layers), count - 1)), layers]
    ends = [0, *sorted(draw.sample(range(1, topology.world_size), count - 1)), topology.world_size]
    used = previous = (0,) * topology.nodes
    found = []
    for i in range(count):
        replicas = ends[i + 1] - ends[i]
        previous = place(used, previous, draw.choice(POLICIES), replicas, topology.devices)
        used = tuple(a + b for a, b in zip(used, previous))
        found.append(Stage(cuts[i], cuts[i + 1], previous))
    return tuple(found)


def batch(draw: random.Random, stages: int, replicas: int) -> Batch:
    """At least four microbatches a stage, at least a sequence a replica."""
    return Batch(draw.randint(4, 16) * stages, draw.randint(replicas, 4 * replicas))
