"""The optimizer: AdamW or SGD over named tensors, with fp32 masters where the parameters have 16
bits.

It is written over torch's functional optimizers (one fused kernel per group) rather than over
`torch.optim.AdamW`, because a gradient here may have another dtype than its parameter, and because
every tensor of the state is then ours to count, to checkpoint and to name. Nothing reads a value
back, so that the step runs under fake tensors.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from workbench.engine.optimizer_groups import Group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workbench.kernels.adamw import AdamW
    from workbench.parallel.layout import Layout
    from workbench.plan import schema


def learning_rate(step: int, optimizer: schema.Optimizer, total_steps: int) -> float:
    """Learning rate of `step` (from 0): linear warm-up to the peak, then constant, linear or cosine
    decay.

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
    """Steps `parameters` by `gradients`; both are dicts by the same names and both are held, not
    copied.

    Matrices (two dimensions or more, as `layouts` know them) are decayed, decoupled from the
    gradient (1711.05101), under SGD too; vectors are not, nor are experts' biases, however stacked.
    State is allocated here, not at the first step, so that memory is known before training starts:
    `moment1` and `moment2` (SGD: `moment1` only, and none without momentum) in fp32, or in the
    parameter's dtype where that is wider, or in bf16 where the plan says so; `master`, the fp32
    copy of a 16-bit parameter, unless the plan wants none; `step`, a scalar.

    A step is made in the widest dtype of the state, and what is kept in less is rounded to nearest
    afterwards. Only AdamW of bf16 parameters and moments, with no master, is made on those, by
    torch's kernel, which widens within.

    `kernels` is the plan's: with "fused", AdamW of contiguous tensors is our own kernel where
    Triton runs. It reads gradients in their own dtype and scales them on the way, and so needs no
    copy of them; elsewhere what torch's kernel needs copies of is cut so that those stay in a
    processor's cache. `on_card` says where the tensors of a rehearsal, which are a processor's,
    would be: there the kernel needs nothing, and nothing is done.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        config: schema.Optimizer,
        total_steps: int,
        kernels: str = "eager",
        on_card: bool = False,
    ) -> None:
        assert parameters.keys() == gradients.keys(), sorted(parameters.keys() ^ gradients.keys())
        self.config = config
        self.total_steps = total_steps
        self._state = {name: self._initial(parameter) for name, parameter in parameters.items()}
        self._fused = self._kernel(parameters, gradients, layouts) if kernels == "fused" else None
        self._groups: list[Group] = []
        on_host = all(parameter.device.type == "cpu" for parameter in parameters.values())
        rehearsed = kernels == "fused" and on_card and on_host and config.name == "adamw"
        if self._fused is not None or rehearsed:
            return
        groups = (
            self._group(
                parameters,
                gradients,
                [n for n in parameters if _is_matrix(layouts[n]) == matrices],
                decay,
            )
            for matrices, decay in ((True, config.weight_decay), (False, 0.0))
        )
        self._groups = [
            piece for group in groups for piece in group.pieces(cut=kernels == "fused" and on_host)
        ]

    def _group(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        names: list[str],
        decay: float,
    ) -> Group:
        held = [parameters[name].detach() for name in names]
        targets = [
            self._state[name].get("master", parameter) for name, parameter in zip(names, held)
        ]
        moments = [[self._state[name][kind] for name in names] for kind in self._moments()]
        dtypes = [self._dtype(*of_one) for of_one in zip(targets, *moments)]
        counts = [self._state[name]["step"] for name in names]
        counted = [True] * len(names)
        return Group(
            held,
            [gradients[name] for name in names],
            targets,
            moments,
            counts,
            counted,
            dtypes,
            decay,
        )

    def _kernel(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
    ) -> AdamW | None:
        """Our own kernel, or None where it has no place."""
        from workbench.kernels.adamw import AdamW, Stepped, suits

        if self.config.name != "adamw" or not all(
            map(suits, (*parameters.values(), *gradients.values()))
        ):
            return None
        stepped = []
        for name, parameter in parameters.items():
            own, decay = (
                self._state[name],
                self.config.weight_decay if _is_matrix(layouts[name]) else 0.0,
            )
            moments = own["moment1"], own["moment2"]
            stepped += [
                Stepped(
                    parameter.detach(),
                    gradients[name],
                    *moments,
                    own["step"],
                    own.get("master"),
                    decay,
                )
            ]
        return AdamW(stepped, self.config.beta1, self.config.beta2, self.config.epsilon)

    def _initial(self, parameter: Tensor) -> dict[str, Tensor]:
        value = parameter.detach()
        state: dict[str, Tensor] = {}
        if value.element_size() < 4 and self.config.master == "auto":
            state["master"] = value.float()
        wide = torch.promote_types(value.dtype, torch.float32)
        for moment in self._moments():
            state[moment] = torch.zeros_like(
                value, dtype=torch.bfloat16 if self.config.moments == "bf16" else wide
            )
        state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
        return state

    def _moments(self) -> tuple[str, ...]:
        return (
            ("moment1", "moment2")
            if self.config.name == "adamw"
            else ("moment1",)
            if self.config.beta1
            else ()
        )

    @torch.no_grad()
    def step(
        self, step_index: int, scale: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """One update with the learning rate of `step_index`; gradients are first multiplied by
        `scale` (0-d).

        Gradients may be scaled in place: they are spent afterwards. Where `skip` (0-d, fp32) is 1
        instead of 0, whatever the gradients are, nothing changes, counts of steps included.
        """
        rate = learning_rate(step_index, self.config, self.total_steps)
        if self._fused is not None:
            self._fused.step(rate, scale, skip)
        for group in self._groups:
            self._update(group, rate, scale, skip)

    def _dtype(self, *kept: Tensor) -> torch.dtype:
        """What the update of a tensor is made in: the widest of what is kept."""
        widest = reduce(torch.promote_types, (x.dtype for x in kept))
        return widest if self.config.name == "adamw" else torch.promote_types(widest, torch.float32)

    def _update(self, group: Group, rate: float, scale: Tensor | None, skip: Tensor | None) -> None:
        wide = group.widened()
        device = wide.targets[0].device
        if scale is not None:
            torch._foreach_mul_(wide.gradients, scale.to(device))
        update = self._adamw if self.config.name == "adamw" else self._sgd
        update(wide, rate, None if skip is None else skip.to(device))
        group.take(wide)

    def _adamw(self, group: Group, rate: float, skip: Tensor | None) -> None:
        first, second = group.moments
        adamw(
            group.targets,
            group.gradients,
            first,
            second,
            [],
            group.counts,
            fused=True,
            foreach=False,
            amsgrad=False,
            maximize=False,
            lr=rate,
            weight_decay=group.decay,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.epsilon,
            found_inf=skip,
        )

    def _sgd(self, group: Group, rate: float, skip: Tensor | None) -> None:
        taken = 1.0 if skip is None else 1 - skip
        if group.decay:
            torch._foreach_mul_(group.targets, 1 - rate * group.decay * taken)
        momentum: list[Tensor | None] = (
            [*group.moments[0]] if group.moments else [None] * len(group.targets)
        )
        sgd(
            group.targets,
            group.gradients,
            momentum,
            fused=True,
            foreach=False,
            weight_decay=0.0,
            momentum=self.config.beta1,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            found_inf=skip,
        )
        torch._foreach_add_(
            group.counts, [torch.ones_like(group.counts[0]) * taken] * len(group.counts)
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The state itself (not a copy), by parameter name, then `moment1`, `moment2`, `master`,
        `step`.
        """
        return self._state

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy `state` in. Raises ValueError, naming the tensor, where it is not of this model and
        optimizer.
        """
        for name, mine in self._state.items():
            theirs = state.get(name, {})
            if theirs.keys() != mine.keys():
                raise ValueError(
                    f"optimizer state of {name}: has {sorted(theirs)}, needs {sorted(mine)}"
                )
            for kind, tensor in mine.items():
                has, needs = tuple(theirs[kind].shape), tuple(tensor.shape)
                if has != needs:
                    raise ValueError(
                        f"optimizer state {kind} of {name}: shape {has}, needs {needs}"
                    )
        for name, mine in self._state.items():
            for kind, tensor in mine.items():
                tensor.copy_(state[name][kind])
