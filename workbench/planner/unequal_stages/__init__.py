"""Stages that are cut, replicated and placed each by itself (DAPPLE, 2007.01045)."""
