"""Facts about the project's own source text, for the tests that hold it to its style."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "offload_ref"
CORE = ("partition", "schedule", "host_memory", "activation", "optimizer", "config", "errors")
"""The modules that a reader has to read; what they import of the package belongs to them."""
BESIDE = ("checks",)
"""What the core imports and a reader of the mechanism can skip: it refuses bad input, and does nothing else."""
PREFIXES = "ACT|OPT|ORD|MEM|CFG|OVH"
"""First letters of every id, one per chapter."""
ID = re.compile(rf"\b(?:{PREFIXES})-\d+\b")
HEADING = re.compile(rf"^### ((?:{PREFIXES})-\d+): (.+)$", re.MULTILINE)
LEVEL = re.compile(r"\b(?:MUST NOT|MUST|SHOULD NOT|SHOULD|MAY)\b")
LAYOUT = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE), *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)}
"""Tokens that are no code."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement of the specification: its id, where it stands, and its sentence."""

    id: str
    where: str
    sentence: str

    @property
    def levels(self) -> list[str]:
        """The level words of the sentence."""
        return LEVEL.findall(self.sentence)


def requirements() -> list[Requirement]:
    """Return every requirement, in reading order, repeated ids included."""
    found = []
    for chapter in sorted((ROOT / "spec").glob("*.md")):
        text = chapter.read_text(encoding="utf-8")
        for heading in HEADING.finditer(text):
            sentence = text[heading.end() :].strip().split("\n\n")[0]
            found.append(Requirement(heading[1], chapter.name, " ".join(sentence.split())))
    return found


def citations(folder: str) -> dict[str, set[str]]:
    """Return id -> the files under ``folder`` that cite it."""
    cited: dict[str, set[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for requirement in ID.findall(path.read_text(encoding="utf-8")):
            cited.setdefault(requirement, set()).add(str(path.relative_to(ROOT)))
    return cited


def code_lines(source: str) -> int:
    """Return the number of lines with code: no blank lines, no comments, no docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function's name and its lines from ``def`` to its end, docstring included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def imported_modules(path: Path) -> set[str]:
    """Return the names of the package's own modules that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "offload_ref":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offload_ref."):
            found.add(str(node.module).split(".")[1])
    return found


def core_modules() -> dict[str, Path]:
    """Return the core with everything of the package that it imports, by name, but for the checks of input."""
    found: dict[str, Path] = {}
    waiting = list(CORE)
    while waiting:
        name = waiting.pop()
        path = PACKAGE / f"{name}.py"
        if name not in (*found, *BESIDE) and path.exists():
            found[name] = path
            waiting += sorted(imported_modules(path))
    return found
