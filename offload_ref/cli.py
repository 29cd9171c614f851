"""The command line: ``offload-ref demo``. It needs the extra ``cli``; no help text loads torch."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typer import Typer

COMMANDS = {"demo": "offload_ref.demo.command"}
"""Name of a command -> the module that defines the function of that name."""

NEEDED = ("rich", "typer")
"""Packages of the extra ``cli``."""

EXIT_BAD_INPUT = 2
"""The command line is wrong, or a package that it needs is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's, and return its exit code."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        complain(f"{' and '.join(missing)} missing: the extra brings them, pip install 'offload-ref[cli]'")
        return EXIT_BAD_INPUT
    return run(sys.argv[1:] if arguments is None else list(arguments))


def run(arguments: list[str]) -> int:
    """Run a command line where typer and rich are installed."""
    import typer  # noqa: PLC0415  # comes with an extra

    usage_error: Any = typer.BadParameter.__base__  # typer exports no other name of it
    command = typer.main.get_command(application())
    try:
        outcome = command.main(arguments, prog_name="offload-ref", standalone_mode=False)
    except usage_error as error:
        complain(error.format_message())
        return EXIT_BAD_INPUT
    return outcome if isinstance(outcome, int) else 0


def application() -> Typer:
    """Build typer's application with every command."""
    import typer  # noqa: PLC0415  # comes with an extra

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help="CPU offloading in LLM training: see it, and see that it changes nothing.")(lambda: None)
    for name, home in COMMANDS.items():
        app.command(name)(getattr(import_module(home), name))
    return app


def complain(message: str) -> None:
    """Print one line to stderr."""
    print(f"offload-ref: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201  # a command line prints


if __name__ == "__main__":
    sys.exit(main())
