"""YAML as people expect it: read safely, duplicate keys refused, `3e-4` a number, `on` and `010` no
surprises.

PyYAML follows YAML 1.1, where `3e-4` is a string, `yes` a boolean and `010` eight; here YAML 1.2's
core schema holds.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from workbench.errors import PlanError, Problem, refuse
from workbench.untrusted_text import HALF, shown, visible

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN)"
)
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_CORE = (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", _NULL, "~nN"),
)


MOST_VALUES = 100_000
"""Of a document: a calibration of every machine has a tenth. Aliases multiply: a few lines of them
fill a memory.
"""


MOST_DIGITS = 4_000
"""Of an integer: Python converts no more than 4,300, and no field takes a number near it."""


TOO_MANY = "holds more than {:,} values, its aliases written out; legal: fewer"
MOST_TEXT = 4 * 2**20
"""Characters of a document: reading more takes longer than anyone waits, and a calibration has a
tenth.
"""


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2's core schema."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node of the document. Raises `PlanError` where it can only hold too many
        values.
        """
        self.nodes += 1
        if self.nodes > 2 * MOST_VALUES:  # a value of a mapping has a key
            raise refuse("", TOO_MANY.format(MOST_VALUES))
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node. Raises `PlanError` for a tag that its text does not have, `!!bool
        maybe`.
        """
        if isinstance(node.value, str) and HALF.search(node.value):
            raise refuse(
                "",
                f"not valid YAML at {_place(node)}: {shown(node.value)} holds half of a character",
            )
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            raise refuse("", _not_of_its_type(node)) from None


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would misread, for other programs (accelerate) read our
    files by 1.1.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def write_double_quoted(self, text: str, split: bool = True) -> None:
        """Write `text`, with escapes where it has characters that no reader of the file sees."""
        before, self.allow_unicode = self.allow_unicode, visible(text) == text
        super().write_double_quoted(text, split)
        self.allow_unicode = before


BREAKS = frozenset("\x85\u2028\u2029\ufeff")
"""Characters that YAML takes for line breaks or drops, unless they are escaped."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    escapes = BREAKS & set(value) or visible(value) != value
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if escapes else None)


_Dumper.add_representer(str, _text)
_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {
    k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    for _name, _pattern, _first in _CORE:
        # An empty plain scalar starts with no character at all, which the resolver looks up under
        # "".
        _starts = [*_first, ""] if _name == "null" else [*_first]
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern.pattern})$"), _starts
        )


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError("too long")
    return int(text)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                problem="a key is one word", problem_mark=key_node.start_mark
            )
        if key in seen:
            lines = f"lines {seen[key]} and {key_node.start_mark.line + 1}"
            raise refuse(str(key), f"is written twice ({lines}); keep one of them")
        seen[key] = key_node.start_mark.line + 1
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: _integer(str(node.value)))


class _CatalogLoader(getattr(yaml, "CSafeLoader", _Loader)):  # type: ignore[misc]
    """The same schema on libyaml's parser, ten times as fast, without limits on size: for files of
    the package itself.
    """

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
    yaml_constructors = _Loader.yaml_constructors


def parse_catalog(text: str, where: str) -> Any:
    """The value of a file that comes with the package. Raises `PlanError` where it is broken."""
    try:
        return yaml.load(text, Loader=_CatalogLoader)
    except yaml.YAMLError:
        return parse(text, where)  # which names line and column


def _place(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"


def _not_of_its_type(node: yaml.Node) -> str:
    at, kind, text = _place(node), node.tag.rpartition(":")[2], str(node.value)
    if kind == "int" and _INT.fullmatch(text):
        return (
            f"not valid YAML at {at}: an integer of {len(text):,} digits; legal: at most "
            f"{MOST_DIGITS:,}"
        )
    return f"not valid YAML at {at}: {shown(node.value)} is no {kind}"


def parse(text: str, where: str = "") -> Any:
    """The value that `text` says. Raises `PlanError` with line and column for broken or duplicated
    YAML.
    """
    if len(text) > MOST_TEXT:
        raise refuse(where, f"holds more than {MOST_TEXT:,} characters; legal: fewer")
    try:
        found = yaml.load(text, Loader=_Loader)  # a SafeLoader with a stricter schema
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise refuse(where, f"not valid YAML{at}: {why}") from None
    except RecursionError:
        raise refuse(where, "not valid YAML: nested too deeply") from None
    except PlanError as error:
        raise PlanError(
            [Problem(one.field or where, one.message) for one in error.problems]
        ) from None
    if _more_than(MOST_VALUES, found):
        raise refuse(where, TOO_MANY.format(MOST_VALUES))
    return found


def _more_than(most: int, value: Any) -> bool:
    """Whether `value` holds more values than `most`, each counted as often as aliases repeat it."""
    count, rest = 0, [value]
    while rest and count <= most:
        one = rest.pop()
        count += 1
        if isinstance(one, dict | list):
            count += len(one)
            rest += (
                part
                for part in (one.values() if isinstance(one, dict) else one)
                if isinstance(part, dict | list)
            )
    return count > most


def dump(value: Any, compact: bool = False) -> str:
    """`value` as YAML in block style; `parse` gives it back unchanged. `compact`: innermost
    mappings on one line.
    """
    flow = None if compact else False
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=flow,
    )
