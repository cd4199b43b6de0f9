"""How many GPUs hold the states of a model, and how many a whole step of it needs."""

from workbench.planner.states_on_gpus.states import states as states
from workbench.planner.states_on_gpus.states_answer import StatesAnswer as StatesAnswer
