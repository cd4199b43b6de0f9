"""Redistributions between all pairs of layouts: `python -m tests.benchmarks.redistribution [--mesh
2x8 --dims 2 --mib 64 --gb 50x400]`.

Beside the chosen steps: slices, all-to-alls and all-gathers in this fixed order, axis by axis; and
what torch's DTensor does (2.13: from the innermost axis outward, an all-to-all from dim to dim, an
all-gather before what an inner axis keeps). Seconds are estimated.
"""

from __future__ import annotations

import argparse
import math

from tests.redistribution_pairs import layouts
from workbench.plan.operators.least_redistribution import LeastRedistribution, RedistributionStep
from workbench.plan.operators.tensor_layout import TensorLayout
from workbench.planner.autoshard import ideal_machine
from workbench.planner.autoshard.device_mesh import LogicalMesh, logical_mesh


def fixed_order(held: TensorLayout, wanted: TensorLayout, size: float, mesh: LogicalMesh) -> float:
    """Seconds of slices, then an all-to-all an axis, then an all-gather an axis from the innermost
    on; infinite where an axis is not the innermost of its dim.
    """
    sizes = mesh.redistribution.sizes
    has, wants = held.at(len(sizes)), wanted.at(len(sizes))
    dims, total = [list(axes) for axes in held.dims], 0.0
    for axis, (a, b) in enumerate(zip(has, wants)):
        if a is None and b is not None:
            dims[b].append(axis)
    for axis in reversed(range(len(sizes))):
        a, b = has[axis], wants[axis]
        if a is None or a == b:
            continue
        if dims[a][-1] != axis:
            return math.inf
        local = size / math.prod(sizes[i] for axes in dims for i in axes)
        dims[a].pop()
        if b is None:
            total += mesh.seconds("all_gather", local * sizes[axis], [axis])
        else:
            dims[b].append(axis)
            total += mesh.seconds("all_to_all", local, [axis])
    return total if tuple(map(tuple, dims)) == wanted.dims else math.inf


def dtensor(held: TensorLayout, wanted: TensorLayout, size: float, mesh: LogicalMesh) -> float:
    """Seconds of DTensor's own steps: axes whose dim an outer axis gives up or takes are gathered,
    innermost first; then each axis gets what it wants, outermost first.
    """
    sizes = mesh.redistribution.sizes
    at, wants = list(held.at(len(sizes))), wanted.at(len(sizes))
    total = 0.0

    def local() -> float:
        return size / math.prod(n for n, dim in zip(sizes, at) if dim is not None)

    for axis in reversed(range(1, len(sizes))):
        dim = at[axis]
        if dim is not None and any((at[i] == dim) != (wants[i] == dim) for i in range(axis)):
            total += mesh.seconds("all_gather", local() * sizes[axis], [axis])
            at[axis] = None
    for axis, dim in enumerate(wants):
        if at[axis] is not None and dim is None:
            total += mesh.seconds("all_gather", local() * sizes[axis], [axis])
        elif at[axis] is not None and at[axis] != dim:
            total += mesh.seconds("all_to_all", local(), [axis])
        at[axis] = dim
    return total


def text(layout: TensorLayout) -> str:
    """A dim by the axes that shard it: `01,-` is a matrix of which both axes shard the rows."""
    return ",".join("".join(map(str, axes)) or "-" for axes in layout.dims)


def step_text(step: RedistributionStep) -> str:
    """Kind, axes and MiB of the larger side."""
    axes = "".join(map(str, step.axes))
    return f"{step.kind}({axes})" + ("" if step.kind == "slice" else f" {step.bytes / 2**20:.4g}")


def main() -> None:
    """Print a row for each pair, and how the three compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="2x2", help="sizes of the axes, outermost first")
    parser.add_argument("--dims", type=int, default=2)
    parser.add_argument("--mib", type=float, default=64.0, help="MiB of the unsharded tensor")
    parser.add_argument("--gb", default="", help="GB/s of each axis, 50x400")
    options = parser.parse_args()
    sizes = tuple(map(int, options.mesh.split("x")))
    rates = tuple(float(gb) * 1e9 for gb in options.gb.split("x")) if options.gb else 50e9
    mesh = logical_mesh(sizes, ideal_machine(1e15, rates, 3e-6))
    least: LeastRedistribution = mesh.redistribution
    size, rows = options.mib * 2**20, []
    for held in layouts(len(sizes), options.dims):
        for wanted in layouts(len(sizes), options.dims):
            steps = least.steps(held, wanted, size)
            found = (
                sum(mesh.seconds(s.kind, s.bytes, s.axes) for s in steps if s.kind != "slice"),
                fixed_order(held, wanted, size, mesh),
                dtensor(held, wanted, size, mesh),
            )
            rows.append(found)
            shown = "".join(f"{1e6 * t:>11.1f}" for t in found)
            how = "; ".join(map(step_text, steps)) or "nothing"
            print(f"{text(held):>10} -> {text(wanted):<10}{shown}  {how}")
    print("us estimated: chosen, in fixed order (inf: has no steps), DTensor's; steps with MiB")
    for name, index in (("fixed order", 1), ("DTensor", 2)):
        cheaper = sum(row[0] < row[index] * (1 - 1e-9) for row in rows)
        dearer = sum(row[0] > row[index] * (1 + 1e-9) for row in rows)
        print(f"cheaper than {name} in {cheaper} of {len(rows)} pairs, dearer in {dearer}")


if __name__ == "__main__":
    main()
