"""Closed forms: the bubble and the activations in flight of the named schedules, without a table.

For equal stages and transfers that take no time. Plain arithmetic without a branch on a value, so
that every number may also be a numpy array (they broadcast): a planner asks for millions of
candidates at once.

A table's rows fix the order, so its makespan is the longest of finitely many paths: a largest of
sums of F, I and W. The papers give the path that is longest near F = I = W; here stand all that can
be the longest, read off the simulator for 2 to 12 ranks and held to it by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

Number = Any
"""A float, an int, or a numpy array of them."""
Paths = tuple[tuple[Number, Number, Number], ...]
"""How often F, I and W of one chunk stand on each path that can be the longest, less the work of a
rank.
"""


def bubble(
    name: str,
    ranks: Number,
    microbatches: Number,
    chunks: Number,
    forward: Number,
    input: Number,
    weight: Number,
) -> Number:
    """Seconds from the step's common start to its common end, less the work of one rank.

    `forward`, `input` and `weight` are the seconds F, I and W that one microbatch takes on a whole
    rank, all its chunks together. Exact: equals `simulate(generate(...)).bubble` for any F, I, W >
    0 and all numbers that `generate` takes, which are not checked here. Unequal stages, and
    transfers that take time, need the simulator.

    With n = ranks - 1 and a pipeline that fills:
    - gpipe, 1f1b: n (F + I + W); interleaved: that / chunks (2104.04473). Both exact in the papers.
    - zb-h1: n (F + I - min(F, I, W)); 2401.10241 has n (F + I - W), exact where W is the least of
      the three.
    - zb-h2: n max(F, F + I - 2W, I - F); the paper's n (F + I - 2W) is a rank's own span, with a
      synchronous optimizer n F is the least.
    - zb-v: n F / 2 and dualpipe-v: n F / 2 at F = I = W (2405.15362, DeepSeek); elsewhere the paths
      below.

    Raises ValueError where the schedule has no closed form.
    """
    return _known(_BUBBLES, name)(ranks, microbatches, chunks, forward, input, weight)


def in_flight(
    name: str, rank: Number, ranks: Number, microbatches: Number, chunks: Number
) -> Number:
    """Most chunks whose activations `rank` holds at once; a chunk is 1/`chunks` of the rank's
    layers.

    Exact: equals `in_flight(generate(...))[rank]`. Raises ValueError where the schedule has no
    closed form.
    """
    return _known(_IN_FLIGHT, name)(rank, ranks, microbatches, chunks)


def _known(forms: dict[str, Callable[..., Number]], name: str) -> Callable[..., Number]:
    if name not in forms:
        raise ValueError(
            f"schedule {name!r} has no closed form; there are: {', '.join(sorted(forms))}"
        )
    return forms[name]


def _larger(a: Number, b: Number) -> Number:
    return (a + b + abs(a - b)) / 2


def _smaller(a: Number, b: Number) -> Number:
    return (a + b - abs(a - b)) / 2


def _longest(paths: Paths, f: Number, i: Number, w: Number) -> Number:
    return reduce(_larger, (a * f + b * i + c * w for a, b, c in paths))


def _unsplit(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    return (p - 1) * (f + i + w) / chunks


def _zb_h1(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    return (p - 1) * (f + i) - (_smaller(m, p) - 1) * _smaller(_smaller(f, i), w)


def _zb_h2(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    """An odd number of microbatches ahead cannot be halved between forward and input gradient: two
    more paths.
    """
    n = p - 1
    ahead = _smaller(m - 1, 2 * n)
    odd = ahead % 2
    half = (ahead - odd) / 2
    paths = (
        (n, n, -ahead),
        (n - ahead, n, 0),
        (n, n - half - odd, 0),
        (n, n - half, -odd),
        (n - odd, n - half, 0),
    )
    return _longest(paths, f, i, w)


def _zb_v(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    n = p - 1
    more = _smaller(_larger(m - p, 0), _smaller(n, 1))
    filling, filled = _zb_v_filling(n, _smaller(m - 1, n)), _zb_v_filled(n, _smaller(m - p, n))
    return ((1 - more) * _longest(filling, f, i, w) + more * _longest(filled, f, i, w)) / 2


def _zb_v_filling(n: Number, q: Number) -> Paths:
    """q + 1 microbatches, one a rank at most."""
    return (
        (2 * n - q, 2 * n - q, 0),
        (2 * n - 2 * q, 2 * n, 0),
        (2 * n, 2 * n - 3 * q, -q),
        (2 * n, 2 * n - 2 * q, -2 * q),
    )


def _zb_v_filled(n: Number, k: Number) -> Paths:
    """k microbatches more than ranks, 1 to n: more than n change nothing."""
    left = n - k
    return (
        (0, 2 * n, -2 * k),
        (0, 2 * left, 0),
        (0, n + left, -left),
        (0, left + 1, k - 1),
        (left, left, 0),
        (left + 1, 0, k - 1),
        (n + k - 1, 1 - k, 0),
        (n + k - 1, left + 1 - k, -left),
        (n + k - 1, left + 1, -2 * k),
        (n + k, -k, -1),
        (n + k, left - k, -_smaller(k, left + 1)),
        (n + k, left, -2 * k - 1),
        (2 * n, -n, -_smaller(n, 2 * left + 1)),
        (2 * n, -k, -_smaller(n + left, 3 * left + 1)),
        (2 * n, 0, -2 * n - 1),
    )


def _dualpipe_v(p: Number, m: Number, chunks: Number, f: Number, i: Number, w: Number) -> Number:
    n = p - 1
    paths = (
        (n, 0, 0),
        (n, n, -n),
        (-1, n, 0),
        (-1, 2 * n, -n),
        (2 * n, -n, -n),
        (2 * n, 0, -2 * n),
    )
    return _longest(paths, f, i, w) / 2


_BUBBLES: dict[str, Callable[..., Number]] = {
    "gpipe": _unsplit,
    "1f1b": _unsplit,
    "interleaved": _unsplit,
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-v": _zb_v,
    "dualpipe-v": _dualpipe_v,
}

_IN_FLIGHT: dict[str, Callable[..., Number]] = {
    "gpipe": lambda rank, p, m, chunks: m + 0 * rank,
    "1f1b": lambda rank, p, m, chunks: _smaller(m, p - rank),
    "interleaved": lambda rank, p, m, chunks: _smaller(
        m * chunks, 2 * (p - rank - 1) + (chunks - 1) * p + 1
    ),
    "zb-h1": lambda rank, p, m, chunks: _smaller(m, p) + 0 * rank,
    "zb-h2": lambda rank, p, m, chunks: _smaller(m, 2 * p - 1) + 0 * rank,
    "zb-v": lambda rank, p, m, chunks: _smaller(_smaller(2 * m, m + 1 + rank), 2 * p),
    "dualpipe-v": lambda rank, p, m, chunks: _smaller(2 * m, 2 * p + 1) + 0 * rank,
}
