"""Which parameters' optimizer states live on the host: pure arithmetic on numbers of elements.

Two rules answer the same question. ``greedy`` is Megatron's comparison of float64 numbers, bit for bit, over
whole parameters; ``exact`` reads the fraction as the decimal that was written and splits one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil
from numbers import Rational, Real

from offload_ref.errors import FractionError, PartitionModeError, SizeError, require, whole_number

__all__ = ["MODES", "Share", "check_fraction", "exact", "greedy", "into_runs", "partition"]


@dataclass(frozen=True, slots=True)
class Share:
    """How one parameter divides: elements [0, host_elements) on the host, the rest on the device.

    What is neither ``whole_host`` nor ``split`` is the device's. A parameter without elements has no count
    that could tell its side, so ``empty_on_host`` does.
    """

    host_elements: int
    numel: int
    empty_on_host: bool = False

    @property
    def device_elements(self) -> int:
        """Number of elements that stay on the device."""
        return self.numel - self.host_elements

    @property
    def whole_host(self) -> bool:
        """Whether every element is the host's."""
        return self.host_elements == self.numel if self.numel else self.empty_on_host

    @property
    def split(self) -> bool:
        """Whether both sides own elements."""
        return 0 < self.host_elements < self.numel


def check_fraction(fraction: object) -> float:
    """Return the offload fraction as a float in [0, 1], or refuse it.

    Python and numpy integers and floats, ``Decimal`` and ``Fraction`` are numbers. A narrow float means the
    decimal that it prints: ``float32(0.1)`` is 0.1 and not 0.10000000149011612. A bool is a switch and a
    string is text: neither is a number.

    Raises:
        FractionError: the value is no number, not finite, below 0 or above 1.
    """
    return float(_intended(fraction))


def greedy(sizes: Sequence[int], fraction: object, counted: Sequence[bool] | None = None) -> list[Share]:
    """Divide as Megatron does: whole parameters, in order, while the host's elements are below the threshold.

    Args:
        sizes: elements of each device parameter, in the order of the groups.
        fraction: the part of the counted elements that the host is to own, in [0, 1].
        counted: ``False`` marks a frozen parameter; all are counted by default.

    The threshold is the float64 product of fraction and total, so the last parameter taken may overshoot it.
    """
    number, counts = check_fraction(fraction), _check_sizes(sizes, counted)
    threshold = number * _total(sizes, counts)
    shares, seen = [], 0
    for size, counts_here in zip(sizes, counts, strict=True):
        on_host = seen < threshold or number == 1  # OPT-1
        shares.append(_whole(size, on_host=on_host))
        seen += size if on_host and counts_here else 0
    return shares


def exact(sizes: Sequence[int], fraction: object, counted: Sequence[bool] | None = None) -> list[Share]:
    """Divide so that the host owns the fraction to within one element: a flat slice splits one parameter.

    The host owns the smallest whole number of elements that is not below fraction x total, computed from the
    fraction's decimal digits without rounding. Arguments are those of `greedy`.
    """
    number, counts = _intended(fraction), _check_sizes(sizes, counted)
    threshold = ceil(number * _total(sizes, counts))  # OPT-2
    shares, seen = [], 0
    for size, counts_here in zip(sizes, counts, strict=True):
        if counts_here and size:
            share = Share(min(size, threshold - seen), size)
            seen += share.host_elements
        else:
            share = _whole(size, on_host=seen < threshold or number == 1)
        shares.append(share)
    return shares


MODES: dict[str, Callable[..., list[Share]]] = {"greedy": greedy, "exact": exact}
"""Name of a partition -> its rule; ``greedy`` is the default everywhere."""


def partition(
    sizes: Sequence[int], fraction: object, mode: str = "greedy", counted: Sequence[bool] | None = None
) -> list[Share]:
    """Divide by the rule named ``mode``; arguments are those of `greedy`.

    Raises:
        PartitionModeError: ``mode`` names no rule.
        FractionError: the fraction is no number in [0, 1].
        SizeError: a size is negative, or ``counted`` has another length than ``sizes``.
    """
    require(mode in tuple(MODES), PartitionModeError, "partition", mode, "'greedy' or 'exact'", "CFG-5")
    return MODES[mode](sizes, fraction, counted)


def into_runs(nbytes: Sequence[int], most: int) -> list[slice]:
    """Split a sequence into runs of at most ``most`` bytes each, but of at least one entry."""
    runs: list[slice] = []
    filled = 0
    for position, size in enumerate(nbytes):
        if not runs or filled + size > most:
            runs.append(slice(position, position))
            filled = 0
        runs[-1] = slice(runs[-1].start, position + 1)
        filled += size
    return runs


def _intended(fraction: object) -> Fraction:
    """Return the number that was meant, exactly, or refuse it."""
    try:
        number = _decimal(fraction)
    except (TypeError, ValueError):
        number = None
    if number is None or not 0 <= number <= 1:  # OPT-3
        raise FractionError("offload fraction", seen=fraction, required="a number in [0, 1]", rule="OPT-3")
    return number


def _decimal(fraction: object) -> Fraction | None:
    """Return the decimal value of a number, or None for what is no number."""
    if isinstance(fraction, bool) or not isinstance(fraction, Real | Decimal):
        return None
    if isinstance(fraction, Rational):
        return Fraction(int(fraction.numerator), int(fraction.denominator))
    return Fraction(str(fraction))


def _check_sizes(sizes: Sequence[int], counted: Sequence[bool] | None) -> Sequence[bool]:
    """Return which parameters are counted, one entry per size."""
    require(isinstance(sizes, Sequence), SizeError, "sizes", sizes, "a list of numbers of elements", "OPT-1")
    for size in sizes:
        number = whole_number(size)
        fits = number is not None and number >= 0
        require(fits, SizeError, "elements of a parameter", size, "a whole number, at least 0", "OPT-1")
    if counted is None:
        return [True] * len(sizes)
    require(isinstance(counted, Sequence), SizeError, "counted", counted, "a list of True and False", "OPT-4")
    for entry in counted:
        require(isinstance(entry, bool), SizeError, "entry of counted", entry, "True or False", "OPT-4")
    require(len(counted) == len(sizes), SizeError, "entries of counted", len(counted), f"{len(sizes)}", "OPT-4")
    return counted


def _total(sizes: Sequence[int], counted: Sequence[bool]) -> int:
    """Return the number of counted elements."""
    return sum(size for size, counts in zip(sizes, counted, strict=True) if counts)  # OPT-4


def _whole(size: int, *, on_host: bool) -> Share:
    """Return the share of a parameter that is not split."""
    return Share(size if on_host else 0, size, empty_on_host=on_host and size == 0)  # OPT-5
