"""What the demo's tests share: a run small enough to be made often."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload_ref.cli import main

SMALL = (
    *("--device", "simulated", "--steps", "2", "--layers", "3", "--hidden", "32", "--heads", "2"),
    *("--sequence", "16", "--batch", "4", "--min-offload-bytes", "1024"),
)
"""Options of a run that takes about a second; a later option of the same name takes precedence."""

Demo = Callable[..., tuple[int, dict[str, Any]]]
"""Runs the small demo with more arguments and returns its exit code and the content of its JSON file."""


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    """Run the command line in this process."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "report.json"
        code = main(["demo", *SMALL, "--json", str(path), *arguments])
        return code, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    return run
