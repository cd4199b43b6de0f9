"""The verb about text alone: tokenize it before a run."""

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
        tokenizer: Of sources: bytes (default), bpe, or a tokenizer.json.
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
        path; and what they add up to.

    Raises:
        PlanError: A source, the tokenizer or an option is unfit; names the file and the row.
    """
    from workbench.corpora.tokenize_sources import tokenize

    options = {
        "tokenizer": tokenizer,
        "field": field,
        "format": format,
        "dtype": dtype,
        "end_of_text": end_of_text,
        "vocab": vocab,
    }
    given = {name: value for name, value in options.items() if value is not None}
    plan = _plan(what)
    if plan is not None:
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise refuse(names, "is for sources; a plan says it in `corpus`")
        corpus, vocab = plan.pin().corpus, plan.resolve().vocab
    else:
        corpus = _corpus(_sources(what), given)
    path = None if output is None else Path(output)
    return tokenize(corpus, vocab, path, processes, progress)


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
