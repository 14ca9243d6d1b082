"""The plan of an experiment, in its folder: its runs, and what is made of them. So it can be taken up."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from afield.core.errors import InputError
from afield.experiments.codec import decode, dumps, encode
from afield.experiments.config import FORMAT, OWN, REGISTRIES, Experiment, config
from afield.experiments.folder import CONFIG, EXPERIMENT, STORE, new_folder, write_whole
from afield.experiments.keep import check_format, group, stored


def write_plan(chosen: Experiment, folder: Path, places: Sequence[Path]) -> None:
    """Make the folder of an experiment, with the plan in it."""
    new_folder(folder)
    own = encode(replace(chosen, runs=()), REGISTRIES)
    runs = [
        {"folder": str(place.relative_to(folder)), "config": run.table()}
        for place, run in zip(places, chosen.runs, strict=True)
    ]
    table = {"format": FORMAT} | {key: own[key] for key in OWN if key in own} | {"runs": runs}
    write_whole(folder / EXPERIMENT, dumps(table))


def read_plan(folder: Path) -> tuple[Experiment, list[Path]]:
    """What is to be done in a folder, and where: that of an experiment, or of one run."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give that of a run, as `afield run` made it")
    if not (folder / EXPERIMENT).is_file():
        if (plan := folder / "plan.json").is_file():
            try:
                command = json.loads(plan.read_text(encoding="utf-8"))["command"]
            except (ValueError, LookupError, TypeError):  # damaged
                command = "the command that began it,"
            raise InputError(f"{folder} holds a reproduction, which goes on by: {command} --out {folder}")
        found = stored(folder)  # one run of several, or one that was run from Python
        for above in folder.absolute().parents[:2]:  # that of an experiment, or of a reproduction
            name = str(folder.absolute().relative_to(above))
            if any(name in group(store) for store in above.glob(f"{STORE}*")):  # or those of shares
                raise InputError(
                    f"{folder} is trained together with others, and goes on with them: give the folder {above}"
                )
        return Experiment(name=folder.name, seeds=(found.seed,), runs=(found,)), [folder]
    try:
        table = tomllib.loads((folder / EXPERIMENT).read_text(encoding="utf-8"))
        check_format(folder / EXPERIMENT, table.get("format"))
        places = [folder / run["folder"] for run in table["runs"]]
        runs = tuple(config(run["config"]) for run in table["runs"])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / EXPERIMENT} is damaged ({error}): restore it from a copy, or resume its runs one by one"
        ) from None
    chosen = decode(Experiment, {key: table[key] for key in OWN if key in table}, REGISTRIES)
    runs = tuple(
        stored(place) if (place / CONFIG).is_file() else run for place, run in zip(places, runs, strict=True)
    )
    return replace(chosen, runs=runs), places
