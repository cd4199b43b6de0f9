"""Which tokens of a sequence a rank holds.

Ring attention deals a causal sequence in 2 x ranks chunks: rank i takes the i-th and the i-th from
the end, so that all ranks attend to equally much. All-to-all over heads (Ulysses) takes contiguous
parts: there every rank sees all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.parallel.mesh import MeshAxis


def token_indices(length: int, axis: MeshAxis, algorithm: str, device: torch.device) -> Tensor:
    """Places [length / ranks] in the whole sequence of the tokens that this rank holds,
    ascending.
    """
    if algorithm == "ulysses":
        part = length // axis.size
        return torch.arange(axis.index * part, (axis.index + 1) * part, device=device)
    chunk = length // (2 * axis.size)
    first, second = (
        torch.arange(i * chunk, (i + 1) * chunk, device=device)
        for i in (axis.index, 2 * axis.size - 1 - axis.index)
    )
    return torch.cat((first, second))
