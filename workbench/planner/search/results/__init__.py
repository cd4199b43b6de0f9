"""What a search found: candidates with their figures, tables, and reasons where there is none."""
