"""What an operator's schema says: which arguments are written, whether the result is a view, what is random."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

Dispatched = Any
"""A torch.ops overload; torch publishes no type for it."""

METADATA_ONLY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Factories that write nothing."""

INDEXING = frozenset(
    {
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index.Tensor,
        aten._unsafe_index_put.default,
    }
)
"""Operators whose index tensors may be on the host."""


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """The facts about one overload that the simulator needs at each call.

    Attributes:
        writes: for each positional argument, whether it is written.
        written_names: names of the written arguments.
        names: names of all arguments.
        is_view: the result aliases an argument and nothing is written.
        returned_arguments: names of the arguments that are returned.
        shape_depends_on_data: the host must wait for the result.
        is_random: draws from the device's generator.
    """

    function: Dispatched
    name: str
    namespace: str
    names: tuple[str, ...]
    writes: tuple[bool, ...]
    written_names: frozenset[str]
    takes_device: bool
    is_view: bool
    return_count: int
    shape_depends_on_data: bool
    is_random: bool


_operators: dict[Dispatched, Operator] = {}


def operator_of(function: Dispatched) -> Operator:
    """The facts about an overload, read from its schema once."""
    operator = _operators.get(function)
    if operator is None:
        operator = _operators[function] = _read_schema(function)
    return operator


def _read_schema(function: Dispatched) -> Operator:
    schema = function._schema
    writes = tuple(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    names = tuple(a.name for a in schema.arguments)
    aliases = any(r.alias_info is not None for r in schema.returns)
    tags = function.tags
    return Operator(
        function=function,
        name=str(function).removeprefix("aten."),
        namespace=function.namespace,
        names=names,
        writes=writes,
        written_names=frozenset(n for n, w in zip(names, writes, strict=True) if w),
        takes_device="device" in names,
        is_view=(aliases and not any(writes)) or _edits_metadata(function),
        return_count=len(schema.returns),
        shape_depends_on_data=torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags,
        is_random=torch.Tag.nondeterministic_seeded in tags,
    )


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments or results; lists are one level deep."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(v for v in value if isinstance(v, torch.Tensor))
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same value with each tensor changed; lists are one level deep."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([change(v) if isinstance(v, torch.Tensor) else v for v in value])
    return value


def _edits_metadata(function: Dispatched) -> bool:
    """Whether an in-place operator changes size, strides or storage but no byte."""
    return function.overloadpacket is aten.set_ or torch.Tag.inplace_view in function.tags
