"""The same workload in afield, in a naive loop, in FLGo and in pfl: client updates per second.

    python benchmarks/peers.py [--quick] [--keep DIR] [--updates 500] [--turns 5]

The peers are installed into a throw-away virtual environment with the torch that afield is tested with; `--keep`
leaves it in DIR, and takes it from there if it is there. Each measurement is a process of its own that warms up and
then times the simulation alone: no imports, no data set-up, no evaluation. Systems take turns, so that whatever else
the machine does falls on all alike; figures are medians over the turns, ratios medians of the turns' ratios.

The workload is benchmarks/peers/workload.py. Peers run as their documentation says, with their work on one process or
on a process per core, one thread or all: the fastest here is what counts. What else was set, and why, is said in
their scripts. pfl has no asynchronous mode: it averages cohorts (FedAvg). A peer that cannot be installed is absent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Pinned: unpinned, pip may take gigabytes of CUDA. pfl asks for no torch by itself.
PIN = "torch==2.13.0"
# FLGo asks for torchvision, of which there may be no build for this torch, and which nothing here uses: it is
# installed without its dependencies, then with those that it imports.
NEEDS = ("tqdm", "prettytable", "requests", "matplotlib", "pyyaml", "networkx", "scipy")
INSTALL = {
    "flgo": (("--no-deps", "flgo==0.4.4"), NEEDS),
    "pfl": (("pfl==0.6.0",),),
}
# Processes, and threads of each, that a peer is given; the first alone if quick: FLGo's default, and what was best
# for pfl on two quiet cores (MLP 450 updates/s against 320 in one process; CNN 101 against 97).
SETTINGS = {
    "flgo": ((1, 1), (1, CORES)),
    "pfl": ((CORES, 1), (1, CORES)),
}
MODELS = ("mlp", "cnn")
ALGORITHMS = ("fedasync", "fedbuff")
PATIENCE = 600  # seconds that one measurement may take


class CommandError(Exception):
    """A command that did not work; says why in one line."""


def execute(command: list[str], **variables: str) -> str:
    """Run a command to its end; its standard output."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Threads are what each script says, or torch's own; a bound set for tests would slow some systems only.
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables,
        start_new_session=True,  # so that what it starts ends with it
    )
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise CommandError(f"took more than {PATIENCE} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        lines = [line.strip() for line in errors.splitlines() if any(map(str.isalnum, line))]
        # pip says first what is wrong, Python last, torch's launcher goes on after it
        named = [line for line in lines if "Error: " in line][-1:]
        said = [line for line in lines if line.startswith("ERROR:")] or named or lines[-1:] or ["no word"]
        raise CommandError(f"exit {process.returncode}: {said[0]}")
    return output


def prepare(folder: Path) -> dict[str, str]:
    """Make the environment, or take the one that is there; which peers are absent, and why."""
    absent: dict[str, str] = {}
    ready = folder / "installed"  # one file per installed peer
    if not ready.exists():
        print(f"making an environment in {folder}", flush=True)
        try:
            venv.create(folder, with_pip=True)
            (folder / "constraints.txt").write_text(f"{PIN}\n")
            _pip(folder, PIN, "numpy")
        except (CommandError, OSError, subprocess.CalledProcessError) as error:
            return dict.fromkeys(INSTALL, f"no environment: {error}")
        ready.mkdir()
    for peer, steps in INSTALL.items():
        if (ready / peer).exists():
            continue
        try:
            for wanted in steps:
                _pip(folder, *wanted)
            (ready / peer).touch()
        except CommandError as error:
            absent[peer] = str(error)
    return absent


def _pip(folder: Path, *wanted: str) -> None:
    constraints = str(folder / "constraints.txt")
    execute([_python(folder), "-m", "pip", "install", "--quiet", "--constraint", constraints, *wanted])


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def measure_ours(model: str, updates: int) -> dict[str, Any]:
    """afield and the naive loop, in this interpreter's environment."""
    paths = os.pathsep.join((str(HERE.parent / "src"), str(HERE)))
    return _last_line(
        execute([sys.executable, str(HERE / "peers" / "ours.py"), model, str(updates)], PYTHONPATH=paths)
    )


def measure_peer(
    folder: Path, peer: str, model: str, updates: int, setting: tuple[int, int]
) -> dict[str, Any]:
    """A peer, in the throw-away environment."""
    processes, threads = setting
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = [str(HERE / "peers" / f"{peer}_run.py"), model, str(updates), str(threads)]
    return _last_line(
        execute([_python(folder), "-W", "ignore", *(many if processes > 1 else []), *script], PYTHONPATH="")
    )


def _last_line(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


class Others:
    """What part of the cores went to processes that are not ours; None where the system does not say."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), self._spent()

    def share(self) -> float | None:
        now = self._spent()
        if now is None or self._before is None:
            return None
        return round((now - self._before) / (time.perf_counter() - self._began) / (os.cpu_count() or 1), 2)

    @staticmethod
    def _spent() -> float | None:
        try:
            words = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        except OSError:
            return None
        ticks = [int(word) for word in words]
        idle, waiting = ticks[3:5]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK") - used.ru_utime - used.ru_stime


class Figures:
    """Updates per second of every turn, by model, system and algorithm; a peer in two settings is two systems."""

    def __init__(self) -> None:
        self.turns: dict[tuple[str, str, str], list[float]] = {}
        self.versions: dict[str, str] = {"python": platform.python_version()}

    def add(self, model: str, found: dict[str, Any], setting: str = "") -> None:
        self.versions |= found["versions"]
        for system, rates in found["updates_per_s"].items():
            for algorithm, rate in rates.items():
                self.turns.setdefault((model, system + setting, algorithm), []).append(rate)
                print(f"  {model} {system + setting} {algorithm}: {rate:.0f}", flush=True)

    def best(self, model: str, system: str, algorithm: str) -> tuple[str, list[float]] | None:
        """The system's fastest setting, and its turns; None if it was not measured."""
        used = "fedavg" if system == "pfl" else algorithm
        mine = [
            (name, turns)
            for (where, name, what), turns in self.turns.items()
            if (where, name.split()[0], what) == (model, system, used)
        ]
        return max(mine, key=lambda pair: statistics.median(pair[1]), default=None)


def report(figures: Figures) -> dict[str, Any]:
    """Print the table; the same for the line of JSON."""
    systems = ("afield", "naive", *INSTALL)
    rates: dict[str, Any] = {model: {algorithm: {} for algorithm in ALGORITHMS} for model in MODELS}
    ratios: dict[str, Any] = {model: {algorithm: {} for algorithm in ALGORITHMS} for model in MODELS}
    fastest: dict[str, list[str]] = {}
    heads = (*systems, *(f"/{other}" for other in systems[1:]))
    print("\nupdates/s, and afield over each of the others (pfl: FedAvg, the same figure in both rows)\n")
    print(f"{'':14}" + "".join(f"{head:>9}" for head in heads))
    for model in MODELS:
        for algorithm in ALGORITHMS:
            mine: list[float] = []
            for system in systems:
                if not (best := figures.best(model, system, algorithm)):
                    continue
                name, turns = best
                mine = mine or turns
                rates[model][algorithm][system] = round(statistics.median(turns), 1)
                if system != "afield":
                    # a peer that failed in a later turn has fewer
                    over = [a / b for a, b in zip(mine, turns, strict=False)]
                    ratios[model][algorithm][system] = round(statistics.median(over), 3)
                if name != system:
                    fastest.setdefault(name, []).append(f"{model} {algorithm}")
            cells = [_cell(rates[model][algorithm], system, 0) for system in systems]
            cells += [_cell(ratios[model][algorithm], system, 2) for system in systems[1:]]
            print(f"{model:5}{algorithm:9}" + "".join(f"{cell:>9}" for cell in cells))
    print("\nprocesses x threads")
    for name, where in fastest.items():
        print(f"{name}: {', '.join(where)}")
    return {"updates_per_s": rates, "ratios": ratios, "versions": figures.versions, "settings": fastest}


def _cell(values: dict[str, float], system: str, digits: int) -> str:
    return f"{values[system]:.{digits}f}" if system in values else "-"


def compare(folder: Path, updates: int, turns: int, quick: bool) -> None:
    """Install, measure, report."""
    absent = prepare(folder)
    figures, others = Figures(), Others()
    for turn in range(turns):
        print(f"turn {turn + 1} of {turns}", flush=True)
        for model in MODELS:
            figures.add(model, measure_ours(model, updates))
            for peer in [peer for peer in INSTALL if peer not in absent]:
                settings = SETTINGS[peer][:1] if quick else dict.fromkeys(SETTINGS[peer])
                try:
                    for setting in settings:
                        found = measure_peer(folder, peer, model, updates, setting)
                        figures.add(model, found, f" {setting[0]}x{setting[1]}")
                except CommandError as error:
                    absent[peer] = str(error)
    found = report(figures)
    for peer, reason in absent.items():
        print(f"absent: {peer} ({reason})")
    share = others.share()
    if share is not None and share > 0.1:
        print(
            f"other processes took {share:.0%} of {CORES} cores: whoever uses several threads suffers most, run again"
        )
    about = {"absent": absent, "updates": updates, "turns": turns, "cores": CORES, "others": share}
    print(json.dumps({"benchmark": "peers", **found, **about}))


def main() -> None:
    parser = argparse.ArgumentParser(description="afield, a naive loop, FLGo and pfl on one workload")
    parser.add_argument("--quick", action="store_true", help="100 updates, 1 turn, peers in one setting")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="the peers' environment, kept for the next time"
    )
    parser.add_argument("--updates", type=int, default=500, help="updates per measurement (500)")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each (5)")
    options = parser.parse_args()
    if options.updates < 1:
        parser.error(f"--updates {options.updates} is below 1: give 1 or more")
    if options.turns < 1:
        parser.error(f"--turns {options.turns} is below 1: give 1 or more")
    updates, turns = (min(options.updates, 100), 1) if options.quick else (options.updates, options.turns)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    folder = options.keep or Path(tempfile.mkdtemp(prefix="afield-peers-"))
    try:
        compare(folder.resolve(), updates, turns, options.quick)
    except CommandError as error:
        raise SystemExit(f"afield could not be measured: {error}") from None
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
