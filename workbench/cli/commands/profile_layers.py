"""The command that measures the layers of a plan's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import AllowCode, Json, Measurement, MeasuringSeconds, emit, planned
from workbench.cli.progress import SecondsBar
from workbench.cli.terminal import Grid
from workbench.plan.model.layer_profile import LayerProfile
from workbench.plan.schema import Plan
from workbench.units import bytes_text, seconds_text

DEFAULT = Path("layers.csv")


@planned
def profile_layers(
    plan: Plan,
    output: Measurement = DEFAULT,
    seconds: MeasuringSeconds = 20.0,
    allow_code: AllowCode = False,
    json: Json = False,
) -> None:
    with SecondsBar(seconds) as bar:
        found = verbs.profile_layers(
            plan, output, seconds=seconds, allow_code=allow_code, progress=bar
        )
    use = f"{output} written; a plan uses it with --model {output}"
    emit(json, _answer(found, output), lambda: [_table(found), found.source, use])


def _answer(found: LayerProfile, path: Path) -> dict[str, Any]:
    return {
        "source": "measured",
        "path": str(path),
        "measured_on": found.source.removeprefix("measured "),
        "model": found.model,
        "profile_batch": found.profile_batch,
        "sequence_length": found.sequence_length,
        "precision": found.precision,
        "forward_seconds": found.forward[-1],
        "backward_seconds": found.backward[-1],
        "parameter_bytes": found.parameters[-1],
        "kept_bytes": found.kept[-1],
        "layers": [vars(layer) for layer in found.layers],
    }


def _table(found: LayerProfile) -> Grid:
    title = f"{found.model}, {found.profile_batch} x {found.sequence_length} tokens (measured)"
    columns = ("layer", "forward", "backward", "output", "kept for backward", "parameters", "reads")
    built = tables.table(title, columns, columns[1:6], ("reads",))
    names = {layer.node: layer.name for layer in found.layers}
    for layer in found.layers:
        sizes = (layer.activation_bytes, layer.kept_bytes or 0.0, layer.parameter_bytes)
        built.add_row(
            layer.name,
            seconds_text(layer.forward_s),
            seconds_text(layer.backward_s),
            *map(bytes_text, sizes),
            ", ".join(names[node] for node in layer.inputs),
        )
    sums = (found.kept[-1], found.parameters[-1])
    built.add_row(
        "all layers",
        seconds_text(found.forward[-1]),
        seconds_text(found.backward[-1]),
        "",
        *map(bytes_text, sums),
        "",
    )
    return built
