"""Names of traced operators, as strategies call them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from workbench.plan.operators.traced.dim_rules import moves_data_only
from workbench.plan.operators.traced.traced_graph import TracedNode


def node_names(nodes: Sequence[TracedNode]) -> tuple[TracedNode, ...]:
    """The nodes with names: the path of a module for its only operator, else `path.operator` and,
    from the second of its kind on, `path.operator_2`. Operators that only move data do not count.
    """
    computing = Counter(node.module for node in nodes if not moves_data_only(node.op))
    seen: Counter[str] = Counter()
    named = []
    for node in nodes:
        only = computing[node.module] == 1 and not moves_data_only(node.op)
        name = (
            node.module if only and node.module else ".".join(filter(None, (node.module, node.op)))
        )
        seen[name] += 1
        named.append(replace(node, name=name if seen[name] == 1 else f"{name}_{seen[name]}"))
    return tuple(named)
