"""Every error says the value seen, the value required and the rule, in its text or beside it."""

import inspect

import pytest

from offload_ref import errors

OWN = {name: value for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
CLASSES = {name: cls for name, cls in OWN.items() if inspect.isclass(cls)}
REASONS = sorted(name for name, cls in CLASSES.items() if issubclass(cls, errors.OffloadError))


@pytest.mark.quick
def test_the_module_holds_errors_and_warnings_alone() -> None:
    """Each class is an `OffloadError` or an `OffloadWarning`, and has a reason of its own in one line."""
    for cls in CLASSES.values():
        assert issubclass(cls, errors.OffloadError | errors.OffloadWarning)
    reasons = [str(cls.__doc__).splitlines()[0] for cls in CLASSES.values()]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.quick
@pytest.mark.parametrize("name", REASONS)
def test_an_error_says_what_was_seen_and_what_is_required(name: str) -> None:
    """Text, attributes and notes together hold the value seen, the value required and the rule."""
    error = vars(errors)[name]("fraction", seen=1.5, required="a number in [0, 1]", rule="OPT-3")
    assert (error.seen, error.required, error.rule) == (1.5, "a number in [0, 1]", "OPT-3")
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    for part in ("fraction", "1.5", "a number in [0, 1]", "[OPT-3]"):
        assert part in said


@pytest.mark.quick
@pytest.mark.parametrize("name", REASONS)
def test_an_error_is_caught_by_its_builtin_kind(name: str) -> None:
    """Every reason is of a built-in kind too, which code that knows nothing of this package catches."""
    kinds = (ValueError, TypeError, RuntimeError)
    assert name == "OffloadError" or issubclass(CLASSES[name], kinds)
