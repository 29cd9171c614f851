"""Bad inputs as rows of a table, and the check that each is refused by its class, with its rule and the value seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from snapshots import frozen

from offload_ref.errors import OffloadError


def _nothing(_subject: object) -> None:
    """Leave the subject as it is."""


@dataclass(frozen=True)
class Case:
    """A bad input.

    Attributes:
        call: the call that is refused, on what the test gives it.
        error: the very class of the error.
        rule: id of the requirement that refuses.
        seen: the value that the error shows.
        prepare: puts the bad value where the call meets it; that is no change made by the call.
    """

    call: Callable[[Any], object]
    error: type[OffloadError]
    rule: str
    seen: object
    prepare: Callable[[Any], object] = _nothing


def case(
    name: str,
    call: Callable[[Any], object],
    error: type[OffloadError],
    rule: str,
    seen: object,
    prepare: Callable[[Any], object] = _nothing,
) -> Any:
    """A row for ``parametrize``, marked with its rule."""
    return pytest.param(Case(call, error, rule, seen, prepare), id=name, marks=pytest.mark.requirement(rule))


def assert_refused(refused: Case, subject: object) -> None:
    """The call raises the very class, whose text has the rule and the value seen."""
    with pytest.raises(refused.error) as refusal:
        refused.call(subject)
    error = refusal.value
    assert type(error) is refused.error
    assert error.rule == refused.rule
    assert error.seen is refused.seen or frozen(error.seen) == frozen(refused.seen)
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert f"[{refused.rule}]" in said
    assert f"got {error.seen!r}" in said


class Plain:
    """A call of a function that has no subject besides its arguments."""

    def __init__(self, function: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
        self.function, self.arguments, self.keywords = function, arguments, keywords

    def __call__(self, _subject: object) -> object:
        return self.function(*self.arguments, **self.keywords)


def assert_arguments_kept(refused: Case, good: Callable[[], object]) -> None:
    """The call is refused, its arguments are as before, and good calls return what they returned."""
    call = refused.call
    assert isinstance(call, Plain)
    before = frozen([call.arguments, call.keywords]), frozen(good())
    assert_refused(refused, None)
    assert (frozen([call.arguments, call.keywords]), frozen(good())) == before
