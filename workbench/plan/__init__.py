"""The plan: its schema, what resolves it, and whether it is legal."""

from workbench.plan.resolution import pin, resolve

__all__ = ["pin", "resolve"]
