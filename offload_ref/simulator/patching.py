"""Replacing attributes of torch for a while, and putting them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offload_ref.simulator.errors import NotSimulatedError

_ABSENT = object()
"""Stands for an attribute that its owner did not have itself."""


class Patcher:
    """Replaces attributes, and puts them back in reverse order."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace one attribute."""
        self._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def put_all(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Replace several attributes."""
        for name, value in values.items():
            self.put(owner, name, value)

    def put_methods(self, owner: type, methods: object, names: Iterable[str]) -> None:
        """Make methods of an object methods of ``owner``, whose instance they take as first argument."""
        for name in names:
            self.put(owner, name, as_method(getattr(methods, name)))

    def restore(self) -> None:
        """Put everything back."""
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, which binds to the instance that it is called on; a bound method would not."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__ = function.__name__
    method.__doc__ = function.__doc__
    return method


def ignoring_arguments(function: Callable[[], Any]) -> Callable[..., Any]:
    """A function that may be given a device, or anything else, and goes by the only device there is."""

    def call(*_args: Any, **_kwargs: Any) -> Any:
        return function()

    return call


def constant(value: Any) -> Callable[..., Any]:
    """A function that always returns ``value``."""
    return ignoring_arguments(lambda: value)


def refusing(name: str) -> Callable[..., Any]:
    """A function in place of one that is not simulated."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotSimulatedError(name)

    return refuse


class SimulatedType(type):
    """A class whose call and whose isinstance go to the simulator's own."""

    make: Callable[..., Any]
    instance_type: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance as the simulator does."""
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.instance_type)


def simulated_type(name: str, instance_type: type, make: Callable[..., Any]) -> type:
    """A class called ``name``: calling it calls ``make``, and instances of ``instance_type`` are its own."""
    return SimulatedType(name, (), {"make": staticmethod(make), "instance_type": instance_type})


class _NoInstance:
    """What nothing is an instance of."""


def refusing_type(name: str) -> type:
    """A class in place of one that is not simulated."""
    return simulated_type(name.rsplit(".", 1)[-1], _NoInstance, refusing(name))
