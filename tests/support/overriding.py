"""Configurations as override lines, to read back."""

from __future__ import annotations

from dataclasses import fields

from offload_ref.config import Config

WORDS = {"null": None, "true": True, "false": False}


def to_overrides(config: Config) -> list[str]:
    """The override lines that ``from_overrides`` reads back as ``config``, defaults left out."""
    return [
        f"{namespace}.{one.name}={text_of(getattr(part, one.name))}"
        for namespace, part in (("model", config.model), ("optimizer", config.optimizer))
        for one in fields(part)
        if getattr(part, one.name) != one.default
    ]


def text_of(value: object) -> str:
    """The text that stands for ``value`` in an override."""
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(text_of, value))}]"
    return next((word for word, meant in WORDS.items() if meant is value), str(value))
