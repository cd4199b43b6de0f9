"""The fused kernels beside their peers: `python -m tests.benchmarks.kernels [--device cuda|cpu]
[--only PART ...]`.

One run, one JSON: the machine's own copy bandwidth first, then every operator at three shapes,
forward and backward, against eager operators, torch.compile and liger-kernel (where installed), all
in turn; the shape below which ours is slower; the head with its loss; a Llama-style layer; a whole
training step; and the factors that the planner reads. What was measured is written after each part,
and `--only` measures some parts again. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import kernels_cases as cases
from tests.benchmarks import kernels_liger as liger
from tests.benchmarks import kernels_models as models
from tests.benchmarks.kernels_goals import line, summary, verdicts
from tests.benchmarks.kernels_models import Size
from tests.benchmarks.kernels_timing import Contest, Seconds, copy_bandwidth, race
from tests.benchmarks.kernels_traffic import traffic
from workbench.plan.model.model_shape import Shape

Found = dict[str, Any]
"""What becomes the JSON."""
FOLDER = Path(__file__).resolve().parents[2] / "data" / "benchmarks"
PARTS = ("kernels", "below", "linear_cross_entropy", "block", "step", "traffic")


@dataclass(frozen=True)
class Sizes:
    """What is measured on a kind of machine. `sweep` are further widths, to find the one below
    which ours is slower; `head` is (tokens, width, vocabularies).
    """

    tokens: int
    hidden: tuple[int, ...]
    vocab: tuple[int, ...]
    sweep: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    head: tuple[int, int, tuple[int, ...]]
    block: Size
    step: Size
    layer: Size


LLAMA_8B = Shape(
    name="a layer of Llama 3 8B",
    layers=1,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=128256,
)
LLAMA_1B = Shape(
    name="Llama 3.2 1B",
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=8,
    ffn=8192,
    vocab=128256,
    tied=True,
)
SMALL = Shape(name="small", layers=2, hidden=256, heads=8, kv_heads=4, ffn=1024, vocab=8192)
LAYER = Shape(name="a layer", layers=1, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=8192)

SIZES = {
    "cuda": Sizes(
        tokens=8192,
        hidden=(1024, 4096, 8192),
        vocab=(8192, 32768, 131072),
        sweep=(512, 256, 128, 64),
        dtypes=(torch.bfloat16,),
        head=(8192, 4096, (32768, 131072)),
        block=Size(LLAMA_8B, 2, 4096),
        step=Size(LLAMA_1B, 4, 2048),
        layer=Size(LLAMA_8B, 2, 4096),
    ),
    "cpu": Sizes(
        tokens=512,
        hidden=(64, 256, 1024),
        vocab=(2048, 8192, 32768),
        sweep=(16,),
        dtypes=(torch.float32, torch.bfloat16),
        head=(4096, 64, (8192, 32768)),
        block=Size(LAYER, 2, 256),
        step=Size(SMALL, 2, 256),
        layer=Size(LAYER, 2, 256),
    ),
}


def contests(
    sizes: Sizes, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> list[Contest]:
    """Every operator at one width."""
    found = [
        cases.add_norm(hidden, sizes.tokens, dtype, device, case)
        for case in ("rmsnorm", "layernorm")
    ]
    found.append(cases.rotary(hidden, sizes.tokens, dtype, device))
    found += [
        cases.activation(hidden, sizes.tokens, dtype, device, case) for case in cases.ACTIVATIONS
    ]
    found.append(cases.loss(vocab, sizes.tokens, dtype, device))
    found += [cases.dropped(hidden, sizes.tokens, dtype, device, case) for case in cases.DROPOUTS]
    found.append(cases.stepped(hidden, dtype, device))
    found += [cases.decoded(hidden, dtype, device, case) for case in cases.WEIGHTS]
    return [one for one in found if "fused" in one.contestants]


class Bench:
    """What was found so far, and what went wrong."""

    def __init__(self, device: torch.device, wanted: str) -> None:
        self.device, self.sizes, self.wanted = device, SIZES[device.type], re.compile(wanted)
        self.found: Found = {}
        self.failed: list[str] = []

    def copy_bandwidth(self) -> None:
        """What everything is compared with."""
        self.found["copy_bandwidth_gbs"] = copy_bandwidth(self.device) / 1e9
        print(
            f"{self.found['device']}: copies {self.found['copy_bandwidth_gbs']:.0f} GB/s",
            flush=True,
        )

    def kernels(self) -> None:
        """Every operator at three shapes."""
        rows: list[dict[str, Any]] = []
        for dtype in self.sizes.dtypes:
            # 16 bits are slow on processors: once says enough.
            several = self.device.type == "cuda" or dtype == torch.float32
            for hidden, vocab in list(zip(self.sizes.hidden, self.sizes.vocab))[
                0 if several else -1 :
            ]:
                for contest in self._of(contests(self.sizes, hidden, vocab, dtype, self.device)):
                    for seconds, off in self._race(contest):
                        rows += self._rows(contest, seconds, off)
        self.found["kernels"] = rows

    def _of(self, found: list[Contest]) -> Iterator[Contest]:
        return (contest for contest in found if self.wanted.search(contest.name))

    def _race(self, contest: Contest) -> Iterator[tuple[dict[str, Seconds], dict[str, float]]]:
        """The result, or nothing: what fails is told and does not end the rest."""
        try:
            yield race(contest, self.device)
        except Exception as error:
            self.failed.append(f"{contest.name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rows(
        self, contest: Contest, seconds: dict[str, Seconds], off: dict[str, float]
    ) -> Iterator[dict[str, Any]]:
        for name, least in contest.least.items():
            row = {
                "kernel": contest.kernel,
                "operator": contest.operator,
                "case": contest.case,
                "shape": list(contest.shape),
                "width": contest.width,
                "dtype": _name(contest.dtype),
                "pass": name,
                "bytes": least,
                "seconds": dict.fromkeys(("eager", "compiled", "fused", "liger"))
                | {who: of_one[name] for who, of_one in seconds.items()},
                "share_of_copy": least
                / seconds["fused"][name]
                / self.found["copy_bandwidth_gbs"]
                / 1e9,
                "errors": off,
            }
            print(line(row, self.device.type), flush=True)
            yield row

    def below(self) -> None:
        """The shape of each operator below which ours is slower than eager; null where it never
        is.
        """
        dtype = self.sizes.dtypes[0]
        sweep = list(
            ratios([row for row in self.found.get("kernels", []) if row["dtype"] == _name(dtype)])
        )
        for hidden in self.sizes.sweep:
            for contest in self._of(contests(self.sizes, hidden, 8 * hidden, dtype, self.device)):
                for seconds, off in self._race(contest.between("eager", "seam", "fused")):
                    sweep += ratios(list(self._rows(contest, seconds, off)))
        self.found["sweep"] = sweep
        names = dict.fromkeys(one["kernel"] for one in sweep)
        self.found["below"] = {
            name: smallest([one for one in sweep if one["kernel"] == name]) for name in names
        }

    def linear_cross_entropy(self) -> None:
        """The head with its loss."""
        rows = []
        for row in models.head_losses(self.device, self.sizes.dtypes[0], *self.sizes.head):
            rows.append(row)
            print(line(row, self.device.type) + verdicts(row, self.found), flush=True)
        self.found["linear_cross_entropy"] = rows

    def block(self) -> None:
        """A layer."""
        self.found["block"] = models.block(self.sizes.block, self.device, self.sizes.dtypes[0])
        print(line({"kernel": "block", **self.found["block"]}, self.device.type), flush=True)

    def step(self) -> None:
        """A training step."""
        self.found["step"] = models.step(self.sizes.step, self.device, self.sizes.dtypes[0])
        row = {"kernel": "step", **self.found["step"]}
        print(line(row, self.device.type) + verdicts(row, self.found), flush=True)

    def traffic(self) -> None:
        """What the planner reads."""
        bandwidth = self.found["copy_bandwidth_gbs"] * 1e9
        self.found |= traffic(self.sizes.layer, self.device, self.sizes.dtypes[0], bandwidth)
        for name in ("traffic", "loss_bytes"):
            told = "  ".join(
                f"{kernels} {value:.2f}" for kernels, value in self.found[name].items()
            )
            print(f"{name:12} {told}", flush=True)


def ratios(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each operator and shape: eager's seconds over ours, all passes together."""
    together: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        together.setdefault(f"{row['kernel']} {row['case']} {row['shape']}", []).append(row)
    for own in together.values():
        eager, fused = (sum(row["seconds"][name] for row in own) for name in ("eager", "fused"))
        yield {name: own[0][name] for name in ("kernel", "case", "shape", "width")} | {
            "eager_over_fused": eager / fused
        }


def smallest(sweep: list[dict[str, Any]]) -> list[int] | None:
    """The widest shape at which ours is slower: from there on down eager is to be taken."""
    slower = [one for one in sweep if one["eager_over_fused"] < 1]
    widest: list[int] | None = (
        max(slower, key=lambda one: one["width"])["shape"] if slower else None
    )
    return widest


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured, with what, when."""
    cuda = device.type == "cuda"
    versions = {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "liger": liger.version(),
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    name = torch.cuda.get_device_name() if cuda else _processor()
    return {
        "source": "measured",
        "device": name,
        "kind": device.type,
        "versions": versions,
        "date": date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            ask, capture_output=True, text=True, timeout=30, check=True
        ).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def file_of(found: dict[str, Any]) -> Path:
    """Where the benchmark of a machine is kept."""
    if found["kind"] == "cpu":
        return FOLDER / "kernels-cpu.json"
    words = re.sub(r"[^a-z0-9]+", "-", found["device"].lower().removeprefix("nvidia ")).strip("-")
    return FOLDER / f"kernels-{words}.json"


def main() -> int:
    """Measure, write, and say what was met; 1 where something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--match",
        default="",
        help="Operators whose name, case, shape or dtype this expression finds.",
    )
    parser.add_argument(
        "--json", type=Path, help="Where to write; by default data/benchmarks/kernels-DEVICE.json."
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is attached; legal: --device cpu")
    device = torch.device(arguments.device)
    now = machine(device)
    path = arguments.json or file_of(now)
    found = (
        json.loads(path.read_text()) if path.exists() and set(arguments.only) != set(PARTS) else {}
    )
    found, failed = measured("copy_bandwidth", device, arguments.match, found | now)
    for part in [] if failed else arguments.only:
        found, why = measured(part, device, arguments.match, found)
        failed += why
        found["goals"] = summary(found)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    for goal in found.get("goals", []):
        print(
            f"{goal['met']:3} of {goal['of']:3} met: {goal['goal']}"
            + "".join(f"\n    {x}" for x in goal["missed"])
        )
    print("\n".join(["", *failed]) if failed else f"\nwritten: {path}")
    return 1 if failed else 0


def measured(part: str, device: torch.device, wanted: str, found: Found) -> tuple[Found, list[str]]:
    """What was found so far and by `part`, and what went wrong there.

    A process of its own measures it, as a run's does: with what another part has left to the
    allocator, the logits of a head cost half of what they do in a fresh one. What crashes ends one
    part.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, part, device, wanted, found).result()
        except BrokenProcessPool as error:
            return found, [f"{part}: {error}"]


def _measure(part: str, device: torch.device, wanted: str, found: Found) -> tuple[Found, list[str]]:
    if device.type == "cpu":
        torch.set_num_threads(1)
    bench = Bench(device, wanted)
    bench.found = found
    try:
        getattr(bench, part)()
    except Exception as error:
        bench.failed.append(f"{part}: {type(error).__name__}: {error}")
        traceback.print_exc()
    return bench.found, bench.failed


if __name__ == "__main__":
    sys.exit(main())
