"""What kernels take of a GPU, with none: the committed table is made again, and every row of it
keeps the limits.
"""

import importlib
import json
import pkgutil
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench.kernels
from workbench.kernels import ahead_of_time
from workbench.kernels.ahead_of_time import (
    CompiledKernelRow,
    exceeded_limits,
    launch_of,
    record_launches,
    table_differences,
)
from workbench.kernels.backends import triton_compat
from workbench.kernels.registry import KERNELS

FILE = Path(__file__).parents[2] / "data" / "kernels.json"
TABLE = json.loads(FILE.read_text())
VERSION = getattr(triton_compat.triton, "__version__", None)
GOOD = CompiledKernelRow(
    "add_norm",
    "add_norm_forward",
    "bf16 x 4096",
    "forward",
    "in and out",
    90,
    8,
    128,
    0,
    1024,
    6,
    4,
)

compiles = pytest.mark.skipif(
    triton_compat.triton is None or triton_compat.INTERPRETED, reason="Triton compiles nothing here"
)
same_triton = pytest.mark.skipif(
    TABLE["triton"] != VERSION, reason=f"the table is Triton {TABLE['triton']}'s, here is {VERSION}"
)


def modules() -> list[Any]:
    return [
        importlib.import_module(f"workbench.kernels.{one.name}")
        for one in pkgutil.iter_modules(workbench.kernels.__path__)
    ]


@pytest.mark.slow
@compiles
@same_triton
def test_the_committed_table_is_what_triton_compiles_today() -> None:
    found = ahead_of_time.compile_all()
    assert [said for row in found for said in exceeded_limits(row)] == []
    assert table_differences(ahead_of_time.table_json(found), FILE.read_text()) == []


def test_the_table_has_the_registrys_entry_of_every_operator() -> None:
    assert TABLE["kernels"] == ahead_of_time.kernel_facts()


def test_the_table_has_every_case_on_every_architecture_within_the_limits() -> None:
    rows = [CompiledKernelRow(**row) for row in TABLE["ahead"]]
    cases = {
        (kernel.name, case, sm)
        for kernel in KERNELS
        for case in kernel.cases
        for sm in ahead_of_time.SHARED_MEMORY_BYTES
    }
    assert {(row.kernel, row.case, row.sm) for row in rows} == cases
    assert [said for row in rows for said in exceeded_limits(row)] == []


def test_every_operator_is_in_the_registry_and_has_its_reference() -> None:
    assert {m.__name__ for m in modules() if hasattr(m, "reference")} == {
        kernel.module for kernel in KERNELS
    }
    for kernel in KERNELS:
        module, name = kernel.reference.rsplit(".", 1)
        assert callable(getattr(importlib.import_module(module), name))
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


@compiles
def test_every_triton_function_that_is_launched_is_in_the_table() -> None:
    functions = {
        f.__name__: f
        for m in modules()
        for f in vars(m).values()
        if isinstance(f, triton_compat.triton.JITFunction)
    }
    called = {
        name
        for name in functions
        if any(re.search(rf"(?<!def )\b{name}\(", f.src) for f in functions.values())
    }
    assert set(functions) - called == {row["function"] for row in TABLE["ahead"]}


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"spills": 8}, "spills 8 bytes of a thread; legal: none"),
        ({"registers": 255, "warps": 16}, "takes 130560 registers; legal: 65536"),
        ({"shared": 170000, "sm": 80}, "takes 170000 bytes of shared memory; legal: 166912"),
        ({"vector_loads": 0}, "loads nothing 16 bytes wide"),
        ({"vector_stores": 0}, "stores nothing 16 bytes wide"),
    ],
)
def test_an_exceeded_limit_is_reported(changed: dict[str, int], said: str) -> None:
    assert exceeded_limits(GOOD) == []
    bad = replace(GOOD, **changed)
    assert exceeded_limits(bad) == [f"add_norm_forward (bf16 x 4096, forward, sm_{bad.sm}) {said}"]


def test_kernels_that_stream_nothing_need_no_vector_loads() -> None:
    assert exceeded_limits(replace(GOOD, streams="in", vector_stores=0)) == []
    assert exceeded_limits(replace(GOOD, streams="nothing", vector_loads=0, vector_stores=0)) == []


def test_tables_differ_by_the_lines_that_one_lacks() -> None:
    assert (
        table_differences("a\nb\nc", "a\nx\nc") == ["+ b", "- x"]
        and table_differences("a\nb", "a\nb") == []
    )


@compiles
def test_a_launch_is_specialised_as_triton_does_it() -> None:
    """Against Triton's own binder, which it runs before every launch."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from workbench.kernels.residual_norm import add_norm_forward

    x = torch.zeros(64, 24, dtype=torch.bfloat16)
    flags = {"HAS_R": True, "HAS_B": False, "CENTRED": False}
    constants = flags | {"WIDE": triton_compat.tl.float32, "ROWS": 2, "BLOCK": 32}
    args = (
        x,
        x[1:],
        x[0, 1:],
        None,
        x,
        x,
        x.float(),
        torch.zeros(3, dtype=torch.float64),
        1,
        48,
        1e-5,
    )
    launch = launch_of("forward", add_norm_forward, args, constants | {"num_warps": 8})
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(
        add_norm_forward.signature, add_norm_forward.params, backend
    )
    kinds = binder(*args, **constants)[1]
    assert list(launch.signature.values()) == [kind for kind, _ in kinds]
    assert launch.multiples == tuple(
        i for i, (kind, known) in enumerate(kinds) if kind != "constexpr" and known == "D"
    )
    assert set(launch.constants) == {
        (i,) for i, (kind, _) in enumerate(kinds) if kind == "constexpr"
    }
    assert (
        launch.options == {"num_warps": 8} and 0 in launch.multiples and 2 not in launch.multiples
    )


@compiles
def test_launches_are_recorded_not_run_and_the_room_is_as_before() -> None:
    run, kernel = triton_compat.triton.JITFunction.run, KERNELS[0]
    found = record_launches(kernel, next(iter(kernel.cases)))
    assert [(one.function.__name__, one.direction) for one in found] == [
        ("add_norm_forward", "forward"),
        ("add_norm_backward", "backward"),
    ]
    assert triton_compat.triton.JITFunction.run is run and not triton_compat.INTERPRETED
