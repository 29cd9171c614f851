"""Real text that every machine has: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from offload_ref.demo.settings import RULE, DemoSettings
from offload_ref.errors import CorpusError, DemoSettingError

MODULES = ("argparse", "ast", "calendar", "configparser", "difflib", "inspect", "mailbox", "optparse")
"""Single-file modules of every Python from 3.11 on, read in this order."""

CORPUS_BYTES_MIN = 100_000
"""Fewer bytes than this are not the standard library."""

VOCABULARY = 256
"""A token is a byte."""

MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, both int64 of shape (batch, sequence) on the host."""


def read_corpus(folder: Path | None = None) -> torch.Tensor:
    """Return the text as a uint8 tensor of shape (bytes,).

    Raises:
        CorpusError: the folder (by default the standard library's) lacks the sources.
    """
    home = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    sources = [path for path in (home / f"{name}.py" for name in MODULES) if path.is_file()]
    content = b"".join(path.read_bytes() for path in sources)
    if len(content) < CORPUS_BYTES_MIN:
        raise CorpusError(
            f"text for the demo in {home}",
            seen=f"{len(content)} bytes",
            required=f"at least {CORPUS_BYTES_MIN} bytes of the modules {', '.join(MODULES)}",
            rule=RULE,
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def draw_micro_batch(corpus: torch.Tensor, batch: int, sequence: int, generator: torch.Generator) -> MicroBatch:
    """Draw ``batch`` windows of the text; the target of each byte is the next one."""
    starts = torch.randint(len(corpus) - sequence, (batch, 1), generator=generator)
    windows = corpus[starts + torch.arange(sequence + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def draw_batches(corpus: torch.Tensor, settings: DemoSettings) -> list[list[MicroBatch]]:
    """Draw the micro-batches of every step, a pure function of the text and the seed.

    Raises:
        DemoSettingError: a sample is longer than the text.
    """
    longest = len(corpus) - 1
    if settings.sequence > longest:
        raise DemoSettingError(
            "--sequence", seen=settings.sequence, required=f"at most {longest}, the text's length", rule=RULE
        )
    generator = torch.Generator().manual_seed(settings.data_seed)
    return [
        [draw_micro_batch(corpus, settings.batch, settings.sequence, generator) for _ in range(settings.accumulation)]
        for _ in range(settings.steps)
    ]
