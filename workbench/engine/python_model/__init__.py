"""Questions to a Python model before it trains: does a plan fit it, what operators has it."""
