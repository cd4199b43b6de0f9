"""What of a model that this repository did not write may be named by a strategy, found by looking
at its modules.
"""

from __future__ import annotations

from torch import nn

from workbench.errors import refuse
from workbench.plan.operator_strategy import Placement
from workbench.plan.rules.operator_rules import sides
from workbench.plan.rules.operator_sites import Site, matched
from workbench.plan.schema import Plan

ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish)
ANY = 0
"""Units of a dimension whose length only the input tells: any number of pieces divides it."""


def placements_of(model: nn.Module, plan: Plan) -> dict[str, Placement]:
    """Module -> where its strategy lies on the grid, for all modules that the plan's operators
    name.

    Raises `PlanError`, pattern by pattern, for what the model does not have or cannot be split so.
    """
    if not plan.strategy.operators:
        return {}
    ranks, shape = plan.strategy.tensor.ranks, sides(plan)
    found = matched(plan.strategy.operators, sites_of(model, plan.training.micro_batch), ranks)
    _refuse_shared(model, list(found))
    return {name: site.placement(form, shape) for name, (site, form) in found.items()}


def sites_of(model: nn.Module, sequences: int) -> dict[str, Site]:
    """Modules of known kinds, by path; what lies inside attention belongs to it."""
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
        whole = module.padding_idx is None
        vocabulary = module.num_embeddings if whole else 1
        return Site("Embedding", rows | {"vocabulary": vocabulary, "hidden": module.embedding_dim})
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return Site("Norm", rows)
    if isinstance(module, ACTIVATIONS):
        return Site("Activation", rows | {"width": ANY})
    if isinstance(module, nn.MultiheadAttention) and _plain_attention(module):
        return Site("SelfAttention", rows | {"heads": module.num_heads})
    return None


def _plain_attention(module: nn.MultiheadAttention) -> bool:
    """Whether attention is of the kind that is split here: one width, [B, T, D], nothing added to
    keys.
    """
    return (
        module.batch_first
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _refuse_shared(model: nn.Module, paths: list[str]) -> None:
    """A parameter in two places could be cut in two ways."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for places in owners.values():
        named = [place for place in places if place in paths]
        if len(places) > 1 and named:
            other = next(place for place in places if place != named[0])
            what = f"names {named[0]}, which shares a parameter with {other}"
            raise refuse("strategy.operators", f"{what}; legal: neither of them, or untied ones")
