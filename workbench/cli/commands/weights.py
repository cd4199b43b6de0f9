"""Commands about files beside plans: weights and what they predict, text as tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from workbench import verbs
from workbench.cli.options import Json, emit
from workbench.cli.progress import LINE_SECONDS, Status
from workbench.units import bytes_text
from workbench.untrusted_text import visible

MOST_SAMPLE = 1000
"""Characters of a conversation that are shown."""
GgufType = Literal["f32", "f16", "bf16", "q8_0"]

if TYPE_CHECKING:
    from workbench.cli.terminal import Grid


def weights(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Checkpoint, run, or PEFT folder.")
    ],
    to: Annotated[
        Path, typer.Option("--to", help="New folder to write into, or new file that ends in .gguf.")
    ],
    type: Annotated[
        GgufType | None, typer.Option("--type", help="Of a GGUF file's matrices; default f16.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="GGUF file, or folder with a tokenizer.json.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into their base.")] = False,
    base: Annotated[
        Path | None, typer.Option("--base", help="Weights that were fine-tuned; default the run's.")
    ] = None,
    json: Json = False,
) -> None:
    with Status("reading") as status:
        found = verbs.weights(
            source, to, _progress(status), type=type, tokenizer=tokenizer, merge=merge, base=base
        )
    words = f"{found['parameters']:,} parameters in {found['tensors']} tensors of {found['dtype']}"
    use = f"a plan starts from them with --set model={to} --set checkpoint.load={to}"
    if "adapter" in found:
        to = Path(found["folder"])
        use = f"generate and perplexity take them with --adapter {to}"
    size = bytes_text(found["bytes"])
    skipped = found.get("skipped", [])
    emit(json, found, lambda: [*skipped, f"{words}, {size}, written to {to}; {use}"])


def tokenize(
    what: Annotated[
        list[str], typer.Argument(metavar="PLAN|SOURCE...", help="A plan file, or files of text.")
    ],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="bytes, bpe, tokenizer.json or GGUF.")
    ] = None,
    field: Annotated[
        str | None, typer.Option("--field", help="Field of a JSONL row, or Parquet column.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="In place of what the suffix says.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Type of raw tokens.")] = None,
    end_of_text: Annotated[
        str | None, typer.Option("--end-of-text", help="Token after each document.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", help="Vocabulary of a BPE that is trained.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Prefix of a Megatron-LM .bin and .idx.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Processes; default one a core.")
    ] = None,
    json: Json = False,
) -> None:
    with Status("reading") as status:
        found = verbs.tokenize(
            what,
            tokenizer=tokenizer,
            field=field,
            format=format,
            dtype=dtype,
            end_of_text=end_of_text,
            vocab=vocab,
            output=output,
            processes=processes,
            progress=_progress(status),
        )
    emit(json, found, lambda: _lines(found))


def _lines(found: dict[str, Any]) -> Iterator[Grid | str | None]:
    for one in found["sources"]:
        skipped = f", {one['skipped']:,} empty ones left out" if one["skipped"] else ""
        took = "were tokenized already"
        if (seconds := one["seconds"]) is not None:
            took = f"in {seconds:.1f} s, {one['bytes'] / max(seconds, 1e-9) / 1e6:,.1f} MB/s"
        what = "documents"
        if (loss := one.get("loss_tokens")) is not None:
            what = "pairs" if one["format"] == "preferences" else "conversations"
            skipped = f", {loss:,} of them with loss"
        words = f"{one['tokens']:,} tokens in {one['documents']:,} {what}{skipped}, {took}"
        yield f"{one['source']}: {words}; {one['path']}"
        if packed := one.get("packed"):
            yield f"  to train on: {packed['words']}"
        if parts := one.get("first"):
            text = "".join(f"⟦{each['text']}⟧" if each["loss"] else each["text"] for each in parts)
            yield f"  the first, ⟦what has loss⟧ in brackets: {_one_line(text)}"
    yield f"{found['tokens']:,} tokens below {found['vocabulary']:,}, by {found['tokenizer']}"
    if found["output"]:
        yield f"written to {found['output']}"


def _one_line(text: str) -> str:
    """The beginning of a text, its line feeds written out."""
    words = visible(text.replace("\n", "\\n"))
    return words if len(words) <= MOST_SAMPLE else f"{words[:MOST_SAMPLE]}…"


def _progress(status: Status) -> Callable[[int, int, str], None]:
    """Shows bytes done of those in all, at most a line in some seconds where nothing redraws it."""
    last_line = 0.0

    def show(done: int, of: int, what: str) -> None:
        nonlocal last_line
        if sys.stderr.isatty() or time.monotonic() - last_line > LINE_SECONDS:
            last_line = time.monotonic()
            status(f"{what}, {min(1.0, done / max(1, of)):.0%} of {bytes_text(of)}")

    return show


Model = Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file, or Hugging Face folder.")]
Tensor = Annotated[int, typer.Option("--tensor", min=1, help="Tensor-parallel ranks.")]
Adapter = Annotated[
    Path | None, typer.Option("--adapter", help="Folder of adapters in PEFT's format.")
]


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the text follows.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens to generate.")] = 64,
    tensor: Tensor = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")
    ] = False,
    adapter: Adapter = None,
    json: Json = False,
) -> None:
    with nullcontext() if json else Status("starting") as status:

        def show(text: str) -> None:
            if status is not None and status.bar.live.is_started:
                status.bar.stop()
            sys.stdout.write(visible(text))
            sys.stdout.flush()

        found = verbs.generate(
            model,
            prompt,
            tokens=tokens,
            tensor=tensor,
            chat=chat,
            adapter=adapter,
            progress=None if json else show,
            loading=_progress(status) if status is not None else None,
        )
    rate = len(found["tokens"]) / found["seconds"]
    said = f"{len(found['tokens'])} tokens after {found['prompt_tokens']}, {rate:.1f} a second"
    emit(json, found, lambda: ["", said])


def perplexity(
    model: Model,
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="UTF-8 files.")],
    tensor: Tensor = 1,
    pipeline: Annotated[int, typer.Option("--pipeline", min=1, help="Pipeline ranks.")] = 1,
    data: Annotated[int, typer.Option("--data", min=1, help="Data-parallel ranks.")] = 1,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of a window.")] = 256,
    adapter: Adapter = None,
    json: Json = False,
) -> None:
    with nullcontext() if json else Status("starting") as status:
        found = verbs.perplexity(
            model,
            texts,
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            length=length,
            adapter=adapter,
            loading=_progress(status) if status is not None else None,
        )
    said = f"perplexity {found['perplexity']:.2f} on {found['tokens']:,} tokens"
    emit(json, found, lambda: [said])
