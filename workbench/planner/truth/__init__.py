"""The planner against published measurements: rows read, expressed as plans, predicted, and set beside each other."""

from workbench.planner.truth.validate import Prediction, Validation, validate

__all__ = ["Prediction", "Validation", "validate"]
