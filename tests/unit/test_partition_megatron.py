"""The greedy rule against unmodified megatron-core, where it is installed."""

import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_ref.partition import greedy

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed here")


class ShapeOnly:
    """Stands for a parameter on the device: a number of elements, of which every copy is one more."""

    is_cuda = True

    def __init__(self, size: int) -> None:
        self.size = size

    def numel(self) -> int:
        """Return the number of elements."""
        return self.size

    def detach(self) -> "ShapeOnly":
        """Return a copy, as every method does that megatron-core calls on the way to the host."""
        return ShapeOnly(self.size)

    clone = cpu = pin_memory = detach


@pytest.fixture(scope="module")
def megatron_optimizer() -> Any:
    """megatron-core's class; importing it warns of what else is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.optimizer.cpu_offloading import hybrid_optimizer  # noqa: PLC0415 - optional package
    return hybrid_optimizer.HybridDeviceOptimizer


def taken_by_megatron(optimizer_class: Any, sizes: list[int], fraction: float) -> list[bool]:
    """Return which parameters the class itself puts on the host, two parameters to a group."""
    parameters = [ShapeOnly(size) for size in sizes]
    groups = [{"params": parameters[start : start + 2]} for start in range(0, len(parameters), 2)]
    optimizer = SimpleNamespace(param_groups=groups, param_update_in_fp32=False)
    host_copies = optimizer_class._get_sub_optimizer_param_groups(optimizer, fraction)[2]
    return [parameter in host_copies for parameter in parameters]


@pytest.mark.requirement("OPT-1")
@given(st.lists(st.integers(0, 10**12), max_size=12), st.floats(0, 1, exclude_max=True))
def test_greedy_lands_where_megatron_lands(megatron_optimizer: Any, sizes: list[int], fraction: float) -> None:
    """At every fraction below 1 both put the same parameters on the host."""
    ours = [share.whole_host for share in greedy(sizes, fraction)]
    assert ours == taken_by_megatron(megatron_optimizer, sizes, fraction)


@pytest.mark.requirement("OPT-1")
def test_greedy_shares_the_five_misses(megatron_optimizer: Any) -> None:
    """Over the 99 percent fractions of 100 unit tensors both land alike, misses included."""
    for percent in range(1, 100):
        ours = [share.whole_host for share in greedy([1] * 100, percent / 100)]
        assert ours == taken_by_megatron(megatron_optimizer, [1] * 100, percent / 100)
