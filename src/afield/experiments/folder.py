"""A run folder: all that `report`, `compare` and `resume` need. Written as the run goes, never overwritten."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afield.core.errors import InputError
from afield.core.types import Receipt
from afield.experiments.tracking import Trackers

SUMMARY = "summary.json"
ROWS = 50_000  # receipts per file
_KINDS = {"int": "int64", "float": "float64", "bool": "bool_", "str": "string"}


class RunFolder:
    """Opens a new folder and writes receipts, metrics and the model into it."""

    def __init__(self, path: Path, config: str, receipts: bool = True) -> None:
        self.path = path
        self._trackers = Trackers(path, config)
        new_folder(path)
        self._keeps = receipts
        if receipts:
            (path / "receipts").mkdir()
        (path / "config.toml").write_text(config, encoding="utf-8")
        (path / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
        self._metrics = (path / "metrics.jsonl").open("w", encoding="utf-8")
        self._rows: list[Receipt] = []
        self._files = 0
        self._trackers.open()

    def receipt(self, receipt: Receipt) -> None:
        if self._keeps:
            self._rows.append(receipt)
        if len(self._rows) == ROWS:
            self._flush()

    def metric(self, row: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()  # `compare` and a curious user may read along
        self._trackers.row(row)

    def diagnosis(self, row: Mapping[str, Any]) -> None:
        """What was found of each client at a measurement: lists too long for the metrics."""
        with (self.path / "diagnostics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def close(self, module: nn.Module | None, summary: Mapping[str, Any] | None = None) -> None:
        """Finish: the summary is written last, so its presence says that the run is complete."""
        if self._keeps:
            self._flush()
        self._metrics.close()
        if module is not None:
            from safetensors.torch import save_file

            # Tied weights are written under each of their names: the format knows no shared ones.
            own = {id(parameter): name for name, parameter in module.named_parameters()}
            state = {
                name: value.detach().contiguous()
                if own.get(id(value), name) == name
                else value.detach().clone()
                for name, value in module.state_dict(keep_vars=True).items()
            }
            save_file(state, str(self.path / "model.safetensors"))
        if summary is not None:
            told = {**summary, "afield": package_version("afield")}
            (self.path / SUMMARY).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        self._trackers.close(summary)

    def _flush(self) -> None:
        if not self._rows and self._files:
            return
        import pyarrow as pa  # here: machines that only simulate from Python need no pyarrow
        from pyarrow import parquet

        columns = {}
        for column in fields(Receipt):
            kind = getattr(pa, _KINDS[str(column.type)])()
            columns[column.name] = pa.array([getattr(row, column.name) for row in self._rows], kind)
        parquet.write_table(pa.table(columns), self.path / "receipts" / f"{self._files:05d}.parquet")
        self._files += 1
        self._rows.clear()


def check_new(path: Path) -> None:
    """Raise if a run would write over something (an empty folder is fine)."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists and is never overwritten: choose another --out, or remove it")


def new_folder(path: Path) -> None:
    """Make a folder that must not be there yet."""
    check_new(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror}; choose another --out") from error


def environment() -> dict[str, Any]:
    """What a run ran on."""
    names = ("afield", "torch", "numpy", "scikit-learn", "pyarrow", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: package_version(name) for name in names},
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in label) or "run"


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
