"""The verbs, one set for shell and notebook: data in, data out.

Each verb is declared here once, with the docstring that `help(wb.estimate)` and `workbench estimate
--help` show, and is imported from its module when it is called: importing them loads nothing,
and no verb loads torch, which works in child processes.
"""

from __future__ import annotations

from workbench.verbs.catalog import gpus, models, strategies
from workbench.verbs.planning import (
    check_order,
    estimate,
    explain,
    operators,
    rehearse,
    search,
    search_methods,
    states,
    validate,
)
from workbench.verbs.running import (
    attach,
    calibrate,
    compare,
    profile_layers,
    report,
    run,
    runs,
    verify,
    watch,
    weights,
)
from workbench.verbs.text import generate, perplexity, tokenize
from workbench.verbs.translation import export, import_config, translate

__all__ = [
    "attach",
    "calibrate",
    "check_order",
    "compare",
    "estimate",
    "explain",
    "export",
    "generate",
    "gpus",
    "import_config",
    "models",
    "operators",
    "perplexity",
    "profile_layers",
    "rehearse",
    "report",
    "run",
    "runs",
    "search",
    "search_methods",
    "states",
    "strategies",
    "tokenize",
    "translate",
    "validate",
    "verify",
    "watch",
    "weights",
]
