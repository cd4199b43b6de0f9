"""Low-rank adapters of layers that are sharded."""
