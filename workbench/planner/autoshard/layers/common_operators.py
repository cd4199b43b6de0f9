"""Operators that several parts of a transformer have: linear layers, norms, activations."""

from __future__ import annotations

from workbench.plan.operators.operator_graph import Operator, OperatorDim, OperatorTensor

Rows = tuple[OperatorDim, OperatorDim]
"""Sequences, and the tokens of each."""


def token_rows(sequences: int, length: int) -> Rows:
    """Dims of `sequences` sequences of `length` tokens."""
    return OperatorDim("rows", sequences, sequences), OperatorDim("tokens", length, length)


def linear_operator(
    name: str,
    rows: Rows,
    inner: tuple[int, int],
    widths: tuple[int, ...],
    units: int,
    *modules: str,
) -> Operator:
    """GEMMs on one input: rows x tokens x inner times inner x width, for each of `widths`.

    Args:
        name: Of the operator.
        rows: Sequences and tokens.
        inner: (size, units).
        widths: Columns of each GEMM.
        units: Into which the columns of all widths together divide.
        modules: That it stands for.
    """
    dims = (*rows, OperatorDim("inner", *inner), OperatorDim("columns", sum(widths), units))
    inputs = (
        OperatorTensor("input", ("rows", "tokens", "inner")),
        OperatorTensor("weight", ("inner", "columns"), "parameter"),
    )
    output = OperatorTensor("output", ("rows", "tokens", "columns"))
    return Operator(
        name,
        "MatMul",
        dims,
        inputs,
        output,
        gemm_widths=widths,
        fp8=True,
        scatters=True,
        modules=modules,
    )


def norm_operator(name: str, rows: Rows, hidden: int, module: str) -> Operator:
    """The residual addition and the norm after it, which are one module: its sequences and their
    tokens alone are split.
    """
    inputs = (
        OperatorTensor("input", ("rows", "tokens", "hidden")),
        OperatorTensor("residual", ("rows", "tokens", "hidden"), "residual"),
        OperatorTensor("weight", ("hidden",), "parameter"),
    )
    dims = (*rows, OperatorDim("hidden", hidden))
    output = OperatorTensor("output", ("rows", "tokens", "hidden"))
    return Operator(name, "Norm", dims, inputs, output, modules=(module,))


def activation_operator(name: str, rows: Rows, width: int, count: int, module: str) -> Operator:
    """An activation of one input, or of `count` = 2 where it is gated."""
    own = "rows", "tokens", "width"
    inputs = tuple(OperatorTensor(f"input {i + 1}", own) for i in range(count))
    dims, output = (*rows, OperatorDim("width", width, width)), OperatorTensor("output", own)
    return Operator(name, "Activation", dims, inputs, output, modules=(module,))
