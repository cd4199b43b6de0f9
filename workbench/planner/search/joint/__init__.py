"""Pipeline stages, submeshes and operator strategies in one search: Alpa's two levels."""
