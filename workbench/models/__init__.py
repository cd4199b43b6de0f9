"""Plain single-device models that know no mesh, with seams that a strategy may replace."""

from workbench.models.transformer import Transformer

__all__ = ["Transformer"]
