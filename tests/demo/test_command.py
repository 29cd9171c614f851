"""The command from end to end: exit codes, the tables, the JSON file, bad input."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload_ref.cli import application, main
from offload_ref.demo import runs
from offload_ref.demo.settings import DemoSettings
from offload_ref.demo.training import Groups, Stepper

Demo = Callable[..., tuple[int, dict[str, Any]]]


@pytest.mark.quick
def test_the_demo_passes_and_says_so(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    """Both differences are 0, the tables show the three runs, and the exit code is 0."""
    code, report = demo()
    printed = capsys.readouterr().out
    assert code == 0
    assert report["passed"]
    assert report["failures"] == report["races"] == []
    for comparison in report["comparisons"].values():
        assert comparison["loss_difference"] == comparison["weight_difference"] == 0.0
        assert comparison["bit_equal"]
    for words in ("plain", "same-kernel", "offloaded", "Peak device memory", "the same bits", "Passed"):
        assert words in printed


def test_the_file_has_the_documented_form(demo: Demo) -> None:
    """Every key is there with its type, and every figure can be recomputed from the runs."""
    _, report = demo("--steps", "3")
    assert_form(report, FORM)
    assert set(report["runs"]) == {"plain", "same-kernel", "offloaded"}
    assert report["settings"]["config"]["model"]["num_layers"] == 3
    for run in report["runs"].values():
        assert_form(run, RUN)
        assert len(run["losses"]) == 3
    for comparison in report["comparisons"].values():
        assert_form(comparison, COMPARISON)
    memory = report["memory"]
    assert memory["baseline"] == report["runs"]["plain"]["peak_device_bytes"]
    assert memory["offloaded"] == report["runs"]["offloaded"]["peak_device_bytes"]
    assert memory["saved"] == memory["baseline"] - memory["offloaded"] > 0


FORM = {
    "format": int,
    "device": dict,
    "settings": dict,
    "runs": dict,
    "comparisons": dict,
    "memory": dict,
    "races": list,
    "failures": list,
    "passed": bool,
}
RUN = {
    "losses": list,
    "peak_device_bytes": int,
    "peak_pinned_bytes": int,
    "traffic": dict,
    "races": list,
    "seconds": float,
}
COMPARISON = {
    "baseline": str,
    "loss_difference": float,
    "weight_difference": float,
    "bit_equal": bool,
    "loss_bound": float,
    "passed": bool,
}


def assert_form(value: dict[str, Any], form: dict[str, type]) -> None:
    """Require exactly the keys of the form, each with its type."""
    assert {key: type(part) for key, part in value.items()} == form


@pytest.mark.parametrize("schedule", ["eager", "lazy", "starve:default"])
def test_every_schedule_gives_the_same_losses(demo: Demo, schedule: str) -> None:
    """A program without races cannot tell how its streams are run."""
    code, report = demo("--schedule", schedule)
    assert code == 0
    assert report["settings"]["schedule"] == schedule
    _, usual = demo()
    assert report["runs"]["offloaded"]["losses"] == usual["runs"]["offloaded"]["losses"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bf16"],
        ["--bf16", "--fraction", "1"],
        ["--foreach"],
        ["--fraction", "0"],
        ["--fraction", "0.3", "--partition", "exact"],
        ["--fraction", "1", "--offload-layers", "0"],
        ["--layers", "1"],
        ["--accumulation", "1", "optimizer.overlap_cpu_optimizer_d2h_h2d=false"],
        ["optimizer.pin_cpu_grads=false", "optimizer.pin_cpu_params=false"],
        ["model.cpu_offloading_retain_pinned_cpu_buffers=true"],
        ["model.cpu_offloading=false", "optimizer.optimizer_cpu_offload=false"],
    ],
    ids=" ".join,
)
def test_every_option_changes_no_bit(demo: Demo, arguments: list[str]) -> None:
    """Both baselines are met exactly whatever is offloaded, in whatever dtype."""
    code, report = demo(*arguments)
    assert code == 0, report["failures"]
    assert [c["bit_equal"] for c in report["comparisons"].values()] == [True, True]


# --- failures, injected where a run's optimizer is made -----------------------------------------------------


class Wrapped:
    """A stepper with one more thing to do after each step."""

    def __init__(self, stepper: Stepper, after: Callable[[], None]) -> None:
        self.stepper = stepper
        self.after = after

    def step(self) -> None:
        """Step, then do the other thing."""
        self.stepper.step()
        self.after()


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[Groups], None]) -> None:
    """Have the run of that name commit a fault after each step."""
    right = runs.STEPPERS[name]

    def wrong(groups: Groups, settings: DemoSettings) -> Stepper:
        return Wrapped(right(groups, settings), lambda: fault(groups))

    monkeypatch.setitem(runs.STEPPERS, name, wrong)


@torch.no_grad()
def nudge(groups: Groups) -> None:
    """Move one number of one bias by the least amount that matters."""
    groups[1]["params"][0][0] += 1e-6


@torch.no_grad()
def read_too_early(groups: Groups) -> None:
    """Copy a weight on a stream that nobody told to wait."""
    weight = groups[0]["params"][0]
    with torch.Stream(weight.device):
        weight.clone()


@pytest.mark.parametrize("name", ["plain", "same-kernel"])
def test_a_baseline_that_differs_fails_the_demo(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A millionth in one weight is found, and only the baseline that has it is blamed."""
    spoil(monkeypatch, name, nudge)
    code, report = demo()
    assert code == 1
    assert [c["baseline"] for c in report["comparisons"].values() if not c["passed"]] == [name]
    assert "FAILED" in capsys.readouterr().out
    assert not report["passed"]


def test_an_offloaded_run_that_differs_fails_both(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both baselines say so."""
    spoil(monkeypatch, "offloaded", nudge)
    code, report = demo()
    assert code == 1
    assert len(report["failures"]) == 2


def test_a_race_fails_the_demo(demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The read is harmless, the values are equal, and the missing wait is reported all the same."""
    spoil(monkeypatch, "offloaded", read_too_early)
    code, report = demo()
    assert code == 1
    assert all(c["passed"] for c in report["comparisons"].values())
    assert report["races"]
    assert "read_too_early" in report["races"][0]
    assert "race" in capsys.readouterr().out


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fraction", "1.5"], "[0, 1]"),
        (["--fraction", "nan"], "[0, 1]"),
        (["--offload-layers", "3"], "CPU offloading can be done only for layers less than 3"),
        (["--offload-layers", "-1"], "CPU offloading can be done only for layers less than 3"),
        (["--layers", "0"], "--layers: got 0, required at least 1"),
        (["--layers", "many"], "--layers"),
        (["--heads", "5"], "--heads: got 5, required a divisor of 32"),
        (["--steps", "0"], "--steps: got 0"),
        (["--schedule", "random"], "--schedule: got 'random', required eager, lazy or starve:NAME"),
        (["--schedule", "starve:"], "--schedule"),
        (["--schedule", "starve:nobody"], "nobody"),
        (["--device", "cpu"], "--device: got 'cpu'"),
        (["--device", "abacus"], "--device: got 'abacus'"),
        (["--sequence", "100000000"], "--sequence: got 100000000"),
        (["--nonsense"], "--nonsense"),
        (["model.num_layer=3"], "model.num_layers"),
        (["model.num_layers"], "override"),
        (["--fraction", "0.5", "optimizer.optimizer_offload_fraction=0.25"], "same value in both"),
        (["model.cpu_offloading_weights=true"], "offload_weights"),
        (["model.cpu_offloading_double_buffering=true"], "double_buffering"),
        (["model.recompute_granularity=full"], "activation recomputation"),
        (["--json", "/nowhere/at/all.json"], "--json: got '/nowhere/at/all.json'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line(
    demo: Demo, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """The exit code is 2, nothing is printed to stdout, and one line says what was wrong."""
    code, report = demo(*arguments)
    printed = capsys.readouterr()
    assert code == 2
    assert report == {}
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    """Without one, and with an unknown one, one line says so."""
    for arguments in ([], ["train"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("package", ["rich", "typer"])
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    """The line says how to install it, and the exit code is 2."""
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        f"offload-ref: {package} missing: the extra brings them, pip install 'offload-ref[cli]'\n"
    )


def test_typer_runs_the_application_too() -> None:
    """The exit codes are the same in typer's own runner."""
    runner = CliRunner()
    assert runner.invoke(application(), ["demo", "--help"]).exit_code == 0
    assert runner.invoke(application(), ["demo", "--fraction", "2"]).exit_code == 2


def test_help_loads_no_torch() -> None:
    """Neither do numpy and rich's tables have to be paid for."""
    program = (
        "import sys; from offload_ref.cli import main\n"
        "code = main(['demo', '--help'])\n"
        "sys.exit(code or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--offload-layers" in done.stdout


def test_a_run_that_diverges_proves_nothing(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses that are no numbers are equal bit by bit, and still fail the demo."""
    code, report = demo("--learning-rate", "1e9", "--steps", "4")
    assert code == 1
    assert report["passed"] is False
    assert "no finite number" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_offloads_nothing_says_so(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict does not claim what was not tried."""
    code, _report = demo("--offload-layers", "0", "--fraction", "0")
    assert code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "nothing was offloaded" in said
    assert "offloading changed nothing" not in said
