"""Search: the best strategies of a whole space, by time, cost, energy or GPUs."""

from workbench.planner.search.results.search_result import Candidate, SearchResult
from workbench.planner.search.search import OBJECTIVES, search

__all__ = ["OBJECTIVES", "Candidate", "SearchResult", "search"]
