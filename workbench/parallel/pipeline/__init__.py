"""Pipeline parallelism: the model cut into stages, run by a table of actions."""
