"""One exception class per reason; each message says the value seen, the value required and the rule's id."""

from __future__ import annotations


class OffloadError(Exception):
    """Base of every error of this package.

    Attributes:
        seen: the offending value.
        required: what the value has to be, in words.
        rule: id of the requirement in ``spec/`` that refuses it.
    """

    def __init__(self, what: str, *, seen: object, required: str, rule: str) -> None:
        super().__init__(f"{what}: got {seen!r}, required {required} [{rule}]")
        self.seen = seen
        self.required = required
        self.rule = rule


class OffloadValueError(OffloadError, ValueError):
    """A value is outside what its requirement admits."""


class FractionError(OffloadValueError):
    """The offload fraction is no number in [0, 1]."""


class PartitionModeError(OffloadValueError):
    """The partition is neither ``greedy`` nor ``exact``, or it does not suit the optimizer class."""


class SizeError(OffloadValueError):
    """A number of elements is negative, or sequences that belong together differ in length."""


class LayerCountError(OffloadValueError):
    """The number of offloaded layers, or of layers met, does not suit the number of layers declared."""


class NoAcceleratorError(OffloadError, RuntimeError):
    """There is neither an accelerator nor an active simulator."""


class UnsupportedError(OffloadError, NotImplementedError):
    """An option or a composition that this version refuses rather than ignores."""
