"""The blocks of a model: what a layer profile has a row for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from workbench.errors import refuse
from workbench.models import Transformer

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose entries are blocks, as they are."""


@dataclass(frozen=True)
class Block:
    """Modules that are timed as one."""

    name: str
    modules: tuple[nn.Module, ...]


def model_blocks(model: nn.Module) -> list[Block]:
    """Blocks in the order of the model's own attributes.

    Of our transformer the embedding, each layer, and final norm, head and loss. Of a user's module
    the entries of its lists, dicts and `nn.Sequential`s, the outermost ones, and the submodules
    beside those; a module without any has its children.

    Raises:
        PlanError: The model has no children.
    """
    if isinstance(model, Transformer):
        return list(_of_transformer(model))
    found = [Block(name, (module,)) for name, module in _children(model)]
    if not found:
        raise refuse(
            "model.python",
            f"builds a {type(model).__name__} without submodules, whose parts cannot be "
            "separated; legal: a module that calls its blocks as submodules",
        )
    return found


def _of_transformer(model: Transformer) -> Iterator[Block]:
    assert model.embedding is not None and model.final_norm is not None and model.head is not None
    yield Block("embedding", (model.embedding,))
    for name, block in model.blocks.items():
        yield Block(f"layer_{name}", (block,))
    yield Block("head", (model.final_norm, model.head))


def _children(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if isinstance(model, CONTAINERS) or not _holds_container(child):
            yield path + name, child
        else:
            yield from _children(child, f"{path}{name}.")


def _holds_container(module: nn.Module) -> bool:
    return any(isinstance(each, CONTAINERS) for each in module.modules())


def block_parameters(
    model: nn.Module, blocks: Sequence[Block]
) -> tuple[list[int], list[dict[int, int]]]:
    """Bytes of each block's parameters, and what it shares with earlier ones.

    Args:
        model: That the blocks are of.
        blocks: In the order in which the model calls them.

    Returns:
        Bytes by block: a parameter of several blocks counts for the first, one of none for the
        first of all. By block, bytes of the parameters that an earlier block has too, by the index
        of the last that does.
    """
    last: dict[nn.Parameter, int] = {}
    own, tied = [0] * len(blocks), [dict[int, int]() for _ in blocks]
    for index, block in enumerate(blocks):
        for parameter in dict.fromkeys(x for m in block.modules for x in m.parameters()):
            before = last.get(parameter)
            if before is None:
                own[index] += parameter.nbytes
            else:
                tied[index][before] = tied[index].get(before, 0) + parameter.nbytes
            last[parameter] = index
    own[0] += sum(x.nbytes for x in model.parameters() if x not in last)
    return own, tied
