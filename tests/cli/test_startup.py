"""What a command imports: nothing that its answer does not need, so that it starts at once."""

import subprocess
import sys

import pytest

LIBRARIES = {
    "IPython",
    "accelerate",
    "altair",
    "anywidget",
    "ipywidgets",
    "numpy",
    "orjson",
    "pandas",
    "psutil",
    "pydantic",
    "rich",
    "scipy",
    "torch",
    "tree_sitter",
    "typer",
    "yaml",
}
PLAN = "'--model', 'llama-3-8b', '--gpu', 'h100-sxm-80gb', '--gpus', '64', '--strategy', 'dapple'"
CORE = {"pydantic", "yaml"}
SHELL = {"typer"}


def loaded(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('', *sorted({LIBRARIES} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def command(*words: str) -> str:
    return f"from workbench.cli import answer; assert answer([{', '.join(words)}]) == 0"


@pytest.mark.parametrize(
    ("code", "libraries"),
    [
        ("import workbench", set()),
        ("import workbench as wb; wb.estimate.__doc__, dir(wb)", set()),
        (f"import workbench as wb; wb.Plan.of({PLAN.split(',')[1]}).resolve()", CORE),
        ("import workbench as wb; wb.estimate(wb.Plan.of('tiny')).summary()", {*CORE, "numpy"}),
        (command("'--help'"), SHELL),
        (command("'estimate'", PLAN, "'--json'"), {*SHELL, *CORE, "numpy"}),
        (command("'estimate'", PLAN), {*SHELL, *CORE, "numpy", "rich"}),
        (command("'plan'", PLAN, "'--json'"), {*SHELL, *CORE}),
        (command("'runs'", "'--json'"), {*SHELL, *CORE, "orjson", "psutil", "rich"}),
        (command("'models'", "'--json'"), {*SHELL, *CORE, "rich"}),
    ],
)
def test_a_command_loads_only_the_libraries_that_it_needs(code: str, libraries: set[str]) -> None:
    assert loaded(code) <= libraries


def test_pandas_is_loaded_when_a_frame_is_read() -> None:
    code = "import workbench as wb; found = wb.estimate(wb.Plan.of('tiny')); found.memory"
    assert "pandas" in loaded(code)


def test_help_imports_few_modules_of_the_project() -> None:
    code = command("'--help'") + "\nprint(len([m for m in sys.modules if m[:9] == 'workbench']))"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True)
    assert int(done.stdout.split()[-1]) <= 14  # five modules of verbs among them
