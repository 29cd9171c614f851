"""Programs that know nothing of the simulator give on it what they give on the host, bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from machines import SCHEDULES
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.utils.checkpoint import checkpoint

from offload_ref.simulator import NotSimulatedError, Simulator

Program = Callable[[str], Sequence[torch.Tensor]]


def values(device: str, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same random values on any device."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*size, generator=generator).to(dtype).to(device)


def trained(device: str, **keywords: Any) -> Sequence[torch.Tensor]:
    """A small network after two steps of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **keywords)
    for _ in range(2):
        model(values(device, 3, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def clipping(device: str) -> Sequence[torch.Tensor]:
    """Gradients clipped by their common norm."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    model(values(device, 3, 4)).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm, *(p.grad for p in model.parameters() if p.grad is not None)]


def attention(device: str) -> Sequence[torch.Tensor]:
    """Backward of scaled_dot_product_attention."""
    query = values(device, 1, 2, 4, 8).requires_grad_()
    F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    assert query.grad is not None
    return [query.grad]


def convolution(device: str) -> Sequence[torch.Tensor]:
    """A convolution and a batch norm with its statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(device)
    output = model(values(device, 2, 2, 6, 6))
    output.sum().backward()
    return [output, *model.buffers()]


def recurrence(device: str) -> Sequence[torch.Tensor]:
    """An LSTM."""
    torch.manual_seed(0)
    return [nn.LSTM(4, 5).to(device)(values(device, 3, 2, 4))[0]]


def indexing(device: str) -> Sequence[torch.Tensor]:
    """Reads and writes by index, on the device and on the host, and by mask."""
    x = values(device, 4, 4).requires_grad_()
    rows = torch.tensor([0, 2]).to(device)
    y = x[rows].sum() + x[:, rows].sin().sum() + x[torch.tensor([1])].sum()
    y.backward()
    assert x.grad is not None
    z = x.detach().clone()
    z[rows] = 1.5
    return [x.grad, z, z[z > 0], (z > 0).nonzero(), torch.tensor([1.0, 2.0]).to(device)]


def splitting(device: str) -> Sequence[torch.Tensor]:
    """A split of which one part is unused, so that autograd fills in zeros."""
    x = values(device, 6, 2).requires_grad_()
    first, _second, third = x.split(2)
    (first * third).sum().backward()
    assert x.grad is not None
    return [x.grad]


def in_place(device: str) -> Sequence[torch.Tensor]:
    """Edits in place, seen by autograd and not, of views and through transposes."""
    x = values(device, 4, 4).requires_grad_()
    y = x * 2
    y[0].zero_()
    y.relu_().sum().backward()
    z = x.detach().clone()
    z[1:3].mul_(2)
    z.t().add_(1)
    assert x.grad is not None
    return [x.grad, z]


def double_backward(device: str) -> Sequence[torch.Tensor]:
    """A gradient of a gradient."""
    x = values(device, 3).requires_grad_()
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad is not None
    return [x.grad]


def checkpointing(device: str) -> Sequence[torch.Tensor]:
    """Both kinds of torch's checkpointing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    x = values(device, 2, 4).requires_grad_()
    for use_reentrant in (False, True):
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad is not None
    return [x.grad]


def host_reads(device: str) -> Sequence[torch.Tensor]:
    """Scalars, lists, arrays and comparisons that the host reads."""
    x = values(device, 3)
    read = [x.sum().item(), float(bool((x > -9).all())), *x.tolist(), *x.cpu().numpy().tolist()]
    return [torch.tensor(read), torch.tensor([torch.equal(x, x.clone()), torch.allclose(x, x + 1)])]


def state_dicts(device: str) -> Sequence[torch.Tensor]:
    """Weights through state dicts, copies and a file."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3).to(device), nn.Linear(3, 3).to(device)
    second.load_state_dict(first.state_dict())
    third = copy.deepcopy(second)
    file = io.BytesIO()
    torch.save(third.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location=device)
    return [second.weight, third.weight, loaded["weight"]]


def data_assignment(device: str) -> Sequence[torch.Tensor]:
    """A parameter whose data is replaced, emptied and put back."""
    parameter = nn.Parameter(values(device, 3))
    parameter.data = values(device, 3) * 2
    kept = parameter.data
    parameter.data = torch.empty(0).to(device)
    parameter.data = kept
    return [parameter]


def half_precision(device: str) -> Sequence[torch.Tensor]:
    """A layer norm in bfloat16, whose statistics the kernel itself chooses."""
    x = values(device, 4, 4, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(4, dtype=torch.bfloat16).to(device)
    F.layer_norm(x @ x, (4,), weight).sum().backward()
    assert x.grad is not None
    return [x.grad]


def autocasting(device: str) -> Sequence[torch.Tensor]:
    """A linear layer under autocast."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        output = model(values(device, 2, 4))
    assert output.dtype is torch.bfloat16
    return [output]


def hooks(device: str) -> Sequence[torch.Tensor]:
    """A hook that runs once a gradient is accumulated."""
    parameter, seen = nn.Parameter(values(device, 3)), []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad * 2))
    (parameter * 2).sum().backward()
    return seen


def saving_on_the_host(device: str) -> Sequence[torch.Tensor]:
    """Torch's own save_on_cpu."""
    x = values(device, 8, 8).requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu"):
        y = (x.exp() * x).sum()
    y.backward()
    assert x.grad is not None
    return [x.grad]


def functional_transforms(device: str) -> Sequence[torch.Tensor]:
    """torch.func's grad and vmap."""
    gradient = torch.func.grad(lambda x: (x**2).sum())(values(device, 3))
    return [gradient, torch.func.vmap(lambda x: x * 2)(values(device, 3, 2))]


def tensor_types(device: str) -> Sequence[torch.Tensor]:
    """Names of tensor types, and tensors made like another one."""
    x = values(device, 3)
    prefix = "torch." if device == "cpu" else "torch.cuda."
    assert x.type() == f"{prefix}FloatTensor"
    return [x.type(torch.float64), x.type(f"{prefix}HalfTensor"), x.double(), x.new_tensor([1.0, 2.0]), x.new_ones(2)]


def factories(device: str) -> Sequence[torch.Tensor]:
    """Factories that are told the device, or find it around them."""
    with torch.device(device):
        ambient = torch.ones(3)
    made = [torch.tensor([1, 2], device=device), torch.arange(4, device=device), torch.eye(2, device=device), ambient]
    made += [torch.full_like(made[0], 7), torch.as_tensor([3.0], device=device), torch.linspace(0, 1, 3, device=device)]
    assert {t.device.type for t in made} == {device}
    return made


KERNELS: dict[str, dict[str, Any]] = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""AdamW's implementations."""

PROGRAMS: dict[str, Program] = {
    **{f"adamw {name}": partial(trained, **keywords) for name, keywords in KERNELS.items()},
    **{
        program.__name__: program
        for program in (
            *(clipping, attention, convolution, recurrence, indexing, splitting, in_place, double_backward),
            *(checkpointing, host_reads, state_dicts, data_assignment, half_precision, autocasting, hooks),
            *(saving_on_the_host, functional_transforms, tensor_types, factories),
        )
    },
}
"""Programs by name."""


@pytest.mark.quick
@pytest.mark.parametrize("schedule", ["eager", "lazy", "starve-default"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_as_on_the_host(name: str, schedule: str) -> None:
    """Under a prompt, a lazy and a starved device the results are the host's, and no race is found."""
    program = PROGRAMS[name]
    expected = program("cpu")
    with Simulator(schedule=SCHEDULES[schedule](), device_type="cuda") as simulator:
        seen = [t.detach().cpu() for t in program("cuda")]
    simulator.assert_race_free()
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs.detach())


@pytest.mark.quick
def test_torch_is_restored() -> None:
    """After the block, also after an exception, every patched name is torch's own again."""
    owners = (torch, torch.cuda, torch.accelerator, torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, torch.amp)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(ZeroDivisionError), Simulator(device_type="cuda"):
        torch.ones(1, device="cuda") / (1 // 0)
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.quick
def test_what_is_not_simulated_says_its_name() -> None:
    """Names of torch.cuda and torch.accelerator without a simulated twin raise, and say which."""
    with Simulator(device_type="cuda"):
        for name in ("memory_summary", "CUDAGraph", "utilization"):
            with pytest.raises(NotSimulatedError, match=f"torch.cuda.{name} is not simulated") as refusal:
                getattr(torch.cuda, name)()
            assert refusal.value.name == f"torch.cuda.{name}"


@pytest.mark.quick
def test_operands_on_two_devices_are_refused_as_cuda_does() -> None:
    """A device tensor and a host tensor do not mix; a host scalar does."""
    with Simulator(device_type="cuda"):
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + torch.ones(3)
        assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            x.numpy()


@pytest.mark.quick
def test_simulators_do_not_nest() -> None:
    """A second one inside the first is refused, and the first goes on."""
    with Simulator(device_type="cuda"):
        with pytest.raises(RuntimeError, match="do not nest"), Simulator():
            pass
        assert torch.ones(2, device="cuda").sum().item() == 2.0


@pytest.mark.quick
def test_the_device_has_its_own_random_numbers() -> None:
    """Drawing on the device moves the device's generator alone, and a state restores its numbers."""
    with Simulator(device_type="cuda"):
        host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        assert torch.equal(torch.get_rng_state(), host)
        torch.cuda.set_rng_state(device)
        assert torch.equal(torch.rand(3, device="cuda").cpu(), first.cpu())
        generators = (torch.Generator(device="cuda").manual_seed(3) for _ in range(2))
        drawn = [torch.rand(3, device="cuda", generator=generator).cpu() for generator in generators]
        assert torch.equal(*drawn)


@pytest.mark.quick
def test_host_reads_that_no_operator_sees_are_accesses() -> None:
    """``tolist``, ``numpy`` and ``repr`` of a pinned buffer race with a copy that is still under way."""
    for read in (torch.Tensor.tolist, torch.Tensor.numpy, repr):
        name = read.__name__
        with Simulator(device_type="cuda") as simulator:
            landing = torch.zeros(4).pin_memory()
            landing.copy_(torch.ones(4, device="cuda"), non_blocking=True)
            getattr(landing, name)() if name != "repr" else repr(landing)
        assert {race.second.actor for race in simulator.races} == {"host"}, name


@pytest.mark.quick
def test_disjoint_columns_are_no_conflict() -> None:
    """Two streams that write the two halves of each row touch no common byte."""
    with Simulator(device_type="cuda") as simulator:
        x, side = torch.zeros(8, 8, device="cuda"), torch.Stream()
        side.wait_stream(torch.accelerator.current_stream())
        x[:, :4].add_(1)
        with side:
            x[:, 4:].add_(1)
    simulator.assert_race_free()


@pytest.mark.quick
def test_the_ledger_is_exact() -> None:
    """Requested bytes, live and peak, of device and pinned memory; a free shows at once."""
    with Simulator(device_type="cuda", device_memory_bytes=10_000) as simulator:
        x = torch.empty(1000, device="cuda")
        y = torch.empty(100, dtype=torch.float64).pin_memory()
        assert (simulator.memory_allocated(), simulator.pinned_allocated()) == (4000, 800)
        assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 4000
        assert x.data_ptr() % 512 == 0
        del x, y
        assert (simulator.memory_allocated(), simulator.pinned_allocated()) == (0, 0)
        assert (simulator.max_memory_allocated(), simulator.max_pinned_allocated()) == (4000, 800)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10_001, dtype=torch.uint8, device="cuda")


@pytest.mark.quick
def test_another_device_type() -> None:
    """With ``device_type="xpu"`` that is the simulated device's name."""
    with Simulator(device_type="xpu") as simulator:
        x = torch.ones(3, device="xpu") * 2
        assert (x.device.type, torch.accelerator.current_accelerator()) == ("xpu", torch.device("xpu"))
        assert x.cpu().tolist() == [2.0] * 3
    simulator.assert_race_free()


@pytest.mark.quick
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inference_mode_may_end_before_the_work_does(schedule: str) -> None:
    """Work that was enqueued in inference mode runs after it, too."""
    with Simulator(schedule=SCHEDULES[schedule](), device_type="cuda"):
        with torch.inference_mode():
            x = torch.ones(3, device="cuda") * 2
        y = torch.ones(3, device="cuda") * 3
        assert (x.cpu().tolist(), y.cpu().tolist()) == ([2.0] * 3, [3.0] * 3)
