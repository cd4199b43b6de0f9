"""Predictions beside what comes of them: a plan under all three instruments, and charts that put a
reader's guess beside every source.
"""

from workbench.lab.prediction.bytes_sent import bytes_sent
from workbench.lab.prediction.memory_by_plan import memory_by_plan
from workbench.lab.prediction.three_instruments import ThreeProfiles, all_three
from workbench.lab.prediction.values_by_source import values_by_source

__all__ = ["ThreeProfiles", "all_three", "bytes_sent", "memory_by_plan", "values_by_source"]
