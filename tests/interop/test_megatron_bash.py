"""Scripts in which everything is known: what is read is what bash itself passes to the training
command.
"""

import random
import shutil
import subprocess
from random import Random
from typing import Any

import pytest

from workbench.interop.shell import Text, commands, shown_value
from workbench.interop.shell.values import literal

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
SHOW = r"""
train() { printf "%s\0" "<$@>"; printf "END\0"; }
srun() { shift; "$@"; }
export -f train
"""


def passed_by_bash(texts: list[str]) -> list[list[list[Any]]]:
    """The words of each script's `train` commands, all scripts run by one bash."""
    script = "set -f\n" + SHOW + "".join(f"(\n{text}\n)\nprintf 'NEXT\\0'\n" for text in texts)
    run = subprocess.run(
        ["bash"], input=script.encode(), capture_output=True, timeout=30, check=False
    )
    answers = run.stdout.decode().split("NEXT\0")[:-1]
    return [[call.split("\0")[:-1] for call in answer.split("END\0")[:-1]] for answer in answers]


def read_here(text: str) -> list[list[str]]:
    found = [command.words[1:] for command in commands(text).commands if command.name == "train"]
    assert all(
        isinstance(word, tuple) and literal(word) is not None for words in found for word in words
    ), text
    calls = [[shown_value(word) for word in words] for words in found]
    return [
        [f"<{words[0]}", *words[1:-1], f"{words[-1]}>"]
        if len(words) > 1
        else [f"<{''.join(words)}>"]
        for words in calls
    ]


FORMS = [
    "A=1; B=2 C='x y'\ntrain $A \"$B\" $C \"$C\" '$A' \\$A a\\ b",
    'A=(1 \'2 3\' "4")\ntrain ${A[@]} "${A[@]}" "${A[*]}" $A ${A[1]} x${A[2]}y',
    'A=(--x 1 # one\n  # --y 2 \\\n  --z\n)\nA+=("--w 5")\ntrain ${A[@]}',
    'A="--x 1 \\\n  --y 2 \\\n"\nA="$A --z\n 3"\ntrain $A',
    "A=4\ntrain $((A*2)) $(( (A + 3) / 2 * 2 )) $((A>3?7:8)) $((-A)) $((A % 3)) $((2**A))",
    'A=\nB=""\ntrain x $A "$B" ${A:-d} ${C-e} ${A-f} ${B:+g} ${D:=h} end',
    "A=big\nif [ $A = big ]; then X=1; elif [ $A = small ]; then X=2; else X=3; fi\ntrain $X",
    'A=3\nif [[ $A -gt 2 && $A != 4 ]]; then X=1; fi\n[ -z "$Q" ] && Y=2\n[ $A -eq 4 ] || '
    "Z=5\ntrain $X $Y $Z",
    "A=b2\ncase $A in\n a*) X=1 ;;\n b1|b2) X=2 ;;\n *) X=3 ;;\nesac\ntrain $X",
    "f() { train \"$1\" $2 \"$@\"; }\nf 'a b' 'c d'",
    'C=\'train "a b" c\'\n$C\neval $C\neval "$C"',
    "X='1 2'\nexport X\nbash -c 'train $X \"$X\" three'",
    'srun -l bash -c "train a b"; train c | cat; true && train d; false || train e',
    'D=bf16\nP=/a/b\ntrain --$D --p=$P/${D}_x "--q=$P" $P/$D/$D',
    "A=\"a\\\"b \\$c\"\ntrain \"$A\" 'q\\n' $'t\\'x'",
    "for X in 7; do train $X; done\nL=Low\ntrain ${L,,} ${L^^}",
    "cat <<EOT > /dev/null\ntrain no $A\nEOT\ntrain yes",
    "A=x\n{ A=y; }\ntrain $A\n# train $A \\\ntrain z",
]


@pytest.mark.parametrize("text", FORMS)
def test_bash_passes_the_same_words(text: str) -> None:
    assert read_here(text) == passed_by_bash([text])[0]


def word(pick: Random, names: list[str]) -> str:
    name = pick.choice(names)
    forms = [
        f"${name}",
        f"${{{name}}}",
        f'"${name}"',
        f"${{{name}:-z}}",
        f"--k=${name}/{name}",
        f"'${name}'",
        f"${name}/${name}/x",
        f'"q ${{{name}}} r"',
        f"$(( {pick.randint(1, 9)} * 3 ))",
        "a7",
    ]
    return pick.choice(forms)


def statement(pick: Random, names: list[str], depth: int = 0) -> str:
    name, kind = pick.choice(names), pick.randrange(8 if depth < 2 else 5)
    inner = [statement(pick, names, depth + 1) for _ in range(2)] if kind > 4 else []
    return [
        lambda: f"{name}={pick.choice(['1', 'x', 'b c', '--f 2', ''])!r}",
        lambda: f'{name}="${{{pick.choice(names)}}} {pick.randint(0, 9)} \\\n  --n"',
        lambda: f"{name}={word(pick, names)}",
        lambda: f"# {name}=0 \\\n:",
        lambda: f'{name}="{pick.randint(1, 5)}"; {pick.choice(names)}=7',
        lambda: (
            f'if [ "${name}" = {pick.choice(["1", "x", "7"])} ]; '
            f"then\n{inner[0]}\nelse\n{inner[1]}\nfi"
        ),
        lambda: f'case "${name}" in 1|7) {inner[0]}\n;; *)\n{inner[1]}\n;; esac',
        lambda: f'if [[ "${name}" != 7 ]]; then {inner[0]}\nfi',
    ][kind]()


def test_bash_passes_the_same_words_of_drawn_scripts() -> None:
    pick, names, texts = random.Random(5), ["A", "B", "C", "D"], []
    for _ in range(150):
        start = [f"{name}={pick.choice(['1', 'x', '7'])}" for name in names]
        body = [statement(pick, names) for _ in range(pick.randint(2, 7))]
        texts.append(
            "\n".join([*start, *body, "train " + " ".join(word(pick, names) for _ in range(4))])
        )
    for text, passed in zip(texts, passed_by_bash(texts), strict=True):
        assert read_here(text) == passed, text


def test_a_piece_knows_its_line() -> None:
    script = commands('A="--x 1\n  --y 2"\ntrain $A z')
    lines = {
        shown_value(word): word[0].line
        for word in script.commands[0].words
        if isinstance(word, tuple) and isinstance(word[0], Text)
    }
    assert (lines["--x"], lines["--y"], lines["z"]) == (1, 2, 3)
