"""Ahead-of-time compilation of the Triton kernels without GPU: resources of each, and its limits.

`python -m workbench.kernels.ahead_of_time [--json FILE | --check FILE]` compiles every case of the
registry for every architecture. Registers and spills are those of the assembler (cuobjdump),
accesses of 16 bytes or more are counted in the PTX. `data/kernels.json` is the table for the Triton
version that it names, with the registry's entries.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.backends import triton_compat
from workbench.kernels.registry import KERNELS, Kernel

SHARED_MEMORY_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Compute capability -> maximum shared memory of a program in bytes (CUDA C++ Programming Guide,
"Technical specifications per compute capability").
"""
REGISTERS_PER_SM = 65536
"""32-bit registers of a multiprocessor, equal on all of them."""
NUM_PROCESSES = 2

TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
WIDE_ACCESS = (
    r"\.global\S*\.(?:v4\.\w(?:32|64)|v2\.\w64|v8\.\w32)\b|"
    r"cp\.async\.\w+\.shared\.global\S* .*, 0x10\b"
)


@dataclass(frozen=True)
class KernelLaunch:
    """A specialisation as Triton compiles it: argument types, constants, multiples of 16."""

    function: Any
    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    multiples: tuple[int, ...]
    options: dict[str, Any]
    direction: str


@dataclass(frozen=True)
class CompiledKernelRow:
    """Resources of a launch on one architecture.

    Registers and spilled bytes per thread, shared memory per program in bytes, and accesses of 16
    bytes or more in its code. `streams` says which accesses must be that wide.
    """

    kernel: str
    function: str
    case: str
    direction: str
    streams: str
    sm: int
    warps: int
    registers: int
    spills: int
    shared: int
    vector_loads: int
    vector_stores: int


# ---- what an operator launches -------------------------------------------------------------------


def record_launches(kernel: Kernel, case: str) -> list[KernelLaunch]:
    """Launches of a case, forward and backward, each specialisation once; nothing is executed."""
    with _recorded() as found:
        out = kernel.cases[case]()
        kinds = [launch_of("step" if out is None else "forward", *own) for own in found]
        found.clear()
        outputs = [x for x in ([out] if isinstance(out, Tensor) else out or ()) if x.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])
        kinds += [launch_of("backward", *own) for own in found]
    return [launch for index, launch in enumerate(kinds) if launch not in kinds[:index]]


@contextmanager
def _recorded() -> Iterator[list[Any]]:
    """A context in which operators take Triton's path on host tensors, and launches are recorded
    instead of run: (function, positional arguments, named arguments).
    """
    found: list[Any] = []

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.append((function, args, named))

    jit, before = triton_compat.triton.JITFunction, triton_compat.INTERPRETED
    true_run = jit.run
    jit.run, triton_compat.INTERPRETED = run, True
    try:
        yield found
    finally:
        jit.run, triton_compat.INTERPRETED = true_run, before


def launch_of(
    direction: str, function: Any, args: Sequence[Any], named: dict[str, Any]
) -> KernelLaunch:
    """The specialisation of a call: None, 1 and `tl.constexpr` arguments are constants."""
    values = {p.name: p.default for p in function.params if p.has_default} | dict(
        zip(function.arg_names, args)
    )
    values |= {name: value for name, value in named.items() if name in function.arg_names}
    options = {name: value for name, value in named.items() if name not in function.arg_names}
    signature, constants, multiples = {}, {}, []
    for index, parameter in enumerate(function.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        if (
            value.data_ptr() if isinstance(value, Tensor) else value if type(value) is int else 1
        ) % 16 == 0:
            multiples.append(index)
    return KernelLaunch(function, signature, constants, tuple(multiples), options, direction)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{TRITON_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


# ---- what it takes of an architecture ------------------------------------------------------------


def compile_launch(launch: KernelLaunch, sm: int) -> Any:
    """Compile a launch for compute capability `sm`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {(index,): [["tt.divisibility", 16]] for index in launch.multiples}
    source = ASTSource(launch.function, launch.signature, launch.constants, known)
    return triton_compat.triton.compile(
        source, target=GPUTarget("cuda", sm, 32), options=launch.options
    )


def measure_launch(kernel: Kernel, case: str, launch: KernelLaunch, sm: int) -> CompiledKernelRow:
    """Resources of a launch on compute capability `sm`."""
    binary = compile_launch(launch, sm)
    function, used = launch.function.__name__, _used(binary.asm["cubin"])
    wide = re.findall(rf"\b(ld|st|)(?:{WIDE_ACCESS})", binary.asm["ptx"])
    return CompiledKernelRow(
        kernel.name,
        function,
        case,
        launch.direction,
        kernel.streams(function),
        sm,
        binary.metadata.num_warps,
        used["REG"],
        used["STACK"] + used["LOCAL"],
        binary.metadata.shared,
        vector_loads=len(wide) - wide.count("st"),
        vector_stores=wide.count("st"),
    )


def _used(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton_compat.triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}


def exceeded_limits(row: CompiledKernelRow) -> list[str]:
    """The limits that `row` exceeds, in words."""
    taken, most_shared = row.registers * row.warps * 32, SHARED_MEMORY_BYTES[row.sm]
    broken = {
        f"spills {row.spills} bytes of a thread; legal: none": row.spills > 0,
        f"takes {taken} registers; legal: {REGISTERS_PER_SM}": taken > REGISTERS_PER_SM,
        f"takes {row.shared} bytes of shared memory; legal: {most_shared}": row.shared
        > most_shared,
        "loads nothing 16 bytes wide": row.streams != "nothing" and not row.vector_loads,
        "stores nothing 16 bytes wide": row.streams == "in and out" and not row.vector_stores,
    }
    return [
        f"{row.function} ({row.case}, {row.direction}, sm_{row.sm}) {said}"
        for said, it in broken.items()
        if it
    ]


# ---- the table -----------------------------------------------------------------------------------


def compile_all(
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> list[CompiledKernelRow]:
    """All cases on all architectures, by `NUM_PROCESSES` processes; `progress(done, of, what)` is
    called after each case.
    """
    cases = [(kernel.name, case) for kernel in KERNELS for case in kernel.cases]
    found: list[CompiledKernelRow] = []
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn")) as pool:
        for done, own in enumerate(pool.map(_rows_of_case, cases)):
            found += own
            progress(done + 1, len(cases), ", ".join(cases[done]))
    return found


def _rows_of_case(name_and_case: tuple[str, str]) -> list[CompiledKernelRow]:
    torch.set_num_threads(1)
    name, case = name_and_case
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    return [
        measure_launch(kernel, case, launch, sm)
        for launch in record_launches(kernel, case)
        for sm in SHARED_MEMORY_BYTES
    ]


def kernel_facts() -> list[dict[str, str]]:
    """The registry's entries as plain data."""
    return [
        {
            name: getattr(kernel, name)
            for name in ("name", "title", "module", "reference", "gpu", "cpu")
        }
        for kernel in KERNELS
    ]


def table_json(found: Iterable[CompiledKernelRow]) -> str:
    """The table as JSON, a line per row."""
    parts = {"kernels": kernel_facts(), "ahead": [asdict(row) for row in found]}
    lists = [
        f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, own)) + "\n ]"
        for name, own in parts.items()
    ]
    return (
        "{\n" + ",\n".join([f' "triton": "{triton_compat.triton.__version__}"', *lists]) + "\n}\n"
    )


def table_differences(now: str, before: str) -> list[str]:
    """Lines that only one of two tables has, as + and -."""
    sides = [[line.rstrip(",") for line in side.splitlines()] for side in (now, before)]
    return [f"+ {x}" for x in sides[0] if x not in sides[1]] + [
        f"- {x}" for x in sides[1] if x not in sides[0]
    ]


def table_text(found: Sequence[CompiledKernelRow]) -> str:
    """The table as aligned text."""
    heads = [
        "kernel",
        "function",
        "case",
        "",
        "streams",
        "sm",
        "warps",
        "regs",
        "spills",
        "shared",
        "loads",
        "stores",
    ]
    lines = [heads, *([str(value) for value in asdict(row).values()] for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in lines)


def _bar(done: int, of: int, what: str) -> None:
    if sys.stderr.isatty():
        filled = 30 * done // of
        end = "\n" if done == of else ""
        print(
            f"\r[{'#' * filled}{' ' * (30 - filled)}] {done} of {of}  {what[:60]:60}",
            end=end,
            file=sys.stderr,
        )


def main() -> int:
    """Compile, then print, write or compare; 1 where a limit is exceeded or the table differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the table here.")
    parser.add_argument("--check", type=Path, metavar="FILE", help="Compare with the table here.")
    arguments = parser.parse_args()
    if triton_compat.triton is None or triton_compat.INTERPRETED:
        parser.error(
            "Triton is missing, or TRITON_INTERPRET=1 is set; legal: pip install "
            "'workbench[kernels]'"
        )
    for path in (arguments.json and arguments.json.parent, arguments.check):
        if path and not path.exists():
            parser.error(f"{path} does not exist")
    found = compile_all(_bar)
    table, wrong = table_json(found), [said for row in found for said in exceeded_limits(row)]
    if arguments.json:
        arguments.json.write_text(table)
    elif arguments.check:
        wrong += table_differences(table, arguments.check.read_text())
    else:
        print(table_text(found))
    print("\n".join(wrong) if wrong else f"{len(found)} kernels within limits", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
