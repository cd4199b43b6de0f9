"""A long layer profile with runs of consecutive layers as one, so that a search of stages ends."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from workbench.plan.model.layer_profile import Layer, LayerProfile, Tie

MOST_LAYERS = 400
"""That a search cuts between; it takes a few seconds for so many."""


@dataclass(frozen=True)
class MergedLayers(LayerProfile):
    """Layers each of which stands for a run of them; all sums before a cut are exact."""

    every: LayerProfile | None = None
    """The layers one by one."""
    cuts: tuple[int, ...] = ()
    """Index in `every` of the first layer of each run, and how many there are."""

    @cached_property
    def forward(self) -> tuple[float, ...]:
        """Seconds of forward of the first n layers, n from 0."""
        return self._at_cuts("forward")

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """Seconds of backward of the first n layers."""
        return self._at_cuts("backward")

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        """Bytes of parameters of the first n layers."""
        return self._at_cuts("parameters")

    @cached_property
    def activations(self) -> tuple[float, ...]:
        """Bytes that the first n layers put out."""
        return self._at_cuts("activations")

    @cached_property
    def kept(self) -> tuple[float, ...]:
        """Bytes that the first n layers keep for backward."""
        return self._at_cuts("kept")

    @cached_property
    def backward_peaks(self) -> tuple[float, ...]:
        """Bytes at the peak of each run's backward that it needs or that it and those before
        keep.
        """
        peaks = self.every.backward_peaks if self.every else ()
        return tuple(max(peaks[first:end]) for first, end in pairwise(self.cuts))

    @cached_property
    def kept_input(self) -> tuple[float, ...]:
        """Bytes that a stage keeps besides, whose first layer is n."""
        return self._at_cuts("kept_input")

    @cached_property
    def crossing(self) -> tuple[float, ...]:
        """Bytes that cross a cut before layer n."""
        return self._at_cuts("crossing")

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that layers of two runs share."""
        every = self.every.ties if self.every else ()
        runs = [
            tie._replace(earlier=self._run_of(tie.earlier), layer=self._run_of(tie.layer))
            for tie in every
        ]
        return tuple(tie for tie in runs if tie.earlier < tie.layer)

    def _run_of(self, layer: int) -> int:
        """The run that has a layer of `every`."""
        return bisect_right(self.cuts, layer) - 1

    def _at_cuts(self, name: str) -> tuple[float, ...]:
        sums = getattr(self.every, name)
        return tuple(sums[cut] for cut in self.cuts)


def merged_layers(profile: LayerProfile, most: int = MOST_LAYERS) -> LayerProfile:
    """`profile`, or where it has more than `most` layers, about as many runs of them that are
    alike in time and memory, cut where least crosses.
    """
    if len(profile.layers) <= most:
        return profile
    cuts = _cuts(profile, most)
    layers = tuple(_run(profile, first, end) for first, end in pairwise(cuts))
    known = (profile.sequence_length, profile.precision, profile.source)
    return MergedLayers(profile.model, profile.profile_batch, layers, *known, profile, cuts)


def layers_before(profile: LayerProfile, layer: int) -> int:
    """Layers of the whole profile before `layer` of one that may be merged."""
    return profile.cuts[layer] if isinstance(profile, MergedLayers) else layer


def _cuts(profile: LayerProfile, most: int) -> tuple[int, ...]:
    """Where runs begin, and the end: each has its part of all seconds, parameters and what is
    kept, or is one layer with more.
    """
    seconds = np.array(profile.forward) + np.array(profile.backward)
    sums = [seconds, np.array(profile.parameters), np.array(profile.kept)]
    share = np.mean([each / each[-1] for each in sums if each[-1]], axis=0)
    last, crossing = len(profile.layers), profile.crossing
    bounds = np.searchsorted(share, np.linspace(0, 1, most + 1)).tolist()
    inner = sorted({min(max(each, 1), last) for each in bounds} | {last})
    starts = (min(range(a, b), key=crossing.__getitem__) for a, b in pairwise(inner))
    return (0, *starts, last)


def _run(profile: LayerProfile, first: int, end: int) -> Layer:
    """Layers `first` to before `end` as one; what it keeps and puts out is read from its sums."""
    head = profile.layers[first]
    forward, backward, output, parameters = (
        sums[end] - sums[first]
        for sums in (profile.forward, profile.backward, profile.activations, profile.parameters)
    )
    return Layer(head.node, head.name, forward, backward, output, parameters)
