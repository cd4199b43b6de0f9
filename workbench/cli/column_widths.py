"""How wide the columns of a table are on a narrow screen: words stay whole, and the least is
lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len

READABLE = 20
"""Columns of the screen below which longer text would be a tower of single words."""
SHORT = 8
"""Columns of the screen to which long words are shortened before those of the first column are."""
LINES = re.compile(r"[^\n]+")
WORDS = re.compile(r"(?m)^[^\S\n]+\S+|\S+")
"""What no line break parts: a word, the first of a line with its indent."""


class Need(NamedTuple):
    """What one column of a table asks for, in columns of the screen."""

    whole: int
    """Its longest line."""
    fair: int
    """Enough to read it well: figures on one line, text on lines of `READABLE`."""
    word: int
    """Its longest word; an indent belongs to the word behind it."""
    figures: bool
    """Whether it holds figures, which are parted from their units last."""


def need(cells: Iterable[str], heading: str, figures: bool) -> Need:
    """What a column with this heading and these cells asks for."""
    texts = list(cells)
    line, word = _longest(texts, LINES), _longest([*texts, heading], WORDS)
    fair = max(word, line if figures else min(line, READABLE))
    return Need(max(line, _longest([heading], LINES)), fair, word, figures)


def fit(needs: Sequence[Need], width: int) -> list[int]:
    """The width of each column, together at most `width`; less than the longest word only where
    words do not fit.

    The first column, which says what a row is about, keeps its words longest.
    """
    whole_figures = [one.fair if one.figures else one.word for one in needs]
    for least in ([one.fair for one in needs], whole_figures, [one.word for one in needs]):
        if sum(least) <= width:
            return _levelled(least, [one.whole for one in needs], width)
    words = [one.word for one in needs]
    first = [*words[:1], *(min(word, SHORT) for word in words[1:])]
    return _levelled(first if sum(first) <= width else [1] * len(needs), words, width)


def shortened_text(text: str, width: int) -> str:
    """`text` with the middle of each word that is wider than `width` left out."""
    return WORDS.sub(lambda word: _middle(word[0], width), text)


def _middle(word: str, width: int) -> str:
    if cell_len(word) <= width:
        return word
    shorter = (_ends(word, size) for size in range(min(width, len(word)) - 1, 0, -1))
    return next((short for short in shorter if cell_len(short) <= width), "…")


def _ends(word: str, size: int) -> str:
    return f"{word[: size - size // 2]}…{word[len(word) - size // 2 :]}"


def _levelled(least: Sequence[int], most: Sequence[int], width: int) -> list[int]:
    """Widths of at least `least` and at most `most`, the widest of them level, that fill `width` as
    far as they can.
    """
    rows = (
        [max(low, min(high, level)) for low, high in zip(least, most)]
        for level in range(width, 0, -1)
    )
    return next((widths for widths in rows if sum(widths) <= width), list(least))


def _longest(texts: Iterable[str], parts: re.Pattern[str]) -> int:
    return max((cell_len(part) for text in texts for part in parts.findall(text)), default=1)
