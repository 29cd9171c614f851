"""What is learnt: the text, the model, the learning rate."""

from pathlib import Path

import pytest
import torch

from offload_ref.demo.model import GPT, initial_model
from offload_ref.demo.settings import resolve
from offload_ref.demo.text import CORPUS_BYTES_MIN, MODULES, VOCABULARY, draw_batches, read_corpus
from offload_ref.demo.training import FINAL_RATE, relative_rate, weight_decay_groups
from offload_ref.errors import CorpusError, DemoSettingError


def test_the_text_is_the_standard_library() -> None:
    """The bytes are Python's own sources, enough of them, and readable."""
    content = bytes(read_corpus().tolist())
    assert len(content) >= CORPUS_BYTES_MIN
    assert b"class ArgumentParser" in content
    assert "def " in content.decode("utf-8")


def test_a_machine_without_the_sources_is_refused(tmp_path: Path) -> None:
    """The message names the folder and the modules."""
    (tmp_path / f"{MODULES[0]}.py").write_text("pass\n")
    with pytest.raises(CorpusError, match=f"{MODULES[0]}.*got '5 bytes'|got '5 bytes'.*{MODULES[0]}"):
        read_corpus(tmp_path)


def test_batches_are_a_function_of_their_seed() -> None:
    """One seed gives the same batches twice, another one other batches; targets are the next bytes."""
    corpus = read_corpus()
    settings = resolve(steps=2, accumulation=3, batch=4, sequence=8)
    batches = draw_batches(corpus, settings)
    assert [len(step) for step in batches] == [3, 3]
    inputs, targets = batches[1][2]
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(draw_batches(corpus, settings)[1][2][0], inputs)
    other = resolve(steps=2, accumulation=3, batch=4, sequence=8, data_seed=2)
    assert not torch.equal(draw_batches(corpus, other)[1][2][0], inputs)


def test_a_sample_as_long_as_the_text_is_the_longest() -> None:
    """One byte more would have no target."""
    corpus = torch.arange(10, dtype=torch.uint8)
    (inputs, targets), *_ = draw_batches(corpus, resolve(sequence=9, steps=1))[0]
    assert inputs[0].tolist() == list(range(9))
    assert targets[0].tolist() == list(range(1, 10))
    with pytest.raises(DemoSettingError, match="--sequence: got 10, required at most 9"):
        draw_batches(corpus, resolve(sequence=10, steps=1))


def small_model(seed: int = 0) -> GPT:
    """Return a model that runs in no time."""
    return initial_model(resolve(hidden=16, heads=2, sequence=8, layers=2, seed=seed), VOCABULARY)


def test_initial_weights_are_a_function_of_their_seed() -> None:
    """One seed gives the same weights, another one others, and torch's own generator is left alone."""
    before = torch.get_rng_state()
    first, second, other = small_model(), small_model(), small_model(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in first.named_parameters():
        assert torch.equal(weight, second.get_parameter(name))
    assert not torch.equal(first.token_embedding.weight, other.token_embedding.weight)


def test_the_head_is_tied_to_the_embedding() -> None:
    """The token embedding is one parameter, and its gradient comes from both of its uses."""
    model = small_model()
    assert sum(weight.shape == (VOCABULARY, 16) for weight in model.parameters()) == 1
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model.loss(tokens, tokens).backward()
    gradient = model.token_embedding.weight.grad
    assert gradient is not None
    assert bool((gradient.abs().sum(dim=1) > 0).all())


def test_no_position_sees_what_follows() -> None:
    """Changing the last byte changes the logits of the last position alone."""
    model = small_model()
    tokens = torch.arange(8).reshape(1, 8)
    changed = tokens.clone()
    changed[0, -1] = 99
    same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 7 + [False]


def test_matrices_decay_and_the_rest_does_not() -> None:
    """Every parameter is in one of the two groups."""
    model = small_model()
    decaying, rest = weight_decay_groups(model)
    assert all(weight.ndim == 2 for weight in decaying["params"])
    assert all(weight.ndim == 1 for weight in rest["params"])
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert len(decaying["params"]) + len(rest["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 60, 1000])
def test_the_learning_rate_rises_then_falls(steps: int) -> None:
    """It reaches its peak after the warm-up and ends at a tenth; it is never 0."""
    rates = [relative_rate(step, steps) for step in range(steps)]
    peak = rates.index(max(rates))
    assert rates[peak] == 1.0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert min(rates) > 0
    assert steps < 3 or rates[-1] == pytest.approx(FINAL_RATE)
