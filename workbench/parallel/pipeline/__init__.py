"""Pipeline parallelism: stages of the model, executed by a schedule's table of actions."""
