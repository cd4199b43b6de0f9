"""Which GPU and which network a table's words mean, by the catalog."""

from __future__ import annotations

import math
import re
from functools import lru_cache

from workbench.machine import gpu_catalog
from workbench.machine.hardware import GPU, Fabric

FORM_FACTORS = ("sxm", "pcie", "nvl", "oam")
MEMORY_TOLERANCE = 0.12
"""Share by which a printed memory may differ from the GPU's and still be it (GB against GiB,
reserved parts).
"""
USABLE_MEMORY_SHARE = 0.991
"""Usable share of a printed size read as GiB, as data/gpus.yaml states."""
NETWORKS = ("efa", "omni-path", "roce", "infiniband", "slingshot", "ethernet")
PROVIDER_NETWORKS = ("efa", "omni-path", "slingshot")
"""Kinds whose rate the catalog knows by their name alone."""


@lru_cache(maxsize=4096)
def find_gpu(text: str, memory_gb: float | None) -> GPU | None:
    """The GPU called `text` with `memory_gb` printed GB: the catalog's most specific of that name;
    None if unknown.

    A bin whose memory the catalog does not list is the nearest part with its own memory.
    """
    words = _name_words(text)
    said = _memory_in_words(words) or memory_gb
    scored = [
        (score, name)
        for name in gpu_catalog.gpus()
        if (score := _distance(name, words, said)) is not None
    ]
    if not scored:
        return None
    (_, _, _, off), name = min(scored)
    found = gpu_catalog.gpus()[name].gpu
    return (
        found
        if off <= MEMORY_TOLERANCE or not said
        else found.model_copy(update={"memory_gib": USABLE_MEMORY_SHARE * said})
    )


def _distance(
    name: str, words: frozenset[str], memory: float | None
) -> tuple[int, bool, bool, float] | None:
    """How far the GPU `name` is from the words, smaller is nearer; None if it is another GPU."""
    own = _name_words(name)
    family = {word for word in own if word not in FORM_FACTORS and not re.fullmatch(r"\d+gb", word)}
    if not family <= words:
        return None
    form = next((form for form in FORM_FACTORS if form in own), "")
    asked = next(
        (form for form in FORM_FACTORS if any(word.startswith(form) for word in words)), ""
    )
    size = gpu_catalog.gpus()[name].gpu.memory_gib
    off = (
        abs(math.log(size / memory)) if memory else 1 / size
    )  # where nothing is said, the larger part
    return -len(family), bool(asked) and form != asked, form == "pcie", off


def _name_words(text: str) -> frozenset[str]:
    """Lower-case words; `RTX5090` and `5060 Ti` as the catalog splits them."""
    plain = re.sub(r"(rtx|gtx)(?=\d)", r"\1 ", text.lower().replace("ascend910", "ascend 910"))
    plain = re.sub(r"sxm\d", "sxm", plain)
    plain = re.sub(r"\b(\d+)\s*(gb|gib|g)\b", r"\1gb", plain)
    words = re.split(r"[^a-z0-9]+", plain)
    return frozenset(
        word
        for word in words
        if word and word not in ("nvidia", "amd", "geforce", "tesla", "instinct")
    )


def _memory_in_words(words: frozenset[str]) -> float | None:
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    return float(sizes[0]) if len(sizes) == 1 else None


@lru_cache(maxsize=4096)
def find_fabric(name: str, text: str) -> Fabric:
    """The network around the GPU `name`: its usual one, but for what `text` says."""
    usual = gpu_catalog.clusters()[gpu_catalog.gpus()[name].fabric]
    kind = next((kind for kind in NETWORKS if re.search(rf"\b{kind}\b", text)), None)
    per_node, rate = _gpus_per_node(text), _node_bandwidth_gbs(text, usual.gpus_per_node)
    if kind is None and per_node is None and rate is None:
        return usual
    like = _catalog_fabric(kind, usual) if kind else usual
    return usual.model_copy(
        update={
            "name": "described",
            "source": "what is said of the run",
            "gpus_per_node": per_node or usual.gpus_per_node,
            "nic_gbs": rate or (like.nic_gbs if kind in PROVIDER_NETWORKS else usual.nic_gbs),
            # A rate alone does not say what kind of network it is.
            "nic_share": like.nic_share if kind or rate is None else None,
            "nic_latency_us": like.nic_latency_us,
        }
    )


def _catalog_fabric(kind: str, usual: Fabric) -> Fabric:
    """The catalog's fabric of that kind of network: the fastest that is no faster than the GPU's
    usual one.
    """
    same = [fabric for fabric in gpu_catalog.clusters().values() if kind in fabric.source.lower()]
    slower = [fabric for fabric in same if fabric.nic_gbs <= usual.nic_gbs]
    return max(slower, key=lambda fabric: fabric.nic_gbs) if slower else same[0] if same else usual


def _gpus_per_node(text: str) -> int | None:
    said = re.search(
        r"(\d+)[- ]?(?:x )?(?:gpus?|cards?|npus?)(?: v100| a100| h100)?[ -]*(?:/|per|a|"
        r"each)? ?nodes?\b",
        text,
    )
    return int(said.group(1)) if said and 0 < int(said.group(1)) <= 72 else None


def _node_bandwidth_gbs(text: str, num_gpus: int) -> float | None:
    """GB/s of one node: from `8x200Gb`, `400Gb/s per GPU`, or `400 Gbps inter-node`."""
    if each := re.search(r"(\d+) ?x ?(\d+) ?gb(?![a-z]*yte)", text):
        return float(each.group(1)) * float(each.group(2)) / 8 or None
    if own := re.search(r"(\d+) ?gb(?:ps|/s|it/s)? (?:per|a|/) ?gpu", text):
        return float(own.group(1)) * num_gpus / 8 or None
    node = re.search(
        r"(?:inter-?node|between nodes)\D{0,12}(\d+) ?gb(?:ps|it|/s)|(\d+) ?gbps (?:inter|between)",
        text,
    )
    return float(node.group(1) or node.group(2)) / 8 or None if node else None
