"""How long a report takes and what it weighs: 10 runs of 10,000 receipts, and one of 1,000,000.

The runs are written here, not simulated: a report reads folders only. `--open` also opens each page in chromium.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from afield.reports import load, page

SECONDS, LARGEST = {10_000: 20, 1_000_000: 60}, 15e6
CLASSES = 10


def write_run(folder: Path, label: str, seed: int, receipts: int, clients: int, measurements: int) -> Path:
    """A finished run in which fast clients come more often, and accuracy rises as 1 - exp(-time)."""
    draw = np.random.default_rng(seed)
    (folder / "receipts").mkdir(parents=True)
    speed = np.exp(draw.normal(0, 0.7, clients))
    (folder / "config.toml").write_text(
        f'format = 1\nlabel = "{label}"\nseed = {seed}\n[scenario]\nclients = {clients}\n[scenario.data]\n'
        f'name = "made"\n[strategy]\nname = "{label}"\n'
    )
    client = draw.choice(clients, receipts, p=(1 / speed) / (1 / speed).sum())
    arrived = np.sort(draw.uniform(0, 100, receipts))
    columns: dict[str, Any] = {
        "number": np.arange(receipts),
        "client": client,
        "base": np.arange(receipts),
        "started": np.maximum(0, arrived - speed[client]),
        "arrived": arrived,
        "examples": np.full(receipts, 20),
        "bytes": np.full(receipts, 40_000),
        "staleness": draw.poisson(speed[client] * 10),
        "weight": draw.uniform(0, 1, receipts),
        "stepped": np.ones(receipts, bool),
        "version": np.arange(receipts),
        "hold": np.zeros(receipts, bool),
        "refused": np.where(draw.uniform(size=receipts) < 0.01, "stale", ""),
    }
    table = pa.table(columns, schema=load.RECEIPTS)
    for number, start in enumerate(range(0, receipts, 50_000)):
        pq.write_table(table.slice(start, 50_000), folder / "receipts" / f"{number:05d}.parquet")
    labels = draw.dirichlet(np.full(CLASSES, 0.3), clients) * 100
    told = {"examples": [100] * clients, "duration": speed.tolist(), "labels": labels.round().tolist()}
    if clients * (2 + CLASSES) <= 1_000_000:  # as a run does
        (folder / "clients.json").write_text(json.dumps(told))
    with (folder / "metrics.jsonl").open("w") as file:
        for at in np.linspace(0, 100, measurements):
            accuracy = 0.95 * (1 - np.exp(-at / (10 + seed))) + 0.005 * draw.normal()
            row: dict[str, Any] = {
                "time": float(at),
                "wall": float(at) / 10,
                "version": int(at * receipts / 100),
            }
            row |= {"updates": int(at * receipts / 100), "bytes": int(at * receipts * 400)}
            row |= {"loss": 2.3 * float(np.exp(-at / 20)), "train_loss": 2 * float(np.exp(-at / 15))}
            row |= {"accuracy": float(accuracy), "per_class": [float(accuracy)] * CLASSES}
            row |= {"groups": {"fast": float(accuracy) + 0.01, "slow": float(accuracy) - 0.01}}
            file.write(json.dumps(row) + "\n")
    (folder / "summary.json").write_text(json.dumps({"clients": clients, "updates": receipts}))
    return folder


def measure(root: Path, runs: int, receipts: int, clients: int, opened: bool) -> dict[str, Any]:
    folder = root / f"{runs}x{receipts}"
    for number in range(runs):
        write_run(folder / f"run-{number}", f"rule-{number % 5}", number // 5, receipts, clients, 500)
    began = time.perf_counter()
    page.write(load.find([folder]), folder / "report.html")
    seconds = time.perf_counter() - began
    size = (folder / "report.html").stat().st_size
    limit = SECONDS[receipts]
    fine = seconds < limit and size < LARGEST
    print(
        f"{runs:3} runs of {receipts:>9,} receipts, {clients:>9,} clients: {seconds:6.2f} s (below {limit}), "
        f"{size / 1e6:5.2f} MB (below {LARGEST / 1e6:.0f}){'' if fine else '  MISSED'}"
    )
    found = {
        "runs": runs,
        "receipts": receipts,
        "clients": clients,
        "seconds": round(seconds, 2),
        "bytes": size,
    }
    return found | ({"opened_s": round(open_page(folder / "report.html"), 2)} if opened else {})


def open_page(file: Path) -> float:
    """Seconds until the first plot is drawn in chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        began = time.perf_counter()
        tab = browser.new_page()
        tab.goto(file.as_uri())
        tab.wait_for_selector(".main-svg")
        seconds = time.perf_counter() - began
        browser.close()
    print(f"    opens in {seconds:.2f} s")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="without the millions")
    parser.add_argument("--open", action="store_true", help="open the pages in chromium, too")
    chosen = parser.parse_args()
    cases = (
        [(10, 10_000, 100)]
        if chosen.quick
        else [(10, 10_000, 100), (1, 1_000_000, 1_000), (1, 1_000_000, 1_000_000)]
    )
    with tempfile.TemporaryDirectory() as root:
        found = [
            measure(Path(root) / str(clients), runs, count, clients, chosen.open)
            for runs, count, clients in cases
        ]
    print(json.dumps({"benchmark": "report", "cases": found}))


if __name__ == "__main__":
    main()
