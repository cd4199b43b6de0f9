"""Pipeline schedules as tables of actions: grammar, generators, lowering, validator, simulator."""

from workbench.schedules.action import Action, parse_action
from workbench.schedules.generators import bounded_names, generate, names, receives_early, warm_up
from workbench.schedules.lowering import executable, forwards, lower
from workbench.schedules.round_robin import round_robin
from workbench.schedules.simulator import (
    Deadlock,
    Interval,
    Timeline,
    Transport,
    in_flight,
    in_flight_by_stage,
    send_ends,
    simulate,
    uniform,
)
from workbench.schedules.table import Table, read_csv, table_of, write_csv
from workbench.schedules.validator import validate

__all__ = [
    "Action",
    "Deadlock",
    "Interval",
    "Table",
    "Timeline",
    "Transport",
    "bounded_names",
    "executable",
    "forwards",
    "generate",
    "in_flight",
    "in_flight_by_stage",
    "lower",
    "names",
    "parse_action",
    "read_csv",
    "receives_early",
    "round_robin",
    "send_ends",
    "simulate",
    "table_of",
    "uniform",
    "validate",
    "warm_up",
    "write_csv",
]
