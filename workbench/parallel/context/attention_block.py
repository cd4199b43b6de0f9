"""Attention of some queries to some keys, with what is needed to join several such results: torch's
fused operators.

They are private in torch; nothing else of the project calls them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if not "2.11" <= torch.__version__ < "2.14":
    raise ImportError(
        f"workbench.parallel.context.attention_block uses attention of torch 2.11 to 2.13, not "
        f"{torch.__version__}"
    )

aten = torch.ops.aten


class Block(NamedTuple):
    """Attention output [B, H, T, K], and the logarithm of each query's sum of exponentials [B, H,
    T].
    """

    out: Tensor
    log_sum: Tensor


def attend_block(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool) -> Block:
    """Attention of queries to these keys alone; G key-value heads divide H. `causal` needs as many
    keys as queries.
    """
    if q_BHTK.device.type == "cpu":
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHTK, k_BGSK, v_BGSK, 0.0, causal
        )
        return Block(out, log_sum)
    k, v = (_repeated(x, q_BHTK.shape[1]) for x in (k_BGSK, v_BGSK))
    if q_BHTK.element_size() == 2:
        out, log_sum, *_ = aten._scaled_dot_product_flash_attention(q_BHTK, k, v, 0.0, causal)
    else:
        out, log_sum, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHTK, k, v, None, True, 0.0, causal
        )
    return Block(out, log_sum[..., : q_BHTK.shape[2]])


def attend_block_backward(
    gradient_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    whole: Block,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values by way of these keys; `whole` is the attention to all
    keys (2205.14135).
    """
    whole = Block(whole.out, whole.log_sum.contiguous())
    _assert_packed(whole.log_sum, gradient_BHTK, q_BHTK, k_BGSK, v_BGSK, whole.out)
    if q_BHTK.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient_BHTK, q_BHTK, k_BGSK, v_BGSK, whole.out, whole.log_sum, 0.0, causal
        )
        return found[0], found[1], found[2]
    groups, none = k_BGSK.shape[1], torch.zeros(2, dtype=torch.int64, device=q_BHTK.device)
    k, v = (_repeated(x, q_BHTK.shape[1]) for x in (k_BGSK, v_BGSK))
    if q_BHTK.element_size() == 2:
        q, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            gradient_BHTK,
            q_BHTK,
            k,
            v,
            whole.out,
            whole.log_sum,
            None,
            None,
            q_BHTK.shape[2],
            k.shape[2],
            0.0,
            causal,
            none,
            none[0],
        )
    else:
        # The kernel reads logarithms in rows of a multiple of 32.
        padded = F.pad(whole.log_sum, (0, -whole.log_sum.shape[-1] % 32), value=torch.inf)
        q, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient_BHTK,
            q_BHTK,
            k,
            v,
            None,
            whole.out,
            padded,
            none[0],
            none[0],
            0.0,
            [True, True, True, False],
            causal,
        )
    return q, _summed(dk, groups), _summed(dv, groups)


def _assert_packed(log_sum_BHT: Tensor, *rows: Tensor) -> None:
    """What CUDA's backward takes for granted of its inputs, held on every device.

    It finds statistics by their pointer as packed [B, H, T], whatever their strides: those of a
    slice would be another head's. CPU's kernel honours strides, so that wrong ones would show on
    GPUs alone, as wrong gradients.
    """
    assert log_sum_BHT.is_contiguous(), f"statistics lie at strides {log_sum_BHT.stride()}"
    assert all(x.stride(-1) == 1 for x in rows), (
        f"last strides are {[x.stride(-1) for x in rows]}, not 1"
    )


def join(first: Block, second: Block) -> Block:
    """Attention to both sets of keys."""
    log_sum = torch.logaddexp(first.log_sum, second.log_sum)
    parts = (one.out * (one.log_sum - log_sum).exp()[..., None] for one in (first, second))
    return Block(
        sum(parts, torch.zeros((), dtype=first.out.dtype, device=first.out.device)), log_sum
    )


def _repeated(x_BGSK: Tensor, heads: int) -> Tensor:
    """Key-value heads, one for every query head."""
    return (
        x_BGSK
        if x_BGSK.shape[1] == heads
        else x_BGSK.repeat_interleave(heads // x_BGSK.shape[1], dim=1)
    )


def _summed(gradient_BHSK: Tensor, groups: int) -> Tensor:
    """Gradients of repeated key-value heads, added."""
    heads = gradient_BHSK.shape[1]
    return (
        gradient_BHSK
        if heads == groups
        else gradient_BHSK.unflatten(1, (groups, heads // groups)).sum(2)
    )
