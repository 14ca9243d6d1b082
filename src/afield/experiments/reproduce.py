"""A paper's table or figure, run: the runs that are missing go, the result is made from all that are there.

Nothing here needs typer or rich: `reproduce("mr-asyncfl-table-1", scale="smoke")` works from Python as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from afield.core.errors import InputError
from afield.experiments.config import Config, Sweep
from afield.experiments.folder import STORE, write_whole
from afield.experiments.keep import Asking, clear, finished, stoppable, stored
from afield.experiments.keep import group as stopped_group
from afield.experiments.paper import AXES, Cell, Preset, load_preset
from afield.experiments.run import load_data, prepare, run
from afield.experiments.sweep import prepare_all, run_together
from afield.runtimes.rows import Measurement
from afield.store.files import DRAFT

PLAN = "plan.json"
Say = Callable[[str], None]
Share = tuple[int, int]  # (2, 3): every third run from the second on


@dataclass(frozen=True)
class Job:
    """One run that is wanted, and where it goes."""

    config: Config
    folder: Path


def reproduce(
    name: str,
    *,
    scale: str = "paper",
    seeds: Sequence[int] | None = None,
    out: Path | None = None,
    device: str | None = None,
    data: Path | None = None,
    stand_in: bool = False,
    only: Sequence[str] = (),
    share: Share = (1, 1),
    settings: Sequence[str] = (),
    collect: bool = False,
    say: Say = print,
) -> Path:
    """Run what is missing of a preset and write its result; gives the folder.

    Finished runs in `out` are kept where their config is the same and refused where it differs. `only` restricts what
    is run, never what the result shows; so does `share` = (2, 3), every third run from the second on: other processes
    may run the others at the same time. `collect`: run nothing, make the result from what is there.
    """
    if not 1 <= share[0] <= share[1]:
        most = max(share[1], 2)
        raise InputError(f"share {share[0]}/{share[1]} is none: give 1/{most} to {most}/{most}")
    check_settings(settings)
    preset = load_preset(name)
    folder = out if out is not None else Path("runs") / f"{preset.name}-{scale}"
    parts = ["afield", "reproduce", name, "--scale", scale]
    parts += ["--device", device] if device else []
    parts += ["--data", "DIR"] if data is not None else []
    parts += ["--stand-in"] if stand_in else []
    chosen = [word for setting in settings for word in ("--set", setting)]
    with data_folder(data):
        return carry_out(
            preset,
            folder,
            scale=scale,
            seeds=seeds or preset.seeds(scale),
            settings=[*settings, *([f"runtime.device={device}"] if device else [])],
            stand_in=stand_in,
            only=only,
            share=share,
            collect=collect,
            command=shlex.join(parts + chosen),
            again=going_on(parts[:5] + chosen, folder, seeds, only, device, data, stand_in, share),
            say=say,
        )


def check_settings(settings: Sequence[str]) -> None:
    """Raise where a setting is none of a run's: each has the seed that its folder says."""
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key in ("seed", "seeds"):
            raise InputError(
                f"--set {setting}: the seeds of a table are given by --seeds, such as --seeds 0,1,2"
            )


def going_on(
    parts: Sequence[str],
    folder: Path,
    seeds: Sequence[int] | None,
    only: Sequence[str],
    device: str | None,
    data: Path | None,
    stand_in: bool,
    share: Share = (1, 1),
) -> str:
    """The command that goes on with what was stopped, here: the one in a result names no folder of a machine."""
    given = {"--out": folder, "--device": device, "--data": data}
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    words += ["--seeds", ",".join(map(str, seeds))] if seeds else []
    words += [word for label in only for word in ("--only", label)]
    words += ["--share", f"{share[0]}/{share[1]}"] if share[1] > 1 else []
    return shlex.join([*parts, *words, *(["--stand-in"] if stand_in else [])])


def carry_out(
    preset: Preset,
    folder: Path,
    *,
    scale: str,
    seeds: Sequence[int],
    settings: Sequence[str] = (),
    stand_in: bool = False,
    only: Sequence[str] = (),
    share: Share = (1, 1),
    collect: bool = False,
    command: str = "",
    again: str = "",
    say: Say = print,
) -> Path:
    """The runs of a preset into `folder`, then its result. `again`: what to type where this is stopped."""
    cells = preset.cells(scale)
    light = ["runtime.model=false"]  # 45 MB each, and no table shows them
    if importlib.util.find_spec("pyarrow") is None:
        light.append("runtime.receipts=false")
    configs = {cell.folder: cell.configs(seeds, [*light, *settings]) for cell in cells}
    stands = _check_stand_ins(preset, configs, allowed=stand_in or scale == "smoke")
    _check_kept(cells, configs, folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_plan(folder / PLAN, _plan(preset, cells, scale, stands, command))
    chosen = {} if collect else {cell.folder: cell for cell in preset.cells(scale, only)}
    wanted = [
        Job(configs[place][number], folder / place / f"seed-{seed}")
        for number, seed in enumerate(seeds)
        for place in chosen
    ][share[0] - 1 :: share[1]]
    store = folder / (STORE if share[1] == 1 else f"{STORE}-{share[0]}-of-{share[1]}")
    missing = [job for job in wanted if not finished(job.folder)]
    if wanted:
        say(f"{preset.name}: {len(wanted)} runs, {len(wanted) - len(missing)} of them are there; {folder}")
    _check_data([job.config for job in missing])
    with stoppable(again) as asking:
        _run(_groups(wanted, preset.sweep(scale), store, share), asking, say)
    if importlib.util.find_spec("pyarrow") is None:
        say(f"no pyarrow here: make the result elsewhere by {command} --out {folder} --collect")
        return folder
    from afield.reports import (
        papers,
    )  # here: it needs pyarrow and matplotlib, which machines that only run may lack

    papers.write(folder)
    return folder


@contextmanager
def data_folder(path: Path | None) -> Iterator[None]:
    """Data sets are looked for in this folder while it is open."""
    before = os.environ.get("AFIELD_DATA")
    if path is not None:
        if not path.is_dir():
            raise InputError(f"--data {path} is not a folder: give the one that holds the data sets")
        os.environ["AFIELD_DATA"] = str(path)
    try:
        yield
    finally:
        if path is not None:
            os.environ.pop("AFIELD_DATA")
            os.environ.update({} if before is None else {"AFIELD_DATA": before})


def _check_stand_ins(preset: Preset, configs: Mapping[str, list[Config]], allowed: bool) -> bool:
    """Whether some model is a small stand-in of a pretrained one; that must be asked for."""
    models = [run.model for runs in configs.values() for run in runs if getattr(run.model, "stand_in", False)]
    if models and not allowed:
        kind = type(models[0]).__name__
        raise InputError(
            f"{preset.name} starts from a pretrained {kind}, and no folder of one is given: give it by "
            f"--set model.folder=DIR, or run the small untrained stand-in by --stand-in"
        )
    return bool(models)


# -- what is there already --------------------------------------------------------------------------


def _check_kept(cells: Sequence[Cell], configs: Mapping[str, list[Config]], folder: Path) -> None:
    """Raise where a finished run of this folder is another one than is wanted."""
    plan = folder / PLAN
    if folder.exists() and not plan.is_file() and not (folder.is_dir() and _empty(folder)):
        raise InputError(f"{folder} exists and holds no reproduction: choose another --out, or remove it")
    for cell in cells:
        for place in sorted((folder / cell.folder).glob("seed-*")):
            if not finished(place):
                continue  # it was stopped
            there = stored(place)
            wanted = replace(configs[cell.folder][0], seed=there.seed)
            if difference := _difference(wanted, there):
                raise InputError(
                    f"{place} was run with {difference}: choose another --out, or remove what is there"
                )


def _empty(folder: Path) -> bool:
    """Whether nothing is there but what another share may be writing just now."""
    return all(part.name.endswith(DRAFT) for part in folder.iterdir())


def _difference(wanted: Config, stored: Config) -> str:
    """The first key in which a stored run differs, other than by what its machine decides.

    Ways of training differ by rounding, so runs of several machines may fill one table; not in their precision.
    """
    there = stored.training
    training = replace(
        wanted.training.by(there.method), channels_last=there.channels_last, compile=there.compile
    )
    wanted = replace(wanted, runtime=stored.runtime, log=stored.log, training=training)
    ours, theirs = _flat(wanted.table()), _flat(stored.table())
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key):
            return f"{key} = {theirs.get(key)!r}, which is {ours.get(key)!r} now"
    return ""


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found


def _plan(preset: Preset, cells: Sequence[Cell], scale: str, stand_in: bool, command: str) -> dict[str, Any]:
    """All that the result needs besides the runs."""
    labels = {axis: [entry.label for entry in preset.axes[axis]] for axis in AXES}
    places = [
        {"row": cell.row, "column": cell.column, "variant": cell.variant, "folder": cell.folder}
        for cell in cells
    ]
    return {
        "name": preset.name,
        "scale": scale,
        "command": command,
        "stand_in": stand_in,
        "paper": asdict(preset.paper),
        "axes": labels,
        "theirs": dict(preset.theirs),
        "cells": places,
    }


def _write_plan(file: Path, plan: Mapping[str, Any]) -> None:
    old: Any = None
    if file.is_file():
        with suppress(ValueError):  # damaged: all that it held is at hand, and the runs were compared with it
            old = json.loads(file.read_text(encoding="utf-8"))
    for key in ("name", "scale") if isinstance(old, dict) else ():
        if old.get(key) != plan[key]:
            raise InputError(
                f"{file.parent} holds {key} {old.get(key)!r}, not {plan[key]!r}: choose another --out"
            )
    write_whole(file, json.dumps(plan, indent=1) + "\n", alone=False)  # by other shares


# -- the runs ---------------------------------------------------------------------------------------


def _check_data(configs: Sequence[Config]) -> None:
    """Raise now where a file is missing, not after hours of other runs."""
    first = {(config.scenario.data, config.model): config for config in reversed(configs)}
    for config in first.values():
        load_data(config)


@dataclass(frozen=True)
class Group:
    """Runs that go together, and where what they share is stored."""

    jobs: list[Job]
    store: Path
    again: bool  # goes on where it was stopped


def _groups(wanted: Sequence[Job], sweep: Sweep, store: Path, share: Share) -> list[Group]:
    """What is missing, in the groups that go together; those that were stopped go on first, as they were.

    Who runs everything also goes on with what shares of it were stopped at.
    """
    places = {os.path.relpath(job.folder, store.parent): job for job in wanted}
    stores = [store, *(sorted(store.parent.glob(f"{STORE}-*-of-*")) if share == (1, 1) else [])]
    stopped: list[Group] = []
    taken: list[Job] = []
    for one in stores:
        names = stopped_group(one)
        jobs = [places[name] for name in names if name in places]
        # not where they are other runs, or others of the same name
        if jobs and len(jobs) == len(names) and all(_same(job) and job not in taken for job in jobs):
            stopped.append(Group(jobs, one, again=True))
            taken += jobs
    rest = [job for job in wanted if job not in taken and not finished(job.folder)]
    for job in wanted:
        if finished(job.folder) and job not in taken:
            clear(job.folder / STORE)
    width = sweep.limit if sweep.together else 1
    parts = [rest[at : at + width] for at in range(0, len(rest), width)]
    # what was trained in common blocks can only go on as it was; a run alone by its own store
    return stopped + [Group(part, store, again=len(part) == 1 and _same(part[0])) for part in parts]


def _same(job: Job) -> bool:
    """Whether a run that was begun is the one that is wanted."""
    try:
        there = stored(job.folder)
    except InputError:  # it never began, or another afield began it
        return False
    return there.runtime.device == job.config.runtime.device and not _difference(job.config, there)


def _run(groups: Sequence[Group], asking: Asking, say: Say) -> None:
    done, began, total = 0, time.perf_counter(), sum(len(group.jobs) for group in groups)
    for group in groups:
        jobs, store, again = group.jobs, group.store, group.again
        configs = [stored(job.folder) if again else job.config for job in jobs]
        if not again:
            for job in jobs:
                shutil.rmtree(job.folder, ignore_errors=True)
            if len(jobs) > 1:
                shutil.rmtree(store, ignore_errors=True)
        prepared = prepare_all(configs) if len(jobs) > 1 else [prepare(configs[0])]
        if len(jobs) == 1:
            alone = run(prepared[0], jobs[0].folder, again=again, asking=asking)
            rows: Any = ((0, row) for row in alone)
        else:
            places = [job.folder for job in jobs]
            rows = run_together(prepared, places, store, again=again, asking=asking)
        last = {number: row for number, row in rows if isinstance(row, Measurement)}
        for number, job in enumerate(jobs):
            done += 1
            if number not in last:
                continue  # it was finished when the others were stopped
            spent = time.perf_counter() - began
            text = f"[{done}/{total}] {job.config.label}, seed {job.config.seed}: {_told(last[number])}"
            ended = prepared[number].simulator.ended
            if ended not in ("time", "updates", "versions", "accuracy"):
                text += f", ended early: {ended}"
            say(f"{text} ({spent:.0f} s so far)")


def _told(row: Measurement) -> str:
    if "accuracy" in row.values:
        return f"accuracy {100 * row.values['accuracy']:.1f} %"
    return f"loss {row.values['loss']:.4g}" if "loss" in row.values else f"version {row.version}"
