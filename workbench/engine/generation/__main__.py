"""`python -m workbench.engine.generation generate|perplexity`: JSON lines, the answer last."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workbench.adapters.peft_folder import read_peft_folder
from workbench.adapters.weight_updates import WeightUpdates, read_updates
from workbench.checkpoint.huggingface.huggingface_names import family_of_weights
from workbench.corpora.tokenizers.model_tokenizer import ModelTokenizer
from workbench.corpora.tokenizers.read_tokenizer import read_tokenizer
from workbench.engine.exit_codes import exit_status
from workbench.engine.generation.greedy import generate_greedily
from workbench.engine.generation.loaded_model import load_session, weights_plan
from workbench.engine.generation.perplexity import measure_perplexity
from workbench.engine.session import Session
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.errors import refuse
from workbench.plan.resolved_plan import ResolvedPlan

DAY_SECONDS = 86_400.0


def _checked(ids: list[int], tokenizer: ModelTokenizer, plan: ResolvedPlan) -> list[int]:
    """Token ids that the model knows.

    Raises:
        PlanError: The tokenizer is that of another vocabulary.
    """
    if ids and max(ids) >= plan.shape.vocab:
        raise refuse(
            "tokenizer",
            f"'{tokenizer.source}' has {tokenizer.vocab} tokens, its model a vocabulary of "
            f"{plan.shape.vocab}; get the file again",
        )
    return ids


def _loaded(plan: ResolvedPlan, updates: WeightUpdates | None, rank: int) -> Session:
    """A rank's part of the model; rank 0 prints the bytes loaded, at every percent."""
    shown = 0

    def show(done: int, of: int) -> None:
        nonlocal shown
        if rank == 0 and (share := int(100 * done / max(1, of))) > shown:
            shown = share
            print(json.dumps({"done": done, "of": of, "what": "loading weights"}), flush=True)

    return load_session(plan, rank, progress=show, updates=updates)


def generate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens that follow a prompt, printed as they come."""
    tokenizer = read_tokenizer(arguments.model)
    text = arguments.prompt.read_bytes().decode()
    if arguments.chat:
        text = tokenizer.chat([{"role": "user", "content": text}])
    prompt = tokenizer.encode_apart(text, control=arguments.chat, ends=False)
    if not prompt:
        raise refuse("prompt", "is empty; give at least one character")
    length = len(prompt) + arguments.tokens
    plan = weights_plan(arguments.model, tensor=arguments.tensor, length=length)
    _checked(prompt, tokenizer, plan)
    if length > plan.shape.max_positions:
        raise refuse(
            "tokens",
            f"is {arguments.tokens}, after {len(prompt)} of the prompt; the model has positions "
            f"for {plan.shape.max_positions} in all",
        )
    updates = _updates(arguments, plan)
    found, seconds = run_ranks(
        plan.world_size,
        partial(_generate, plan, updates, prompt, arguments.tokens, tokenizer),
        DAY_SECONDS,
    )[0]
    return {
        "text": tokenizer.decode(found),
        "tokens": found,
        "prompt_tokens": len(prompt),
        "tensor": arguments.tensor,
        "seconds": seconds,
    }


def _generate(
    plan: ResolvedPlan,
    updates: WeightUpdates | None,
    prompt: list[int],
    most: int,
    tokenizer: ModelTokenizer,
    rank: int,
) -> tuple[list[int], float]:
    session = _loaded(plan, updates, rank)
    began, seen = time.monotonic(), list[int]()

    def show(token: int) -> None:
        before = tokenizer.decode(seen)
        seen.append(token)
        more = tokenizer.decode(seen)
        # A character of several tokens is shown once it is complete.
        if rank == 0 and not more.endswith("\ufffd"):
            print(json.dumps({"more": more.removeprefix(before)}), flush=True)

    found = generate_greedily(session, prompt, most, tokenizer.ends, show)
    return found, time.monotonic() - began


def perplexity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Perplexity of the texts, one after the other."""
    tokenizer = read_tokenizer(arguments.model)
    plan = weights_plan(
        arguments.model,
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        data=arguments.data,
        length=arguments.length,
    )
    if arguments.length > plan.shape.max_positions:
        raise refuse(
            "length",
            f"is {arguments.length}; the model has positions for {plan.shape.max_positions}",
        )
    ids = [index for path in arguments.texts for index in tokenizer.encode_apart(_text(path))]
    _checked(ids, tokenizer, plan)
    if len(ids) < 2:
        raise refuse("texts", f"have {len(ids)} tokens, of which none follows another; legal: 2")
    work = partial(_perplexity, plan, _updates(arguments, plan), ids)
    value, tokens = run_ranks(plan.world_size, work, DAY_SECONDS)[0]
    mesh = {axis: getattr(arguments, axis) for axis in ("tensor", "pipeline", "data")}
    return {"perplexity": value, "tokens": tokens, "length": arguments.length, **mesh}


def _perplexity(
    plan: ResolvedPlan, updates: WeightUpdates | None, ids: list[int], rank: int
) -> tuple[float, int]:
    return measure_perplexity(_loaded(plan, updates, rank), ids)


def _updates(arguments: argparse.Namespace, plan: ResolvedPlan) -> WeightUpdates | None:
    """The adapters that are merged into the weights, read once for all ranks."""
    if arguments.adapter is None:
        return None
    family = family_of_weights(Path(arguments.model), plan.shape)
    found = read_peft_folder(arguments.adapter, family, plan.shape)
    return read_updates(found.source, found.scales, found.replaced)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise refuse("texts", f"'{path}' is no UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise refuse("texts", f"'{path}' cannot be read: {error.strerror}") from None


def main() -> int:
    """Answer; 2 with one line on stderr where it is refused."""
    parser = argparse.ArgumentParser(prog="python -m workbench.engine.generation")
    commands = parser.add_subparsers(required=True)
    generating = commands.add_parser("generate")
    generating.set_defaults(work=generate)
    generating.add_argument("model")
    generating.add_argument("prompt", type=Path, help="file of UTF-8 text")
    generating.add_argument("--tokens", type=int, required=True)
    generating.add_argument("--tensor", type=int, required=True)
    generating.add_argument("--chat", action="store_true")
    measuring = commands.add_parser("perplexity")
    measuring.set_defaults(work=perplexity)
    measuring.add_argument("model")
    measuring.add_argument("texts", type=Path, nargs="+")
    for option in ("--tensor", "--pipeline", "--data", "--length"):
        measuring.add_argument(option, type=int, required=True)
    for command in (generating, measuring):
        command.add_argument("--adapter", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return exit_status(lambda: print(json.dumps(arguments.work(arguments)), flush=True))


if __name__ == "__main__":
    sys.exit(main())
