"""The optimizer: AdamW or SGD over named tensors, with fp32 masters where the parameters have 16 bits.

It is written over torch's functional optimizers (one fused kernel per group) rather than over `torch.optim.AdamW`,
because a gradient here may have another dtype than its parameter, and because every tensor of the state is then
ours to count, to checkpoint and to name. Nothing reads a value back, so that the step runs under fake tensors.
"""

from __future__ import annotations

import math
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
"""Gradients of another dtype than the master's are cast in pieces of this size, which bounds the temporary."""


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
    momentum) in fp32, or in the parameter's dtype where that is wider; `master`, the fp32 copy of a 16-bit parameter;
    `step`, a scalar.
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

    def _initial(self, parameter: Tensor) -> dict[str, Tensor]:
        value = parameter.detach()
        state: dict[str, Tensor] = {}
        if value.element_size() < 4:
            state["master"] = value.float()
        wide = state.get("master", value)
        moments = ("moment1", "moment2") if self.config.name == "adamw" else ("moment1",) if self.config.beta1 else ()
        for moment in moments:
            state[moment] = torch.zeros_like(wide)
        state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
        return state

    @torch.no_grad()
    def step(self, step_index: int, scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """One update with the learning rate of `step_index`; gradients are first multiplied by `scale` (0-d).

        Gradients may be scaled in place: they are spent afterwards. Where `skip` (0-d, fp32) is 1 instead of 0,
        whatever the gradients are, nothing changes, counts of steps included.
        """
        rate = learning_rate(step_index, self.config, self.total_steps)
        for decayed in (True, False):
            for names in self._pieces([n for n in self.parameters if _is_matrix(self.layouts[n]) == decayed]):
                self._update(names, rate, self.config.weight_decay if decayed else 0.0, scale, skip)

    def _pieces(self, names: list[str]) -> Iterator[list[str]]:
        """Names in runs that need at most `CAST_BYTES` of cast gradients (a larger tensor stands alone)."""
        piece: list[str] = []
        cast = 0
        for name in names:
            target = self._target(name)
            need = 0 if self.gradients[name].dtype == target.dtype else target.nbytes
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

    def _update(self, names: list[str], rate: float, decay: float, scale: Tensor | None, skip: Tensor | None) -> None:
        targets = [self._target(name) for name in names]
        skip = None if skip is None else skip.to(targets[0].device)
        gradients = [self.gradients[name].to(target.dtype) for name, target in zip(names, targets)]
        if scale is not None:
            torch._foreach_mul_(gradients, scale.to(targets[0].device))
        if self.config.name == "adamw":
            self._adamw(names, targets, gradients, rate, decay, skip)
        else:
            self._sgd(names, targets, gradients, rate, decay, skip)
        for name, target in zip(names, targets):
            if "master" in self._state[name]:
                self.parameters[name].detach().copy_(target)

    def _adamw(
        self,
        names: list[str],
        targets: list[Tensor],
        gradients: list[Tensor],
        rate: float,
        decay: float,
        skip: Tensor | None,
    ) -> None:
        adamw(
            targets, gradients, self._all(names, "moment1"), self._all(names, "moment2"), [], self._all(names, "step"),
            fused=True, foreach=False, amsgrad=False, maximize=False, lr=rate, weight_decay=decay,
            beta1=self.config.beta1, beta2=self.config.beta2, eps=self.config.epsilon, found_inf=skip,
        )  # fmt: skip

    def _sgd(
        self,
        names: list[str],
        targets: list[Tensor],
        gradients: list[Tensor],
        rate: float,
        decay: float,
        skip: Tensor | None,
    ) -> None:
        taken = 1.0 if skip is None else 1 - skip
        if decay:
            torch._foreach_mul_(targets, 1 - rate * decay * taken)
        momentum: list[Tensor | None] = list(self._all(names, "moment1")) if self.config.beta1 else [None] * len(names)
        sgd(
            targets, gradients, momentum, fused=True, foreach=False, weight_decay=0.0, momentum=self.config.beta1,
            lr=rate, dampening=0.0, nesterov=False, maximize=False, found_inf=skip,
        )  # fmt: skip
        torch._foreach_add_(self._all(names, "step"), taken)

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
