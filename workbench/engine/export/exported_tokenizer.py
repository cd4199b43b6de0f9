"""The tokenizer that goes with exported weights: the one that is given, else the run's own."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from workbench.checkpoint.checkpoint_format import write_atomically
from workbench.checkpoint.gguf.gguf_writer import MetadataValue, tokenizer_fields
from workbench.corpora.conversations.chat_encoder import PLAIN_TEMPLATE
from workbench.corpora.tokenized_corpus import tokenizer_file
from workbench.corpora.tokenizers.gguf_tokenizer import CONTROL, KEYS, USER_DEFINED, gguf_split
from workbench.corpora.tokenizers.model_tokenizer import tokens_around
from workbench.corpora.tokenizers.read_tokenizer import own_template
from workbench.corpora.tokenizers.text_tokenizer import end_token, load_tokenizer, vocabulary_size
from workbench.errors import PlanError, refuse
from workbench.plan.corpus_files import conversation_format, template_text
from workbench.plan.model.model_shape import Shape
from workbench.plan.schema import Plan
from workbench.safe_io.gguf_files import SUFFIX

FIELD = "--tokenizer"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files that stand beside weights in a folder, and go with them."""
NORMAL, UNUSED = 1, 5
"""Further values of tokenizer.ggml.token_type."""


class ExportedTokenizer(NamedTuple):
    """A tokenizer.json or GGUF file, and the template of the plan that trained with it."""

    path: Path
    template: str | None = None

    @property
    def own(self) -> tuple[str | None, dict[str, str]]:
        """The chat template, and the special tokens that templates name."""
        template, special = own_template(self.path)
        if "eos_token" not in special and self.path.suffix != SUFFIX:
            tokenizer = load_tokenizer(self.path, FIELD)
            with suppress(PlanError):  # a tokenizer may know no end
                end = end_token(self.path, tokenizer, None)
                special["eos_token"] = str(tokenizer.id_to_token(end))
        return self.template or template, special


def given_tokenizer(given: Path) -> ExportedTokenizer:
    """The tokenizer of a GGUF file, a tokenizer.json or its folder.

    Raises:
        PlanError: There is none.
    """
    path = given / "tokenizer.json" if given.is_dir() else given
    if not path.is_file():
        legal = "legal: a GGUF file, a tokenizer.json, or a folder with one"
        raise refuse(FIELD, f"'{given}' has no tokenizer; {legal}")
    return ExportedTokenizer(path)


def run_tokenizer(checkpoint: Path, vocab: int) -> ExportedTokenizer | None:
    """The tokenizer of the run that wrote a checkpoint; None where it trained on bytes, or its plan
    or tokenizer is gone.
    """
    plan = checkpoint.parent.parent / "plan.yaml"
    try:
        corpus = Plan.load(plan).corpus if plan.is_file() else None
        path = None if corpus is None else tokenizer_file(corpus, vocab)
        if corpus is None or path is None:
            return None
        load_tokenizer(path)
        template = template_text(corpus)
        if corpus.tokenizer == "bpe" and conversation_format(corpus):
            template = template or PLAIN_TEMPLATE
    except PlanError:
        return None
    return ExportedTokenizer(path, template)


def write_tokenizer(found: ExportedTokenizer, folder: Path, vocab: int) -> None:
    """Write a tokenizer beside weights, as `generate` and transformers load it.

    Raises:
        PlanError: It has more ids than the model.
    """
    tokenizer = load_tokenizer(found.path, FIELD)
    _check_size(found, vocabulary_size(tokenizer), vocab)
    template, special = found.own
    if found.path.name == "tokenizer.json":
        for name in TOKENIZER_FILES:
            if (beside := found.path.with_name(name)).is_file():
                shutil.copyfile(beside, folder / name)
    else:
        write_atomically(folder / "tokenizer.json", tokenizer.to_str())
        config = {**special, "tokenizer_class": "PreTrainedTokenizerFast"}
        write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    if template is not None and (found.template or found.path.name != "tokenizer.json"):
        write_atomically(folder / "chat_template.jinja", template)


def gguf_tokenizer_fields(found: ExportedTokenizer, shape: Shape) -> dict[str, MetadataValue]:
    """The metadata that say a tokenizer in a GGUF file: a GGUF file's own, or those of a byte-level
    BPE of a tokenizer.json, whose unused ids are named as llama.cpp's converter does.

    Raises:
        PlanError: GGUF has no name for how it splits a text, or it is of another vocabulary.
    """
    if found.path.suffix == SUFFIX:
        return tokenizer_fields(found.path, shape)
    tokenizer = load_tokenizer(found.path, FIELD)
    state = json.loads(tokenizer.to_str())
    split = gguf_split(state)
    if split is None:
        why = "is no byte-level BPE whose splitting GGUF has a name for"
        raise refuse(FIELD, f"'{found.path}' {why}; legal: a GGUF file, or another tokenizer")
    _check_size(found, vocabulary_size(tokenizer), shape.vocab)
    tokens, types = [f"[PAD{i}]" for i in range(shape.vocab)], [UNUSED] * shape.vocab
    for text, index in tokenizer.get_vocab(with_added_tokens=True).items():
        tokens[index], types[index] = text, NORMAL
    for index, added in tokenizer.get_added_tokens_decoder().items():
        types[index] = CONTROL if added.special else USER_DEFINED
    merges = [one if isinstance(one, str) else " ".join(one) for one in state["model"]["merges"]]
    before, after = tokens_around(tokenizer, found.path, FIELD)
    template, special = found.own
    ids = {name: tokenizer.token_to_id(text) for name, text in special.items()}
    made: dict[str, Any] = {"ggml.model": "gpt2", "ggml.pre": split, "ggml.tokens": tokens}
    made |= {"ggml.token_type": types, "ggml.merges": merges, "chat_template": template}
    for name, put in (("bos_token", before), ("eos_token", after)):
        if len(put) > 1 or (put and ids.get(name, put[0]) != put[0]):
            raise refuse(FIELD, f"'{found.path}' puts tokens {put} round a text; GGUF {name} alone")
        ids |= {name: put[0]} if put else {}
        made[f"ggml.add_{name}"] = bool(put)
    made |= {f"ggml.{key}_token_id": ids.get(name) for name, key in KEYS.items()}
    return {f"tokenizer.{k}": MetadataValue.of(v) for k, v in made.items() if v not in (None, [])}


def _check_size(found: ExportedTokenizer, size: int, vocab: int) -> None:
    if size > vocab:
        has = f"has {size:,} ids; the model's vocabulary is {vocab:,}"
        raise refuse(FIELD, f"'{found.path}' {has}")
