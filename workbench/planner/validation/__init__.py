"""The planner against published measurements: rows read, expressed as plans, predicted, and set
beside each other.
"""

from workbench.planner.validation.predictions import Prediction, predict
from workbench.planner.validation.validate import Validation, validate

__all__ = ["Prediction", "Validation", "predict", "validate"]
