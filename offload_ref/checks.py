"""What the optimizer is given, checked before anything changes: options, classes, parameters, gradients, states.

Whoever reads how offloading works can skip this file: nothing here moves a tensor or steps one.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.optim import Optimizer

from offload_ref import errors
from offload_ref.errors import require, whole_number
from offload_ref.partition import MODES

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD", "Rprop"}
)
"""Classes of torch.optim that treat each element alone, so that a parameter may be split."""

ONE_ELEMENT_STATES = frozenset({"step", "mu_product", "eta", "mu"})
"""States of these classes that are one number for the whole parameter."""

MASTER_KEY = "master_param"
"""Megatron's name for the master in a parameter's state."""

OptimizerClass = Callable[..., Optimizer]
"""A torch.optim class, or a function that builds an optimizer from groups."""

Groups = list[tuple[dict[str, Any], list[Any]]]
"""Param groups as given, each with its members as a list."""


# Options and classes


def check_switches(**switches: object) -> None:
    """Take True and False alone (OPT-43)."""
    for name, value in switches.items():
        require(isinstance(value, bool), errors.OffloadTypeError, name, value, "True or False", "OPT-43")


def check_partition(mode: object, classes: Sequence[OptimizerClass], elementwise: bool | None) -> None:
    """Take a partition by its name; ``exact`` for classes that may be split."""
    known, required = mode in tuple(MODES), f"one of {', '.join(MODES)}"
    require(known, errors.PartitionModeError, "partition", mode, required, "OPT-42")
    required = f"one of {sorted(ELEMENTWISE)}, or elementwise=True"
    for cls in classes if mode == "exact" and not elementwise else ():
        fits = is_elementwise(cls) and elementwise is None
        require(fits, errors.PartitionModeError, "class for partition='exact'", cls, required, "OPT-42")


def is_elementwise(cls: OptimizerClass) -> bool:
    """Whether the class is known to treat each element alone."""
    return getattr(cls, "__module__", "").startswith("torch.optim") and getattr(cls, "__name__", "") in ELEMENTWISE


def check_classes(classes: Sequence[object]) -> None:
    """Take classes of optimizers, and functions."""
    required = "a torch.optim class, or a function that builds an optimizer"
    for cls in classes:
        fits = issubclass(cls, Optimizer) if isinstance(cls, type) else callable(cls)
        require(fits, errors.OffloadTypeError, "optimizer class", cls, required, "OPT-41")


def check_optimizer(built: object, cls: OptimizerClass) -> None:
    """Take what a class or function has built if it is an optimizer."""
    required = "a function that builds an optimizer"
    require(isinstance(built, Optimizer), errors.OffloadTypeError, "optimizer class", cls, required, "OPT-41")


def keywords_of(cls: OptimizerClass, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keywords that the class's signature takes."""
    parameters = inspect.signature(cls).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in keywords.items() if takes_all or name in parameters}


def check_keywords(keywords: Mapping[str, Any], known: Collection[str], defaults: Mapping[str, Any]) -> None:
    """Refuse a keyword that no class knows, unless it states what the class does anyway."""
    for name, value in keywords.items():
        states_a_fact = name in defaults and type(value) is type(defaults[name]) and value == defaults[name]
        seen, required = f"{name}={value!r}", "a keyword of the optimizer classes"
        require(name in known or states_a_fact, errors.OffloadTypeError, "optimizer keyword", seen, required, "OPT-15")


def check_host_step(cls: OptimizerClass, keywords: dict[str, Any], dimensions: Iterable[int]) -> None:
    """Step one host element of each number of dimensions, to learn now whether the class can."""
    for number in set(dimensions):
        parameter = torch.zeros([1] * number, requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        try:
            cls([parameter], **keywords).step()
        except Exception as failure:
            required = "a class that steps host tensors"
            raise errors.HostStepError("host optimizer class", seen=cls, required=required, rule="OPT-41") from failure


# Parameters


def checked_groups(params: Any) -> Groups:
    """The very groups that were given, each with a list of its members: distinct leaf tensors (OPT-40)."""
    seen = type(params) if isinstance(params, torch.Tensor) else params
    fits = isinstance(params, Iterable) and not isinstance(params, torch.Tensor)
    _require_input(fits, "params", seen, "an iterable of tensors or groups")
    listed = list(params)
    _require_input(bool(listed), "params", [], "at least one parameter or group")
    groups = listed if isinstance(listed[0], dict) else [{"params": listed}]
    given = [(group, _members(group)) for group in groups]
    everyone = [member for _, members in given for member in members]
    _check_members(everyone, set(), named=any(isinstance(member, tuple) for member in everyone[:1]))
    return given


def checked_group(group: Any, others: Sequence[dict[str, Any]]) -> Groups:
    """A further group with a list of its members, none of which the other groups have."""
    members = _members(group)
    taken = {id(p) for other in others for p in other["params"]}
    first_is_named = any(isinstance(member, tuple) for member in members[:1])
    _check_members(members, taken, named=any("param_names" in other for other in others) if taken else first_is_named)
    return [(group, members)]


def parameter_of(member: Any) -> Any:
    """The parameter of a group's member, which may be a (name, parameter) pair."""
    return member[1] if isinstance(member, tuple) else member


def _members(group: Any) -> list[Any]:
    _require_input(isinstance(group, dict) and "params" in group, "param group", group, "a dict with params")
    members = group["params"]
    if isinstance(members, torch.Tensor):
        return [members]
    fits = isinstance(members, Iterable) and not isinstance(members, AbstractSet)
    _require_input(fits, "params of a group", members, "a tensor, or tensors in an order")
    return list(members)


def _check_members(members: Sequence[Any], taken: set[int], *, named: bool) -> None:
    """Each member is a leaf tensor of its own, whose id is not taken yet, and either all have names or none has."""
    for member in members:
        parameter = _checked_parameter(member)
        _require_input(id(parameter) not in taken, "parameter", "a parameter twice", "distinct parameters")
        taken.add(id(parameter))
        seen = member[0] if isinstance(member, tuple) else "a parameter without a name"
        fits = isinstance(member, tuple) is named
        _require_input(fits, "named parameters", seen, "names for all parameters, or for none")


def _checked_parameter(member: Any) -> torch.Tensor:
    if isinstance(member, tuple):
        fits = len(member) == len(("name", "parameter")) and isinstance(member[0], str)
        _require_input(fits, "parameter", member, "a tensor, or a pair of name and tensor")
    parameter: torch.Tensor = parameter_of(member)
    _require_input(isinstance(parameter, torch.Tensor), "parameter", parameter, "a leaf tensor")
    _require_input(parameter.is_leaf, "parameter", "a non-leaf tensor", "a leaf tensor")
    _require_input(parameter.layout is torch.strided, "parameter", parameter.layout, "a dense tensor")
    _require_input(parameter.device.type != "meta", "parameter", "meta", "a tensor with memory")
    _require_input(not parameter.is_inference(), "parameter", "an inference tensor", "a tensor that can be trained")
    return parameter


def _require_input(fits: bool, what: str, seen: object, required: str) -> None:
    require(fits, errors.OptimizerInputError, what, seen, required, "OPT-40")


# Gradients


def check_gradient(gradient: Any, parameter: torch.Tensor) -> None:
    """Take a dense gradient like its parameter: autograd sees to ``grad``, but not to ``decoupled_grad`` (OPT-49)."""
    if isinstance(gradient, torch.Tensor) and gradient is parameter.grad and gradient.layout is torch.strided:
        return

    def require_that(fits: bool, seen: object, required: str) -> None:
        require(fits, errors.OptimizerInputError, "decoupled_grad", seen, required, "OPT-49")

    require_that(isinstance(gradient, torch.Tensor), gradient, "a tensor")
    layout = gradient.layout
    require(layout is torch.strided, errors.SparseGradientError, "gradient", layout, "dense gradients", "OPT-45")
    require_that(gradient.shape == parameter.shape, tuple(gradient.shape), f"shape {tuple(parameter.shape)}")
    require_that(gradient.device == parameter.device, gradient.device.type, f"a tensor on {parameter.device}")
    fits = gradient.is_complex() if parameter.is_complex() else gradient.is_floating_point()
    require_that(fits, gradient.dtype, f"numbers of the kind of {parameter.dtype}")


# State dicts


def checked_state_dict(
    state_dict: Any, groups: Sequence[dict[str, Any]], *, elementwise: bool
) -> dict[int, torch.Tensor]:
    """The parameter of each number in the state dict, if the whole of it fits the groups."""
    _fits(isinstance(state_dict, Mapping), "state_dict", state_dict, "a dict")
    keys = sorted(map(str, state_dict))
    _fits({"state", "param_groups"} <= set(keys), "keys", keys, "state and param_groups")
    numbers = _checked_numbers(state_dict["param_groups"], [len(group["params"]) for group in groups])
    listed = [p for group in groups for p in group["params"]]
    parameters = dict(zip(numbers, listed, strict=True))
    states = state_dict["state"]
    _fits(isinstance(states, Mapping), "state", states, "a dict")
    for number, state in states.items():
        _fits(isinstance(number, int) and number in parameters, "parameter number", number, f"one of {numbers}")
        _fits(isinstance(state, Mapping), f"state of parameter {number}", state, "a dict")
        for name, value in state.items():
            _check_state(name, f"{name} of parameter {number}", value, parameters[number], elementwise)
    return parameters


def _checked_numbers(groups: Any, ours: list[int]) -> list[int]:
    """The numbers of all parameters, if the groups have as many as ours."""
    _fits(isinstance(groups, list | tuple), "param_groups", groups, "a list of groups")
    for group in groups:
        _fits(isinstance(group, Mapping) and "params" in group, "param group", group, "a dict with params")
        _fits(isinstance(group["params"], list | tuple), "params", group["params"], "a list of numbers")
    theirs = [len(group["params"]) for group in groups]
    _fits(theirs == ours, "parameters in each group", theirs, str(ours))
    numbers = [number for group in groups for number in group["params"]]
    for number in numbers:
        _fits(whole_number(number) is not None, "parameter number", number, "a whole number")
    times = Counter(numbers)
    for group in groups:
        distinct = all(times[number] == 1 for number in group["params"])
        _fits(distinct, "params", group["params"], "each number once")
    return numbers


def _check_state(name: str, what: str, value: Any, parameter: torch.Tensor, elementwise: bool) -> None:
    """The step is a count; masters, and other states of element-wise classes, have the parameter's shape."""
    if name == "step":
        _check_count(what, value)
    elif name == MASTER_KEY or (elementwise and name not in ONE_ELEMENT_STATES):
        if value is None and name == "momentum_buffer":  # SGD's before its first step with momentum
            return
        _fits(isinstance(value, torch.Tensor), what, value, "a tensor")
        _fits(value.layout is torch.strided, what, value.layout, "a dense tensor")
        _fits(value.device.type != "meta", what, value.device.type, "a tensor with memory")
        _fits(value.is_complex() <= parameter.is_complex(), what, value.dtype, "real numbers")
        _fits(value.shape == parameter.shape, f"shape of {what}", tuple(value.shape), str(tuple(parameter.shape)))


def _check_count(what: str, value: Any) -> None:
    required = "a number of steps, at least 0"
    if isinstance(value, torch.Tensor):
        _fits(value.numel() == 1 and not value.is_complex(), what, tuple(value.shape), required)
        value = value.item()
    fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    _fits(fits, what, value, required)


def _fits(fits: bool, what: str, seen: object, required: str) -> None:
    require(fits, errors.StateDictError, f"state_dict: {what}", seen, required, "OPT-32")
