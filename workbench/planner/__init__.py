"""What a plan will cost: memory, compute, collectives, step time, and what to change when it does
not fit.
"""

from workbench.planner.estimate import estimate

__all__ = ["estimate"]
