"""Which modules work where torch is not installed."""

import subprocess
import sys

import pytest


@pytest.mark.quick
@pytest.mark.requirement("CFG-9")
@pytest.mark.parametrize("module", ["config", "errors", "partition", "planner", "schedule"])
def test_module_imports_no_torch(module: str) -> None:
    """Importing the module, in a process of its own, leaves torch unloaded."""
    program = f"import sys, offload_ref.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.quick
@pytest.mark.requirement("CFG-9")
def test_reading_validating_and_planning_import_no_torch() -> None:
    """Overrides are read, validated and planned in a process that never loads torch."""
    program = """
import sys
from offload_ref.config import from_overrides
from offload_ref.planner import Parameter, predict
config = from_overrides(["optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=0.5"])
config.validate(megatron=False)
predict([Parameter(10)], config.optimizer.optimizer_offload_fraction)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
