"""Rules of the strategy's fields."""
