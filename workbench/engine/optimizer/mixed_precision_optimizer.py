"""Mixed-precision AdamW and SGD over named tensors, with fp32 master weights of 16-bit parameters.

Built on torch's functional optimizers (one fused kernel per group) rather than `torch.optim.AdamW`,
because a gradient may have another dtype than its parameter, and because every state tensor then
has a name by which it is counted and checkpointed. No value is read back to the host, so that a
step runs under fake tensors too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from workbench.engine.optimizer.optimizer_groups import CastScratch, OptimizerGroup
from workbench.models.torch_dispatch import FakeTensor
from workbench.parallel.data.offload.host_arena import host_zeros
from workbench.plan.learning_rate import learning_rate
from workbench.plan.optimizer_state import has_master
from workbench.planned_device import HOST, REHEARSED_GPU, on_gpu
from workbench.runtime_facts.cast_sizes import CPU_FUSED_CAST_BYTES, HOST_CAST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from workbench.kernels.adamw import FusedAdamW
    from workbench.parallel.layout import Layout
    from workbench.plan import schema


def _ignore(index: int) -> None:
    """Nobody waits for a bucket."""


def _is_matrix(layout: Layout) -> bool:
    return len(layout.shape) >= 2 and not layout.name.endswith("bias")


class HostStates(Protocol):
    """What an optimizer steps in host memory, by local name: of `HostShards`."""

    masters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    names: list[list[str]]


class MixedPrecisionOptimizer:
    """Updates parameters by gradients, and owns the optimizer state.

    Matrices (two dims or more in their global layout) have weight decay, decoupled from the
    gradient (AdamW, arXiv 1711.05101), under SGD too; vectors and expert biases have none.

    State is allocated at construction, not at the first step, so that memory is known before
    training starts: `moment1` and `moment2` (SGD: `moment1`, none without momentum) in fp32, in the
    parameter's dtype where that is wider, or in bf16 where the plan says so; `master`, the fp32
    copy of a 16-bit parameter, unless the plan has none; `step`, a scalar.

    An update is computed in the widest dtype of a tensor's state and rounded to nearest into
    narrower state. The exception is AdamW of bf16 parameters and moments without master weights,
    which torch's kernel updates in place, upcasting in registers.

    With `kernels="fused"`, contiguous tensors are updated by the Triton kernel
    (`workbench.kernels.adamw`) where Triton runs: it reads gradients in their own dtype and scales
    them in registers, so no upcast copies exist. On CPU, tensors are instead cut so that the
    upcast copies that torch's kernel needs stay in cache.

    Args:
        parameters: Name -> local parameter; referenced, not copied.
        gradients: Name -> gradient; same names, referenced.
        layouts: Name -> layout of the global tensor.
        config: The plan's optimizer.
        total_steps: Steps of the run, for the learning-rate schedule.
        kernels: The plan's `strategy.kernels`.
        host: What is stepped in host memory (offload): its state is there, and so are its upcast
            copies; master weights are the host's own, which it rounds into parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        config: schema.Optimizer,
        total_steps: int,
        kernels: str = "eager",
        host: HostStates | None = None,
    ) -> None:
        assert parameters.keys() == gradients.keys(), sorted(parameters.keys() ^ gradients.keys())
        self.config = config
        self.total_steps = total_steps
        self._host = host
        self.scratch: CastScratch | None = None
        """In host memory, for tensors that are stepped there."""
        self._state = {name: self._initial(name, value) for name, value in parameters.items()}
        own = {name: value for name, value in parameters.items() if not self.is_on_host(name)}
        fused = kernels == "fused" and bool(own)
        self._fused = self._kernel(own, gradients, layouts) if fused else None
        self._groups: list[OptimizerGroup] = []
        self.rehearses_kernel = fused and self._rehearses_kernel(own)
        """Whether one Triton kernel would update all tensors on the planned GPU."""
        if self._fused is None and not self.rehearses_kernel:
            on_cpu = not any(on_gpu(parameter) for parameter in own.values())
            for group in self._by_decay(own, gradients, layouts):
                self._groups += group.split(CPU_FUSED_CAST_BYTES if fused and on_cpu else None)
        self._host_groups: list[list[OptimizerGroup]] = []
        """Of each of the host's buckets."""
        if host is not None:
            self._host_groups = self._by_bucket(host, parameters, gradients, layouts)

    def _by_bucket(
        self,
        host: HostStates,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
    ) -> list[list[OptimizerGroup]]:
        """Groups of what is stepped in host memory, by bucket, in pieces."""
        buckets = [
            self._by_decay({name: parameters[name] for name in names}, gradients, layouts)
            for names in host.names
        ]
        casts = sum(group.total_cast_bytes() for groups in buckets for group in groups)
        self.scratch = CastScratch(min(casts, HOST_CAST_BYTES))
        if any(isinstance(gradient, FakeTensor) for gradient in host.gradients.values()):
            return [[] for _ in buckets]  # without values; their update allocates nothing
        return [
            [
                replace(piece, scratch=self.scratch)
                for group in groups
                for piece in group.split(HOST_CAST_BYTES)
            ]
            for groups in buckets
        ]

    def _by_decay(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
    ) -> list[OptimizerGroup]:
        return [
            self._group(
                parameters,
                gradients,
                [n for n in parameters if _is_matrix(layouts[n]) == matrices],
                decay,
            )
            for matrices, decay in ((True, self.config.weight_decay), (False, 0.0))
        ]

    def _group(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        names: list[str],
        decay: float,
    ) -> OptimizerGroup:
        held = [parameters[name].detach() for name in names]
        targets = [
            self._state[name].get("master", parameter) for name, parameter in zip(names, held)
        ]
        held = [x if self.is_on_host(n) else p for n, p, x in zip(names, held, targets)]
        moments = [[self._state[name][kind] for name in names] for kind in self._moments()]
        dtypes = [self._dtype(*of_one) for of_one in zip(targets, *moments)]
        counts = [self._state[name]["step"] for name in names]
        counted = [True] * len(names)
        return OptimizerGroup(
            held,
            [gradients[name] for name in names],
            targets,
            moments,
            counts,
            counted,
            dtypes,
            decay,
        )

    def _rehearses_kernel(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether the Triton AdamW would run on the planned GPU; it allocates nothing."""
        rehearsed = [parameter.device == REHEARSED_GPU for parameter in parameters.values()]
        return self.config.name == "adamw" and any(rehearsed)

    def _kernel(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
    ) -> FusedAdamW | None:
        """The Triton AdamW, or None where it does not support the tensors."""
        from workbench.kernels.adamw import AdamWTensor, FusedAdamW, is_supported

        if self.config.name != "adamw" or not all(
            is_supported(parameter) and is_supported(gradients[name])
            for name, parameter in parameters.items()
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
                AdamWTensor(
                    parameter.detach(),
                    gradients[name],
                    *moments,
                    own["step"],
                    own.get("master"),
                    decay,
                )
            ]
        return FusedAdamW(stepped, self.config.beta1, self.config.beta2, self.config.epsilon)

    def _initial(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        value = parameter.detach()
        state: dict[str, Tensor] = {}
        if has_master(self.config, value.element_size()):
            masters = {} if self._host is None else self._host.masters
            state["master"] = masters[name] if name in masters else value.float()
        wide = torch.promote_types(value.dtype, torch.float32)
        narrow = torch.bfloat16 if self.config.moments == "bf16" else wide
        for moment in self._moments():
            state[moment] = self._zeros_like(name, value, narrow)
        state["step"] = self._zeros_like(name, value.new_empty(()), torch.float32)
        return state

    def _zeros_like(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.is_on_host(name):
            return torch.zeros_like(value, dtype=dtype)
        return host_zeros(value.numel(), dtype, HOST).view(value.shape)

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
        self,
        step_index: int,
        scale: Tensor | None = None,
        skip: Tensor | None = None,
        on_stepped: Callable[[int], None] = _ignore,
    ) -> None:
        """Update all parameters, those in host memory bucket by bucket after the device's.

        Args:
            step_index: Selects the learning rate.
            scale: Factor of the gradients, a 0-d tensor; may be applied in place.
            skip: 0-d fp32 tensor; where 1, nothing changes, step counts included, even if gradients
                are not finite. A tensor, so that the host need not wait to know it.
            on_stepped: Called with the index of a bucket of the host's once it is updated.
        """
        rate = learning_rate(step_index, self.config, self.total_steps)
        if self._fused is not None:
            self._fused.step(rate, scale, skip)
        for group in self._groups:
            self._update(group, rate, scale, skip)
        if any(self._host_groups):  # once, not for every group: the host waits for the device
            scale, skip = (None if x is None else x.to(HOST) for x in (scale, skip))
            if scale is not None and scale.item() == 1:
                scale = None  # spares a pass over all gradients, where none is clipped
        for index, groups in enumerate(self._host_groups):
            for group in groups:
                self._update(group, rate, scale, skip)
            on_stepped(index)

    def _dtype(self, *kept: Tensor) -> torch.dtype:
        """The dtype of a tensor's update: the widest of its state."""
        widest = reduce(torch.promote_types, (x.dtype for x in kept))
        return widest if self.config.name == "adamw" else torch.promote_types(widest, torch.float32)

    def _update(
        self, group: OptimizerGroup, rate: float, scale: Tensor | None, skip: Tensor | None
    ) -> None:
        device = group.targets[0].device
        wide = group.upcast()
        if scale is not None:
            torch._foreach_mul_(wide.gradients, scale.to(device))
        update = self._adamw if self.config.name == "adamw" else self._sgd
        update(wide, rate, None if skip is None else skip.to(device))
        group.store(wide)

    def _adamw(self, group: OptimizerGroup, rate: float, skip: Tensor | None) -> None:
        first, second = group.moments
        adamw(
            group.targets,
            group.gradients,
            first,
            second,
            [],
            group.step_counts,
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

    def _sgd(self, group: OptimizerGroup, rate: float, skip: Tensor | None) -> None:
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
            group.step_counts,
            [torch.ones_like(group.step_counts[0]) * taken] * len(group.step_counts),
        )

    def is_on_host(self, name: str) -> bool:
        """Whether a tensor's state is in host memory."""
        return self._host is not None and name in self._host.gradients

    def state(self) -> dict[str, dict[str, Tensor]]:
        """State by parameter name, then `moment1`, `moment2`, `master`, `step`; not a copy."""
        return self._state

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy `state` in.

        Raises:
            ValueError: It is of another model or optimizer; names the tensor.
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
