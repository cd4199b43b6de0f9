"""Which modules of a user's model a strategy may name, found by their types."""

from __future__ import annotations

from torch import nn

from workbench.errors import refuse
from workbench.plan.operators.operator_sites import Site, matched
from workbench.plan.operators.strategy_form import Placement
from workbench.plan.rules.operator_rules import sides
from workbench.plan.schema import Plan

ACTIVATION_MODULES = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish)
ANY_SIZE = 0
"""Size of a dimension that only the input gives: any number of shards divides it."""


def operator_placements(model: nn.Module, plan: Plan) -> dict[str, Placement]:
    """Module -> its strategy's placement on the grid, for all modules that the plan names.

    Raises:
        PlanError: For each pattern that the model does not have, or that cannot be sharded so.
    """
    if not plan.strategy.operators:
        return {}
    ranks, shape = plan.strategy.tensor.ranks, sides(plan)
    found = matched(plan.strategy.operators, module_sites(model, plan.training.micro_batch), ranks)
    _refuse_shared(model, list(found))
    return {name: site.placement(form, shape) for name, (site, form) in found.items()}


def module_sites(model: nn.Module, sequences: int) -> dict[str, Site]:
    """Modules of known types, by path; those within attention belong to it."""
    found: dict[str, Site] = {}
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if any(path.startswith(within) for within in inside):
            continue
        site = _site(module, {"rows": sequences})
        if site is not None:
            found[path] = site
        if isinstance(module, nn.MultiheadAttention):
            inside = (*inside, f"{path}.")
    return found


def _site(module: nn.Module, rows: dict[str, int]) -> Site | None:
    if isinstance(module, nn.Linear):
        return Site("MatMul", rows | {"inner": module.in_features, "columns": module.out_features})
    if isinstance(module, nn.Embedding) and not (
        module.max_norm or module.sparse or module.scale_grad_by_freq
    ):
        # A vocabulary of 1 cannot be sharded: `padding_idx` is an index into the global table.
        shardable = module.padding_idx is None
        vocabulary = module.num_embeddings if shardable else 1
        return Site("Embedding", rows | {"vocabulary": vocabulary, "hidden": module.embedding_dim})
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return Site("Norm", rows)
    if isinstance(module, ACTIVATION_MODULES):
        return Site("Activation", rows | {"width": ANY_SIZE})
    if isinstance(module, nn.MultiheadAttention) and _plain_attention(module):
        return Site("SelfAttention", rows | {"heads": module.num_heads})
    return None


def _plain_attention(module: nn.MultiheadAttention) -> bool:
    """Whether attention can be sharded here: one width, batch first, nothing added to the keys."""
    return (
        module.batch_first
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _refuse_shared(model: nn.Module, paths: list[str]) -> None:
    """Refuse strategies for tied parameters, which could be sharded in two ways."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for places in owners.values():
        named = [place for place in places if place in paths]
        if len(places) > 1 and named:
            other = next(place for place in places if place != named[0])
            what = f"names {named[0]}, which shares a parameter with {other}"
            raise refuse("strategy.operators", f"{what}; legal: neither of them, or untied ones")
