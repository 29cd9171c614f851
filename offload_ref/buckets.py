"""What the host step moves and steps: units (parameters, or slices of them) gathered in buckets.

A bucket is the grain of overlap: its gradients come to the host, its sub-optimizer steps, its weights go
back, while the next bucket's gradients are still on their way. The device's share is a bucket too, one that
nothing crosses for. Every bucket steps ``working`` tensors: the parameters themselves, or copies of them.

| unit | working tensor | gradient arrives in | weight leaves from |
|---|---|---|---|
| device, no master | alias of the parameter | (the gradient itself) | (nothing leaves) |
| device, master | fp32 copy on the device | (cast on the device) | (cast on the device) |
| host, no master | copy on the host | pinned buffer | the working copy, pinned |
| host, master | fp32 copy on the host | pinned buffer | pinned staging, in the weight's dtype |
| parameter on the host itself | alias, or fp32 copy | (the gradient itself) | (nothing leaves) |
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from offload_ref.host_memory import carve

MASTER_DTYPE = torch.float32
"""Masters are fp32."""


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient to step with: Megatron's ``decoupled_grad`` where there is one, else ``grad``."""
    decoupled: torch.Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


@dataclass(slots=True, eq=False)
class Unit:
    """A parameter, or a flat slice of a dense one, that is stepped on one side.

    Attributes:
        parameter: the object in the user's group.
        group: number of that group.
        start, stop: the slice of elements, in memory order; all of them for a whole unit.
        on_host: whether the states live on the host.
        crosses: whether the parameter is on the device and the states are not.
        has_master: whether an fp32 copy of a 16-bit weight is stepped.
        working: what the sub-optimizer steps.
    """

    parameter: torch.Tensor
    group: int
    start: int
    stop: int
    on_host: bool
    crosses: bool
    has_master: bool
    working: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    seen: tuple[weakref.ref[torch.UntypedStorage], int] | None = None

    @property
    def whole(self) -> bool:
        """Whether the unit is all of its parameter."""
        return self.stop - self.start == self.parameter.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that is stepped."""
        return MASTER_DTYPE if self.has_master else self.parameter.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape that is stepped: the parameter's own if whole (OPT-8), else flat."""
        return self.parameter.shape if self.whole else torch.Size([self.stop - self.start])

    @property
    def nbytes(self) -> int:
        """Bytes of the working tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The unit's part of a tensor of the parameter's shape; a view if its layout is the parameter's."""
        if self.whole:
            return tensor
        if tensor.stride() != self.parameter.stride():
            tensor = torch.empty_like(self.parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided(self.shape, (1,), int(tensor.storage_offset()) + self.start)

    def laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """The unit's part of the gradient at the working tensor's strides, which fused kernels rely on."""
        part = self.part(gradient)
        if part.stride() == self.working.stride():
            return part
        return torch.empty_like(self.working, dtype=part.dtype).copy_(part)

    def weight(self) -> torch.Tensor:
        """The unit's part of the parameter, without its graph."""
        return self.part(self.parameter.detach())

    def bind(self, host_copy: torch.Tensor | None) -> None:
        """Make the working tensor, from the weight as it is now."""
        if host_copy is None and not self.has_master:
            self.working = self.weight()
            return
        self.working = torch.empty_like(self.weight(), dtype=self.dtype) if host_copy is None else host_copy
        self.read_weight()

    @property
    def is_copy(self) -> bool:
        """Whether the working tensor is a copy, which an outside change of the weight does not reach."""
        return self.crosses or self.has_master

    def read_weight(self) -> None:
        """Let the working copy follow the weight (OPT-24); the cast happens where the copy is."""
        if self.is_copy:
            self.working.copy_(self.weight().to(self.working.device))

    def read_changes(self) -> None:
        """Let the working copy follow the weight where it does not round to it, and else keep its bits."""
        weight = self.weight().to(self.working.device)
        unchanged = self.working.to(weight.dtype) == weight
        self.working.copy_(torch.where(unchanged, self.working, weight.to(self.working.dtype)))

    def note_weight(self) -> None:
        """Remember the weight's storage and version, to know an outside change by."""
        self.seen = (weakref.ref(self.parameter.untyped_storage()), self.parameter._version)

    def follow_weight(self) -> None:
        """Take up what was done to the weight since the last step (OPT-25)."""
        if not self.is_copy:
            self.working.data = self.weight()
        elif self.seen is not None:
            storage, version = self.seen
            if storage() is not self.parameter.untyped_storage() or version != self.parameter._version:
                self.read_changes()


@dataclass(slots=True, eq=False)
class Bucket:
    """Units that are stepped together by one sub-optimizer.

    Attributes:
        units: in the order of the groups.
        optimizer: steps their working tensors; its groups mirror ``group_numbers`` of the user's.
        gradients: for units that cross, where their gradients arrive on the host.
        staging: for units that cross, where their weights leave from.
        copied: the event after which the gradients are on the host.
    """

    units: list[Unit]
    optimizer: torch.optim.Optimizer
    group_numbers: list[int]
    pin_gradients: bool
    staging: list[torch.Tensor]
    gradients: list[torch.Tensor] = field(default_factory=list)
    copied: torch.Event | None = None

    @property
    def crosses(self) -> bool:
        """Whether the bucket is stepped on the host for parameters on the device."""
        return self.units[0].crosses

    def has_gradients(self) -> bool:
        """Whether any unit is to be stepped."""
        return any(gradient_of(unit.parameter) is not None for unit in self.units)

    def arrange_gradients(self) -> None:
        """Have room on the host for gradients in their own dtypes."""
        known = [g.dtype for g in self.gradients] or [unit.parameter.dtype for unit in self.units]
        found = [gradient_of(unit.parameter) for unit in self.units]
        dtypes = [k if g is None else g.dtype for k, g in zip(known, found, strict=True)]  # OPT-21
        if not self.gradients or dtypes != known:
            layout = [(unit.shape, dtype) for unit, dtype in zip(self.units, dtypes, strict=True)]
            self.gradients = carve(layout, pin=self.pin_gradients)

    def copy_gradients(self, stream: torch.Stream, ready: torch.Event) -> None:
        """Start the gradients' way to the host, on ``stream``, once they are ``ready``."""
        self.arrange_gradients()
        # WAIT
        stream.wait_event(ready)  # ORD-10
        # COPY
        with stream:
            for unit, arrival in zip(self.units, self.gradients, strict=True):
                gradient = gradient_of(unit.parameter)
                if gradient is not None:
                    arrival.copy_(unit.part(gradient.detach()), non_blocking=True)
        # RECORD
        self.copied = stream.record_event()

    def step(self, begun: list[Bucket]) -> None:
        """Step each unit that has a gradient, the others are left alone (OPT-11); tell when it begins."""
        try:
            for unit, gradient in self._gradients_to_step():
                unit.working.grad = None if gradient is None else gradient.to(unit.dtype)
            begun.append(self)
            self.optimizer.step()
        finally:
            for unit in self.units:
                unit.working.grad = None

    def _gradients_to_step(self) -> Iterator[tuple[Unit, torch.Tensor | None]]:
        for i, unit in enumerate(self.units):
            gradient = gradient_of(unit.parameter)
            if gradient is None:
                yield unit, None
            else:
                yield unit, self.gradients[i] if self.crosses else unit.laid_out(gradient.detach())

    def wait_for_host(self) -> None:
        """Block the host until the gradients are there (ORD-11).

        Their copies waited for the compute stream. So by then the device has also read this bucket's last
        weights, which the compute stream waited for a step ago, and has used them.
        """
        if self.copied is not None:
            self.copied.synchronize()

    def step_in_place(self, begun: list[Bucket]) -> None:
        """Step units that do not cross, and round their masters into their weights (OPT-20)."""
        self.step(begun)
        for unit in self.units:
            if unit.has_master and gradient_of(unit.parameter) is not None:
                unit.weight().copy_(unit.working)

    def copy_weights(self, stream: torch.Stream) -> None:
        """Start the weights' way to the device, on ``stream``.

        Nothing is left to wait for: the host has seen the device finish with the old weights (ORD-14), and
        with the staging tensors (ORD-13), before it stepped.
        """
        # COPY
        for unit, departure in zip(self.units, self.staging, strict=True):
            if gradient_of(unit.parameter) is None:
                continue
            if unit.has_master:
                departure.copy_(unit.working)
            with stream:
                unit.weight().copy_(departure, non_blocking=True)


def bind_host_copies(units: Sequence[Unit], *, pin: bool) -> list[torch.Tensor]:
    """Give units that cross their working copies; returns where their weights leave from.

    Only what the link reads is pinned: a master is cast into a staging tensor, which leaves in its place.
    """
    masters = [u for u in units if u.has_master]
    plain = [u for u in units if not u.has_master]
    copies = dict(zip(masters, carve([(u.shape, u.dtype) for u in masters], pin=False), strict=True))
    leaving = carve([(u.shape, u.parameter.dtype) for u in (*plain, *masters)], pin=pin)
    staging = dict(zip((*plain, *masters), leaving, strict=True))
    for unit in units:
        unit.bind(copies.get(unit, staging[unit]))
    return [staging[unit] for unit in units]
