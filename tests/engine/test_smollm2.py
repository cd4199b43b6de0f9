"""SmolLM2-135M-Instruct from its GGUF file (matrices Q4_1, embedding Q8_0): transformers' logits,
the same perplexity on every mesh in fp64, the same greedy tokens with a key-value cache as without.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.smollm2 import model_file, recorded_ids
from workbench.corpora.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from workbench.engine.generation.greedy import generate_greedily
from workbench.engine.generation.loaded_model import load_session, only_stage, weights_plan
from workbench.engine.generation.logits_head import LogitsHead
from workbench.engine.generation.perplexity import measure_perplexity
from workbench.engine.verify.forked_ranks import run_ranks
from workbench.plan.resolved_plan import ResolvedPlan

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def file() -> Path:
    return model_file()


def logits(made: ResolvedPlan, ids: list[int], rank: int) -> Any:
    model = only_stage(load_session(made, rank))
    model.head = LogitsHead(model.head, model.shape.vocab)  # type: ignore[assignment]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        return model(tokens, tokens)[0].numpy()


@pytest.mark.slow
def test_logits_are_those_of_transformers(file: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    _, recorded = recorded_ids()
    ids = [index for line in recorded[:20] for index in line][:256]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    for tensor in (1, 3):
        made = weights_plan(file, tensor=tensor)
        for found in run_ranks(tensor, partial(logits, made, ids), seconds=200):
            assert abs(found - expected).max() <= 2e-5 * abs(expected).max()


def perplexity(made: ResolvedPlan, ids: list[int], rank: int) -> tuple[float, int]:
    return measure_perplexity(load_session(made, rank, torch.float64), ids)


@pytest.mark.slow
def test_perplexity_is_the_same_on_every_mesh(file: Path) -> None:
    _, recorded = recorded_ids()
    ids = [index for line in recorded[:100] for index in line][:600]  # the last window is short
    found: dict[str, Any] = {}
    meshes: list[dict[str, int]] = [{}, {"data": 2}, {"pipeline": 2}, {"tensor": 3}]
    for mesh in meshes:
        made = weights_plan(file, sequences=2, **mesh)
        work = partial(perplexity, made, ids)
        found |= {str(mesh): run_ranks(made.world_size, work, seconds=200)}
    ((expected, tokens),) = found.pop("{}")
    assert tokens == 600 - 3 and 10 < expected < 100
    for ranks, answers in found.items():
        for answer in answers:
            assert answer == (pytest.approx(expected, rel=1e-10), tokens), ranks


def with_and_without_cache(made: ResolvedPlan, ids: list[int], rank: int) -> list[list[int]]:
    session = load_session(made, rank)
    model = only_stage(session)
    head, seen = model.head, list(ids)
    model.head = LogitsHead(head, model.shape.vocab, last=1)  # type: ignore[assignment]
    with torch.no_grad():
        for _ in range(32):
            given = torch.tensor([seen])
            seen.append(int(model(given, given)[0, -1].argmax()))
    model.head = head
    return [generate_greedily(session, ids, 32), seen[len(ids) :]]


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 3])
def test_cached_tokens_are_the_uncached_ones(file: Path, tensor: int) -> None:
    tokenizer = read_gguf_tokenizer(file)
    made = weights_plan(file, tensor=tensor)
    work = partial(with_and_without_cache, made, tokenizer.encode(PROMPT))
    for cached, uncached in run_ranks(tensor, work, seconds=200):
        assert cached == uncached and len(cached) == 32
        assert tokenizer.decode(cached).startswith(" Paris")
