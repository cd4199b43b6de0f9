"""Search: the best strategies of a whole space, by time, cost, energy or GPUs."""

from workbench.planner.search.search import OBJECTIVES, Candidate, SearchResult, search

__all__ = ["OBJECTIVES", "Candidate", "SearchResult", "search"]
