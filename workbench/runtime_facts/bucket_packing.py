"""Which tensors share a flat bucket: few large collectives carry many small tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

ALIGNED_NUMEL = 64
"""Tensors and shards of a flat bucket start at a multiple of so many elements: 128 bytes in 16-bit
dtypes. cuBLAS and kernels load vectors of 16 bytes where addresses allow it, and NCCL moves lines
of 128.
"""


def pack_by_size(tensors: Iterable[tuple[Hashable, int]], limit: float) -> Iterator[list[int]]:
    """Buckets of at most `limit` elements, in the order in which they are full.

    A tensor larger than `limit` gets a bucket of its own. Tensors of different keys (reduced over
    different ranks, say) never share a bucket.

    Args:
        tensors: (key, number of elements) of each tensor, in the order in which backward makes the
            gradients.
        limit: Elements of a bucket at most.

    Yields:
        Places in `tensors` of what shares a bucket.
    """
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for place, (key, elements) in enumerate(tensors):
        bucket, size = filling.get(key, ([], 0))
        if bucket and size + elements > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(place)
        filling[key] = bucket, size + elements
    for bucket, _ in filling.values():
        yield bucket


def pack_by_unit(keys: Iterable[Hashable]) -> Iterator[list[int]]:
    """One bucket for each key (a ZeRO-3 unit, and what its gradients are reduced over), however
    large.

    Args:
        keys: Of each tensor, in the model's order.

    Yields:
        Places in `keys` of what shares a bucket, in the model's order; buckets in the order of
        backward.
    """
    buckets: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        buckets.setdefault(key, []).append(place)
    yield from reversed(buckets.values())


def aligned_numel(elements: int) -> int:
    """Elements of a tensor and of the padding behind it."""
    return -(-elements // ALIGNED_NUMEL) * ALIGNED_NUMEL


def padded_numel(tensors: Iterable[int], shard_ranks: int) -> int:
    """Elements of a bucket of aligned tensors, which ZeRO cuts into as many equal aligned shards.

    Args:
        tensors: Elements of each.
        shard_ranks: Number of shards.
    """
    return aligned_numel(-(-sum(map(aligned_numel, tensors)) // shard_ranks)) * shard_ranks


def shard_parts(numel: int, ranks: int) -> list[tuple[int, int]]:
    """[start, stop) of a tensor that is a bucket of its own, of each of `ranks` shards; their
    padding left out.
    """
    length = padded_numel([numel], ranks) // ranks
    return [(min(numel, i * length), min(numel, (i + 1) * length)) for i in range(ranks)]
