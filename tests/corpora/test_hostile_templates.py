"""A chat template or tokenizer that does not end, fills memory or fails is one sentence, wherever
text is rendered or encoded: within seconds of CPU time, below 1 GB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers

from tests.corpora.gguf_tokenizers import write_gguf_tokenizer
from workbench.corpora.tokenized_corpus import load_corpus
from workbench.corpora.tokenizers.read_tokenizer import read_tokenizer
from workbench.errors import PlanError
from workbench.plan.schema import Corpus

MOST_MIB = 1024
MOST_CPU_SECONDS = 8
"""CPU time of a process that starts, reads a tokenizer and meets the bound of 1 s."""
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
TEMPLATES = {
    "writes without end": (NESTED.replace("BODY", "{{ j }}"), "writes more than"),
    "loops without a word": (NESTED.replace("BODY", ""), "is not done in 1 s of CPU time"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "is not done in 1 s of CPU time"),
    "a long constant": ("{{ 'x' * (3 * 10**9) }}", "multiplies a text to 3,000,000,000 characters"),
    "a long list": ("{{ [0] * (3 * 10**9) }}", "multiplies a text to 3,000,000,000 characters"),
    "a wide field": ("{{ 'x' | center(3 * 10**9) }}", "takes more depth or memory"),
    "a wide format": ("{{ '%3000000000d' % 1 }}", "takes more depth or memory"),
    "doubled": (
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{{ ns.x }}",
        "takes more depth or memory",
    ),
    "a call of itself": (
        "{% macro a(x) %}{{ a(x) }}{% endmacro %}{{ a(1) }}",
        "takes more depth or memory",
    ),
    "deep brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "takes more depth or memory"),
    "deep loops": ("{% for i in [1] %}" * 200 + "{% endfor %}" * 200, "too many levels"),
    "half a template": ("{% for m in messages %}", "Unexpected end of template"),
    "no filter": ("{{ 1 | nofilter }}", "No filter named"),
    "no attribute": ("{{ messages.x.y }}", "has no attribute 'x'"),
    "division": ("{{ 1 / 0 }}", "division by zero"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_refused_by_generate_and_tokenize(name: str, tmp_path: Path) -> None:
    template, words = TEMPLATES[name]
    path, source = tmp_path / "a.gguf", tmp_path / "a.jsonl"
    write_gguf_tokenizer(path, {"tokenizer.chat_template": template})
    with pytest.raises(PlanError) as chat:
        read_tokenizer(path).chat([{"role": "user", "content": "hi"}])
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    source.write_text(json.dumps({"messages": turns}) + "\n")
    corpus = Corpus(source=str(source), tokenizer=str(path), holdout=0)
    with pytest.raises(PlanError) as tokenized:
        load_corpus(corpus, 5, folder=tmp_path / "cache")
    for raised in (chat, tokenized):
        assert words in str(raised.value) and "chat template" in str(raised.value)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 700


def test_a_hostile_tokenizer_is_refused_by_generate_and_tokenize(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(PlanError) as prompted:
        read_tokenizer(tmp_path).encode_apart("ab")
    (tmp_path / "a.txt").write_text("ab")
    path = str(tmp_path / "tokenizer.json")
    corpus = Corpus(source=str(tmp_path / "a.txt"), tokenizer=path, holdout=0)
    with pytest.raises(PlanError) as tokenized:
        load_corpus(corpus, 3, folder=tmp_path / "cache")
    for raised in (prompted, tokenized):
        assert "the tokenizer of" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", [models.WordLevel, models.BPE, models.WordPiece])
def test_a_vocabulary_that_skips_most_ids_is_refused(kind: type, tmp_path: Path) -> None:
    folder, source = tmp_path, tmp_path / "a.txt"
    more: dict[str, Any] = {"merges": []} if kind is models.BPE else {"unk_token": "a"}
    one = Tokenizer(kind(vocab={"a": 0, "b": 1, "</s>": 2}, **more))
    written = json.loads(one.to_str())
    written["model"]["vocab"]["b"] = 2**32 - 1
    (folder / "tokenizer.json").write_text(json.dumps(written))
    source.write_text("ab")
    corpus = Corpus(source=str(source), tokenizer=str(folder / "tokenizer.json"), holdout=0)
    with pytest.raises(PlanError, match="has token id 4,294,967,295; legal: below 16,777,216"):
        read_tokenizer(folder).encode_apart("ab")
    with pytest.raises(PlanError, match="has token id 4,294,967,295; legal: below 16,777,216"):
        load_corpus(corpus, 3, folder=tmp_path / "cache")


@pytest.mark.parametrize("name", ["writes without end", "loops without a word", "a long constant"])
def test_the_command_ends_in_a_sentence_and_takes_little(name: str, tmp_path: Path) -> None:
    write_gguf_tokenizer(tmp_path / "a.gguf", {"tokenizer.chat_template": TEMPLATES[name][0]})
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
    # Its own ru_maxrss would hold the peak of this test's process, which a fork and exec hand on.
    code = (
        "import re, resource, sys\nfrom workbench.cli.app import answer\n"
        "code = answer(['tokenize', 'a.jsonl', '--tokenizer', 'a.gguf'])\n"
        "peak = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "own, child = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "print(max(peak, child.ru_maxrss), own.ru_utime + child.ru_utime)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and TEMPLATES[name][1] in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
    kib, seconds = map(float, done.stdout.split())
    assert kib < MOST_MIB * 2**10 and seconds < MOST_CPU_SECONDS
