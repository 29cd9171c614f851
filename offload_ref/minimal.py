"""Both mechanisms of CPU offloading, correct and without options: read this first, from top to bottom.

A training step keeps on the device what it seldom needs: *activations*, which forward saves and backward reads much
later, and *optimizer states*, which only the step reads. Offloading moves them to the host's memory and back.

Work on one stream runs in order. Work on different streams runs in any order, unless one stream *waits* for an *event*
that the other has *recorded*. So each copy below has the same phases: WAIT for what made the bytes, COPY on a side
stream, RECORD an event for whoever needs the result. To free device memory is such a need too, for torch hands it to
the next work of the compute stream at once.

    optimizer = HybridDeviceOptimizer(model.parameters(), 0.5, torch.optim.AdamW, lr=1e-4)
    with offload_layers(model.layers, num_layers=8):  # the first 8, since backward needs the last ones at once
        loss = model(batch)
    loss.backward()
    optimizer.step()

Left to the core: size floor, marks, packing, reused buffers; fp32 masters, buckets, exact partitions, gradients laid
out otherwise than their weights (which torch's fused kernels misread), most refusals.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import AdamW, Optimizer

from offload_ref.errors import InPlaceEditError, NoAcceleratorError, require
from offload_ref.partition import check_fraction, greedy
from offload_ref.schedule import Schedule

# Part one: activations. Autograd calls `pack` with each tensor that it saves and keeps what that returns, a handle;
# in backward it calls `unpack` with the handle and goes on with what that returns.


class HostCopy:
    """A storage on its way: on the device, then on the host alone, then on the device again."""

    on_device: torch.Tensor | None = None
    alias: torch.Tensor

    def __init__(self, tensor: torch.Tensor, layer: int, d2h: torch.Stream, h2d: torch.Stream) -> None:
        self.layer, self.h2d, self.compute = layer, h2d, torch.accelerator.current_stream()
        storage = tensor.untyped_storage()
        self.origin, self.version = weakref.ref(storage), tensor._version
        self.on_host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self.on_device = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        # WAIT
        d2h.wait_event(self.compute.record_event())
        # COPY
        with d2h:
            self.on_host.copy_(self.on_device, non_blocking=True)
        # RECORD
        self.copied = self.last_touched = d2h.record_event()

    def release(self) -> None:
        """Let the device memory go: whatever reuses it comes after the copy that still touches it."""
        if self.on_device is not None:
            self.compute.wait_event(self.last_touched)
            self.on_device = None

    def fetch(self) -> torch.Tensor:
        """Start the copy back, unless the bytes are on the device."""
        if self.on_device is None:
            self.compute = torch.accelerator.current_stream()
            self.on_device = torch.empty_like(self.on_host, device=self.compute.device)
            # WAIT: for earlier work in the memory just taken, and for the bytes to be on the host
            self.h2d.wait_event(self.compute.record_event())
            self.h2d.wait_event(self.copied)
            # COPY
            with self.h2d:
                self.on_device.copy_(self.on_host, non_blocking=True)
            # RECORD
            self.last_touched = self.h2d.record_event()
        return self.on_device

    __del__ = release  # a graph may be dropped at any time, also while a copy is under way


class Handle:
    """What autograd keeps in place of a tensor: the tensor's own alias, or how it lies in a copied storage."""

    def __init__(self, forward: ForwardPass, layer: int, tensor: torch.Tensor, copy: HostCopy | None) -> None:
        self.forward, self.layer, self.copy, self.version = forward, layer, copy, tensor._version
        self.alias = tensor.detach()  # never the tensor itself: its own node would keep it alive for ever
        if copy is not None:
            copy.alias, self.lies = self.alias, (tensor.storage_offset(), tensor.size(), tensor.stride())
            self.alias.data = tensor.new_empty(0)  # keeps the version counter without the bytes

    def unpack(self) -> torch.Tensor:
        """The tensor as it was saved, as often as autograd asks."""
        if self.alias._version != self.version:
            seen, required = f"version {self.alias._version}", f"version {self.version}"
            raise InPlaceEditError("saved tensor modified in place", seen=seen, required=required, rule="ACT-24")
        self.forward.enter_backward(self.layer)
        if self.copy is None:
            return self.alias
        on_device = self.copy.fetch()
        torch.accelerator.current_stream().wait_event(self.copy.last_touched)
        return self.alias.new_empty(0).set_(on_device.untyped_storage(), *self.lies)


class ForwardPass:
    """The copies of one forward pass. Handles own them, so that a dropped graph drops them too."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.entered = schedule, -1
        self.copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()

    def of_layer(self, layer: int | None) -> list[HostCopy]:
        """The layer's copies; none for no layer."""
        return [copy for copy in self.copies if copy.layer == layer]

    def enter_forward(self, layer: int) -> None:
        """Release the layer whose copies have had the longest time to end."""
        self.entered = layer
        for copy in self.of_layer(self.schedule.released_when_entering(layer)):
            copy.release()

    def enter_backward(self, layer: int) -> None:
        """Fetch the layer that backward needs a few layers later, but for what was edited meanwhile."""
        for copy in self.of_layer(self.schedule.due_back_when_backward_of(layer)):
            if copy.alias._version == copy.version:
                copy.fetch()

    def copy_of(self, tensor: torch.Tensor, layer: int, d2h: torch.Stream, h2d: torch.Stream) -> HostCopy:
        """One copy for all views of a storage; the last layer that saves it decides when it is released."""
        identity = tensor.untyped_storage(), tensor._version
        found = [copy for copy in self.copies if (copy.origin(), copy.version) == identity]
        copy = found[0] if found else HostCopy(tensor, layer, d2h, h2d)
        copy.layer = layer
        self.copies.add(copy)
        return copy


@contextmanager
def offload_layers(layers: Iterable[torch.nn.Module], num_layers: int) -> Iterator[None]:
    """Offload what the first ``num_layers`` of the layers save for backward whenever they run inside."""
    modules = list(layers)
    schedule = Schedule(num_layers, len(modules))
    if num_layers == 0:
        yield
        return
    require(torch.accelerator.is_available(), NoAcceleratorError, "offload_layers", None, "an accelerator", "ACT-16")
    d2h, h2d = torch.Stream(), torch.Stream()
    forward, running = ForwardPass(schedule), ExitStack()

    def enter(layer: int, _module: torch.nn.Module, _arguments: object) -> None:
        nonlocal forward
        if layer <= forward.entered:
            forward = ForwardPass(schedule)
        if torch.is_grad_enabled():
            forward.enter_forward(layer)
            running.enter_context(saved_tensors_hooks(partial(pack, forward, layer), Handle.unpack))

    def pack(forward: ForwardPass, layer: int, tensor: torch.Tensor) -> Handle:
        activation = type(tensor) is torch.Tensor and not isinstance(tensor._base, torch.nn.Parameter)
        dense = tensor.is_floating_point() and tensor.layout is torch.strided
        leaves = schedule.offloads(layer) and activation and dense and tensor.device.type == d2h.device.type
        with torch.no_grad():
            return Handle(forward, layer, tensor, forward.copy_of(tensor, layer, d2h, h2d) if leaves else None)

    with ExitStack() as hooks:
        hooks.enter_context(running)
        for layer, module in enumerate(modules):
            hooks.callback(module.register_forward_pre_hook(partial(enter, layer)).remove)
            hooks.callback(module.register_forward_hook(lambda *_: running.close(), always_call=True).remove)
        yield


# Part two: the optimizer. Gradients and weights of the host share come to the host, which steps them with the states
# that it keeps, and the new weights go back. Between two steps the device's weight is the only one: none goes stale.


class HybridDeviceOptimizer(Optimizer):
    """``optimizer_cls``, with states and step of a fraction of the parameters on the host."""

    def __init__(self, params: Any, offload_fraction: float = 0.5, optimizer_cls: Any = AdamW, **keywords: Any) -> None:
        self.offload_fraction, self.optimizer_cls = check_fraction(offload_fraction), optimizer_cls
        self.on_host: dict[torch.Tensor, torch.Tensor] = {}
        self.parts: list[Optimizer] = []
        super().__init__(params, optimizer_cls([torch.zeros(1)], **keywords).defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; returns what the closure returns."""
        with torch.enable_grad():
            result = closure() if closure is not None else None
        self._place(self.param_groups[len(self.parts[0].param_groups) if self.parts else 0 :])
        self._hand_over()
        device_part, host_part = self.parts
        crossing = [(p, p.grad, copy) for p, copy in self.on_host.items() if p.grad is not None]
        if crossing:
            # WAIT
            compute = torch.accelerator.current_stream()
            self.d2h.wait_event(compute.record_event())
            # COPY
            with self.d2h:
                for p, gradient, copy in crossing:
                    copy.copy_(p, non_blocking=True)
                    copy.grad = torch.empty_like(copy, pin_memory=True).copy_(gradient, non_blocking=True)
        device_part.step()
        if crossing:
            # WAIT: by now the device has done with the old weights too
            self.d2h.synchronize()
            host_part.step()
            # COPY
            with self.h2d:
                for p, _, copy in crossing:
                    p.copy_(copy, non_blocking=True)
                    copy.grad = None
            # RECORD
            compute.wait_event(self.h2d.record_event())
        self.state.update({p: host_part.state[copy] for p, copy in self.on_host.items() if copy in host_part.state})
        return result

    def _place(self, groups: list[dict[str, Any]]) -> None:
        """Divide groups that are new; each side has an optimizer with as many groups as the user's."""
        on_device = [p for group in groups for p in group["params"] if p.device.type != "cpu"]
        shares = greedy([p.numel() for p in on_device], self.offload_fraction, [p.requires_grad for p in on_device])
        chosen = [p for p, share in zip(on_device, shares, strict=True) if share.whole_host]
        self.on_host.update({p: torch.empty_like(p, device="cpu", pin_memory=True) for p in chosen})
        if chosen:
            self.d2h, self.h2d = torch.Stream(), torch.Stream()
        stay = [{**g, "params": [p for p in g["params"] if p not in self.on_host]} for g in groups]
        leave = [{**g, "params": [self.on_host[p] for p in g["params"] if p in self.on_host]} for g in groups]
        if self.parts:
            for part, side in zip(self.parts, (stay, leave), strict=True):
                for group in side:
                    part.add_param_group(group)
        else:
            self.parts = [self.optimizer_cls(stay), self.optimizer_cls(leave)]
            self.parts[0].state.update(self.state)  # some classes begin with states
            self.state = self.parts[0].state

    def _hand_over(self) -> None:
        """Give both sides what the user may have changed: hyperparameters and states."""
        for part in self.parts:
            for theirs, ours in zip(part.param_groups, self.param_groups, strict=True):
                theirs.update({**ours, "params": theirs["params"]})
        self.parts[0].state = self.state
        for p, copy in self.on_host.items():
            if p in self.state:
                self.parts[1].state[copy] = {k: v.cpu() if torch.is_tensor(v) else v for k, v in self.state[p].items()}
