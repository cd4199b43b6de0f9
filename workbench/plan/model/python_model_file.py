"""The file of a model that is code, found and hashed without running any of it."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from workbench.errors import refuse
from workbench.plan.schema import PythonModel


def pinned(model: PythonModel) -> PythonModel:
    """The model with the hash of the file that holds its factory; null where no source file is
    found.

    Raises `PlanError` where the file is no longer the one that the plan was resolved with.
    """
    found = python_model_sha256(model.python)
    if model.sha256 not in (None, found):
        what = f"the plan was resolved with code {model.sha256}, '{model.python}' is now {found}"
        raise refuse("model.sha256", f"{what}; remove the field to run what is there")
    return model.model_copy(update={"sha256": found})


def python_model_sha256(python: str) -> str | None:
    """sha256 of the module's source, looked for as Python would: the current folder, then the
    path.
    """
    module = Path(*python.partition(":")[0].split("."))
    for folder in dict.fromkeys([os.getcwd(), *sys.path]):
        for path in (Path(folder, module, "__init__.py"), Path(folder, f"{module}.py")):
            if path.is_file():
                return hashlib.sha256(path.read_bytes()).hexdigest()
    return None
