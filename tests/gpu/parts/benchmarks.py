"""What takes longest and is worth least: kernels that Inductor compiles, the kernel benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

from tests.gpu.checks import Check, Evidence
from tests.gpu.parts.kernels import OPERATORS, attempt, gpu_tests

BENCHMARK_SECONDS = 400
COMPILED = "Inductor compiles other kernels for a CPU, which tests/kernels/test_compiled.py runs"


def compiled(name: str, evidence: Evidence) -> None:
    """One operator as Inductor compiles it, against fp64."""
    names = ("width 4098, bfloat16",)
    if evidence.on_gpu(COMPILED, *names):
        tests = gpu_tests(evidence)
        width, dtype, kernels = tests.CHOICES[-1]
        test = partial(tests.test_equals_plain_operators_in_fp64, name, width, dtype, kernels)
        attempt(evidence, names[0], test)


def compiled_models(evidence: Evidence) -> None:
    """Models whose seams are compiled."""
    if evidence.on_gpu(COMPILED, "llama", "gpt"):
        tests = gpu_tests(evidence)
        for style in ("llama", "gpt"):
            attempt(evidence, style, partial(tests.test_a_model_trains_alike, style, "compiled"))


def kernel_benchmark(evidence: Evidence) -> None:
    """`make gpu-bench`, kernels alone; its figures are kept whole."""
    names = ("the benchmark runs", "it has figures")
    if not evidence.on_gpu("speeds of a CPU are `make cpu-bench`", *names):
        return
    path = evidence.folder / "kernels.json"
    command = [sys.executable, "-m", "tests.benchmarks.kernels", "--device", "cuda"]
    command += ["--only", "kernels", "--json", str(path)]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=BENCHMARK_SECONDS, env=dict(os.environ)
    )
    said = (answer.stdout + answer.stderr)[-2000:]
    evidence.expect(names[0], answer.returncode in (0, 1) and path.exists(), said=said)
    found = json.loads(path.read_text())
    evidence.expect(names[1], found.get("kernels"))
    evidence.measured("kernels", found)


CHECKS = [
    Check("kernel benchmark", kernel_benchmark, BENCHMARK_SECONDS + 20),
    *(Check(f"compiled {name}", partial(compiled, name), 120) for name in OPERATORS),
    Check("compiled models", compiled_models, 180),
]
