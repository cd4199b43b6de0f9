"""Store the frozen weights of a stage's blocks in 4 bits: parameters of bytes in place of
`weight`, with layouts of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from workbench.adapters.four_bit_tensor import PARTS, FourBitTensor, four_bit_grouped_linear
from workbench.adapters.lora_linear import with_place
from workbench.models import Transformer
from workbench.models.grouped_gemm import GroupedLinear, RowGroups
from workbench.parallel.four_bit.fill_four_bit import StoredWeight
from workbench.parallel.layout import Layout
from workbench.plan.model.block_linears import model_linears
from workbench.runtime_facts.four_bit_sizes import SCALE_BYTES, FourBitFormat


def apply_four_bit(
    model: Transformer, layouts: dict[str, Layout], form: FourBitFormat, kernels: str
) -> dict[str, StoredWeight]:
    """Store the weights of a stage's linear layers in 4 bits, in place, after adapters.

    Embeddings, head, norms, biases and routers stay as they are.

    Args:
        model: A stage, on the meta device, every axis but data parallelism applied; frozen but
            for adapters.
        layouts: Local parameter name -> layout; the parts' are added beside the weights'.
        form: How they are stored.
        kernels: What dequantizes them.

    Returns:
        Local name of each stored weight -> what it is.
    """
    linears, found = model_linears(model.shape), {}
    for path, module in list(model.named_modules()):
        if path not in linears:
            continue
        own = with_place(model, path, module)
        name, weight = f"{path}.weight", own.weight
        assert isinstance(weight, Tensor)
        del own.weight
        own.weight = FourBitTensor(weight, form, kernels)
        if isinstance(own, GroupedLinear):
            own.forward = partial(_grouped_forward, own)  # type: ignore[method-assign]
        found[name] = StoredWeight(layouts[name].name, layouts[name].shape, form)
        for part, layout in part_layouts(layouts[name], form).items():
            layouts[f"{name}.{part}"] = layout
    return found


def _grouped_forward(layer: GroupedLinear, x_RI: Tensor, groups: RowGroups) -> Tensor:
    """`GroupedLinear.forward` of weights in 4 bits."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, FourBitTensor)
    bias = bias if bias is None or layer.bias_share == 1 else bias * layer.bias_share
    y_RO = four_bit_grouped_linear(x_RI, weight, bias, groups)
    return y_RO if layer.add_adapter is None else layer.add_adapter(y_RO, x_RI, groups)


def part_layouts(layout: Layout, form: FourBitFormat) -> dict[str, Layout]:
    """Layouts of the stored parts of a weight, by the names of `PARTS`.

    Args:
        layout: Of the weight [..., N, K], before ZeRO shards it; its slice of columns, and the
            padding behind it, are of complete groups.
        form: The format.
    """
    columns, padding = layout.slices[-1], layout.padding[-1]
    assert not any(n % form.group for n in (*columns, padding)), (layout, form)
    of = partial(_part, layout)
    numbers, scales = (
        of(name, size(layout.shape[-1]), (size(columns[0]), size(columns[1])), size(padding))
        for name, size in zip(PARTS, (form.number_bytes, form.scale_bytes))
    )
    found = {PARTS[0]: numbers, PARTS[1]: scales}
    if form.double:
        factors = of(PARTS[2], SCALE_BYTES, (0, SCALE_BYTES), 0)
        if columns != (0, layout.shape[-1]):  # ranks with other columns of a row have its factor
            over = ("tensor", *layout.replicated_over)
            factors = replace(factors, replicated_over=over)
        found[PARTS[2]] = factors
    return found


def _part(
    layout: Layout, name: str, row_bytes: int, columns: tuple[int, int], padding: int
) -> Layout:
    return replace(
        layout,
        name=f"{layout.name}.{name}",
        shape=(*layout.shape[:-1], row_bytes),
        slices=(*layout.slices[:-1], columns),
        padding=(*layout.padding[:-1], padding),
        dtype=torch.uint8,
    )
