"""HybridDeviceOptimizer: a fraction of the parameters has its optimizer states, and its step, on the host.

Each step, the gradients of the host share come to the host, a host optimizer steps copies of the parameters
there, and the new weights go back; the rest is stepped on the device meanwhile. ``partition`` says which
parameters these are, ``buckets`` moves and steps them, and this module is what the user's loop sees: param
groups, ``step``, ``state_dict``, and what happens when weights change from outside.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer

from offload_ref import checks, errors
from offload_ref.buckets import Bucket, Unit, bind_host_copies, gradient_of, is_dense
from offload_ref.checks import MASTER_KEY, OptimizerClass
from offload_ref.errors import require
from offload_ref.partition import Share, check_fraction, into_runs
from offload_ref.partition import partition as divide

DEFAULT_BUCKET_BYTES = 32 << 20
"""Bytes of working copies that are moved and stepped together."""

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
"""Dtypes that have a master with ``param_update_in_fp32``."""

NOT_HYPERPARAMETERS = frozenset({"params", "param_names"})
"""Keys of a param group that name parameters."""


class HybridDeviceOptimizer(Optimizer):
    """An optimizer whose states, masters and step are on the host for a fraction of the parameters.

    Args:
        params: as for any torch optimizer; groups keep number, order, identity and keys.
        offload_fraction: fraction of the trainable device elements, in [0, 1].
        cpu_optimizer_cls, gpu_optimizer_cls: what steps the host share and the device share.
        param_update_in_fp32: step fp32 masters of bfloat16 and float16 parameters.
        pin_cpu_grads, pin_cpu_params: gradients arrive in, and weights leave from, pinned memory.
        overlap_cpu_optimizer_d2h_h2d: transfer on streams of their own; never changes a bit.
        partition: ``greedy`` (Megatron's rule), or ``exact`` (splits one parameter; element-wise classes).
        step_on: ``host``; ``device`` is refused in this version.
        bucket_bytes: bytes of working copies that are moved and stepped together.
        elementwise: vouch that the classes treat each element alone, for ``exact``.
        optimizer_kwargs: hyperparameters, for both classes and for the groups.

    Raises:
        FractionError: the fraction is no number in [0, 1] (OPT-3).
        OptimizerInputError: no group, or a parameter that is None, no tensor, or no leaf (OPT-40).
        HostStepError: the host's class cannot step a host tensor (OPT-41).
        PartitionModeError: an unknown partition, or ``exact`` for other than element-wise classes (OPT-42).
        UnsupportedError: ``step_on`` other than ``host`` (OPT-43).
        OffloadTypeError: a keyword that neither class knows (OPT-15).

    Host memory is allocated at the first step or load, not here (MEM-10).
    """

    def __init__(
        self,
        params: Iterable[Any],
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: OptimizerClass = torch.optim.AdamW,
        gpu_optimizer_cls: OptimizerClass = torch.optim.AdamW,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        partition: str = "greedy",
        step_on: str = "host",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        elementwise: bool | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        self.offload_fraction = check_fraction(offload_fraction)
        self.cpu_optimizer_cls, self.gpu_optimizer_cls = cpu_optimizer_cls, gpu_optimizer_cls
        self.param_update_in_fp32 = param_update_in_fp32
        self.pin_cpu_grads, self.pin_cpu_params = pin_cpu_grads, pin_cpu_params
        self.overlap_cpu_optimizer_d2h_h2d = overlap_cpu_optimizer_d2h_h2d
        self.partition, self.step_on, self.bucket_bytes = partition, step_on, bucket_bytes
        self.elementwise = elementwise
        self._check_options()
        given = checks.checked_groups(params)
        first = next((checks.parameter_of(member) for _, members in given for member in members), torch.empty(0))
        hyperparameters = self._hyperparameters(optimizer_kwargs, first.device)
        self.units = self._planned(given, first=0)
        self.buckets: list[Bucket] = []
        self._side_streams: tuple[torch.Stream, torch.Stream] | None = None
        for group, members in given:
            group["params"] = members
        super().__init__([group for group, _ in given], hyperparameters)
        self._hyperparameter_names = frozenset(self.defaults)
        self.defaults = {**self.defaults, **self._constructor_keywords()}

    # Construction

    def _check_options(self) -> None:
        switches = ("param_update_in_fp32", "pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d")
        checks.check_switches(**{name: getattr(self, name) for name in switches})
        if self.elementwise is not None:
            checks.check_switches(elementwise=self.elementwise)
        fits = self.step_on == "host"
        require(fits, errors.UnsupportedError, "step_on", self.step_on, "'host' in this version", "OPT-43")
        fits, required = type(self.bucket_bytes) is int and self.bucket_bytes >= 1, "a whole number, at least 1"
        require(fits, errors.OptimizerInputError, "bucket_bytes", self.bucket_bytes, required, "OPT-40")
        classes = (self.cpu_optimizer_cls, self.gpu_optimizer_cls)
        checks.check_classes(classes)
        checks.check_partition(self.partition, classes, self.elementwise)

    def _hyperparameters(self, keywords: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The classes' own defaults with the keywords over them."""
        self._keywords = keywords
        defaults: dict[str, Any] = {}
        known: set[str] = set()
        for cls, place in ((self.cpu_optimizer_cls, torch.device("cpu")), (self.gpu_optimizer_cls, device)):
            built = cls([torch.zeros(1, device=place)], **self._known_to(cls))
            checks.check_optimizer(built, cls)
            defaults |= built.defaults
            known |= set(self._known_to(cls))
        checks.check_keywords(keywords, known, {"bias_correction": True, **defaults})
        return {**defaults, **keywords}

    def _known_to(self, cls: OptimizerClass) -> dict[str, Any]:
        return checks.keywords_of(cls, self._keywords)

    def _constructor_keywords(self) -> dict[str, Any]:
        """Every keyword of the constructor: Megatron builds the optimizer anew from ``defaults``."""
        names = [name for name in inspect.signature(HybridDeviceOptimizer).parameters if hasattr(self, name)]
        return {name: getattr(self, name) for name in names}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, divided by the same fraction on its own; what exists stays where it is (OPT-16)."""
        if not hasattr(self, "_hyperparameter_names"):
            super().add_param_group(param_group)
            return
        given = checks.checked_group(param_group, self.param_groups)
        units = self._planned(given, first=len(self.param_groups))
        super().add_param_group(param_group)
        for name in set(self.defaults) - self._hyperparameter_names:
            del self.param_groups[-1][name]
        self.units += units

    # Planning

    def _planned(self, groups: checks.Groups, first: int) -> list[Unit]:
        """Decide for each parameter of these groups, numbered from ``first``, on which side it is stepped."""
        listed = [
            (number, checks.parameter_of(m)) for number, (_, members) in enumerate(groups, first) for m in members
        ]
        on_device = [p for _, p in listed if p.device.type != "cpu"]
        counted = [p.requires_grad for p in on_device]
        shares = divide([p.numel() for p in on_device], self.offload_fraction, self.partition, counted)
        of_parameter = dict(zip(on_device, shares, strict=True))
        units = [unit for number, p in listed for unit in self._units_of(p, number, of_parameter.get(p))]
        dimensions = {unit.parameter.dim() for unit in units if unit.on_host}
        checks.check_host_step(self.cpu_optimizer_cls, self._known_to(self.cpu_optimizer_cls), dimensions)
        return units

    def _units_of(self, parameter: torch.Tensor, group: int, share: Share | None) -> Iterator[Unit]:
        """One unit, or two if split; ``share`` is None for a parameter on the host itself (OPT-7)."""
        has_master = self.param_update_in_fp32 and parameter.dtype in SIXTEEN_BIT

        def unit(start: int, stop: int, *, on_host: bool) -> Unit:
            return Unit(parameter, group, start, stop, on_host, on_host and share is not None, has_master)

        size = parameter.numel()
        if share is None or share.whole_host or (share.split and not is_dense(parameter)):
            yield unit(0, size, on_host=True)
        elif share.split:
            yield unit(0, share.host_elements, on_host=True)
            yield unit(share.host_elements, size, on_host=False)
        else:
            yield unit(0, size, on_host=False)

    def _fill_buckets(self, wanted: Callable[[Unit], bool]) -> None:
        """Allocate for the wanted units that have no bucket yet."""
        placed = {unit for bucket in self.buckets for unit in bucket.units}
        fresh = [unit for unit in self.units if unit not in placed and wanted(unit)]
        crossing = [unit for unit in fresh if unit.crosses]
        for run in into_runs([unit.nbytes for unit in crossing], self.bucket_bytes):
            units = crossing[run]
            staging = bind_host_copies(units, pin=self.pin_cpu_params)
            self.buckets.append(self._bucket(units, staging))
        for on_host in (True, False):
            units = [unit for unit in fresh if not unit.crosses and unit.on_host is on_host]
            for unit in units:
                unit.bind(None)
            if units:
                self.buckets.append(self._bucket(units, []))

    def _bucket(self, units: list[Unit], staging: list[torch.Tensor]) -> Bucket:
        for unit in units:
            unit.note_weight()
        numbers = sorted({unit.group for unit in units})
        return Bucket(units, self._sub_optimizer(units, numbers), numbers, self.pin_cpu_grads, staging)

    def _sub_optimizer(self, units: list[Unit], numbers: list[int]) -> Optimizer:
        """What steps these units, with the states that its class begins with."""
        cls = self.cpu_optimizer_cls if units[0].on_host else self.gpu_optimizer_cls
        groups = [
            {**self._hyperparameters_of(n), "params": [u.working for u in units if u.group == n]} for n in numbers
        ]
        return cls(groups, **self._known_to(cls))

    def _hyperparameters_of(self, number: int) -> dict[str, Any]:
        return {name: value for name, value in self.param_groups[number].items() if name not in NOT_HYPERPARAMETERS}

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: runs once, with gradients enabled, before any gradient is read (OPT-9).

        Returns:
            What the closure returns.

        Raises:
            SparseGradientError: a gradient is sparse (OPT-45).
            PartialStepError: the step failed when parameters had been stepped already; any other error of a
                step, and of the closure, leaves everything as it was (OPT-47).
        """
        result = None
        if closure is not None:
            require(callable(closure), errors.OptimizerInputError, "closure", closure, "a function, or None", "OPT-9")
            with torch.enable_grad():
                result = closure()
        self._check_gradients()
        with torch.no_grad():
            self._fill_buckets(lambda u: u.parameter.requires_grad or gradient_of(u.parameter) is not None)
            self._hand_over()
            self._step_buckets([bucket for bucket in self.buckets if bucket.has_gradients()])
            self._take_back()
        return result

    def _check_gradients(self) -> None:
        for unit in self.units:
            gradient = gradient_of(unit.parameter)
            if gradient is not None:
                checks.check_gradient(gradient, unit.parameter)

    def _step_buckets(self, buckets: list[Bucket]) -> None:
        crossing = [bucket for bucket in buckets if bucket.crosses]
        staying = [bucket for bucket in buckets if not bucket.crosses]
        begun: list[Bucket] = []
        try:
            if crossing:
                self._step_both_sides(staying, crossing, begun)
            else:
                _step_in_place(staying, begun)
        except Exception as failure:
            if begun:  # OPT-47
                raise _partial_step(begun, failure) from failure
            raise

    def _step_both_sides(self, staying: list[Bucket], crossing: list[Bucket], begun: list[Bucket]) -> None:
        compute, d2h, h2d = self._compute_and_side_streams(crossing[0].units[0].parameter.device)
        ready = compute.record_event()
        try:
            # COPY gradients to the host
            for bucket in crossing:
                bucket.copy_gradients(d2h, ready)
            # STEP the device share beside the copies
            _step_in_place(staying, begun)
            # STEP the host share bucket by bucket, COPY its weights back
            for bucket in crossing:
                bucket.wait_for_host()
                bucket.step(begun)
                bucket.copy_weights(h2d)
        finally:
            # WAIT
            for side in (d2h, h2d):
                compute.wait_event(side.record_event())  # ORD-15

    def _compute_and_side_streams(self, device: torch.device) -> tuple[torch.Stream, torch.Stream, torch.Stream]:
        """The current stream and one per direction; without overlap all three are the current one."""
        compute = torch.accelerator.current_stream(device)
        if not self.overlap_cpu_optimizer_d2h_h2d:
            return compute, compute, compute
        if self._side_streams is None:
            self._side_streams = (torch.Stream(device), torch.Stream(device))
        return compute, *self._side_streams

    def _bound_units(self) -> Iterator[tuple[Unit, dict[torch.Tensor, Any]]]:
        """Each unit that has a working tensor, with the states of its sub-optimizer."""
        return ((unit, bucket.optimizer.state) for bucket in self.buckets for unit in bucket.units)

    def _hand_over(self) -> None:
        """Give the sub-optimizers what the user may have changed: hyperparameters, states, weights."""
        for bucket in self.buckets:
            for group, number in zip(bucket.optimizer.param_groups, bucket.group_numbers, strict=True):
                group.update(self._hyperparameters_of(number))  # OPT-10
        for unit, states in self._bound_units():
            unit.follow_weight()
            if unit.whole and unit.parameter in self.state:
                states[unit.working] = self.state[unit.parameter]

    def _take_back(self) -> None:
        """Show the states of whole parameters as the user's own; remember the weights that were written."""
        for unit, states in self._bound_units():
            unit.note_weight()
            if unit.whole and unit.working in states:
                self.state[unit.parameter] = states[unit.working]  # OPT-36

    # Weights that change from outside

    def update_fp32_param_by_new_param(self) -> None:
        """Let every copy follow the weights, after they were changed from outside; states stay (OPT-24)."""
        with torch.no_grad():
            for unit, _states in self._bound_units():
                unit.read_weight()
                unit.note_weight()

    # State

    def state_dict(self, *, copy: bool = False) -> dict[str, Any]:
        """The state in torch's layout, with ``master_param`` where there is a master (OPT-30).

        Args:
            copy: return copies, safe for an asynchronous save; else tensors are valid until the next step.
        """
        live, self.state = self.state, self._merged_states()
        try:
            result: dict[str, Any] = super().state_dict()
        finally:
            self.state = live
        return deepcopy(result) if copy else result

    def _merged_states(self) -> Any:
        """Each parameter's state with its master, those of its slices put together."""
        slices: dict[torch.Tensor, list[tuple[Unit, dict[str, Any]]]] = {}
        for unit, states in self._bound_units():
            live = self.state if unit.whole and unit.parameter in self.state else None
            state = dict(states.get(unit.working, {}) if live is None else live[unit.parameter])
            if unit.has_master:
                state[MASTER_KEY] = unit.working
            slices.setdefault(unit.parameter, []).append((unit, state))
        merged = {parameter: _merge(parameter, parts) for parameter, parts in slices.items()}
        return defaultdict(dict, {parameter: state for parameter, state in merged.items() if state})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, at any other fraction, partition or placement (OPT-31).

        Groups stay the same objects. States take the dtype and device of what they belong to here.

        Raises:
            StateDictError: groups, sizes or shapes do not fit; nothing has changed then (OPT-32).
            PartialLoadError: the load failed when states had been replaced already; any other error leaves
                everything as it was (OPT-47).
        """
        for prepare in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = prepare(self, state_dict) or state_dict
        elementwise = all(map(checks.is_elementwise, (self.cpu_optimizer_cls, self.gpu_optimizer_cls)))
        parameters = checks.checked_state_dict(state_dict, self.param_groups, elementwise=elementwise)
        groups = deepcopy(state_dict["param_groups"])
        states = {parameters[number]: state for number, state in state_dict["state"].items()}
        with torch.no_grad():
            self._fill_buckets(lambda unit: unit.parameter in states)
            try:
                self._replace(groups, states)
            except Exception as failure:
                seen, required = f"{failure!r} after some states had been replaced", "a load that ends"
                raise errors.PartialLoadError("load", seen=seen, required=required, rule="OPT-47") from failure
        for follow_up in self._optimizer_load_state_dict_post_hooks.values():
            follow_up(self)

    def _replace(self, groups: list[dict[str, Any]], states: dict[torch.Tensor, Any]) -> None:
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name not in NOT_HYPERPARAMETERS})
        self.state.clear()
        for bucket in self.buckets:
            bucket.optimizer.state.clear()
            bucket.optimizer = self._sub_optimizer(bucket.units, bucket.group_numbers)  # OPT-33
        for unit, own in self._bound_units():
            self._load_unit(unit, own, states.get(unit.parameter, {}))
        self._take_back()

    def _load_unit(self, unit: Unit, states: dict[torch.Tensor, Any], state: dict[str, Any]) -> None:
        group = self.param_groups[unit.group]
        on_device_step = bool(group.get("capturable") or group.get("fused"))
        if own := {n: _placed(n, v, unit, on_device_step) for n, v in state.items() if n != MASTER_KEY}:
            states[unit.working] = own
        if unit.has_master and MASTER_KEY in state:
            unit.working.copy_(unit.part(state[MASTER_KEY]).to(unit.working.device))  # OPT-34
        else:
            unit.follow_weight()

    def __getstate__(self) -> dict[str, Any]:
        """Streams, events and pinned memory belong to this process (OPT-46)."""
        what, required = "pickling or copying the optimizer", "state_dict() and load_state_dict()"
        raise errors.UnsupportedError(what, seen=type(self), required=required, rule="OPT-46")


def _merge(parameter: torch.Tensor, parts: list[tuple[Unit, dict[str, Any]]]) -> dict[str, Any]:
    """One state from those of a parameter's slices: their tensors put together on the host."""
    (first, state), *others = parts
    if first.whole:
        return state
    merged: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == first.shape and name != "step":
            whole = torch.empty_like(parameter, dtype=value.dtype, device="cpu")
            for unit, part in ((first, state), *others):
                if name in part:
                    unit.part(whole).copy_(part[name])
            merged[name] = whole
        else:
            merged[name] = value
    return merged


def _placed(name: str, value: Any, unit: Unit, on_device_step: bool) -> Any:
    """A loaded state's part, in a tensor of its own, where the unit's sub-optimizer keeps such a state."""
    if name == "step" and isinstance(value, int | float):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if name == "step":
        device = unit.working.device if on_device_step else torch.device("cpu")
        return value.detach().to(device=device, dtype=torch.float32, copy=True)
    part = unit.part(value) if value.shape == unit.parameter.shape else value
    dtype = unit.dtype if part.is_floating_point() else part.dtype
    if part.shape == unit.working.shape:
        return torch.empty_like(unit.working, dtype=dtype).copy_(part.detach())
    return part.detach().to(device=unit.working.device, dtype=dtype, copy=True)


def _step_in_place(buckets: list[Bucket], begun: list[Bucket]) -> None:
    for bucket in buckets:
        bucket.step_in_place(begun)


def _partial_step(begun: list[Bucket], failure: Exception) -> errors.PartialStepError:
    """The error that says which parameters have been stepped when the last of the buckets failed."""
    *done, last = [[unit.parameter for unit in bucket.units] for bucket in begun]
    stepped = tuple(parameter for parameters in done for parameter in parameters)
    seen = f"{failure!r} after {len(stepped)} parameters were stepped, {len(last)} are in doubt"
    error = errors.PartialStepError("step", seen=seen, required="a step that ends", rule="OPT-47")
    error.stepped, error.in_doubt = stepped, tuple(last)
    return error
