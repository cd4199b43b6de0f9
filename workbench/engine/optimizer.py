"""The optimizer: AdamW or SGD over named tensors, with fp32 masters where the parameters have 16 bits.

It is written over torch's functional optimizers (one fused kernel per group) rather than over `torch.optim.AdamW`,
because a gradient here may have another dtype than its parameter, and because every tensor of the state is then
ours to count, to checkpoint and to name. Nothing reads a value back, so that the step runs under fake tensors.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from workbench.parallel.layout import Layout
    from workbench.plan import schema

CAST_BYTES = 64 * 2**20
"""What has another dtype than a step is made in is cast in pieces of this size, which bounds the temporary."""


def learning_rate(step: int, optimizer: schema.Optimizer, total_steps: int) -> float:
    """Learning rate of `step` (from 0): linear warm-up to the peak, then constant, linear or cosine decay.

    The last step of the run has exactly `final_ratio` of the peak, unless the decay is constant.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.decay == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    left = 1 - progress if optimizer.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (optimizer.final_ratio + (1 - optimizer.final_ratio) * left)


def _is_matrix(layout: Layout) -> bool:
    return len(layout.shape) >= 2 and not layout.name.endswith("bias")


class Optimizer:
    """Steps `parameters` by `gradients`; both are dicts by the same names and both are held, not copied.

    Matrices (two dimensions or more, as `layouts` know them) are decayed, decoupled from the gradient (1711.05101),
    under SGD too; vectors are not, nor are experts' biases, however stacked. State is allocated here, not at the first
    step, so that memory is known before training starts: `moment1` and `moment2` (SGD: `moment1` only, and none without
    momentum) in fp32, or in the parameter's dtype where that is wider, or in bf16 where the plan says so; `master`, the
    fp32 copy of a 16-bit parameter, unless the plan wants none; `step`, a scalar.

    A step is made in the widest dtype of the state, and what is kept in less is rounded to nearest afterwards. Only
    AdamW of bf16 parameters and moments, with no master, is made on those, by torch's kernel, which widens within.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        config: schema.Optimizer,
        total_steps: int,
    ) -> None:
        assert parameters.keys() == gradients.keys(), sorted(parameters.keys() ^ gradients.keys())
        self.parameters = parameters
        self.gradients = gradients
        self.layouts = layouts
        self.config = config
        self.total_steps = total_steps
        self._state = {name: self._initial(parameter) for name, parameter in parameters.items()}
        self._groups = [
            (names, config.weight_decay if decayed else 0.0)
            for decayed in (True, False)
            for names in self._pieces([name for name in parameters if _is_matrix(layouts[name]) == decayed])
        ]

    def _initial(self, parameter: Tensor) -> dict[str, Tensor]:
        value = parameter.detach()
        state: dict[str, Tensor] = {}
        if value.element_size() < 4 and self.config.master == "auto":
            state["master"] = value.float()
        wide = torch.promote_types(value.dtype, torch.float32)
        for moment in self._moments():
            state[moment] = torch.zeros_like(value, dtype=torch.bfloat16 if self.config.moments == "bf16" else wide)
        state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
        return state

    def _moments(self) -> tuple[str, ...]:
        return ("moment1", "moment2") if self.config.name == "adamw" else ("moment1",) if self.config.beta1 else ()

    @torch.no_grad()
    def step(self, step_index: int, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """One update with the learning rate of `step_index`; gradients are first multiplied by `scale` (0-d).

        Gradients may be scaled in place: they are spent afterwards. Where `skip` (0-d, fp32) is 1 instead of 0,
        whatever the gradients are, nothing changes, counts of steps included.
        """
        rate = learning_rate(step_index, self.config, self.total_steps)
        for names, decay in self._groups:
            self._update(names, rate, decay, scale, skip)

    def _pieces(self, names: list[str]) -> Iterator[list[str]]:
        """Names in runs that need at most `CAST_BYTES` of cast tensors (a larger one stands alone)."""
        piece: list[str] = []
        cast = 0
        for name in names:
            dtype = self._dtype(name)
            used = (self.gradients[name], self._target(name), *(self._state[name][kind] for kind in self._moments()))
            need = sum(x.numel() * dtype.itemsize for x in used if x.dtype != dtype)
            if piece and cast + need > CAST_BYTES:
                yield piece
                piece, cast = [], 0
            piece.append(name)
            cast += need
        if piece:
            yield piece

    def _target(self, name: str) -> Tensor:
        """What the update is applied to: the master where there is one."""
        return self._state[name].get("master", self.parameters[name].detach())

    def _dtype(self, name: str) -> torch.dtype:
        """What the update is made in."""
        dtypes = [self._target(name).dtype, *(self._state[name][kind].dtype for kind in self._moments())]
        widest = reduce(torch.promote_types, dtypes)
        return widest if self.config.name == "adamw" else torch.promote_types(widest, torch.float32)

    def _update(self, names: list[str], rate: float, decay: float, scale: Tensor | None, skip: Tensor | None) -> None:
        dtypes = [self._dtype(name) for name in names]
        kept = [[self._target(name) for name in names], *(self._all(names, kind) for kind in self._moments())]
        targets, *moments = used = [[x.to(dtype) for x, dtype in zip(of_kind, dtypes)] for of_kind in kept]
        gradients = [self.gradients[name].to(dtype) for name, dtype in zip(names, dtypes)]
        skip = None if skip is None else skip.to(targets[0].device)
        if scale is not None:
            torch._foreach_mul_(gradients, scale.to(targets[0].device))
        if self.config.name == "adamw":
            self._adamw(names, targets, gradients, moments, rate, decay, skip)
        else:
            self._sgd(names, targets, gradients, moments, rate, decay, skip)
        for narrow, wide in zip(chain(*kept), chain(*used)):
            if narrow is not wide:
                narrow.copy_(wide)
        for name, target in zip(names, targets):
            if "master" in self._state[name]:
                self.parameters[name].detach().copy_(target)

    def _adamw(
        self,
        names: list[str],
        targets: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        rate: float,
        decay: float,
        skip: Tensor | None,
    ) -> None:
        first, second = moments
        adamw(
            targets, gradients, first, second, [], self._all(names, "step"),
            fused=True, foreach=False, amsgrad=False, maximize=False, lr=rate, weight_decay=decay,
            beta1=self.config.beta1, beta2=self.config.beta2, eps=self.config.epsilon, found_inf=skip,
        )  # fmt: skip

    def _sgd(
        self,
        names: list[str],
        targets: list[Tensor],
        gradients: list[Tensor],
        moments: list[list[Tensor]],
        rate: float,
        decay: float,
        skip: Tensor | None,
    ) -> None:
        taken = 1.0 if skip is None else 1 - skip
        if decay:
            torch._foreach_mul_(targets, 1 - rate * decay * taken)
        momentum: list[Tensor | None] = [*moments[0]] if moments else [None] * len(names)
        sgd(
            targets, gradients, momentum, fused=True, foreach=False, weight_decay=0.0, momentum=self.config.beta1,
            lr=rate, dampening=0.0, nesterov=False, maximize=False, found_inf=skip,
        )  # fmt: skip
        steps = self._all(names, "step")
        torch._foreach_add_(steps, [torch.ones_like(steps[0]) * taken] * len(steps))

    def _all(self, names: list[str], kind: str) -> list[Tensor]:
        return [self._state[name][kind] for name in names]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The state itself (not a copy), by parameter name, then `moment1`, `moment2`, `master`, `step`."""
        return self._state

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy `state` in. Raises ValueError, naming the tensor, where it is not of this model and optimizer."""
        for name, mine in self._state.items():
            theirs = state.get(name, {})
            if theirs.keys() != mine.keys():
                raise ValueError(f"optimizer state of {name}: has {sorted(theirs)}, needs {sorted(mine)}")
            for kind, tensor in mine.items():
                has, needs = tuple(theirs[kind].shape), tuple(tensor.shape)
                if has != needs:
                    raise ValueError(f"optimizer state {kind} of {name}: shape {has}, needs {needs}")
        for name, mine in self._state.items():
            for kind, tensor in mine.items():
                tensor.copy_(state[name][kind])
