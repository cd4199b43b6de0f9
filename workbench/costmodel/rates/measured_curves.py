"""Measured points as curves: seconds of a GEMM, a copy, attention, an operator and a collective,
of any size.

Pure functions of arrays. Other work on a machine only makes a measurement longer, so fits follow
the bulk of the points, not outliers, and a larger size never counts as faster than a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.machine.calibration_file import Calibration, Collective, Gemm, Host, Probe

FloatArray = NDArray[np.float64]
T = TypeVar("T")

REWEIGHTING_ROUNDS = 20
"""Rounds of iteratively reweighted least squares, which fit absolute instead of squared residuals.
"""
MIN_RESIDUAL = 0.02
TRUST_OCTAVES = 2.0
"""Distance from the measured shapes, in doublings, beyond which the fit counts more than the
deviations of its neighbors.
"""


@dataclass(frozen=True)
class GemmFit:
    """seconds = launch + 2 M N K / rate * (1 + half_dim (1/M + 1/N + 1/K)), times the deviation of
    nearby shapes.
    """

    rate: float
    """FLOP/s of an infinitely large GEMM."""
    half_dim: float
    launch: float
    """Launch overhead, seconds."""
    shapes: FloatArray
    """log2 of the measured (rows, columns, inner), `[points, 3]`."""
    deviations: FloatArray
    """log of measured over fitted seconds, `[points]`."""

    def fitted(self, rows: ArrayLike, columns: ArrayLike, inner: ArrayLike) -> FloatArray:
        """Seconds by the fitted form alone; arguments broadcast."""
        m, n, k = (np.asarray(x, float) for x in (rows, columns, inner))
        slow = 1 + self.half_dim * (1 / m + 1 / n + 1 / k)
        return np.asarray(self.launch + 2 * m * n * k / self.rate * slow)

    def seconds(self, rows: ArrayLike, columns: ArrayLike, inner: ArrayLike) -> FloatArray:
        """Seconds of a GEMM: exact at measured shapes, the fitted form far from all of them."""
        shape = np.stack(
            np.broadcast_arrays(*(np.log2(np.asarray(x, float)) for x in (rows, columns, inner))),
            axis=-1,
        )
        distance = ((shape[..., None, :] - self.shapes) ** 2).sum(axis=-1)
        weight = 1 / np.maximum(distance, 1e-9) ** 2
        pull = (weight * self.deviations).sum(axis=-1) / (weight.sum(axis=-1) + TRUST_OCTAVES**-4)
        return np.asarray(self.fitted(rows, columns, inner) * np.exp(pull))


@dataclass(frozen=True)
class TimeCurve:
    """Seconds by size: linear between points in log-log, constant below, proportional above."""

    sizes: FloatArray
    times: FloatArray

    @property
    def latency(self) -> float:
        """Seconds of the smallest size."""
        return float(self.times[0])

    def seconds(self, size: ArrayLike) -> FloatArray:
        """Seconds of a call on `size` bytes."""
        x = np.asarray(size, float)
        inside = np.exp(
            np.interp(np.log(np.maximum(x, 1e-9)), np.log(self.sizes), np.log(self.times))
        )
        return np.asarray(inside * np.maximum(1.0, x / self.sizes[-1]))


@dataclass(frozen=True)
class LatencyLine:
    """Seconds by size: latency plus bytes over bandwidth (alpha-beta).

    On CPU ranks a call's latency is that of threads that wake up, which scatters from call to call:
    a line through all sizes depends on no single one of them.
    """

    sizes: FloatArray
    latency: float
    per_byte: float

    def seconds(self, size: ArrayLike) -> FloatArray:
        """Seconds of a call on `size` bytes."""
        return np.asarray(self.latency + self.per_byte * np.asarray(size, float))


@dataclass(frozen=True)
class MeasuredCurves:
    """Calibration of one machine with `ranks` ranks working at once."""

    calibration: Calibration
    ranks: int

    @property
    def host(self) -> Host:
        """Host costs of operators and steps."""
        chosen, crowd = self.crowd({h.ranks for h in self.calibration.host})
        found = next(h for h in self.calibration.host if h.ranks == chosen)
        costs: dict[str, Any] = {
            name: value if value is None else value * crowd
            for name, value in found.model_dump(exclude={"ranks", "precision"}).items()
        }
        return Host(ranks=self.ranks, precision=found.precision, **costs)

    @property
    def probes(self) -> list[Probe]:
        """Whole steps timed at the nearest number of ranks."""
        found = self.calibration.probes
        return [p for p in found if p.ranks == self.crowd({p.ranks for p in found})[0]]

    def gemm_fit(self, dtype: str) -> GemmFit:
        """GEMMs in `dtype`; unmeasured tf32 and fp16 fall back to fp32 and bf16."""
        found = self.calibration
        return _gemm_fit(found.gemm, *self.crowd({g.ranks for g in found.gemm}), dtype)

    def stream_seconds(self, size: ArrayLike) -> FloatArray:
        """Seconds of an elementwise operator that reads and writes `size` bytes in all."""
        chosen, crowd = self.crowd({s.ranks for s in self.calibration.memory})
        points = [
            (s.bytes, s.seconds * crowd) for s in self.calibration.memory if s.ranks == chosen
        ]
        return _curve(points).seconds(size)

    def memory_rate(self, size: ArrayLike) -> FloatArray:
        """Bytes a second that one rank reads and writes, by the bytes of one operator."""
        return np.asarray(np.asarray(size, float) / self.stream_seconds(size))

    def host_optimizer_rate(self) -> float | None:
        """Bytes of host memory a second that the optimizer's step moves on a rank's cores; None
        where it was not measured.
        """
        found = self.calibration.host_optimizer
        if not found:
            return None
        chosen, crowd = self.crowd({each.ranks for each in found})
        rates = [each.bytes / each.seconds / crowd for each in found if each.ranks == chosen]
        return float(np.median(rates))

    def attention_rates(self, dtype: str, kernel: str = "flash") -> tuple[float, float] | None:
        """(forward FLOP/s, backward over forward seconds) of fused causal attention; None where
        not measured. A kernel that was not measured takes the figures of a fused one.
        """
        chosen, crowd = self.crowd({a.ranks for a in self.calibration.attention} or {1})
        points = [a for a in self.calibration.attention if a.ranks == chosen]
        for name in (kernel, "flash", "efficient"):
            if own := [a for a in points if a.kernel in (name, None)]:
                points = own
                break
        points = _of_dtype(points, dtype, lambda a: a.dtype)
        if not points:
            return None
        rates = [
            2 * a.batch * a.heads * a.sequence**2 * a.head_dim / a.forward / crowd for a in points
        ]
        return float(np.median(rates)), float(np.median([a.backward / a.forward for a in points]))

    def collective_seconds(
        self, kind: str, size: ArrayLike, group: int, dtype: str = "fp32"
    ) -> FloatArray:
        """Seconds of one collective.

        Args:
            kind: Kind of collective.
            size: Bytes of the full tensor.
            group: Number of ranks; one takes no time.
            dtype: Dtype of the tensor.

        Raises:
            ValueError: No collective of this kind was measured.
        """
        if group <= 1:
            return np.zeros_like(np.asarray(size, float))
        points, crowd = self._collectives(kind, group, dtype)
        curve = self._curve_of((c.bytes, c.seconds) for c in points)
        return crowd * _grown(curve, kind, size, points[0].group, group)

    def collective_cpu_seconds(
        self, kind: str, size: ArrayLike, group: int, dtype: str = "fp32"
    ) -> FloatArray | None:
        """CPU seconds of one collective on one rank, arguments as above; of a send, on both ends.
        None where they were not measured.
        """
        if group <= 1:
            return np.zeros_like(np.asarray(size, float))
        points, _ = self._collectives(kind, group, dtype)
        used = [(c.bytes, c.cpu_seconds) for c in points if c.cpu_seconds is not None]
        return _grown(_line(used), kind, size, points[0].group, group) if used else None

    def alpha_beta(self, kind: str, group: int, dtype: str = "fp32") -> tuple[float, float]:
        """(alpha in seconds, beta in seconds per byte) of a collective: the line through its
        measured points.
        """
        points, _ = self._collectives(kind, group, dtype)
        curve = self._curve_of((c.bytes, c.seconds) for c in points)
        times = self.collective_seconds(kind, curve.sizes, group, dtype)
        alpha, beta = fit_nonnegative(
            np.stack((np.ones_like(curve.sizes), curve.sizes), axis=1), times
        )
        return float(alpha), float(beta)

    def _curve_of(self, timed: Iterable[tuple[int, float]]) -> TimeCurve | LatencyLine:
        on_cpu = self.calibration.machine.device == "cpu"
        return _line(timed) if on_cpu else _curve(timed)

    def _collectives(self, kind: str, group: int, dtype: str) -> tuple[list[Collective], float]:
        """(points of the nearest group that was measured, slowdown by ranks that share cores)."""
        wanted = "send" if kind == "recv" else kind
        points = [c for c in self.calibration.collectives if c.kind == wanted]
        if not points:
            raise ValueError(f"the calibration holds no {kind}; measure with 2 ranks or more")
        chosen, crowd = self.crowd({c.ranks for c in points})
        points = [c for c in points if c.ranks == chosen]
        nearest = min(
            {c.group for c in points}, key=lambda size: (abs(np.log(size / group)), -size)
        )
        of_group = [c for c in points if c.group == nearest]
        return _of_dtype(of_group, dtype, lambda c: c.dtype), crowd

    def crowd(self, measured: set[int]) -> tuple[int, float]:
        """(ranks of the nearest measured world, slowdown beyond the largest one); GPU ranks never
        share cores.
        """
        enough = [ranks for ranks in sorted(measured) if ranks >= self.ranks]
        if enough:
            return enough[0], 1.0
        largest = max(measured)
        waits = (
            self.calibration.machine.device == "cpu" and self.ranks > self.calibration.machine.cores
        )
        return largest, self.ranks / max(largest, self.calibration.machine.cores) if waits else 1.0


def _grown(
    curve: TimeCurve | LatencyLine, kind: str, size: ArrayLike, measured: int, group: int
) -> FloatArray:
    """A curve that was measured on `measured` ranks, on `group`: latency grows by hops of a ring,
    bytes by a rank's share of them.
    """
    if kind in ("send", "recv"):
        return curve.seconds(size)
    latency = curve.latency
    steps, share = (group - 1) / (measured - 1), (1 - 1 / group) / (1 - 1 / measured)
    return np.asarray(latency * steps + (curve.seconds(size) - latency) * share)


def _of_dtype(points: list[T], dtype: str, of: Callable[[T], str]) -> list[T]:
    """Points in `dtype`, else in the dtype that stands for it."""
    for name in (dtype, {"fp16": "bf16", "fp8": "bf16"}.get(dtype, "fp32"), "fp32"):
        if found := [p for p in points if of(p) == name]:
            return found
    return points


def _curve(points: Iterable[tuple[int, float]]) -> TimeCurve:
    """Points sorted by size; one slower than a larger one was disturbed, and takes that one's
    time.
    """
    ordered = sorted(points)
    times = np.minimum.accumulate(np.array([t for _, t in ordered])[::-1])[::-1]
    return TimeCurve(np.array([s for s, _ in ordered], float), times)


def _line(points: Iterable[tuple[int, float]]) -> LatencyLine:
    """The line that most points are near."""
    sizes, times = np.array(sorted(points), float).T
    latency, per_byte = fit_nonnegative(np.stack((np.ones_like(sizes), sizes), axis=1), times)
    return LatencyLine(sizes, float(latency), float(per_byte))


@lru_cache(maxsize=32)
def _gemm_fit(gemm: tuple[Gemm, ...], ranks: int, crowd: float, dtype: str) -> GemmFit:
    points = _of_dtype([g for g in gemm if g.ranks == ranks], dtype, lambda g: g.dtype)
    dims = np.array([(g.rows, g.columns, g.inner) for g in points], float)
    times = np.array([g.seconds for g in points]) * crowd
    flops = 2 * dims.prod(axis=1)
    launch, a, b = fit_nonnegative(
        np.stack((np.ones_like(flops), flops, flops * (1 / dims).sum(axis=1)), axis=1), times
    )
    a = max(a, 0.5 * float(np.min(times / flops)))  # too few points leave the rate open
    found = GemmFit(float(1 / a), float(b / a), float(launch), np.log2(dims), np.zeros(len(points)))
    return replace(found, deviations=np.log(times / found.fitted(*dims.T)))


def fit_nonnegative(terms: FloatArray, times: FloatArray) -> FloatArray:
    """Fit nonnegative coefficients of `times` by least absolute relative residuals.

    Args:
        terms: Values of each term at each point, `[points, terms]`.
        times: Seconds, `[points]`.

    Returns:
        Coefficients, `[terms]`; 0 of a term that no point has.
    """
    from scipy.optimize import (
        nnls,
    )  # half of the planner's import time, and only a calibrated plan needs it

    left, right = terms / times[:, None], np.ones_like(times)
    scale = np.abs(left).max(axis=0)
    scale[scale == 0] = 1.0
    weight = np.ones_like(times)
    found = np.zeros(terms.shape[1])
    for _ in range(REWEIGHTING_ROUNDS):
        found = nnls(left / scale * weight[:, None], weight)[0]
        weight = 1 / np.sqrt(np.maximum(np.abs(left / scale @ found - right), MIN_RESIDUAL))
    return np.asarray(found / scale)
