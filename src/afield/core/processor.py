"""What the processor is, where a rule goes by it."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def capabilities() -> dict[str, Any]:
    """What torch knows of it; nothing, where torch is too old to tell."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found


@functools.cache
def amd() -> bool:
    return str(capabilities().get("cpu_name")).startswith("AMD")
