"""README, CONTRIBUTING and docs/: what they name exists.

Commands and their options, make targets, modules, files, plan fields, plans, Python calls, links.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.cli.app import COMMANDS, app
from workbench.machine import gpu_catalog
from workbench.plan.catalog import catalog
from workbench.plan.schema import Plan, parse_plan

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "data/validation/README.md")),
        *(ROOT / "docs").glob("*.md"),
    ]
)
NAMES = {name for family in COMMANDS.values() for name in family}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SECTIONS = tuple(Plan.model_fields)
ENDINGS = (".py", ".yaml", ".md", ".ipynb", ".json", ".csv", ".png")

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT))
)


def blocks(document: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(document.read_text()) if name == language]


def spans(document: Path) -> list[str]:
    return SPAN.findall(FENCE.sub("", document.read_text()))


def command_lines(document: Path) -> Iterator[list[str]]:
    """Commands of console and shell blocks, and of code within a sentence, as words."""
    for body in blocks(document, "console"):
        joined = body.replace("\\\n", " ")
        yield from (shlex.split(line[2:]) for line in joined.splitlines() if line[:2] == "$ ")
    for body in blocks(document, "sh"):
        yield from (shlex.split(line, comments=True) for line in body.splitlines() if line.strip())
    for span in spans(document):
        if span.split()[0] in ("workbench", "make", "python"):
            yield shlex.split(span)


def invocations(document: Path, program: str) -> list[list[str]]:
    """What follows `program` on each command line that runs it."""
    found = []
    for words in command_lines(document):
        names = [Path(word).name for word in words]
        if program in names[:2]:
            found.append(words[names.index(program) + 1 :])
    return found


def options_of(command: str) -> set[str]:
    params = app.get_command(None, command).params
    return {"--help", *(flag for one in params for flag in (*one.opts, *one.secondary_opts))}


def test_readme_is_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@each_document
def test_each_command_and_its_options_exist(document: Path) -> None:
    for command, *words in filter(None, invocations(document, "workbench")):
        if command == "VERB" or command.startswith("--"):
            continue
        assert command in NAMES, f"workbench {command}"
        unknown = {word for word in words if word.startswith("-")} - options_of(command)
        assert not unknown, f"workbench {command}: {unknown}"


@each_document
def test_each_make_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {words[0] for words in invocations(document, "make") if words}
    assert named <= targets


@each_document
def test_each_module_and_script_that_is_run_exists(document: Path) -> None:
    for words in invocations(document, "python") + invocations(document, "python3"):
        if words[:1] == ["-m"]:
            assert find_spec(words[1]), words
        elif words:
            assert (ROOT / words[0]).is_file(), words


@each_document
def test_each_file_that_is_named_exists(document: Path) -> None:
    tops = {path.name for path in [*ROOT.iterdir(), *(ROOT / "workbench").iterdir()]}
    tops.discard("build")  # what commands write, there once one has
    for span in spans(document):
        first, slash, _ = span.partition("/")
        if not re.fullmatch(r"[\w./-]+", span) or not slash or first not in tops:
            continue
        if re.search(r"[A-Z]{3,}(?!\.md)", span):
            continue  # a placeholder such as DATE-NAME
        if span.endswith("/") or span.endswith(ENDINGS):
            assert (ROOT / span).exists() or (ROOT / "workbench" / span).exists(), span


@each_document
def test_each_dotted_name_of_the_package_exists(document: Path) -> None:
    for span in spans(document):
        name = re.fullmatch(r"((?:workbench|wb)(?:\.\w+)+)(?:\(.*\))?", span)
        if name is None or name[1].endswith(".VERB"):
            continue
        found: Any = wb
        path = "workbench"
        for part in name[1].split(".")[1:]:
            path += f".{part}"
            if not hasattr(found, part):
                import_module(path)
            found = getattr(found, part)


@each_document
def test_each_plan_field_that_is_named_exists(document: Path) -> None:
    for span in spans(document):
        if re.fullmatch(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+", span) and not span.endswith(
            ENDINGS
        ):
            section, *rest = span.split(".")
            kind = Plan.model_fields[section].annotation
            for name in rest:
                fields = fields_of(kind)
                assert name in fields, span
                kind = fields[name].annotation


def fields_of(kind: Any) -> dict[str, Any]:
    """Fields of a section; of a union, those of every member."""
    found = dict(getattr(kind, "model_fields", {}))
    for member in getattr(kind, "__args__", ()):
        found |= fields_of(member)
    return found


@each_document
def test_each_plan_is_legal(document: Path) -> None:
    for body in blocks(document, "yaml"):
        if body.startswith("model:"):
            plan = parse_plan(body)
            assert plan.code or plan.resolve()


@each_document
def test_python_examples_call_what_exists(document: Path) -> None:
    for body in blocks(document, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                check_call(node)


def check_call(node: ast.Call) -> None:
    """`wb.verb(...)`, `wb.Plan.method(...)`, `charts.name(...)`: the name, and its keywords."""
    from workbench.lab import charts

    *above, name = ast.unparse(node.func).split(".")
    owners = {("wb",): wb, ("wb", "Plan"): wb.Plan, ("charts",): charts}
    if tuple(above) not in owners:
        return
    function = getattr(owners[tuple(above)], name)
    keywords = {one.arg for one in node.keywords if one.arg}
    assert keywords <= set(inspect.signature(function).parameters), ast.unparse(node)


@each_document
def test_each_link_leads_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        file, _, anchor = target.partition("#")
        if "://" in file:
            continue
        other = document.parent / file if file else document
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


def test_readme_names_every_preset() -> None:
    table = (ROOT / "README.md").read_text()
    missing = [name for name in catalog.strategies() if f"`{name}`" not in table]
    assert not missing, "a preset has a row in the README's table of strategies"


def test_verbs_page_names_every_command() -> None:
    document = ROOT / "docs" / "verbs.md"
    named = {words[0] for words in invocations(document, "workbench") if words}
    assert named >= NAMES


@each_document
def test_numbers_of_the_catalog_are_current(document: Path) -> None:
    counts = {
        "models": len(catalog.models()),
        "GPUs": len(gpu_catalog.gpus()),
        "presets": len(catalog.strategies()),
    }
    text = document.read_text()
    for what, count in counts.items():
        stated = re.findall(rf"(?:catalog: |lists |, )(\d+) {what}\b", text)
        assert set(stated) <= {str(count)}, f"{stated} {what}, the catalog has {count}"
