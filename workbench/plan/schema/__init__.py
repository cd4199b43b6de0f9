"""The plan file's schema: one file a group of sections. What reads a plan imports names from
here.
"""

from workbench.plan.schema.cluster import Cluster
from workbench.plan.schema.profiled_model import ProfiledModel
from workbench.plan.schema.python_model import PythonModel
from workbench.plan.schema.run_settings import (
    Checkpoint,
    Corpus,
    CorpusFormat,
    Telemetry,
    TextSource,
    TokenDtype,
    WeightedSource,
)
from workbench.plan.schema.strategy import (
    AXES,
    NARROW,
    STORED,
    Axis,
    Context,
    Data,
    Expert,
    FrameworkAttention,
    GradientDtype,
    Loss,
    Pipeline,
    Precision,
    Recompute,
    Strategy,
    Tensor,
    axis_sizes,
)
from workbench.plan.schema.tasks import (
    Evaluation,
    Finetune,
    Lora,
    Optimizer,
    Preference,
    Quantize,
    Task,
    Training,
)
from workbench.plan.schema.written_plan import (
    Plan,
    build_corpus,
    build_plan,
    parse_plan,
    written_fields,
)

__all__ = [
    "AXES",
    "NARROW",
    "STORED",
    "Axis",
    "Checkpoint",
    "Cluster",
    "Context",
    "Corpus",
    "CorpusFormat",
    "Data",
    "Evaluation",
    "Expert",
    "Finetune",
    "FrameworkAttention",
    "GradientDtype",
    "Lora",
    "Loss",
    "Optimizer",
    "Pipeline",
    "Plan",
    "Precision",
    "Preference",
    "ProfiledModel",
    "PythonModel",
    "Quantize",
    "Recompute",
    "Strategy",
    "Task",
    "Telemetry",
    "Tensor",
    "TextSource",
    "TokenDtype",
    "Training",
    "WeightedSource",
    "axis_sizes",
    "build_corpus",
    "build_plan",
    "parse_plan",
    "written_fields",
]
