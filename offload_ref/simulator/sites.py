"""Where in the user's program something happened: the nearest frame outside torch and outside this package."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

_SKIPPED = ("/torch/", "/offload_ref/simulator/", "<frozen", "/contextlib.py", "/weakref.py")
"""Parts of file names whose frames are machinery, not the program."""

_skip_by_code: dict[CodeType, bool] = {}


class Site(NamedTuple):
    """A line of the user's program."""

    code: CodeType | None
    line: int

    def __str__(self) -> str:
        if self.code is None:
            return "?"
        return f"{self.code.co_filename.rsplit('/', 1)[-1]}:{self.line} in {self.code.co_name}"


UNKNOWN = Site(None, 0)
"""No frame of the user's program was on the stack."""


def call_site() -> Site:
    """The line of the user's program that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        skip = _skip_by_code.get(code)
        if skip is None:
            name = code.co_filename.replace("\\", "/")
            skip = _skip_by_code[code] = any(part in name for part in _SKIPPED)
        if not skip:
            return Site(code, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN
