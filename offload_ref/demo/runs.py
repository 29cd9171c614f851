"""The three runs: equal text, equal initial weights, and only one of them offloads."""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from offload_ref.activation import ActivationOffload, offload_layers
from offload_ref.demo.baselines import CopyStepper, other_kernel, plain, same_kernel, slice_groups
from offload_ref.demo.machine import Traffic, is_simulated, open_machine
from offload_ref.demo.memory import plan_optimizer, report_memory
from offload_ref.demo.model import GPT, initial_model
from offload_ref.demo.probe import MemoryProbe, Segment
from offload_ref.demo.report import LOSS_BOUND, DemoReport, compare, largest_difference
from offload_ref.demo.text import VOCABULARY, draw_batches, read_corpus
from offload_ref.demo.training import Groups, OptimizerStepper, Stepper, hyperparameters, train, weight_decay_groups
from offload_ref.optimizer import HybridDeviceOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from offload_ref.demo.settings import DemoSettings
    from offload_ref.demo.text import MicroBatch

OFFLOADED = "offloaded"
"""Name of the run that is judged."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one run left behind, all of it on the host.

    Attributes:
        device: what the device calls itself.
        losses: loss of each step in nats, fp32, shape (steps,).
        weights: final weights by name, in the dtype that they were trained in.
        segments: the memory probe's segments.
        pinned_bytes: most pinned host bytes, or None where the device does not tell.
        traffic: copies across the link during training, or None where nobody counts them.
        races: reports of the happens-before checker, or None on a real accelerator, which has none.
        seconds: wall-clock time of training.
    """

    name: str
    device: str
    losses: torch.Tensor
    weights: dict[str, torch.Tensor]
    segments: tuple[Segment, ...]
    pinned_bytes: int | None
    traffic: Traffic | None
    races: tuple[str, ...] | None
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """Most device bytes of the whole run."""
        return max(segment.peak_bytes for segment in self.segments)

    def as_json(self) -> dict[str, Any]:
        """Return what can be plain JSON: all but the weights and the single segments."""
        return {
            "losses": self.losses.tolist(),
            "peak_device_bytes": self.peak_bytes,
            "peak_pinned_bytes": self.pinned_bytes,
            "traffic": None if self.traffic is None else asdict(self.traffic),
            "races": None if self.races is None else list(self.races),
            "seconds": self.seconds,
        }


def reference(groups: Groups, settings: DemoSettings) -> Stepper:
    """Return the reference's optimizer, or plain AdamW where optimizer offloading is off."""
    options = settings.config.optimizer
    if not options.optimizer_cpu_offload:
        return plain(groups, settings)
    optimizer = HybridDeviceOptimizer(
        groups,
        offload_fraction=options.optimizer_offload_fraction,
        param_update_in_fp32=settings.bf16,
        pin_cpu_grads=options.pin_cpu_grads,
        pin_cpu_params=options.pin_cpu_params,
        overlap_cpu_optimizer_d2h_h2d=options.overlap_cpu_optimizer_d2h_h2d,
        partition=settings.partition,
        **hyperparameters(settings),
    )
    return OptimizerStepper(optimizer, settings.steps)


STEPPERS: dict[str, Callable[[Groups, DemoSettings], Stepper]] = {
    "plain": plain,
    "same-kernel": same_kernel,
    OFFLOADED: reference,
}
"""Name of a run -> what steps its weights, in the order in which the runs are shown."""

YARDSTICK = "other-kernel"
"""Name of the run that tells how far two kernels of one device come apart; made where a bound depends on it."""


def offload_activations(model: GPT, settings: DemoSettings) -> AbstractContextManager[ActivationOffload | None]:
    """Return the context in which the model's first layers are offloaded, or one that does nothing."""
    if settings.offloaded_layers == 0:
        return nullcontext()
    options = settings.config.model
    return offload_layers(
        model.blocks,
        settings.offloaded_layers,
        min_offload_bytes=settings.min_offload_bytes,
        double_buffering=options.cpu_offloading_double_buffering,
        retain_pinned_cpu_buffers=options.cpu_offloading_retain_pinned_cpu_buffers,
        offload_weights=options.cpu_offloading_weights,
    )


def make_run(name: str, experiment: Experiment, advance: Callable[[], None]) -> RunRecord:
    """Train a copy of the initial model as the run of that name does; call ``advance`` after each step."""
    settings = experiment.settings
    with open_machine(settings) as machine:
        model = experiment.model_on(machine.device)
        stepper = STEPPERS.get(name, other_kernel)(weight_decay_groups(model), settings)

        def after_step() -> None:
            if name == OFFLOADED:
                machine.require_stream(settings.schedule)
            advance()

        probe = MemoryProbe(machine, after_step)
        probe.watch(model.blocks)
        activations = offload_activations(model, settings) if name == OFFLOADED else nullcontext()
        with activations as engine:
            probe.engine = engine
            machine.start_counting()
            started = time.perf_counter()
            losses = train(model, stepper, experiment.batches, settings, probe)
            seconds = time.perf_counter() - started
            traffic = machine.traffic()
        return RunRecord(
            name=name,
            device=machine.name,
            losses=losses,
            weights={key: weight.detach().cpu() for key, weight in model.named_parameters()},
            segments=tuple(probe.segments),
            pinned_bytes=machine.peak_pinned(),
            traffic=traffic,
            races=machine.races(),
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all three runs have in common, ready on the host."""

    settings: DemoSettings
    simulated: bool
    batches: list[list[MicroBatch]]
    initial: GPT

    def model_on(self, device: torch.device) -> GPT:
        """Return a copy of the initial model, in the dtype that it is trained in."""
        dtype = torch.bfloat16 if self.settings.bf16 else torch.float32
        return copy.deepcopy(self.initial).to(device=device, dtype=dtype)


def prepare(settings: DemoSettings) -> Experiment:
    """Check the settings against this machine, draw the batches and build the initial model.

    Raises:
        NoAcceleratorError: the device asked for is not here.
        CorpusError: the text is not here.
        DemoSettingError: the schedule is none, or a sample is longer than the text.
    """
    simulated = is_simulated(settings)
    batches = draw_batches(read_corpus(), settings)
    return Experiment(settings, simulated, batches, initial_model(settings, VOCABULARY))


def warm_up(experiment: Experiment) -> None:
    """Let a real accelerator's libraries allocate their workspaces, which belong to no run."""
    with open_machine(experiment.settings) as machine:
        inputs, targets = experiment.batches[0][0]
        experiment.model_on(machine.device).loss(inputs.to(machine.device), targets.to(machine.device)).backward()


def loss_bound(experiment: Experiment, runs: dict[str, RunRecord]) -> float:
    """Return what the difference in loss to ``plain`` has to stay below (OPT-17); 0.0 asks for the same bits."""
    if experiment.simulated or experiment.settings.host_fraction == 0:
        return 0.0
    if YARDSTICK not in runs:
        return LOSS_BOUND
    return max(LOSS_BOUND, 2 * largest_difference(runs["plain"].losses, runs[YARDSTICK].losses))


def rehearse_step(experiment: Experiment) -> tuple[int, int]:
    """Return the device bytes that a first and a later AdamW step of the device share take, over those before.

    The rehearsal has its own machine and steps plain copies, so it knows nothing of the offloading.
    """
    settings, taken = experiment.settings, []
    with open_machine(settings) as machine:
        model = experiment.model_on(machine.device)
        groups = slice_groups(weight_decay_groups(model), settings, on_host=False)
        if not any(group["slices"] for group in groups):
            return 0, 0
        stepper = CopyStepper(groups, settings)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            before = machine.allocated()
            machine.reset_peak()
            stepper.step()
            taken.append(machine.peak() - before)
    return taken[0], taken[1]


def run_demo(experiment: Experiment, advance: Callable[[str], None]) -> DemoReport:
    """Make the three runs and compare them; ``advance`` is told the run's name after each step.

    Raises:
        UnsupportedError: a mechanism refuses an option.
        DemoSettingError: the schedule starves a stream that the offloaded run does not have.
    """
    settings = experiment.settings
    if not experiment.simulated:
        warm_up(experiment)
    offloaded_first = sorted(STEPPERS, key=lambda name: name != OFFLOADED)  # it refuses what cannot be done
    made = {name: make_run(name, experiment, partial(advance, name)) for name in offloaded_first}
    runs = {name: made[name] for name in STEPPERS}
    if settings.bf16 and settings.host_fraction > 0 and not experiment.simulated:
        runs[YARDSTICK] = make_run(YARDSTICK, experiment, lambda: None)
    sizes = [p.numel() for group in weight_decay_groups(experiment.initial) for p in group["params"]]
    plan = plan_optimizer(settings, sizes, rehearse_step(experiment))
    bounds = {"plain": loss_bound(experiment, runs), "same-kernel": 0.0}
    return DemoReport(
        settings=settings,
        device=runs[OFFLOADED].device,
        simulated=experiment.simulated,
        runs=runs,
        comparisons={name: compare(runs[OFFLOADED], runs[name], bound) for name, bound in bounds.items()},
        memory=report_memory(runs["plain"].segments, runs[OFFLOADED].segments, plan),
    )
