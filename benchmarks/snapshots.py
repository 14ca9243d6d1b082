"""What saving costs: the default race, never saved, saved as by default, and saved every second, taking turns.

    python benchmarks/snapshots.py [--quick]

"bare" is the simulation alone, without a run folder.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from afield.experiments.config import Config, Saving, experiment, presets, read
from afield.experiments.keep import Kept
from afield.experiments.run import prepare, run
from afield.runtimes.simulate import threads

RULES = {
    "never": Saving(seconds=math.inf),
    "default": Saving(),
    "every second": Saving(seconds=1.0),
    "every 10 versions": Saving(seconds=math.inf, versions=10),
}


class Watch:
    """Counts snapshots and their seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._save = Kept.save
        watch = self

        def save(kept: Kept) -> None:
            began = time.perf_counter()
            watch._save(kept)
            watch.times.append(time.perf_counter() - began)

        Kept.save = save  # type: ignore[method-assign]


def bare(chosen: Config) -> float:
    """Seconds of the simulation alone."""
    prepared = prepare(chosen)
    began = time.perf_counter()
    with threads(prepared.config.runtime.threads or 1):
        for _ in prepared.simulator.rows():
            pass
    return time.perf_counter() - began


def saved(chosen: Config, rule: Saving, folder: Path) -> float:
    prepared = prepare(replace(chosen, runtime=replace(chosen.runtime, snapshots=rule)))
    began = time.perf_counter()
    for _ in run(prepared, folder):
        pass
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn in place of five")
    turns = 1 if parser.parse_args().quick else 5
    runs = experiment(read(presets()["default"])).runs
    watch, found = Watch(), {name: [0.0] * turns for name in ("bare", *RULES)}
    count: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(-1, turns):  # the first one warms up
            for number, chosen in enumerate(runs):
                for rule in found:
                    folder = Path(name) / f"{turn}-{number}-{rule}"
                    before = len(watch.times)
                    spent = bare(chosen) if rule == "bare" else saved(chosen, RULES[rule], folder)
                    if turn >= 0:
                        found[rule][turn] += spent
                        count[rule] = count.get(rule, 0) + len(watch.times) - before
    ratios = {
        rule: statistics.median(spent / never for spent, never in zip(times, found["never"], strict=True))
        for rule, times in found.items()
    }
    for rule, times in found.items():
        snapshots = count[rule] / turns
        print(
            f"{rule:18} {statistics.median(times):6.2f} s, {100 * (ratios[rule] - 1):+.1f} %, {snapshots:g} snapshots"
        )
    print(f"a snapshot: median {1e3 * statistics.median(watch.times):.1f} ms")
    told = {rule: round(statistics.median(times), 3) for rule, times in found.items()}
    result = {"benchmark": "snapshots", "turns": turns, "seconds": told, "over_never": ratios}
    print(json.dumps(result | {"snapshot_ms": 1e3 * statistics.median(watch.times)}))


if __name__ == "__main__":
    main()
