"""Names of the notebooks on strategies: each asks, predicts, runs and explains, and is kept with
the pictures of its last execution.
"""

from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
STRATEGY_NOTEBOOKS = (
    "10_memory_of_100b",
    "11_data_parallel_and_zero",
    "12_offload_13b",
    "13_tensor_parallel",
    "14_sequence_and_context",
    "15_operator_strategies",
    "15b_operator_search",
    "16_pipelines",
    "17_dapple",
    "18_hybrid_and_topology",
    "19_precision_and_recompute",
    "20_experts",
    "21_your_own_module",
    "22_real_weights",
    "23_finetune",
)
ALL_NOTEBOOKS = tuple(sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
