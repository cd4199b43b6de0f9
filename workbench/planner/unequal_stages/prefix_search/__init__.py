"""Pipelines built stage by stage: prefixes, the placements and the stages that may come next."""
