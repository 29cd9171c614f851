"""What every test shares: one thread, a reproducible hypothesis profile, the marks of requirements."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on CUDA
sys.path.insert(0, str(Path(__file__).parent / "support"))

settings.register_profile("ci", deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("ci")
torch.set_num_threads(1)


from implementations import IMPLEMENTATIONS, Implementation  # noqa: E402 - in support/, put on the path above
from machines import Machine  # noqa: E402 - as above


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.accelerator)])
def machine(request: pytest.FixtureRequest) -> Machine:
    """The simulated accelerator, and the real one where there is one."""
    if request.param == "simulated":
        return Machine("cuda", simulated=True)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.skip("this machine has no accelerator")
    return Machine(accelerator.type, simulated=False)


@pytest.fixture(params=list(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """The core, and the first lesson: what both offer is judged by the same tests."""
    return IMPLEMENTATIONS[request.param]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark that ties a test to sentences of the specification."""
    config.addinivalue_line("markers", "requirement(*ids): the sentences of spec/ that the test judges")
