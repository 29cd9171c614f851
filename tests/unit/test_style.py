"""The project's own text: sizes, device-neutral names, citations, public names."""

import ast
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from statistics import median

import pytest
from source_facts import (
    CORE,
    PACKAGE,
    ROOT,
    Requirement,
    citations,
    code_lines,
    core_modules,
    functions,
    imported_modules,
    requirements,
)

MOST_CORE_LINES = 1500
MOST_MINIMAL_LINES = 250
MOST_FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 12
MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.quick
def test_the_counter_counts_code() -> None:
    """Blank lines, comments and docstrings of modules, constants and functions are not counted."""
    source = '''"""Module."""

    # comment
LIMIT = (  # counted
    1,
)
"""Docstring
of a constant."""

def double(number):
    """Docstring."""
    return """text
of two lines""" * 2 * number
'''.replace("    # comment", "# comment")
    assert code_lines(source) == 6


@pytest.mark.quick
def test_the_core_is_readable_in_an_afternoon() -> None:
    """The core, with all of the package that it imports but the checks of input, has at most 1,500 lines of code."""
    modules = core_modules()
    assert set(CORE) <= set(modules)
    lines = {name: code_lines(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    assert sum(lines.values()) <= MOST_CORE_LINES, lines


@pytest.mark.quick
def test_the_first_lesson_is_short() -> None:
    """Both mechanisms fit in 250 lines, blank ones included, and need arithmetic and errors alone of the package."""
    path = PACKAGE / "minimal.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_MINIMAL_LINES
    assert imported_modules(path) == {"errors", "partition", "schedule"}


@pytest.mark.quick
def test_functions_are_short() -> None:
    """Half of the functions have at most 12 lines, docstring included, and none has more than 60."""
    lengths = [(length, f"{path.name}: {name}") for path in MODULES for name, length in functions(path)]
    assert median(length for length, _ in lengths) <= MEDIAN_FUNCTION_LINES
    assert [one for one in lengths if one[0] > MOST_FUNCTION_LINES] == []


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(core_modules()))
def test_core_names_no_kind_of_accelerator(name: str) -> None:
    """The core takes streams and events through ``torch.`` and says neither ``torch.cuda`` nor "cuda".

    The one exception is the question whether a CUDA graph is being captured, which has no neutral name
    before torch 2.13.
    """
    tree = ast.parse(core_modules()[name].read_text(encoding="utf-8"))
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    of_cuda = {attribute for attribute in attributes if attribute.startswith("torch.cuda.")}
    assert of_cuda <= {"torch.cuda.is_available", "torch.cuda.is_current_stream_capturing"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("torch.cuda") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            assert not {alias.name for alias in node.names} & {"cuda", "Stream", "Event", "accelerator"}
        if isinstance(node, ast.Constant):
            assert node.value != "cuda", f"line {node.lineno}"


@pytest.mark.quick
def test_the_core_stands_alone() -> None:
    """The core imports nothing of the simulator, the demo or the command line."""
    for path in core_modules().values():
        assert not imported_modules(path) & {"simulator", "demo", "cli", "planner"}


@pytest.mark.quick
def test_ids_are_unique() -> None:
    """No two requirements have one id."""
    assert [one for one, number in Counter(r.id for r in requirements()).items() if number > 1] == []


@pytest.mark.quick
@pytest.mark.parametrize("requirement", requirements(), ids=lambda one: f"{one.id}-{one.where}")
def test_a_requirement_is_one_sentence_with_one_level(requirement: Requirement) -> None:
    """A requirement has exactly one of MUST, SHOULD and MAY, and is one sentence."""
    assert len(requirement.levels) == 1, requirement
    assert len(re.findall(r"[.!?](?: [A-Z]|$)", requirement.sentence.rstrip("`"))) == 1, requirement


@pytest.mark.quick
@pytest.mark.parametrize("folder", ["offload_ref", "tests"])
def test_cited_ids_exist(folder: str) -> None:
    """Every id that code or tests cite is the id of a requirement."""
    known = {one.id for one in requirements()}
    assert {one: files for one, files in citations(folder).items() if one not in known} == {}


@pytest.mark.quick
@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_exist(path: Path) -> None:
    """Every module imports, and every name that it calls public is there."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    module = import_module(name)
    assert [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)] == []
