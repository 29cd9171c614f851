"""Two optimizers with one face: a plain one of torch.optim, and the offloading one, for programs that compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from optimizing import CLASSES
from torch import nn
from torch.optim import Optimizer

from offload_ref import HybridDeviceOptimizer, minimal
from offload_ref.buckets import gradient_of


@dataclass(frozen=True)
class Setting:
    """What a program is run on; ``fraction`` and what follows mean offloading alone."""

    kinds: tuple[str, ...] = ("tanh", "tanh", "tanh")
    dtype: torch.dtype = torch.float32
    masters: bool = False
    tied: bool = False
    optimizer: str = "AdamW"
    foreach: bool = False
    num_layers: int = 2
    fraction: float = 0.5
    partition: str = "greedy"
    bucket_bytes: int = 64
    overlap: bool = True
    context_per_forward: bool = False

    @property
    def partitions(self) -> list[str]:
        """The partitions that leave every bit as it is (OPT-44)."""
        return ["greedy", "exact"] if self.masters or self.dtype is torch.float32 else ["greedy"]

    @property
    def classes(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """The optimizer's class and its hyperparameters; foreach SGD with nesterov would change the gradients."""
        cls, keywords = CLASSES[self.optimizer]
        leaves_gradients = {"nesterov": False} if self.foreach and self.optimizer == "SGD" else {}
        return cls, {**keywords, **leaves_gradients, "foreach": self.foreach}


class PlainTrainer:
    """A class of torch.optim, on the parameters themselves or on fp32 masters of them."""

    def __init__(self, groups: list[dict[str, Any]], setting: Setting) -> None:
        self.parameters = [p for group in groups for p in group["params"]]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters if setting.masters]
        cls, keywords = setting.classes
        self.optimizer = cls(self._stepped(groups), **keywords)

    def _stepped(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups, with masters for parameters where there are masters."""
        of = {**dict(zip(self.parameters, self.parameters, strict=True)), **dict(self._pairs())}
        return [{**group, "params": [of[p] for p in group["params"]]} for group in groups]

    def _pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter with its master; nothing where there are none."""
        return zip(self.parameters if self.masters else (), self.masters, strict=True)

    def add(self, group: dict[str, Any]) -> None:
        """Add a parameter group."""
        self.masters += [nn.Parameter(p.detach().float()) for p in group["params"] if self.masters]
        self.parameters += group["params"]
        self.optimizer.add_param_group(self._stepped([group])[0])

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> Any:
        """Step; a master first follows a weight that it does not round to, and then gives it its new value."""
        result = None if closure is None else closure()
        with torch.no_grad():
            for parameter, master in self._pairs():
                unchanged = master.to(parameter.dtype) == parameter
                master.copy_(torch.where(unchanged, master, parameter.float()))
                gradient = gradient_of(parameter)
                master.grad = None if gradient is None else gradient.float()
            self.optimizer.step()
            for parameter, master in self._pairs():
                if master.grad is not None:
                    parameter.copy_(master)
        return result

    def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """A step that the scaler skips if a gradient is infinite."""
        scaler.step(self)  # type: ignore[arg-type]  # it asks for param_groups and step alone

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Where a scaler finds the gradients."""
        return [{"params": self.parameters}]

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients as torch's optimizers do."""
        torch.optim.SGD(self.parameters).zero_grad(set_to_none)

    def announce(self) -> None:
        """Let masters equal the weights."""
        with torch.no_grad():
            for parameter, master in self._pairs():
                master.copy_(parameter)

    def state(self) -> dict[str, Any]:
        """A copy of the optimizer's state dict, with masters in the state of what has been stepped."""
        state: dict[str, Any] = deepcopy(self.optimizer.state_dict())
        for number, (_, master) in enumerate(self._pairs()):
            if number in state["state"]:
                state["state"][number]["master_param"] = master.detach().clone()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state; a master that is not in it equals the weight."""
        state = deepcopy(state)
        masters = {n: one.pop("master_param") for n, one in state["state"].items() if "master_param" in one}
        self.optimizer.load_state_dict(state)
        with torch.no_grad():
            for number, (parameter, master) in enumerate(self._pairs()):
                master.copy_(masters.get(number, parameter))

    def rebuilt(self, _fraction: float, _partition: str) -> PlainTrainer:
        """Placement means nothing here."""
        return self


class OffloadingTrainer:
    """The offloading optimizer."""

    def __init__(self, groups: list[dict[str, Any]], setting: Setting) -> None:
        self.setting = setting
        cls, keywords = setting.classes
        self.optimizer = HybridDeviceOptimizer(
            groups,
            setting.fraction,
            cls,
            cls,
            param_update_in_fp32=setting.masters,
            overlap_cpu_optimizer_d2h_h2d=setting.overlap,
            partition=setting.partition,
            bucket_bytes=setting.bucket_bytes,
            **keywords,
        )
        self.add, self.step, self.zero_grad = (
            self.optimizer.add_param_group,
            self.optimizer.step,
            self.optimizer.zero_grad,
        )
        self.announce, self.load = self.optimizer.update_fp32_param_by_new_param, self.optimizer.load_state_dict

    def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """A step that the scaler skips if a gradient is infinite."""
        scaler.step(self.optimizer)

    def state(self) -> dict[str, Any]:
        """A copy of the state dict."""
        return self.optimizer.state_dict(copy=True)

    def rebuilt(self, fraction: float, partition: str) -> OffloadingTrainer:
        """Another optimizer for the same parameters, which continues from this one's state."""
        groups = [{**group, "params": list(group["params"])} for group in self.optimizer.param_groups]
        other = OffloadingTrainer(groups, replace(self.setting, fraction=fraction, partition=partition))
        other.load(self.optimizer.state_dict())
        return other

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups."""
        return self.optimizer.param_groups


class MinimalTrainer:
    """The optimizer of the first lesson, which knows neither masters nor partitions."""

    def __init__(self, groups: list[dict[str, Any]], setting: Setting) -> None:
        self.setting = setting
        cls, keywords = setting.classes
        self.optimizer = minimal.HybridDeviceOptimizer(groups, setting.fraction, cls, **keywords)
        self.step, self.zero_grad = self.optimizer.step, self.optimizer.zero_grad
        self.add, self.load = self.optimizer.add_param_group, self.optimizer.load_state_dict

    def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """A step that the scaler skips if a gradient is infinite."""
        scaler.step(self.optimizer)

    def announce(self) -> None:
        """Nothing: the device's weight is the only one."""

    def state(self) -> dict[str, Any]:
        """A copy of the state dict."""
        return deepcopy(self.optimizer.state_dict())

    def rebuilt(self, fraction: float, _partition: str) -> MinimalTrainer:
        """Another optimizer for the same parameters, which continues from this one's state."""
        groups = [{**group, "params": list(group["params"])} for group in self.optimizer.param_groups]
        other = MinimalTrainer(groups, replace(self.setting, fraction=fraction))
        other.load(self.optimizer.state_dict())
        return other

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups."""
        return self.optimizer.param_groups
