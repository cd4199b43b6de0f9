"""A data-parallel LoRA step of ours beside one of `peft` with `accelerate`, in the same processes.

    python -m tests.benchmarks.lora_step [--models small smollm2] [--ranks 2] [--rounds 30]

Both train the same adapters (rank 8 on all linear layers) of the same Llama from the same values,
by the same AdamW and clipping, on the same tokens in fp32, a thread a rank: a step of ours, a step
of the peer, in turn, the first of a pair alternating. The peer has DistributedDataParallel as
`accelerate` prepares it, SDPA attention and the fused AdamW. Prints a JSON line a model:
`cpu_ratio` is the median over pairs of our CPU seconds over the peer's, summed over ranks; below 1
ours is cheaper. The losses of every step must agree within 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.checkpoint.huggingface.huggingface_names import (
    config_json,
    stored_parts,
    writing_family,
)
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.parallel.mesh import build_mesh
from workbench.plan.resolved_plan import ResolvedPlan
from workbench.plan.schema import Plan

WARM, ROUNDS, DEADLINE = 3, 30, 3600.0
AGREE = 1e-4
SMALL = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 8192}
MODELS: dict[str, tuple[Any, int, int, int]] = {
    "small": (SMALL, 256, 2, 2),
    "smollm2": ("smollm2-135m", 256, 1, 1),
}
"""Name -> (model, sequence length, sequences of a micro-batch, micro-batches of a rank)."""
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Step = Callable[[Tensor, Tensor], float]
"""One step on this rank's tokens and targets [micro-batches, B, T] -> the job's loss."""


def plan_of(name: str, ranks: int) -> ResolvedPlan:
    """LoRA of a model under plain data parallelism."""
    model, length, micro, microbatches = MODELS[name]
    return Plan.model_validate(
        {
            "model": model,
            "cluster": {"gpu": "local", "gpus": ranks},
            "strategy": {"data": {"zero": 0}, "precision": "fp32"},
            "finetune": {
                "sequence_length": length,
                "micro_batch": micro,
                "global_batch": micro * microbatches * ranks,
                "lora": {"rank": 8},
                "optimizer": {"decay": "constant", "clip": 1.0},
            },
        }
    ).resolve()


def ours(session: Session) -> Step:
    """The product's own step."""
    count = iter(range(10**9))

    def step(tokens: Tensor, targets: Tensor) -> float:
        return session.step(next(count), tokens, targets).loss.item()

    return step


def peer_model(session: Session) -> nn.Module:
    """`peft`'s model with the values of our session."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    plan, store = session.plan, session.part.store
    assert plan.lora is not None
    family = writing_family(plan.shape)
    model = LlamaForCausalLM(LlamaConfig(**config_json(plan.shape, torch.float32)))
    lora = LoraConfig(r=plan.lora.rank, lora_alpha=plan.lora.alpha, target_modules=PROJECTIONS)
    keys = {name: part[0].key for name, part in stored_parts(family, plan.shape).items()}
    base = {keys[name]: value for name, value in store.frozen_values.items()}
    missing, unknown = model.load_state_dict(base, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    adapted: nn.Module = get_peft_model(model, lora)
    parameters = dict(adapted.named_parameters())
    for name, value in store.values.items():
        path, _, leaf = name.rpartition(".")
        module = keys[f"{path}.weight"].removesuffix(".weight")
        theirs = f"base_model.model.{module}.lora_{leaf[-1].upper()}.default.weight"
        with torch.no_grad():
            parameters.pop(theirs).copy_(value)
    assert not any(p.requires_grad for p in parameters.values())
    return adapted


def peer(session: Session, rank: int) -> Step:
    """A loop as the documentation of `accelerate` writes it."""
    plan = session.plan
    names = ("LOCAL_RANK", "RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict.fromkeys(names[0], str(rank))
    os.environ |= dict.fromkeys(names[1], str(plan.world_size)) | {"ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator

    o = plan.training.optimizer
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.num_microbatches)
    model = peer_model(session)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(
        trained,
        lr=o.learning_rate,
        betas=(o.beta1, o.beta2),
        eps=o.epsilon,
        weight_decay=o.weight_decay,
        fused=True,
    )
    prepared: Any
    prepared, optimizer = accelerator.prepare(model, optimizer)
    prepared.train()
    assert accelerator.num_processes == plan.world_size
    assert isinstance(prepared, nn.parallel.DistributedDataParallel) or plan.world_size == 1

    def step(tokens: Tensor, targets: Tensor) -> float:
        total = torch.zeros(())
        for x, y in zip(tokens, targets, strict=True):
            with accelerator.accumulate(prepared):
                answer = prepared(input_ids=x, labels=y, shift_labels=y, use_cache=False)
                accelerator.backward(answer.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, o.clip)
                optimizer.step()
                optimizer.zero_grad()
                total += answer.loss.detach() / len(tokens)
        return float(accelerator.reduce(total, "mean"))

    return step


def timed(rank: int, plan: ResolvedPlan, rounds: int) -> list[list[tuple[float, float, float]]]:
    """(wall seconds, CPU seconds, loss) of every round, of ours and of the peer."""
    session = Session.build(plan, build_mesh(plan, rank), torch.device("cpu"))
    for _ in session.warm_up():
        pass
    steps = [ours(session), peer(session, rank)]
    t, generator = plan.training, torch.Generator().manual_seed(rank)
    batch = plan.num_microbatches, t.micro_batch, t.sequence_length + 1
    found: list[list[tuple[float, float, float]]] = [[], []]
    for index in range(WARM + rounds):
        text = torch.randint(plan.shape.vocab, batch, generator=generator)
        pair = text[..., :-1].contiguous(), text[..., 1:].contiguous()
        for which in (0, 1) if index % 2 else (1, 0):
            dist.barrier()
            wall, cpu = time.perf_counter(), _cpu_seconds()
            loss = steps[which](*pair)
            found[which].append((time.perf_counter() - wall, _cpu_seconds() - cpu, loss))
    return found


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def contest(name: str, ranks: int, rounds: int) -> dict[str, Any]:
    """Ratios of one model, and the medians that they are of."""
    plan = plan_of(name, ranks)
    by_rank = run_ranks(ranks, partial(timed, plan=plan, rounds=rounds), DEADLINE)
    both = range(WARM, WARM + rounds)
    wall = [[max(r[which][i][0] for r in by_rank) for i in both] for which in (0, 1)]
    cpu = [[sum(r[which][i][1] for r in by_rank) for i in both] for which in (0, 1)]
    losses = [[loss for _, _, loss in by_rank[0][which]] for which in (0, 1)]
    apart = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    assert apart < AGREE, f"losses differ by {apart:.1e}: {losses}"
    return {
        "source": "measured",
        "model": name,
        "ranks": ranks,
        "tokens_a_step": plan.training.global_batch * plan.training.sequence_length,
        "rounds": rounds,
        "cpu_ratio": statistics.median(a / b for a, b in zip(*cpu, strict=True)),
        "wall_ratio": statistics.median(a / b for a, b in zip(*wall, strict=True)),
        "cpu_seconds": [statistics.median(each) for each in cpu],
        "losses_differ_by": apart,
        "versions": {each: version(each) for each in ("torch", "peft", "accelerate")},
    }


def main() -> None:
    """Print a JSON line a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        print(json.dumps(contest(name, arguments.ranks, arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
