"""Verify every strategy against one device, at a stated precision.

`python -m tests.parallel.sweep [--all] [--seed 0] [--summary FILE] [--details FILE]`

The space is what `plan/rules` allows of the values below. Without `--all`, a subset: on up to four
ranks every pair of values that some legal plan joins, on eight every factorisation. CI verifies a
plan with every value. `--all` verifies every factorisation of the ranks with every schedule, ZeRO
stage and tensor algorithm, the rest drawn by the seed.

`--order` instead checks, without computing, that no order of collectives and sends can hang on
NCCL.

`--details` names a JSON-lines file, kept out of git, with a line per plan; a sweep that was stopped
goes on from it. `--summary` names the file for the repository, written when all plans are verified.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from datetime import date
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from tests.parallel.operator_strategies import columns_before_rows, sequences
from tests.parallel.small import GPT, LLAMA
from tests.parallel.sweep_record import Details, summary, verify_all, versions, write_summary
from workbench.engine.verify.equivalence import verify
from workbench.errors import PlanError
from workbench.kernels.fused_seams import VocabParallelLoss, replace_seams, warm_up
from workbench.models import Transformer
from workbench.plan.model.model_shape import Shape
from workbench.plan.rules.supported import unsupported
from workbench.plan.schema import Plan
from workbench.rehearsal.order_check import check_order
from workbench.schedules import bounded_names

Choice = dict[str, Any]
"""Name of a dimension -> its value."""

MOE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn": 32}}
UNEVEN = {**LLAMA, "heads": 6, "kv_heads": 3, "head_dim": 6, "ffn": 45}
"""Divided by neither two nor four tensor ranks."""
AXES = ("tensor", "context", "pipeline", "data")
"""Of a mesh, in the order of its sizes."""
MODELS: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt": GPT, "moe": MOE, "uneven": UNEVEN}
OPERATORS = {"columns": columns_before_rows, "sequences": sequences}
SPACE: dict[str, tuple[Any, ...]] = {
    "mesh": tuple(
        (t, c, p, n // (t * c * p))
        for n in (2, 4, 8)
        for t, c, p in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4))
        if n % (t * c * p) == 0
    ),
    "algorithm": ("1d", "2d", "2.5d", "3d"),
    "schedule": (
        *("gpipe", "1f1b", "eager-1f1b", "interleaved"),
        *("zb-h1", "zb-h2", "zb-v", "dualpipe-v"),
    ),
    "in_flight": (None, 1, 2),
    "zero": (0, 1, 2, 3),
    "sequence": (False, True),
    "context": ("ring", "ulysses", "usp"),
    "expert": (1, 2, 4),
    "operators": (None, *OPERATORS),
    "shard": ("all", 2),
    "reduce": ("step", "microbatch"),
    "keep_gathered": (False, True),
    "tile_factor": (1, 2),
    "offload": ("none", "optimizer", "parameters"),
    "offload_ratio": (1.0, 0.5),
    "offload_activations": (False, True),
    "recompute": ("none", "selective", "full", (1, 2), ("blocks.*.mlp", "blocks.*.attend")),
    "model": tuple(MODELS),
    "tied": (False, True),
    "microbatches": (2, 4, 8),
    "replicas": ("equal", "most first", "most last"),
    "distribution": ("split", "round_robin"),
    "placement": (
        ("tensor", "context", "data", "pipeline"),
        ("pipeline", "data", "context", "tensor"),
    ),
    "precision": ("fp64", "fp32"),
    "kernels": ("eager", "compiled", "fused"),
}
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
GRIDS = {"2d": {4: [2, 2]}, "2.5d": {4: [2, 2, 1], 8: [2, 2, 2]}, "3d": {8: [2, 2, 2]}}
IDLE = {
    "schedule": (lambda c: c["mesh"][2] == 1, "1f1b"),
    "in_flight": (lambda c: c["mesh"][2] == 1 or c["schedule"] not in bounded_names(), None),
    "context": (lambda c: c["mesh"][1] == 1, "ring"),
    "sequence": (lambda c: c["mesh"][0] == 1, False),
    "algorithm": (lambda c: c["mesh"][0] == 1, "1d"),
    "keep_gathered": (lambda c: c["zero"] < 3, False),
    "tile_factor": (lambda c: c["zero"] < 3, 1),
    "offload": (lambda c: c["zero"] == 0, "none"),
    "offload_ratio": (lambda c: c["offload"] != "optimizer", 1.0),
    "offload_activations": (lambda c: c["recompute"] not in ("full", (1, 2)), False),
    "shard": (lambda c: c["zero"] == 0, "all"),
    "expert": (lambda c: c["model"] != "moe", 1),
    "operators": (lambda c: c["mesh"][0] == 1, None),
    "microbatches": (lambda c: c["mesh"][2] == 1, 3),
    "replicas": (lambda c: c["mesh"][2] == 1 or c["mesh"][3] == 1, "equal"),
    "distribution": (lambda c: c["replicas"] == "equal", "split"),
}
"""Dimension -> (when it has no effect, the one value that it then has). Without stages,
microbatches only accumulate: a first, a last and one between.
"""
EXHAUSTED = ("mesh", "algorithm", "schedule", "zero", "sequence")
"""Dimensions whose every legal combination `--all` verifies."""
POOL = 6000


def plan_of(choice: Choice) -> Plan | None:
    """The resolved plan of a choice; None where it is illegal or cannot run."""
    if any(idle(choice) and choice[name] != value for name, (idle, value) in IDLE.items()):
        return None
    tensor, context, pipeline, data = choice["mesh"]
    size = tensor if choice["algorithm"] == "1d" else GRIDS[choice["algorithm"]].get(tensor)
    chunks = CHUNKS.get(choice["schedule"], 1)
    layers = max(LLAMA["layers"], pipeline * chunks)
    replicas = unequal_replicas(choice["replicas"], pipeline, data)
    recompute = (
        list(choice["recompute"]) if isinstance(choice["recompute"], tuple) else choice["recompute"]
    )
    written = {
        "model": {**MODELS[choice["model"]], "tied": choice["tied"], "layers": layers},
        "cluster": {"gpu": "local", "gpus": prod(choice["mesh"])},
        "strategy": {
            "tensor": {
                "size": size or 0,
                "algorithm": choice["algorithm"],
                "sequence": choice["sequence"],
            },
            "context": {"size": context, "algorithm": choice["context"], "ulysses_size": 2},
            "pipeline": {
                "size": pipeline,
                "schedule": choice["schedule"],
                "chunks": chunks,
                "in_flight": choice["in_flight"],
                "replicas": replicas,
                "distribution": choice["distribution"],
            },
            "data": {
                "zero": choice["zero"],
                "shard": choice["shard"],
                "reduce": choice["reduce"],
                "bucket_mib": 0.01,
                "keep_gathered": choice["keep_gathered"],
                "tile_factor": choice["tile_factor"],
                "offload": choice["offload"],
                "offload_ratio": choice["offload_ratio"],
            },
            "expert": {"size": choice["expert"]},
            "operators": operators_of(choice),
            "recompute": recompute,
            "offload_activations": choice["offload_activations"],
            "placement": list(choice["placement"]),
            "kernels": choice["kernels"],
        },
        "training": {
            "sequence_length": 16,
            "micro_batch": 4,
            "global_batch": 4 * choice["microbatches"] * (1 if replicas else data),
            "steps": 3,
            "optimizer": {"clip": 0.5, "learning_rate": 1e-2},
        },
    }
    try:
        plan = Plan.model_validate(written).resolve()
    except (PlanError, ValueError):
        return None
    return None if unsupported(plan, "run") else plan


def operators_of(choice: Choice) -> dict[str, str]:
    """The operator strategies of a choice; {} without."""
    if choice["operators"] is None:
        return {}
    shape = Shape.model_validate(MODELS[choice["model"]])
    return OPERATORS[choice["operators"]](shape, choice["mesh"][0])


def unequal_replicas(kind: str, stages: int, data: int) -> list[int] | None:
    """Replicas of each stage, on as many ranks as `data` of each would take."""
    if kind == "equal":
        return None
    most = [stages * data - (stages - 1)]
    return [*most, *[1] * (stages - 1)] if kind == "most first" else [*[1] * (stages - 1), *most]


def draw_choice(generator: random.Random, fixed: Choice) -> Choice:
    """A choice with the values `fixed`; dimensions without effect at their idle value, the rest
    drawn.
    """
    choice = {name: fixed.get(name, generator.choice(values)) for name, values in SPACE.items()}
    for name, (idle, value) in IDLE.items():
        if name not in fixed and idle(choice):
            choice[name] = value
    return choice


def joined_values(choice: Choice, together: int) -> set[tuple[Any, ...]]:
    """All that a choice joins of so many values, each axis' size a value of its own."""
    sizes = dict(zip((f"{axis} axis" for axis in AXES), choice["mesh"]))
    values = sizes | {name: value for name, value in choice.items() if name != "mesh"}
    return set(combinations(values.items(), together))


def drawn_pool(seed: int) -> list[Choice]:
    """Legal choices, drawn."""
    generator = random.Random(seed)
    drawn = (draw_choice(generator, {}) for _ in range(POOL))
    return [choice for choice in drawn if plan_of(choice) is not None]


def fewest_choices(pool: list[Choice], together: int) -> list[Choice]:
    """Choices of the pool that join all which it joins of so many values, greedily."""
    joined = [joined_values(choice, together) for choice in pool]
    left, chosen = set().union(*joined), []
    while left:
        best = max(range(len(pool)), key=lambda i: len(joined[i] & left))
        chosen.append(pool[best])
        left -= joined[best]
    return chosen


def covering_choices(seed: int) -> list[Choice]:
    """Few legal choices: on up to four ranks every pair of values that the pool joins; on eight
    ranks every factorisation once.
    """
    pool = drawn_pool(seed)
    eight = {choice["mesh"]: choice for choice in pool if prod(choice["mesh"]) == 8}
    return fewest_choices([c for c in pool if prod(c["mesh"]) < 8], 2) + list(eight.values())


def all_choices(seed: int) -> Iterator[Choice]:
    """Every legal combination of the exhausted dimensions, the others drawn."""
    generator = random.Random(seed)
    for values in product(*(SPACE[name] for name in EXHAUSTED)):
        fixed = dict(zip(EXHAUSTED, values))
        for _ in range(40):
            if plan_of(choice := draw_choice(generator, fixed)) is not None:
                yield choice
                break


def compile_once() -> None:
    """Compile the compiled seams here, before ranks are forked from this process: they inherit
    it.
    """
    for precision, model in product((torch.float64, torch.float32), MODELS.values()):
        shape = Plan.of("tiny", gpu="local", gpus=1, set={"model": model}).resolve().shape
        built, split = Transformer(shape), VocabParallelLoss("compiled")
        replace_seams(built, "compiled")
        for _ in warm_up([built, split], precision, batch=4):
            pass


def verify_choice(choice: Choice) -> dict[str, Any]:
    """The choice with the answer of `verify`; an error is a failure with its words."""
    plan = plan_of(choice)
    assert plan is not None
    began = time.perf_counter()
    try:
        answer = verify(plan, choice["precision"])
    except Exception as error:  # a sweep goes on, and reports it
        return {**choice, "passed": False, "error": str(error)[-500:]}
    worst = answer["worst"]
    return {
        **choice,
        "passed": answer["passed"],
        "worst": worst["tensor"],
        "relative": worst["relative"],
        "seconds": round(time.perf_counter() - began, 2),
    }


def check_choice(choice: Choice) -> dict[str, Any]:
    """The order check of one plan, on H100s where they have attention for its heads."""
    plan = plan_of(choice)
    assert plan is not None
    started = time.monotonic()
    try:
        auto = dict.fromkeys(
            ("strategy.precision", "strategy.attention", "strategy.gradient_dtype"), "auto"
        )
        plan = plan.replace(**{"cluster.gpu": "h100-sxm-80gb", **auto})
        plan.resolve()
    except PlanError:  # ring attention of six entries a head
        plan = plan.replace(**{"cluster.gpu": "local"})
    found = check_order(plan)
    problem = found.problems[0] if found.problems else ""
    seconds = round(time.monotonic() - started, 1)
    return {**choice, "passed": not problem, "error": problem, "seconds": seconds}


def main() -> int:
    """Verify and report; 1 where a plan failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every legal combination")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="counts and worst errors")
    parser.add_argument("--details", type=Path, metavar="FILE", help="every plan; resumed from")
    parser.add_argument("--order", action="store_true", help="check the order of calls instead")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check orders")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seed = arguments.seed
    choices = list(all_choices(seed)) if arguments.all else covering_choices(seed)
    head = {
        "source": "measured",
        "versions": versions(),
        "all": arguments.all,
        **({"order": True} if arguments.order else {}),
        "seed": seed,
        "mesh": AXES,
    }
    details = Details(arguments.details, head)
    print(f"{len(choices)} plans, {len(details.rows)} already in {arguments.details}", flush=True)
    if arguments.order:
        found = verify_all(choices, check_choice, details, arguments.jobs)
        return report(found, "cannot hang")
    compile_once()
    found = verify_all(choices, verify_choice, details)
    if arguments.summary:
        dated = {**head, "date": date.today().isoformat()}
        write_summary(arguments.summary, summary(dated, found))
    return report(found, "equal one device")


def report(found: list[dict[str, Any]], what: str) -> int:
    """Print the plans that failed, and how many do `what`; 1 where one failed."""
    failed = [one for one in found if not one["passed"]]
    for one in failed:
        print(json.dumps(one))
    print(f"{len(found) - len(failed)} of {len(found)} plans {what}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
