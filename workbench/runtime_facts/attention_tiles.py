"""Size of the tiles of blockwise attention, which its memory follows."""

from __future__ import annotations

TILE_QUERIES = 128
"""Queries of a tile."""
