"""The calibration file: what `workbench calibrate` measured of one machine, and whether a plan may
use it.

A plan names the file in `cluster.calibration`; `Plan.pin()` adds its hash. Times are seconds
of one call, dtypes and kinds are the planner's words, `ranks` is how many ranks of the machine
worked at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeInt, ValidationError

from workbench.errors import PlanError, refuse
from workbench.fields.bounds import (
    RANKS,
    SECONDS,
    Count,
    Elements,
    Factor,
    FreeGibibytes,
    Layers,
    Load,
    Microseconds,
    Milliseconds,
    PositiveMicroseconds,
    Ranks,
    Seconds,
    Share,
    Vocabulary,
    Width,
)
from workbench.fields.frozen import Frozen
from workbench.fields.validation_messages import plan_error
from workbench.machine.attached import Attached
from workbench.safe_io import yaml_files
from workbench.safe_io.files import known_file, replace_file, unread
from workbench.units import GIB
from workbench.untrusted_text import shown

FIELD = "cluster.calibration"
AGAIN = "write a new one with `workbench calibrate -o FILE`, or remove the field"
CPUINFO = Path("/proc/cpuinfo")

Dtype = Literal["fp32", "tf32", "bf16", "fp16"]
AttentionKernel = Literal["flash", "efficient", "math"]
Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "exchange",
]
"""torch.distributed's collectives; a send to a rank that waits for it; an exchange is a send and a
receive at once, as around a ring.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)
OperatorKind = Literal[
    "linear",
    "rmsnorm",
    "layernorm",
    "rope",
    "swiglu",
    "gelu",
    "head_loss",
    "embedding",
    "attention",
    "ring_step",
    "grouped_linear",
    "routing",
    "adamw",
]


class Measured(Frozen):
    """What was measured, where and when; it names no path and no host."""

    device: Literal["cuda", "npu", "cpu"] = Field(description="torch device type.")
    card: str = Field(description="Catalog name of the GPU; local for CPU ranks.")
    title: str = Field(description="Name in full.")
    count: Count = Field(description="GPUs, or CPU ranks, that may run here.")
    cores: Count = Field(description="Cores that ranks share.")
    fingerprint: str = Field(description="Hash of processor, cores, memory and GPU.")
    backend: str = Field(description="torch.distributed backend.")
    versions: dict[str, str] = Field(description="Library versions.")
    date: str = Field(description="Day, ISO 8601.")


class Gemm(Frozen):
    """One matrix product [rows, inner] x [inner, columns] without gradients."""

    rows: Elements
    columns: Elements
    inner: Elements
    dtype: Dtype
    ranks: Ranks
    seconds: Seconds


class Stream(Frozen):
    """One elementwise sum of two tensors into a third, newly allocated; `bytes` of all three."""

    bytes: Elements
    ranks: Ranks
    seconds: Seconds


class AttentionRate(Frozen):
    """Fused causal attention, forward, and backward with respect to all three inputs; `kernel` is
    null where torch chose it.
    """

    batch: Elements
    heads: Width
    sequence: Elements
    head_dim: Width
    dtype: Dtype
    kernel: AttentionKernel | None = None
    ranks: Ranks
    forward: Seconds
    backward: Seconds


class Operator(Frozen):
    """One operator of a model in fp32 with what Python and autograd take, on a CPU rank.

    A linear layer, and the head with its loss, is [rows, inner] x [inner, columns]; an embedding
    looks up rows of a table [inner, columns]; attention, and a step of ring attention, has rows
    heads of columns tokens, inner wide; a grouped linear layer is one group of several, [rows,
    inner] x [inner, columns]; routing has rows, of which a token has two, of columns entries to and
    from inner experts; AdamW has rows parameters; other kinds are elementwise over [rows, columns].
    """

    kind: OperatorKind
    kernels: Literal["eager", "compiled"]
    rows: Elements
    columns: Elements
    inner: Elements
    ranks: Ranks
    forward: Seconds
    backward: Annotated[float, Field(ge=0), SECONDS] = Field(
        0.0, description="All of it: gradients of inputs and of weights, seconds."
    )
    weight: Annotated[float, Field(ge=0), SECONDS] = Field(
        0.0, description="Of a linear layer: the gradient of its weight alone, seconds."
    )


class Host(Frozen):
    """Costs that do not grow with tensors: a step of a model so small that only the host works.

    step = step_us + microbatches * (microbatch_us + layers * layer_us) + layers * layer_step_us.
    """

    ranks: Ranks
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Of the model, plan's words.")
    operator_us: PositiveMicroseconds = Field(
        description="One eager operator without gradients, microseconds."
    )
    autograd_us: PositiveMicroseconds = Field(
        description="One operator, forward and backward, microseconds."
    )
    step_us: Microseconds = Field(
        description="Fixed cost of a step: zeroing, norm, optimizer, microseconds."
    )
    microbatch_us: Microseconds = Field(
        description="Embedding and head, forward and backward, microseconds."
    )
    layer_us: Microseconds = Field(
        description="One layer, forward and backward, of a microbatch, microseconds."
    )
    layer_step_us: Microseconds = Field(
        description="One layer's part of the optimizer, microseconds."
    )
    full_us: Microseconds = Field(
        0.0, description="More of layer_us where layers are recomputed in full, microseconds."
    )
    selective_us: Microseconds = Field(
        0.0, description="More of layer_us where attention is recomputed, microseconds."
    )
    compiled_layer_us: Microseconds = Field(
        0.0, description="More of layer_us with compiled kernels, microseconds."
    )
    compiled_microbatch_us: Microseconds = Field(
        0.0, description="More of microbatch_us with compiled kernels, microseconds."
    )
    split_us: Microseconds = Field(
        0.0,
        description="More of layer_us where weight gradients are deferred (zero bubble), "
        "microseconds.",
    )
    fused_layer_us: Microseconds | None = Field(
        None,
        description="As layer_us, with fused kernels on a GPU, microseconds; null where it was not "
        "measured.",
    )


class HostOptimizer(Frozen):
    """One step of AdamW on fp32 states in host memory, rounded to 16 bits, on the cores of a rank,
    as an offloaded optimizer takes it; `bytes` that it reads and writes.
    """

    parameters: Elements
    bytes: Elements
    ranks: Ranks
    seconds: Seconds


class Probe(Frozen):
    """A whole step of a small Llama-like model on one rank, eager, fp32, AdamW: the parts above,
    and the rest.
    """

    layers: Layers
    hidden: Width
    heads: Width
    ffn: Width
    vocab: Vocabulary
    sequence: Elements
    microbatches: Elements
    ranks: Ranks
    seconds: Seconds


class Collective(Frozen):
    """One collective; `bytes` of the full tensor: what a gather returns, what the others take."""

    kind: Kind
    group: Annotated[int, Field(ge=2), RANKS]
    ranks: Ranks
    dtype: Dtype
    bytes: Elements
    seconds: Seconds
    cpu_seconds: Seconds | None = Field(
        None,
        description="CPU seconds that one rank and its communication threads use, those of both "
        "ends of a send; null where they were not measured.",
    )


class Conditions(Frozen):
    """How busy the machine was: what other work takes makes every figure longer."""

    load_average: Load = Field(description="Processes that ran or waited, mean of the last minute.")
    cpus: Count = Field(description="Logical processors.")
    free_memory_gib: FreeGibibytes = Field(description="Memory that was free, GiB.")


class Doubt(Frozen):
    """A figure that was measured again and could still not be believed."""

    section: str = Field(description="gemm, memory, attention, collectives or host_optimizer.")
    point: str = Field(description="Which figure: its section and labels.")
    ranks: Ranks = Field(description="Ranks that worked at once.")
    why: str = Field(description="What stands against it.")
    refused: bool = Field(
        description="true: it is left out of this file; false: it stands there, unsteady."
    )


class Scale(Frozen):
    """Factors on estimated seconds that finished runs asked for, and the error without and with
    them.
    """

    compute: Factor = Field(1.0, description="On seconds of compute.")
    communication: Factor = Field(1.0, description="On seconds of collectives.")
    fixed_ms: Milliseconds = Field(0.0, description="Added to every step, milliseconds.")
    runs: list[str] = Field(default_factory=list, description="Runs that it was fitted to.")
    error_before: Share | None = Field(
        None, description="Mean |estimated / measured - 1| without it."
    )
    error_after: Share | None = Field(None, description="The same with it.")


class Calibration(Frozen):
    """A machine as it was measured."""

    version: Literal[1, 2, 3] = Field(
        3,
        description="Of this file's form; files of version 1 hold no operators, those before 3 no "
        "host_optimizer.",
    )
    machine: Measured
    host: Annotated[tuple[Host, ...], Field(strict=False, min_length=1)]
    gemm: Annotated[tuple[Gemm, ...], Field(strict=False, min_length=1)]
    memory: Annotated[tuple[Stream, ...], Field(strict=False, min_length=1)]
    attention: Annotated[tuple[AttentionRate, ...], Field(strict=False)] = ()
    probes: Annotated[tuple[Probe, ...], Field(strict=False)] = ()
    collectives: Annotated[tuple[Collective, ...], Field(strict=False)] = ()
    operators: Annotated[tuple[Operator, ...], Field(strict=False)] = ()
    host_optimizer: Annotated[tuple[HostOptimizer, ...], Field(strict=False)] = ()
    scale: Scale | None = None
    conditions: Conditions | None = Field(
        None, description="How busy the machine was when measuring began."
    )
    doubts: Annotated[tuple[Doubt, ...], Field(strict=False)] = ()

    @property
    def doubt(self) -> str:
        """How many figures are unsteady or refused, in words; empty where all are steady."""
        refused = sum(doubt.refused for doubt in self.doubts)
        counts = ((len(self.doubts) - refused, "unsteady"), (refused, "refused"))
        return ", ".join(
            f"{count} figure{'s' * (count > 1)} {word}" for count, word in counts if count
        )

    def __repr__(self) -> str:
        points = (
            len(self.gemm)
            + len(self.memory)
            + len(self.attention)
            + len(self.probes)
            + len(self.collectives)
            + len(self.operators)
            + len(self.host_optimizer)
        )
        doubt = f", {self.doubt}" if self.doubts else ""
        learned = f", learned from {', '.join(self.scale.runs)}" if self.scale else ""
        return (
            f"<Calibration of {self.machine.title}: {points} points measured "
            f"{self.machine.date}{learned}{doubt}>"
        )

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(
            (
                self.machine.fingerprint,
                self.gemm,
                self.memory,
                self.attention,
                self.host,
                self.collectives,
                self.operators,
                self.host_optimizer,
            )
        )


def read_calibration(path: str | Path) -> Calibration:
    """The calibration in `path`. Raises `PlanError` naming the file, what is wrong with it, and the
    remedy.
    """
    return read_with_digest(path)[0]


def calibration_sha256(path: str | Path) -> str:
    """sha256 of the calibration file; it must be one."""
    return read_with_digest(path)[1]


def write_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write the file, whole or not at all; a link stays a link. Raises OSError."""
    replace_file(path, yaml_files.dump(calibration.model_dump(mode="json"), compact=True))


def fingerprint(found: Attached) -> str:
    """What tells one kind of machine from another: processor, cores, memory and GPU, hashed."""
    words = (_processor(), found.cores, found.device, found.name, round(found.memory_bytes / GIB))
    return hashlib.sha256("|".join(map(str, words)).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith(("model name", "CPU part"))
    ]
    return named[0] if named else platform.processor() or platform.machine()


def read_with_digest(path: str | Path) -> tuple[Calibration, str]:
    try:
        seen = known_file(path)
        return _parsed(os.fspath(path), seen.st_mtime_ns, seen.st_size, seen.st_ino)
    except OSError as error:
        raise refuse(FIELD, f"'{path}' cannot be read: {error.strerror}; {AGAIN}") from None


@lru_cache(maxsize=8)
def _parsed(path: str, *_version: NonNegativeInt) -> tuple[Calibration, str]:
    """Parsed once for each content: a slider completes a plan at every move."""
    content = Path(path).read_bytes()
    try:
        written = yaml_files.parse(content.decode("utf-8"), where=FIELD)
        return _validated(written), hashlib.sha256(content).hexdigest()
    except PlanError as error:
        raise refuse(
            FIELD, f"'{path}' is no calibration: {error.first.removeprefix(f'{FIELD}: ')}; {AGAIN}"
        ) from None
    except UnicodeDecodeError as error:
        raise refuse(FIELD, f"'{path}' is no calibration: {unread(error)}; {AGAIN}") from None


def _validated(written: Any) -> Calibration:
    if not isinstance(written, dict):
        raise refuse("", "the file is empty" if written is None else f"it is {shown(written)}")
    try:
        return Calibration.model_validate(written)
    except ValidationError as error:
        raise plan_error(error, written, Calibration) from None
