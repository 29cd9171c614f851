"""The two partition rules: where Megatron lands, and where the fraction was meant to land."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_ref.errors import FractionError
from offload_ref.partition import MODES, Share, check_fraction, exact, greedy, into_runs, partition

SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 50), st.integers(1, 10**9)), max_size=20)
"""Elements per parameter: empty, small and large ones."""
FRACTIONS = st.one_of(st.floats(0, 1), st.integers(0, 100).map(lambda percent: percent / 100), st.just(0.1 * 3))
"""Fractions as users write them, and as arithmetic makes them."""
FLOAT_MISSES = {7: 8, 14: 15, 28: 29, 55: 56, 56: 57}
"""Percent -> what the float comparison gives of 100 unit tensors, where that is not the percentage."""


def host_elements(shares: list[Share]) -> int:
    """Return how many elements the host owns."""
    return sum(share.host_elements for share in shares)


def on_host(shares: list[Share]) -> list[bool]:
    """Return which parameters are wholly on the host."""
    return [share.whole_host for share in shares]


def megatron_walk(sizes: list[int], fraction: float) -> list[bool]:
    """Return which parameters megatron-core's comparison takes, written out over numpy's float64."""
    threshold = np.float64(sum(sizes)) * np.float64(fraction)
    taken: list[bool] = []
    for _ in sizes:
        before = np.float64(sum(size for size, took in zip(sizes, taken, strict=False) if took))
        taken.append(bool(before < threshold))
    return taken


@pytest.mark.quick
@pytest.mark.requirement("OPT-1")
@pytest.mark.parametrize("percent", range(1, 100))
def test_greedy_lands_where_float64_lands(percent: int) -> None:
    """Of 100 unit tensors the float comparison takes one too many at five of the 99 percent fractions."""
    assert host_elements(greedy([1] * 100, percent / 100)) == FLOAT_MISSES.get(percent, percent)


@pytest.mark.quick
@pytest.mark.requirement("OPT-2")
@pytest.mark.parametrize("percent", range(1, 100))
def test_exact_lands_on_the_intent(percent: int) -> None:
    """Of 100 unit tensors the decimal value takes exactly the percentage."""
    assert host_elements(exact([1] * 100, percent / 100)) == percent


@pytest.mark.quick
@pytest.mark.requirement("OPT-1")
@pytest.mark.parametrize(
    ("sizes", "fraction", "expected"),
    [
        pytest.param([1000, 10], 0.01, [True, False], id="large-first-overshoots"),
        pytest.param([10, 1000], 0.01, [True, True], id="large-second-overshoots"),
        pytest.param([100] * 4, 0.26, [True, True, False, False], id="just-above-one"),
        pytest.param([100] * 4, 0.25, [True, False, False, False], id="just-one"),
        pytest.param([1] * 10, 0.1 * 3, [True] * 4 + [False] * 6, id="float-above-three-tenths"),
        pytest.param([1] * 10, 0.3, [True] * 3 + [False] * 7, id="three-tenths"),
        pytest.param([0, 5, 0], 0.5, [True, True, False], id="empty-before-and-after"),
        pytest.param([], 0.5, [], id="none"),
    ],
)
def test_greedy_cases(sizes: list[int], fraction: float, expected: list[bool]) -> None:
    """A whole parameter goes to the host while the elements so far are below the threshold."""
    assert on_host(greedy(sizes, fraction)) == expected


@pytest.mark.requirement("OPT-1")
@given(SIZES, FRACTIONS)
def test_greedy_is_the_float64_walk(sizes: list[int], fraction: float) -> None:
    """At every fraction below 1 the walk is the float64 comparison bit for bit."""
    if fraction < 1:
        assert on_host(greedy(sizes, fraction)) == megatron_walk(sizes, fraction)


@pytest.mark.requirement("OPT-1")
@given(SIZES, FRACTIONS)
def test_greedy_takes_a_prefix_of_whole_parameters(sizes: list[int], fraction: float) -> None:
    """Nothing is split, and what has elements goes to the host only before what stays."""
    shares = greedy(sizes, fraction)
    assert not any(share.split for share in shares)
    taken = on_host(shares)
    assert taken == sorted(taken, reverse=True)


@pytest.mark.quick
@pytest.mark.requirement("OPT-2")
@pytest.mark.parametrize(
    ("sizes", "fraction", "expected"),
    [
        pytest.param([1000, 10], 0.01, [11, 0], id="split-first"),
        pytest.param([10, 1000], 0.01, [10, 1], id="split-second"),
        pytest.param([1] * 10, 0.1, [1] + [0] * 9, id="tenth-is-one"),
        pytest.param([1] * 7, Fraction(5, 7), [1] * 5 + [0] * 2, id="ratio"),
        pytest.param([3], Decimal("0.34"), [2], id="decimal"),
        pytest.param([1] * 10, np.float32(0.1), [1] + [0] * 9, id="float32"),
        pytest.param([10], 5e-324, [1], id="smallest-float"),
        pytest.param([10], 0, [0], id="zero"),
        pytest.param([10, 20], 1, [10, 20], id="one"),
    ],
)
def test_exact_cases(sizes: list[int], fraction: float, expected: list[int]) -> None:
    """The host owns the smallest whole number of elements not below the threshold, in order."""
    assert [share.host_elements for share in exact(sizes, fraction)] == expected


@pytest.mark.requirement("OPT-2")
@given(SIZES, FRACTIONS)
def test_exact_is_the_fraction_to_within_one_element(sizes: list[int], fraction: float) -> None:
    """The host share is at least the product and less than one element above it; one parameter is split."""
    shares = exact(sizes, fraction)
    meant = Fraction(repr(float(fraction))) * sum(sizes)
    assert meant <= host_elements(shares) < meant + 1
    assert sum(share.split for share in shares) <= 1
    filled = [share.host_elements / share.numel for share in shares if share.numel]
    assert filled == sorted(filled, reverse=True)


@pytest.mark.quick
@pytest.mark.requirement("OPT-3")
@pytest.mark.parametrize("mode", sorted(MODES))
@given(sizes=SIZES)
def test_the_ends_of_the_range(mode: str, sizes: list[int]) -> None:
    """Fraction 0 puts nothing on the host, and fraction 1 everything."""
    assert all((share.whole_host, share.split) == (False, False) for share in partition(sizes, 0.0, mode))
    assert all(share.whole_host for share in partition(sizes, 1.0, mode))


@pytest.mark.requirement("OPT-1", "OPT-2")
@given(SIZES, FRACTIONS, FRACTIONS)
def test_more_fraction_is_more_host(sizes: list[int], one: float, other: float) -> None:
    """A larger fraction never puts fewer elements on the host."""
    low, high = sorted((one, other))
    for mode in MODES:
        assert host_elements(partition(sizes, low, mode)) <= host_elements(partition(sizes, high, mode))


@pytest.mark.requirement("OPT-5")
@given(SIZES, FRACTIONS, st.sampled_from(sorted(MODES)))
def test_every_share_has_one_side(sizes: list[int], fraction: float, mode: str) -> None:
    """A parameter, with elements or without, is wholly on one side or split, and no element is lost."""
    for size, share in zip(sizes, partition(sizes, fraction, mode), strict=True):
        assert not (share.whole_host and share.split)
        assert share.host_elements + share.device_elements == share.numel == size


@pytest.mark.quick
@pytest.mark.requirement("OPT-5")
@pytest.mark.parametrize("mode", sorted(MODES))
def test_empty_parameters_follow_the_walk(mode: str) -> None:
    """An empty parameter is on the host before the threshold, on the device after it, on the host at 1."""
    assert on_host(partition([0, 2, 0, 2, 0], 0.5, mode)) == [True, True, False, False, False]
    assert on_host(partition([0, 2, 0], 1.0, mode)) == [True, True, True]
    assert on_host(partition([0], 0.5, mode)) == [False]


@pytest.mark.quick
@pytest.mark.requirement("OPT-4")
@pytest.mark.parametrize("mode", sorted(MODES))
def test_frozen_parameters_get_the_side_of_the_walk(mode: str) -> None:
    """A frozen parameter goes to the host before the threshold and to the device after it."""
    shares = partition([70, 10, 70, 10, 70], 0.5, mode, [False, True, False, True, False])
    assert on_host(shares) == [True, True, False, False, False]


@pytest.mark.requirement("OPT-4")
@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=20), FRACTIONS)
def test_frozen_parameters_do_not_change_the_others(marked: list[tuple[int, bool]], fraction: float) -> None:
    """The counted parameters divide as they would if the frozen ones were not there."""
    sizes, counted = [size for size, _ in marked], [counts for _, counts in marked]
    for mode in MODES:
        shares = partition(sizes, fraction, mode, counted)
        alone = partition([size for size, counts in marked if counts], fraction, mode)
        assert [share for share, counts in zip(shares, counted, strict=True) if counts] == alone
        assert not any(share.split for share, counts in zip(shares, counted, strict=True) if not counts)


@pytest.mark.quick
@pytest.mark.requirement("OPT-3")
@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        pytest.param(0, 0.0, id="int"),
        pytest.param(-0.0, 0.0, id="negative-zero"),
        pytest.param(0.1 * 3, 0.1 * 3, id="float-keeps-its-bits"),
        pytest.param(np.float64(0.1), 0.1, id="float64"),
        pytest.param(np.float32(0.1), 0.1, id="float32"),
        pytest.param(np.float16(0.1), 0.1, id="float16"),
        pytest.param(np.int64(1), 1.0, id="int64"),
        pytest.param(Fraction(1, 3), 1 / 3, id="ratio"),
        pytest.param(Decimal("0.25"), 0.25, id="decimal"),
    ],
)
def test_numbers_of_any_kind_are_fractions(fraction: object, expected: float) -> None:
    """A number of any kind means the decimal that it prints."""
    assert check_fraction(fraction) == expected
    assert str(check_fraction(fraction)) == str(expected)


@pytest.mark.requirement("OPT-3")
@given(st.floats(0, 1))
def test_floats_pass_unchanged(fraction: float) -> None:
    """A float in the range is returned with its bits."""
    assert check_fraction(fraction) == fraction


@pytest.mark.quick
@pytest.mark.requirement("OPT-3")
@pytest.mark.parametrize(
    "fraction",
    [
        pytest.param(float("nan"), id="nan"),
        pytest.param(np.float32("nan"), id="nan32"),
        pytest.param(Decimal("nan"), id="decimal-nan"),
        pytest.param(float("inf"), id="inf"),
        pytest.param(-float("inf"), id="negative-inf"),
        pytest.param(-1e-300, id="below"),
        pytest.param(1.0000000000000002, id="above"),
        pytest.param(50, id="percent"),
        pytest.param(10**400, id="beyond-floats"),
        pytest.param(True, id="bool"),
        pytest.param(np.True_, id="numpy-bool"),
        pytest.param("0.5", id="text"),
        pytest.param(None, id="none"),
        pytest.param(0.5j, id="complex"),
        pytest.param([0.5], id="list"),
        pytest.param(np.array(0.5), id="array"),
    ],
)
def test_other_fractions_are_refused(fraction: object) -> None:
    """What is no finite number in [0, 1] is refused by both rules with the value seen."""
    for rule in (check_fraction, lambda seen: greedy([1], seen), lambda seen: exact([1], seen)):
        with pytest.raises(FractionError) as refused:
            rule(fraction)
        assert refused.value.seen is fraction
        assert refused.value.rule == "OPT-3"
        assert isinstance(refused.value, ValueError)


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 200))
def test_runs_are_full_and_in_order(nbytes: list[int], most: int) -> None:
    """Runs keep the order, hold at most the bytes asked for or one entry, and could not hold the next."""
    runs = [nbytes[run] for run in into_runs(nbytes, most)]
    assert [size for run in runs for size in run] == nbytes
    for run, following in zip(runs, [*runs, [most + 1]][1:], strict=True):
        assert len(run) == 1 or sum(run) <= most
        assert sum(run) + following[0] > most
