"""Chunks of the fused linear cross entropy: how many tokens' logits exist at once."""

from __future__ import annotations

from typing import Any

import numpy as np

LOSS_CHUNK_ALIGNMENT = 64
"""Tokens of a chunk, and columns of its logits in memory, are multiples of this, which vectorized
loads and GEMMs ask for.
"""

LOSS_MIN_CHUNK_TOKENS = 1024
"""Tokens that keep the GEMMs busy: fewer would move the weight's gradient more often than they
multiply.
"""

LOSS_MAX_CHUNKS = 8
"""Chunks at most, so that the weight's gradient is rounded few times."""


def loss_chunk_tokens(tokens: Any, hidden: Any, vocab: Any) -> Any:
    """Tokens of one chunk, such that its logits are about as large as the hidden activation.

    A chunk has at least `LOSS_MIN_CHUNK_TOKENS` tokens, there are at most `LOSS_MAX_CHUNKS` chunks,
    and all but the last have the same size.

    Args:
        tokens: Tokens of the microbatch on this rank; an integer or an array.
        hidden: Width of the hidden activation.
        vocab: Rows of the head's weight.

    Returns:
        Tokens, at most `tokens`; an array where an argument is one.
    """
    # A kernel asks with integers, also while torch.compile traces it, which numpy would break.
    integers = all(isinstance(x, int) for x in (tokens, hidden, vocab))
    most, least = (max, min) if integers else (np.maximum, np.minimum)
    wanted = most(LOSS_MIN_CHUNK_TOKENS, tokens * hidden // vocab)
    chunks = most(1, -(-tokens // most(wanted, -(-tokens // LOSS_MAX_CHUNKS))))
    return least(tokens, -(-tokens // (chunks * LOSS_CHUNK_ALIGNMENT)) * LOSS_CHUNK_ALIGNMENT)


def loss_chunk_columns(vocab: Any) -> Any:
    """Columns of a chunk's logits in memory, padding included."""
    return -(-vocab // LOSS_CHUNK_ALIGNMENT) * LOSS_CHUNK_ALIGNMENT
