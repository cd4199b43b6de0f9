"""Commands that list the catalog: models, GPUs, strategies."""

from __future__ import annotations

from workbench import verbs
from workbench.cli import tables
from workbench.cli.options import Json, emit
from workbench.cli.terminal import print_message
from workbench.verbs.catalog import Listing


def models(json: Json = False) -> None:
    _show(verbs.models(), json)


def gpus(json: Json = False) -> None:
    _show(verbs.gpus(), json)


def strategies(json: Json = False) -> None:
    _show(verbs.strategies(), json)


def _show(found: Listing, json: bool) -> None:
    if found.note:
        print_message(found.note)
    emit(json, found, lambda: [tables.listing_table(found)])
