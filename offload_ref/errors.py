"""One exception class per reason; each message says the value seen, the value required and the rule's id."""

from __future__ import annotations

from numbers import Integral


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


def require(fits: bool, reason: type[OffloadError], what: str, seen: object, required: str, rule: str) -> None:
    """Raise ``reason`` unless the value fits."""
    if not fits:
        raise reason(what, seen=seen, required=required, rule=rule)


def whole_number(value: object) -> int | None:
    """An integer of any kind as an int, or None; a bool is a switch, not a count."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


class OffloadValueError(OffloadError, ValueError):
    """A value is outside what its requirement admits."""


class FractionError(OffloadValueError):
    """The offload fraction is no number in [0, 1]."""


class PartitionModeError(OffloadValueError):
    """The partition is neither ``greedy`` nor ``exact``, or it does not suit the optimizer class."""


class SizeError(OffloadValueError):
    """A number of elements is negative, or sequences that belong together differ in length."""


class DtypeError(OffloadValueError):
    """A dtype has no size that is known."""


class LayerCountError(OffloadValueError):
    """The number of offloaded layers, or of layers met, does not suit the number of layers declared."""


class OffloadTypeError(OffloadError, TypeError):
    """A value is of the wrong kind."""


class InPlaceEditError(OffloadError, RuntimeError):
    """Backward needs a saved tensor that was modified in place since it was saved."""


class OptimizerInputError(OffloadValueError):
    """The optimizer is given no group, or what is no leaf parameter."""


class HostStepError(OffloadError, RuntimeError):
    """The host's optimizer class cannot step host tensors."""


class SparseGradientError(OffloadError, RuntimeError):
    """A gradient is sparse."""


class StateDictError(OffloadValueError):
    """A state dict does not fit the optimizer's groups and parameters."""


class PartialStepError(OffloadError, RuntimeError):
    """A step failed when some parameters had been stepped already; the failure is its cause.

    Attributes:
        stepped: the parameters that have made the step.
        in_doubt: the parameters that were being stepped; all others are as they were.
    """

    stepped: tuple[object, ...] = ()
    in_doubt: tuple[object, ...] = ()


class PartialLoadError(OffloadError, RuntimeError):
    """A load failed when some states had been replaced already; the failure is its cause."""


class NoAcceleratorError(OffloadError, RuntimeError):
    """There is neither an accelerator nor an active simulator."""


class UnsupportedError(OffloadError, NotImplementedError):
    """An option or a composition that this version refuses rather than ignores."""


class CorpusError(OffloadValueError):
    """The text that the demo learns from is not where it should be."""


class DemoSettingError(OffloadValueError):
    """A setting of the demo is out of range, or two settings contradict each other."""


class ConfigTypeError(OffloadError, TypeError):
    """A configuration value is of another type than its field."""


class UnknownFieldError(OffloadValueError):
    """An override names no field of the configuration."""


class OverrideSyntaxError(OffloadValueError):
    """An override is no assignment of a value to a field."""


class ConstraintError(OffloadValueError):
    """A configuration violates a row of the constraints table.

    Its text is the row's exact message and nothing else; what every error of this package says besides
    stands in its attributes and in a note under the traceback.
    """

    def __init__(self, message: str, *, seen: object, required: str, rule: str) -> None:
        super().__init__(message, seen=seen, required=required, rule=rule)
        self.args = (message,)
        self.add_note(f"got {seen!r}, required {required} [{rule}]")


class OffloadedLayersError(ConstraintError, LayerCountError):
    """As many layers are to be offloaded as the model has, more, or fewer than none."""


class PipelineParallelError(ConstraintError):
    """Activation offloading meets more than one pipeline stage."""


class RecomputationError(ConstraintError):
    """Activation offloading meets activation recomputation."""


class FineGrainedOffloadError(ConstraintError, AssertionError):
    """Activation offloading by layer meets offloading by module; Megatron asserts this."""


class PagedStashError(ConstraintError):
    """Activation offloading meets the paged stash of expert activations."""


class CudaGraphError(ConstraintError):
    """Activation offloading meets CUDA graphs that cover less than an iteration."""


class FullLayerCudaGraphError(ConstraintError, AssertionError):
    """CUDA graphs of whole TransformerEngine layers meet offloading or recomputation; Bridge asserts this."""


class ConfigFractionError(ConstraintError, FractionError):
    """The configured offload fraction is no number in [0, 1]."""


class DistributedOptimizerError(ConstraintError):
    """Optimizer offloading lacks the distributed optimizer."""


class MegatronWrappingError(ConstraintError):
    """Optimizer offloading meets a request for the bare optimizer."""


class WeightDecayError(ConstraintError, AssertionError):
    """Optimizer offloading meets weight decay inside the gradient; Megatron asserts this."""


class OffloadWarning(UserWarning):
    """A setting is legal and yet surely not meant; carries what `OffloadError` carries."""

    def __init__(self, message: str, *, seen: object, required: str, rule: str) -> None:
        super().__init__(f"{message} [{rule}]")
        self.seen = seen
        self.required = required
        self.rule = rule


class NothingOffloadedWarning(OffloadWarning):
    """A master switch is on, but nothing is offloaded."""


class NoOverlapWarning(OffloadWarning):
    """So many layers are offloaded that no reload overlaps with compute."""
