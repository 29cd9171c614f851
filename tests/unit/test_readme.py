"""What README.md shows: its programs run, its commands are those of CI, its links lead somewhere."""

import re
from pathlib import Path

import pytest

from offload_ref.simulator import Lazy, Simulator

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_programs_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs without a race on a simulated device; one that brings its own simulator uses that."""
    program = blocks("python")[number]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(blocks("python")[0], encoding="utf-8")
    code = compile(program, "README.md", "exec")
    if "Simulator(" in program:
        exec(code, {"__name__": "readme"})  # noqa: S102 - the README is our own
        return
    with Simulator(schedule=Lazy(), device_type="cuda") as simulator:
        exec(code, {"__name__": "readme"})  # noqa: S102 - the README is our own
    simulator.assert_race_free()


def test_both_mechanisms_have_an_example() -> None:
    """So does the simulator."""
    programs = "\n".join(blocks("python"))
    for name in ("offload_layers(", "HybridDeviceOptimizer(", "Simulator("):
        assert name in programs


def test_the_commands_are_complete() -> None:
    """Each makes an environment of its own, installs, and does its work."""
    demo, tests = blocks("sh")
    for command in (demo, tests):
        assert command.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install ")
    assert 'pip install ".[cli]"' in demo
    assert demo.endswith("&& offload-ref demo\n")
    assert 'pip install ".[test]"' in tests


def test_ci_runs_the_tests_as_the_readme_does() -> None:
    """The line that .ci/run looks for in the README is there, once, and is the whole test command."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -m1 -x '([^']+)' README.md", ci)
    _, tests = blocks("sh")
    assert [line for line in README.splitlines() if re.fullmatch(pattern, line)] == [tests.strip()]


def test_links_lead_to_files() -> None:
    """Every relative link is a path of this repository."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_no_host_is_named() -> None:
    """Commands use the registries that the machine is set up for."""
    assert "://" not in README
