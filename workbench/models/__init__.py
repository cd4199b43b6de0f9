"""Plain single-device models that name no mesh, written with seams that a strategy may replace."""

from workbench.models.transformer import Transformer

__all__ = ["Transformer"]
