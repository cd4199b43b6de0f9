"""Measured operators as functions of their shape: a form fitted to the points, met at the points.

Every form counts what an operator does (calls, multiplications, elements), so that it goes on
beyond the shapes that were measured; between them the deviations of the nearest points count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.costmodel.rates.measured_curves import TRUST_OCTAVES, MeasuredCurves, fit_nonnegative
from workbench.machine.calibration_file import Calibration, Host, Operator, Scale

FloatArray = NDArray[np.float64]
Terms = Callable[[FloatArray, FloatArray, FloatArray], list[FloatArray]]
PASSES = ("forward", "backward", "weight")


def _gemm_terms(r: FloatArray, c: FloatArray, i: FloatArray) -> list[FloatArray]:
    """A call; multiplications; what is read and written."""
    return [np.ones_like(r), r * c * i, r * c, r * i, c * i]


def _elementwise_terms(r: FloatArray, c: FloatArray, i: FloatArray) -> list[FloatArray]:
    return [np.ones_like(r), r * c]


def _embedding_terms(r: FloatArray, c: FloatArray, i: FloatArray) -> list[FloatArray]:
    """A call; rows looked up; the table, of which the gradient is dense."""
    return [np.ones_like(r), r * c, i * c]


def _attention_terms(r: FloatArray, c: FloatArray, i: FloatArray) -> list[FloatArray]:
    """A call; scores times width; scores; operands."""
    return [np.ones_like(r), r * c * c * i, r * c * c, r * c * i]


def _routing_terms(r: FloatArray, c: FloatArray, i: FloatArray) -> list[FloatArray]:
    """A call; rows and their entries, which are copied; scores, and the products that they are."""
    return [np.ones_like(r), r, r * c, r * i, r * c * i]


TERMS: Mapping[str, Terms] = {
    "linear": _gemm_terms,
    "grouped_linear": _gemm_terms,
    "routing": _routing_terms,
    "head_loss": _gemm_terms,
    "embedding": _embedding_terms,
    "attention": _attention_terms,
    "ring_step": _attention_terms,
}
"""What the time of an operator consists of, by rows, columns and inner; else calls and elements."""


@dataclass(frozen=True)
class OperatorFit:
    """Seconds of one pass of an operator."""

    terms: Terms
    coefficients: FloatArray
    shapes: FloatArray
    """log2 of the measured (rows, columns, inner), `[points, 3]`."""
    deviations: FloatArray
    """log of measured over fitted seconds, `[points]`."""

    def fitted(self, *shape: FloatArray) -> FloatArray:
        """Seconds by the form alone."""
        return np.asarray(
            sum(a * x for a, x in zip(self.coefficients, self.terms(*shape))), dtype=float
        )

    def seconds(self, *shape: ArrayLike) -> FloatArray:
        """Seconds; exact at measured shapes, the form's far from all of them."""
        dims = np.broadcast_arrays(*(np.maximum(np.asarray(x, float), 1.0) for x in shape))
        at = np.stack([np.log2(x) for x in dims], axis=-1)
        distance = ((at[..., None, :] - self.shapes) ** 2).sum(axis=-1)
        weight = 1 / np.maximum(distance, 1e-9) ** 2
        pull = (weight * self.deviations).sum(-1) / (weight.sum(-1) + TRUST_OCTAVES**-4)
        return np.asarray(self.fitted(*dims) * np.exp(pull))


@dataclass(frozen=True)
class OperatorTimes:
    """Seconds of an operator: forward, all of backward, and of it the weight gradient."""

    forward: FloatArray
    backward: FloatArray
    weight: FloatArray


@dataclass(frozen=True)
class MeasuredOperators:
    """Operators and collectives of one machine in fp32, with `ranks` ranks at work at once."""

    calibration: Calibration
    ranks: int
    has_collectives: bool
    """Whether all ranks are on this machine, and its collectives were measured."""

    @property
    def scale(self) -> Scale:
        """What finished runs correct."""
        return self.calibration.scale or Scale()

    @property
    def host(self) -> Host:
        """Host costs of layers, microbatches and steps."""
        return MeasuredCurves(self.calibration, self.ranks).host

    def operator(
        self, kind: str, kernels: str, rows: ArrayLike, columns: ArrayLike, inner: ArrayLike = 1.0
    ) -> OperatorTimes:
        """Seconds of one operator, sizes as in `calibration_file.Operator`; arrays broadcast.

        A kind of code that was not measured is taken as eager: torch's own operator.
        """
        slow = self.scale.compute
        return OperatorTimes(
            *(
                slow * self._fit(kind, kernels, each).seconds(rows, columns, inner)
                for each in PASSES
            )
        )

    def has(self, kind: str) -> bool:
        """Whether an operator was measured."""
        return kind in self._kinds

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(o.kind for o in self.calibration.operators)

    def stream_seconds(self, size: ArrayLike) -> FloatArray:
        """Seconds of an elementwise operator over `size` bytes."""
        curves = MeasuredCurves(self.calibration, self.ranks)
        return self.scale.compute * curves.stream_seconds(size)

    def collective_seconds(self, kind: str, size: ArrayLike, ranks: ArrayLike) -> FloatArray:
        """Seconds of one collective; arrays broadcast."""
        curves = MeasuredCurves(self.calibration, self.ranks)
        sizes, groups = np.broadcast_arrays(np.asarray(size, float), np.asarray(ranks, float))
        found = np.zeros(sizes.shape)
        for group in np.unique(groups):
            here = groups == group
            found[here] = curves.collective_seconds(kind, sizes[here], round(float(group)))
        return self.scale.communication * found

    def collective_cpu_seconds(
        self, kind: str, size: ArrayLike, ranks: ArrayLike
    ) -> FloatArray | None:
        """CPU seconds of one collective on one rank, arguments as above; of a send, on both ends.
        None where they were not measured.
        """
        curves = MeasuredCurves(self.calibration, self.ranks)
        sizes, groups = np.broadcast_arrays(np.asarray(size, float), np.asarray(ranks, float))
        found = np.zeros(sizes.shape)
        for group in np.unique(groups):
            here = groups == group
            used = curves.collective_cpu_seconds(kind, sizes[here], round(float(group)))
            if used is None:
                return None
            found[here] = used
        return self.scale.communication * found

    @property
    def threads(self) -> int:
        """Threads of a rank."""
        return max(1, self.calibration.machine.cores // self.ranks)

    def on_own_cores(self) -> MeasuredOperators:
        """As many of the ranks as have a core each: by these a rank's own seconds are known."""
        cores = self.calibration.machine.cores
        return replace(self, ranks=min(self.ranks, cores))

    def _fit(self, kind: str, kernels: str, name: str) -> OperatorFit:
        return _operator_fits(self.calibration, self.ranks)[_code_of(self, kind, kernels), name]


def _code_of(operators: MeasuredOperators, kind: str, kernels: str) -> tuple[str, str]:
    measured = {(o.kind, o.kernels) for o in operators.calibration.operators}
    return (kind, kernels) if (kind, kernels) in measured else (kind, "eager")


@lru_cache(maxsize=16)
def _operator_fits(
    calibration: Calibration, ranks: int
) -> dict[tuple[tuple[str, str], str], OperatorFit]:
    """Every operator and pass of the nearest number of ranks."""
    chosen, crowd = MeasuredCurves(calibration, ranks).crowd(
        {o.ranks for o in calibration.operators}
    )
    points: dict[tuple[str, str], list[Operator]] = {}
    for operator in calibration.operators:
        if operator.ranks == chosen:
            points.setdefault((operator.kind, operator.kernels), []).append(operator)
    return {
        (key, name): _fit(key[0], name, own, crowd)
        for key, own in points.items()
        for name in PASSES
    }


def _fit(kind: str, name: str, points: list[Operator], crowd: float) -> OperatorFit:
    terms = TERMS.get(kind, _elementwise_terms)
    dims = np.array([(p.rows, p.columns, p.inner) for p in points], float)
    times = crowd * np.array([getattr(p, name) for p in points])
    known = times > 0
    if not known.any():
        return OperatorFit(terms, np.zeros(1), np.log2(dims), np.zeros(len(points)))
    dims, times = dims[known], times[known]
    coefficients = fit_nonnegative(np.stack(terms(*dims.T), axis=1), times)
    found = OperatorFit(terms, coefficients, np.log2(dims), np.zeros(len(dims)))
    deviations = np.log(times / np.maximum(found.fitted(*dims.T), 1e-12))
    return OperatorFit(terms, coefficients, np.log2(dims), deviations)
