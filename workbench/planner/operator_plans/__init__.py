"""Plans with operator strategies, as the cost model takes them."""
