"""Run folders written by hand, with every number that a report may speak of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from afield.reports.load import RECEIPTS, Run, load


def made(
    folder: Path,
    label: str = "a",
    seed: int = 0,
    accuracy: Sequence[float] = (0.1, 0.5, 0.9),
    *,
    every: float = 1.0,
    bytes_each: int = 1000,
    clients: int = 10,
    senders: Sequence[int] | None = None,
    staleness: Sequence[int] | None = None,
    refused: Sequence[int] = (),
    per_class: Sequence[float | None] | None = None,
    labels: Sequence[Sequence[int]] | None = None,
    duration: Sequence[float] | None = None,
    relabelled: bool = False,
    terms: Sequence[tuple[float, float, float]] | None = None,
    share: Sequence[float] | None = None,
    loss: float = 1.0,
    finished: bool = True,
    settings: str = "",
) -> Run:
    """An evaluation every `every`; `senders`: the client of each receipt, which arrive one per unit of time."""
    (folder / "receipts").mkdir(parents=True)
    config = f"format = 1\nlabel = {json.dumps(label)}\nseed = {seed}\n{settings}\n[scenario]\nclients = {clients}\n"
    (folder / "config.toml").write_text(config)
    with (folder / "metrics.jsonl").open("w") as file:
        for i, value in enumerate(accuracy):
            row: dict[str, Any] = {"time": i * every, "wall": i / 10, "version": i, "updates": i}
            row |= {"bytes": i * bytes_each, "loss": loss, "train_loss": loss, "accuracy": value}
            if per_class is not None:
                row["per_class"] = list(per_class)
                row["groups"] = {"fast": value, "slow": value / 2}
            if terms is not None:
                row |= dict(zip(("noise", "bias", "delay"), terms[i], strict=True)) | {"drift": 0.5}
            file.write(json.dumps(row) + "\n")
    sent = list(range(clients)) if senders is None else list(senders)
    count = len(sent)
    columns: dict[str, Any] = {name: [0] * count for name in RECEIPTS.names}
    columns |= {"number": list(range(count)), "client": sent, "weight": [0.5] * count}
    columns |= {
        "started": [float(i) for i in range(count)],
        "arrived": [i + 1.0 + c for i, c in enumerate(sent)],
    }
    columns |= {
        "staleness": list(staleness or [0] * count),
        "stepped": [True] * count,
        "hold": [False] * count,
    }
    columns |= {"refused": ["stale" if i in refused else "" for i in range(count)]}
    pq.write_table(pa.table(columns, schema=RECEIPTS), folder / "receipts" / "00000.parquet")
    if labels is not None or duration is not None:
        told = {
            "examples": [1] * clients,
            "duration": list(duration or range(clients)),
            "relabelled": relabelled,
        }
        (folder / "clients.json").write_text(json.dumps(told | {"labels": labels}))
    if share is not None:
        row = {"version": 1, "time": 1.0, "share": list(share), "drift": [0.5] * clients}
        (folder / "diagnostics.jsonl").write_text(json.dumps(row) + "\n")
    if finished:
        (folder / "summary.json").write_text(json.dumps({"clients": clients}))
    return load(folder)
