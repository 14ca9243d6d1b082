"""`afield list`: everything that a config can name. `afield doctor`: what this machine has."""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

import afield
from afield.cli.screen import screen
from afield.core.errors import InputError, closest
from afield.core.protocols import Availability, Delay, Partition, Strategy
from afield.experiments.config import REGISTRIES, AnyRounds, AnyScheduler, Source, presets
from afield.experiments.folder import package_version
from afield.experiments.probe import free_memory
from afield.strategies.staleness import Staleness
from afield.training.models import Model

KINDS: dict[str, Any] = {
    "strategies": Strategy,
    "staleness": Staleness,
    "data": Source,
    "partitions": Partition,
    "delays": Delay,
    "availability": Availability,
    "schedulers": AnyScheduler,
    "rounds": AnyRounds,
    "models": Model,
}
FOLDERS = {
    "MNIST": "MNIST/raw",
    "Fashion-MNIST": "FashionMNIST/raw",
    "CIFAR-10": "cifar-10-batches-py",
    "CIFAR-100": "cifar-100-python",
    "MRPC": "MRPC",
    "20 Newsgroups": "20news-bydate",
    "GSM8K": "gsm8k",
    "MathInstruct": "MathInstruct",
}


def catalogue(
    kind: Annotated[str | None, typer.Argument(help="One kind only, such as strategies or delays.")] = None,
) -> None:
    """List every strategy, delay, partition, preset and so on, with parameters and a line each."""
    kinds = [*KINDS, "presets"]
    if kind is not None and kind not in kinds:
        raise InputError(f"{kind!r} is no kind of thing{closest(kind, kinds)}")
    console = screen()
    for name in [kind] if kind else kinds:
        if name == "presets":
            rows = {preset: ("", _first_comment(path)) for preset, path in presets().items()}
        else:
            rows = {key: (_parameters(cls), _first_line(cls)) for key, cls in _entries(name).items()}
        console.print(_table(name, rows))


def doctor() -> None:
    """Show versions, devices, threads, free memory and the data folders that are found."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("afield", afield.__version__)
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in ("torch", "numpy", "scikit-learn", "rich", "typer", "safetensors", "pyarrow", "matplotlib"):
        table.add_row(name, package_version(name) or "not installed")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    table.add_row("CUDA devices", ", ".join(devices) or "none: runs use the CPU")
    table.add_row("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores")
    table.add_row("free memory", _free_memory())
    root = os.environ.get("AFIELD_DATA", "")
    table.add_row("AFIELD_DATA", root or "not set: only the built-in digits are at hand")
    for name, folder in FOLDERS.items() if root else ():
        place = Path(root) / folder
        table.add_row(f"  {name}", str(place) if place.is_dir() else f"not found ({place})")
    screen().print(table)


def _entries(kind: str) -> Mapping[str, type]:
    return REGISTRIES[KINDS[kind]]


def _table(title: str, rows: Mapping[str, tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("name", style="bold", no_wrap=True)
    if any(parameters for parameters, _ in rows.values()):
        table.add_column("parameters", ratio=3)
        table.add_column("what it is", ratio=4)
        for name, (parameters, line) in rows.items():
            table.add_row(name, parameters, line)
    else:
        table.add_column("what it is", ratio=1)
        for name, (_, line) in rows.items():
            table.add_row(name, line)
    return table


def _parameters(cls: type) -> str:
    return ", ".join(f"{field.name}={_shown(field)}" for field in fields(cls) if field.init)


def _shown(field: Field[Any]) -> str:
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return "?"
    return f"{type(value).__name__.lower()}" if hasattr(value, "__dataclass_fields__") else repr(value)


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip()


def _free_memory() -> str:
    found = free_memory()
    return "unknown" if found is None else f"{found / 2**30:.1f} GiB"
