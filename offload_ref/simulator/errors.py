"""The simulator's own errors."""

from __future__ import annotations


class NotSimulatedError(NotImplementedError):
    """The program asked the simulated accelerator for something that it does not simulate.

    Attributes:
        name: the torch name, or the operator.
    """

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(f"{name} is not simulated{': ' + why if why else ''}")
        self.name = name
