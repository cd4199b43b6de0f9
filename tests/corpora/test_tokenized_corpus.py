"""A corpus is tokenized once, completely, and decodes to its text."""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from workbench.corpora import encoder, token_cache
from workbench.corpora import tokenized_corpus as corpora
from workbench.corpora.pieces import Piece
from workbench.plan import corpus_files, schema
from workbench.plan.corpus_files import corpus_sha256, files, source_files

TEXTS = {
    "a.txt": "the quick brown fox jumps over the lazy dog. " * 40,
    "b.txt": "häßliche Wörter\n" * 30,
    "c.txt": "",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def whole(corpus: corpora.TokenizedCorpus) -> list[int]:
    (tokens,) = corpus.sources
    return [*tokens.train.tolist(), *tokens.holdout.tolist()]


def pinned(source: Path) -> schema.Corpus:
    found = schema.Corpus(source=str(source))
    return schema.Corpus(source=str(source), sha256=corpus_sha256(*source_files(found)))


def test_bytes_are_the_files(source: Path, tmp_path: Path) -> None:
    corpus = corpora.load_corpus(
        schema.Corpus(source=str(source), holdout=0.25), 300, folder=tmp_path / "cache"
    )
    (tokens,) = corpus.sources
    paths = files(str(source))
    assert bytes(whole(corpus)) == b"".join(p.read_bytes() + b"\0" for p in paths)
    assert len(tokens.holdout) == len(whole(corpus)) // 4
    assert isinstance(tokens.train, np.memmap)
    assert tokens.train.dtype == np.uint16
    assert not tokens.train.flags.writeable


def test_bpe_round_trips_and_is_deterministic(source: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    setting = schema.Corpus(source=str(source), tokenizer="bpe", holdout=0.0)
    first, second = (
        corpora.load_corpus(setting, 320, folder=tmp_path / name) for name in ("one", "two")
    )
    assert whole(first) == whole(second)
    assert max(whole(first)) < 320
    assert len(whole(first)) < sum(len(text.encode()) for text in TEXTS.values()) / 2
    assert first.tokenizer_file is not None
    decoded = Tokenizer.from_file(str(first.tokenizer_file)).decode(whole(first))
    assert decoded == "".join(p.read_text() for p in files(str(source)))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_nobody_else_may_read_the_cache(source: Path, tmp_path: Path, tokenizer: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(0o755)  # as an earlier version made it
    setting = schema.Corpus(source=str(source), tokenizer=tokenizer)
    corpora.load_corpus(setting, 300, folder=cache)
    corpora.load_corpus(setting, 300, folder=tmp_path / "new")
    for folder in (cache, tmp_path / "new"):
        assert folder.stat().st_mode & 0o777 == 0o700
        modes = {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert modes.keys() >= {".bin", ".idx", ".json"} and set(modes.values()) == {0o600}


def test_a_bpe_is_not_trained_on_another_text_than_the_plans(source: Path, tmp_path: Path) -> None:
    setting = pinned(source).model_copy(update={"tokenizer": "bpe"})
    (source / "a.txt").write_text("another text " * 40)
    with pytest.raises(ValueError, match=r"corpus\.sha256: the plan was resolved with"):
        corpora.load_corpus(setting, 320, folder=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.json"))


def test_cache_is_used_without_reading_the_text(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = pinned(source)
    before = whole(corpora.load_corpus(setting, 256, folder=tmp_path))

    def fail(*_: object) -> None:
        raise AssertionError("read the text again")

    monkeypatch.setattr(corpus_files, "corpus_sha256", fail)
    monkeypatch.setattr(corpora, "source_files", fail)
    assert whole(corpora.load_corpus(setting, 256, folder=tmp_path)) == before


@pytest.mark.parametrize("how", ["replaced", "written over", "one bit"])
def test_damaged_tokens_are_encoded_again(
    source: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = schema.Corpus(source=str(source))
    before = whole(corpora.load_corpus(setting, 256, folder=tmp_path / "cache"))
    (data,) = (tmp_path / "cache").glob("*.bin")
    content = bytearray(data.read_bytes())
    if how == "one bit":
        content[77] ^= 128
    else:
        content = bytearray(b"\xff" * len(content))  # 65,535: no model of 256 ids has such a row
    if how == "replaced":
        data.rename(tmp_path / "kept")
    data.write_bytes(content)
    os.utime(data, ns=(1, 1))
    assert whole(corpora.load_corpus(setting, 256, folder=tmp_path / "cache")) == before
    assert "are damaged; encoding the corpus again" in capsys.readouterr().err


def test_a_cache_that_was_copied_is_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = pinned(source)
    before = whole(corpora.load_corpus(setting, 256, folder=tmp_path / "cache"))
    shutil.copytree(tmp_path / "cache", tmp_path / "copy", copy_function=shutil.copyfile)
    monkeypatch.setattr(corpora._Work, "_encode", None)
    assert whole(corpora.load_corpus(setting, 256, folder=tmp_path / "copy")) == before


@pytest.mark.parametrize("damage", ["truncate", "no-count", "torn-count"])
def test_an_unfinished_cache_entry_is_encoded_again(
    source: Path, tmp_path: Path, damage: str
) -> None:
    setting = schema.Corpus(source=str(source))
    before = whole(corpora.load_corpus(setting, 256, folder=tmp_path / "cache"))
    (data,) = (tmp_path / "cache").glob("*.bin")
    (meta,) = (tmp_path / "cache").glob("*.json")
    if damage == "truncate":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "no-count":
        meta.unlink()
    else:
        meta.write_text(meta.read_text()[:5])
    assert whole(corpora.load_corpus(setting, 256, folder=tmp_path / "cache")) == before


def test_drafts_of_killed_processes_are_removed(source: Path, tmp_path: Path) -> None:
    corpora.load_corpus(schema.Corpus(source=str(source)), 256, folder=tmp_path)
    (entry,) = tmp_path.glob("*.json")
    entry.unlink()
    host, ended = socket.gethostname(), subprocess.Popen(["true"])
    ended.wait()
    abandoned, living, elsewhere = (
        entry.with_suffix(f".bin.{name}")
        for name in (f"{host}.{ended.pid}", f"{host}.{os.getppid()}", f"x{host}.{ended.pid}")
    )
    for path in (abandoned, living, elsewhere):
        path.touch()
    corpora.load_corpus(schema.Corpus(source=str(source)), 256, folder=tmp_path)
    assert not abandoned.exists() and living.exists() and elsewhere.exists()


def test_errors_name_the_field(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"corpus\.tokenizer: bytes needs .* at least 256, the model has 100"
    ):
        corpora.load_corpus(schema.Corpus(source=str(source)), 100, folder=tmp_path)
    with pytest.raises(ValueError, match=r"corpus\.sha256: the plan was resolved with 0000"):
        corpora.load_corpus(
            schema.Corpus(source=str(source), sha256="0" * 64), 256, folder=tmp_path
        )
    assert not list(tmp_path.glob("*.bin*"))


def test_waiting_ends_at_the_deadline(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(ValueError, match="another process has been encoding it"),
            token_cache.locked(tmp_path / "lock", 0.1),
        ):
            pass


def test_a_file_system_without_locks_lets_every_rank_encode(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lustre without `-o flock`: two ranks encode at once, and the later leaves what ranks map."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    setting = schema.Corpus(source=str(source))
    expected = whole(corpora.load_corpus(setting, 256, folder=tmp_path / "locks"))
    encode, inodes = encoder.Encoder.encode, list[int]()

    def encode_last(self: encoder.Encoder, piece: Piece) -> encoder.Encoded:
        """Encode a file; another rank starts and is through while this one encodes its first."""
        if not inodes:
            inodes.append(0)
            assert whole(corpora.load_corpus(setting, 256, folder=tmp_path / "none")) == expected
            inodes[0] = next((tmp_path / "none").glob("*.bin")).stat().st_ino
        return encode(self, piece)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(encoder.Encoder, "encode", encode_last)
    assert whole(corpora.load_corpus(setting, 256, folder=tmp_path / "none")) == expected
    assert [path.stat().st_ino for path in (tmp_path / "none").glob("*.bin*")] == inodes
    assert "no lock on" in capsys.readouterr().err


def test_several_processes_build_once(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from workbench.corpora import tokenized_corpus as c\n"
        "from workbench.plan import schema\n"
        "build = c._Work._encode\n"
        "def count(*a):\n    open(sys.argv[3], 'a').write('x'); return build(*a)\n"
        "c._Work._encode = count\n"
        "t = c.load_corpus(schema.Corpus(source=sys.argv[1]), 256, folder=Path(sys.argv[2])); "
        "print(len(t.sources[0].train))"
    )
    arguments = [
        sys.executable,
        "-c",
        code,
        str(source),
        str(tmp_path / "cache"),
        str(tmp_path / "built"),
    ]
    children = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lengths = {child.communicate(timeout=60)[0] for child in children}
    assert len(lengths) == 1
    assert (tmp_path / "built").read_text() == "x"
