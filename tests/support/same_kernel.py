"""The same-kernel baseline: what an offloaded step computes, without any machinery of offloading.

Each part of the parameters is copied to the side that steps it, stepped there by the plain class, and copied
back. There are no buckets, no streams and no pinned memory, and nothing overlaps. What the device's kernels and
the host's kernels do to the bits is the same as with offloading, so the results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from offload_ref.partition import Share
from offload_ref.partition import partition as divide

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
"""Dtypes that have an fp32 master where masters are asked for."""


@dataclass(eq=False)
class Part:
    """A parameter, or a flat slice of one, and the copy of it that is stepped.

    Attributes:
        parameter: the whole of it, contiguous, on the device.
        group: number of its group.
        start, stop: the elements that are stepped.
        working: their copy on the side that steps them; in fp32 if it is a master.
    """

    parameter: torch.Tensor
    group: int
    start: int
    stop: int
    working: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part's elements of a tensor of the parameter's shape."""
        return tensor.detach().reshape(-1)[self.start : self.stop].view(self.working.shape)

    def read_gradient(self) -> None:
        """Copy the gradient to the side that steps, and cast it there."""
        gradient = self.parameter.grad
        moved = None if gradient is None else self.of(gradient).to(self.working.device, copy=True)
        self.working.grad = None if moved is None else moved.to(self.working.dtype)

    def write_weight(self) -> None:
        """Copy the weight back, cast on the side that stepped; without a gradient it stays as it is."""
        if self.parameter.grad is not None:
            self.of(self.parameter).copy_(self.working.detach().to(self.parameter.dtype))


def parts_of(parameter: torch.Tensor, group: int, share: Share, *, masters: bool) -> Iterator[Part]:
    """The parameter whole on its side, or its first elements on the host and the others on the device."""
    dtype = torch.float32 if masters and parameter.dtype in SIXTEEN_BIT else parameter.dtype

    def part(start: int, stop: int, device: torch.device) -> Part:
        elements = parameter.detach().reshape(-1)[start:stop]
        copy = elements.to(device, copy=True).to(dtype)
        return Part(parameter, group, start, stop, copy if share.split else copy.view(parameter.shape))

    host, here, size = torch.device("cpu"), parameter.device, parameter.numel()
    if share.split:
        yield part(0, share.host_elements, host)
        yield part(share.host_elements, size, here)
    else:
        yield part(0, size, host if share.whole_host else here)


class SameKernel:
    """An optimizer of contiguous device parameters whose host share is stepped on the host, step by step.

    Args:
        param_groups: as for any torch optimizer; hyperparameters that they state are live.
        fraction, partition: what goes to the host.
        cls: the class that steps on both sides.
        masters: step fp32 masters of 16-bit parameters.
        keywords: hyperparameters, for both sides.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        fraction: float,
        partition: str,
        cls: type[Optimizer],
        masters: bool,
        **keywords: Any,
    ) -> None:
        self.param_groups = param_groups
        listed = [(number, p) for number, group in enumerate(param_groups) for p in group["params"]]
        shares = divide([p.numel() for _, p in listed], fraction, partition, [p.requires_grad for _, p in listed])
        both = zip(listed, shares, strict=True)
        self.parts = [part for (n, p), share in both for part in parts_of(p, n, share, masters=masters)]
        on_host = [part for part in self.parts if part.working.device.type == "cpu"]
        on_device = [part for part in self.parts if part not in on_host]
        self.sides = [cls(self._groups(side), **keywords) for side in (on_host, on_device)]

    def _groups(self, side: Sequence[Part]) -> list[dict[str, Any]]:
        """The user's groups with the working tensors of one side in them; a group may be empty."""
        members = [[part.working for part in side if part.group == n] for n in range(len(self.param_groups))]
        return [{**group, "params": own} for group, own in zip(self.param_groups, members, strict=True)]

    def step(self) -> None:
        """Step every parameter that has a gradient."""
        for part in self.parts:
            part.read_gradient()
        for side in self.sides:
            for group, users in zip(side.param_groups, self.param_groups, strict=True):
                group.update({name: value for name, value in users.items() if name != "params"})
            side.step()
        for part in self.parts:
            part.write_weight()

    def masters(self) -> list[torch.Tensor]:
        """What is stepped of each parameter, in the order of the groups, put together on the host."""
        pieces: dict[torch.Tensor, list[torch.Tensor]] = {}
        for part in self.parts:
            pieces.setdefault(part.parameter, []).append(part.working.detach().cpu().reshape(-1))
        return [torch.cat(flat).view(parameter.shape) for parameter, flat in pieces.items()]
