"""A model of which only a layer profile is known."""

from __future__ import annotations

from pydantic import Field

from workbench.fields.frozen import Frozen


class ProfiledModel(Frozen):
    """Layers with their times and sizes: enough to plan stages on, nothing that runs.

    A plan may name it in short: `model: layers.csv`, or `layers.csv#NAME` where the file holds
    several models.
    """

    layer_profile: str = Field(description="CSV, as `workbench profile-layers` writes it.")
    name: str | None = Field(None, description="Which of the file's models; null: its only one.")
    sha256: str | None = Field(
        None, description="Hash of the file; filled when a plan is resolved."
    )
