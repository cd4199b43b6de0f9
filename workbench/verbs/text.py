"""Verbs on text: tokenize it before a run, continue it, measure how well a model predicts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import refuse

if TYPE_CHECKING:
    from workbench.plan.schema import Corpus, Plan


def tokenize(
    what: Plan | str | Path | Sequence[str | Path],
    *,
    tokenizer: str | None = None,
    field: str | None = None,
    format: str | None = None,
    dtype: str | None = None,
    end_of_text: str | None = None,
    vocab: int | None = None,
    output: str | Path | None = None,
    processes: int | None = None,
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> dict[str, Any]:
    """Tokenize a plan's corpus, or files, for runs to read.

    Text is encoded in parallel and in constant memory; what the cache holds is not encoded again.

    Args:
        what: A plan, the path of a plan file (.yaml), or sources: JSONL, Parquet, text, tokens.
        tokenizer: Of sources: bytes (default), bpe, a tokenizer.json, or a GGUF file.
        field: Of sources: field of a JSONL row, or Parquet column; default text.
        format: Of sources: in place of what their suffix says.
        dtype: Of raw tokens.
        end_of_text: Token after each document; default the one that the tokenizer names.
        vocab: Vocabulary of the model, for a BPE that is trained on the text.
        output: Prefix of a Megatron-LM .bin and .idx to write all tokens into.
        processes: Processes that encode; default one a core.
        progress: Called with (bytes done, bytes of the source, source).

    Returns:
        Of each source its documents, those skipped, tokens, seconds (None: from the cache) and
        path; and what they add up to. Of conversations also the tokens with loss, the first one in
        parts with and without, and of a plan how they are packed.

    Raises:
        PlanError: A source, the tokenizer or an option is unfit; names the file and the row.
    """
    from workbench.corpora.tokenize_sources import SequencesOf, tokenize

    options = {
        "tokenizer": tokenizer,
        "field": field,
        "format": format,
        "dtype": dtype,
        "end_of_text": end_of_text,
        "vocab": vocab,
    }
    given = {name: value for name, value in options.items() if value is not None}
    plan, sequences = _plan(what), None
    if plan is not None:
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise refuse(names, "is for sources; a plan says it in `corpus`")
        full = plan.pin()
        corpus, vocab, t = full.corpus, full.vocab, full.training
        sequences = SequencesOf(t.sequence_length, bool(corpus.packing), t.seed)
    else:
        corpus = _corpus(_sources(what), given)
    path = None if output is None else Path(output)
    return tokenize(corpus, vocab, path, processes, progress, sequences)


def generate(
    model: str | Path,
    prompt: str,
    *,
    tokens: int = 64,
    tensor: int = 1,
    chat: bool = False,
    adapter: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    loading: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Generate text greedily from a model's weights.

    In fp32 on CPU through a key-value cache, in a child process of each tensor-parallel rank.

    Args:
        model: A GGUF file, or a folder of Hugging Face weights, with its tokenizer.
        prompt: What the text follows.
        tokens: Most tokens to generate; the model's end-of-text token ends it earlier.
        tensor: Tensor-parallel ranks.
        chat: Render the prompt by the model's chat template, as a user's message.
        adapter: Folder of adapters in PEFT's format, merged into the weights in memory.
        progress: Called with each piece of text.
        loading: Called with (bytes done, bytes in all, what) while the first rank loads.

    Returns:
        The text, its token ids, the number of tokens of the prompt, and the seconds it took.

    Raises:
        PlanError: A file is damaged, the adapters are of another model, the tokenizer is not
            known, or the model is illegal on so many ranks.
    """
    from workbench.runs.launch import subprocess_verbs

    return subprocess_verbs.generate(
        model, prompt, tokens, tensor, chat, adapter, progress, loading
    )


def perplexity(
    model: str | Path,
    texts: Sequence[str | Path] | str | Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    length: int = 256,
    adapter: str | Path | None = None,
    loading: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Measure the perplexity of a model on texts, on any mesh.

    In fp32 on CPU, in child processes. Texts are tokenized by the model's own tokenizer and cut
    into windows, each read by itself: of its `length` + 1 tokens the first is predicted by none.

    Args:
        model: A GGUF file, or a folder of Hugging Face weights, with its tokenizer.
        texts: UTF-8 files, read one after the other.
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline ranks.
        data: Data-parallel ranks.
        length: Tokens of a window that are read.
        adapter: Folder of adapters in PEFT's format, merged into the weights in memory.
        loading: Called with (bytes done, bytes in all, what) while the first rank loads.

    Returns:
        The perplexity, and the number of predicted tokens.

    Raises:
        PlanError: A file is damaged, or the model is illegal on this mesh.
    """
    from workbench.runs.launch import subprocess_verbs

    files = [texts] if isinstance(texts, str | Path) else texts
    return subprocess_verbs.perplexity(
        model, files, tensor, pipeline, data, length, adapter, loading
    )


def _sources(what: Any) -> list[str | Path]:
    return [what] if isinstance(what, str | Path) else list(what)


def _plan(what: Any) -> Plan | None:
    from workbench.plan.schema import Plan

    if isinstance(what, Plan):
        return what
    one = what if isinstance(what, str | Path) else what[0] if len(what) == 1 else ""
    return Plan.load(one) if Path(one).suffix in (".yaml", ".yml") else None


def _corpus(sources: Sequence[str | Path], given: dict[str, Any]) -> Corpus:
    from workbench.plan.schema import build_corpus

    how: dict[str, Any] = {
        name: given[name] for name in ("field", "format", "dtype") if name in given
    }
    written: dict[str, Any] = {
        name: given[name] for name in ("tokenizer", "end_of_text") if name in given
    }
    written["holdout"] = 0.0
    if len(sources) == 1:
        return build_corpus({**written, **how, "source": str(sources[0])})
    mix = [{"source": str(source), "weight": 1.0, **how} for source in sources]
    return build_corpus({**written, "mix": mix})
