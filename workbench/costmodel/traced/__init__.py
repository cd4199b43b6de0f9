"""A user's traced module on shapes: what its operators allocate, keep for backward and compute."""
