"""The architecture: which package may import which, and what some of them may never load."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "workbench"
LAYERS = [
    "units",
    "termination",
    "untrusted_text",
    "errors",
    "safe_io",
    "data_files",
    "fields",
    "vocabulary",
    "profile",
    "schedules",
    "runtime_facts",
    "machine",
    "plan",
    "corpora",
    "interop",
    "costmodel",
    "planner",
    "planned_device",
    "copy_stream",
    "models",
    "checkpoint",
    "runs",
    "kernels",
    "adapters",
    "parallel",
    "engine",
    "rehearsal",
    "lab",
    "top",
]
"""Packages, lowest first; what lies outside them (the verbs and the command line) is the top."""

PYDANTIC = {"pydantic", "pydantic_core"}
OUTSIDE = {
    "units": set(),
    "termination": set(),
    "untrusted_text": set(),
    "errors": set(),
    "safe_io": {"yaml", "gguf"},
    "data_files": set(),
    "fields": PYDANTIC,
    "vocabulary": set(),
    "profile": {"pandas"},
    "schedules": set(),
    "machine": {"pynvml", *PYDANTIC},
    "plan": PYDANTIC,
    "corpora": {"jinja2", "numpy", "orjson", "tokenizers", "pyarrow"},
    "interop": {"yaml", "tree_sitter", "tree_sitter_bash", *PYDANTIC},
    "runtime_facts": {"numpy"},
    "costmodel": {"numpy", "scipy", "pandas"},
    "planner": {"numpy", "scipy", "pandas"},
    "planned_device": {"torch"},
    "copy_stream": {"torch"},
    "models": {"torch"},
    "checkpoint": {"torch", "safetensors", "numpy", "gguf"},
    "runs": {"psutil", "orjson", "pynvml", "pandas"},
    "kernels": {"torch", "triton"},
    "adapters": {"torch", *PYDANTIC},
    "parallel": {"torch", "torchao"},
    "engine": {"torch", "torchao", "accelerate", "safetensors", "numpy"},
    "rehearsal": {"torch"},
    "lab": {
        "ipywidgets",
        "anywidget",
        "altair",
        "vl_convert",
        "traitlets",
        "pandas",
        "IPython",
        "jinja2",
    },
    "top": {"typer", "rich", "pandas", "accelerate", "psutil"},
}
"""Packages outside the standard library that each may import."""

TORCH_FREE = tuple(name for name in LAYERS if "torch" not in OUTSIDE[name])
"""Packages that never load torch: a slider answers in milliseconds, a kernel holds no CUDA context.
"""

PRIVATE = (
    "torch._subclasses",
    "torch.testing._internal",
    "torch.distributed._tools",
    "torch.utils._python_dispatch",
)


def package_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return first if first in LAYERS else "top"


@cache
def imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(found)


FILES = sorted(path for path in ROOT.rglob("*.py") if "_assets" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_package_imports_only_from_layers_below(path: Path) -> None:
    package = package_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "workbench" and len(parts) > 1:
            home = ROOT / parts[1]
            outside = (
                home.is_dir() or home.with_suffix(".py").exists()
            )  # else a name such as `workbench.Plan`
            other = parts[1] if parts[1] in LAYERS else "top" if outside else None
            if other is not None:
                assert LAYERS.index(other) <= LAYERS.index(package), f"{package} imports {name}"
        elif parts[0] not in sys.stdlib_module_names and parts[0] != "workbench":
            assert parts[0] in OUTSIDE[package], f"{package} imports {name}"


def test_private_torch_is_imported_in_one_file_each() -> None:
    for private in PRIVATE:
        users = [
            path.name for path in FILES if any(name.startswith(private) for name in imports(path))
        ]
        assert len(users) <= 1, f"{private} is imported by {users}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_torch_free_packages_load_no_torch(package: str) -> None:
    module = "workbench.cli" if package == "top" else f"workbench.{package}"
    code = f"import sys, {module}, workbench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def module_of(path: Path) -> str:
    parts = ("workbench", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions count; those for annotations alone (TYPE_CHECKING) do not."""
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        annotations = [
            node
            for branch in ast.walk(tree)
            if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
            for node in ast.walk(branch)
        ]
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and node not in annotations:
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node not in annotations:
                names = {f"{node.module}.{alias.name}": alias for alias in node.names}
                found |= {name if name in modules else str(node.module) for name in names}
        graph[module] = {name for name in found if name in modules and name != module}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_folders_stay_small() -> None:
    files = Counter(path.parent for path in FILES if path.name != "__init__.py")
    largest, count = files.most_common(1)[0]
    assert count <= 15, f"{largest} has {count} files"


def test_files_stay_small() -> None:
    lines = {path: path.read_text().count("\n") for path in FILES}
    largest = max(lines, key=lambda path: lines[path])
    assert lines[largest] <= 600, f"{largest} has {lines[largest]} lines"
    ordered = sorted(lines.values())
    assert ordered[int(len(ordered) * 0.9)] <= 350
    assert ordered[len(ordered) // 2] <= 150


def test_formulas_ask_no_framework_by_name() -> None:
    """Neither by a name in a string, docstrings apart, nor by comparing the plan's framework with
    anything: what a framework does differently is a field of its profile.
    """
    names = {path.stem for path in (ROOT.parent / "data/frameworks").glob("*.yaml")}
    for path in FILES:
        if package_of(path) != "costmodel":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{path.name}:{node.lineno} names {node.value}"
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                for side in (node.left, *node.comparators):
                    asked = side.attr if isinstance(side, ast.Attribute) else ""
                    asked = side.id if isinstance(side, ast.Name) else asked
                    assert asked not in ("stack", "DEFAULT_FRAMEWORK"), f"{path.name}:{node.lineno}"
