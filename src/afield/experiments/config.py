"""The whole of one run as data: TOML keys are the fields of these classes, config.toml holds all of them."""

from __future__ import annotations

import importlib.util
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from afield.core.errors import InputError, closest, one_of, within
from afield.core.places import KINDS
from afield.core.protocols import Availability, Delay, Partition, Strategy
from afield.experiments.codec import Table, assign, decode, dumps, encode, merge
from afield.experiments.trackers import Log
from afield.runtimes.terms import Manners, Measuring, Stop
from afield.scenarios.availability import AVAILABILITIES, Always
from afield.scenarios.data import DATA, Dataset, Digits
from afield.scenarios.delays import DELAYS, Speeds
from afield.scenarios.partition import PARTITIONS, Dirichlet
from afield.scenarios.schedulers import ROUNDS, SCHEDULERS, All, Cohort
from afield.scenarios.texts import Texts
from afield.strategies import STRATEGIES, FedBuff
from afield.strategies.staleness import STALENESS, Staleness
from afield.training.choose import Training
from afield.training.local import Local
from afield.training.models import MODELS, Mlp, Model

FORMAT = 1
OWN = ("name", "figure", "target", "seeds", "sweep")  # keys of an experiment, beside those of its runs
PAPERS = ("paper", "theirs", "scales", "grid")  # keys of a paper's preset that its runs do not know
INTERFACE = ("uses_base", "whole", "init", "receive")  # what a strategy has


class Source(Protocol):
    """Where data comes from."""

    def load(self, seed: int) -> Dataset | Texts: ...


class AnyScheduler(Protocol):
    """A scheduler of scenarios/schedulers.py for updates used as they arrive."""

    def concurrency(self, clients: int) -> int: ...


class AnyRounds(Protocol):
    """Who takes part in a synchronous round."""

    def participation(self, clients: int) -> tuple[float, ...]: ...


REGISTRIES: dict[Any, Mapping[str, type]] = {
    Strategy: STRATEGIES,
    Staleness: STALENESS,
    Model: MODELS,
    Source: DATA,
    Partition: PARTITIONS,
    Delay: DELAYS,
    Availability: AVAILABILITIES,
    AnyScheduler: SCHEDULERS,
    AnyRounds: ROUNDS,
}


@dataclass(frozen=True)
class Scenario:
    """Who has which data, how slow, when present."""

    clients: int = 50  # how many
    data: Source = Digits()  # what there is to learn
    partition: Partition = Dirichlet()  # who has which of it
    delay: Delay = Speeds()  # how long a task takes
    availability: Availability = Always()  # who is present when
    scheduler: AnyScheduler = All()  # for strategies that use updates as they arrive
    rounds: AnyRounds = Cohort()  # for strategies that work in rounds

    def __post_init__(self) -> None:
        within("clients", self.clients, 1, math.inf)


@dataclass(frozen=True)
class Saving:
    """How often a run is saved, so that it can be taken up (experiments/keep.py)."""

    seconds: float = (
        10.0  # at the least between two; longer where they take long. inf: only when it is stopped
    )
    versions: int | None = None  # also after so many versions

    def __post_init__(self) -> None:
        within("seconds", self.seconds, 0, math.inf)
        if self.versions is not None:
            within("versions", self.versions, 1, math.inf)


@dataclass(frozen=True)
class Runtime:
    """What moves tasks and updates, and on what. Threads, block and table are chosen by rule where left out."""

    name: str = "simulator"  # "ray": the same, its tasks trained all over a cluster (runtimes/ray.py)
    address: str = "auto"  # of the Ray cluster
    actors: int | None = None  # as many as the cluster has room for, one per GPU or per `cpus` CPUs
    cpus: int = 1  # per actor
    device: str = "cpu"
    threads: int | None = None
    block: int | None = None
    table: str = "auto"  # where a strategy keeps a vector per client: "memory" or "disk" (core/places.py)
    model: bool = True  # whether the trained model is kept in the run folder
    receipts: bool = True  # likewise the log of updates, which needs pyarrow
    snapshots: Saving = Saving()

    def __post_init__(self) -> None:
        one_of("name", self.name, ("simulator", "ray", "service"))
        one_of("table", self.table, KINDS)
        within("cpus", self.cpus, 1, math.inf)
        for name, most in (("threads", 4096), ("block", math.inf), ("actors", math.inf)):
            if getattr(self, name) is not None:
                within(name, getattr(self, name), 1, most)


@dataclass(frozen=True)
class Config:
    """One run."""

    format: int = FORMAT
    label: str = ""  # what tables and pictures call it; empty: the strategy's name
    seed: int = 0  # of all that is drawn
    strategy: Strategy = FedBuff()  # the server's rule
    model: Model = Mlp()  # the network
    local: Local = Local()
    training: Training = Training()
    scenario: Scenario = Scenario()
    server: Manners = Manners()
    measure: Measuring = Measuring(versions=10)
    stop: Stop = Stop(updates=1000)
    runtime: Runtime = Runtime()
    log: Log = Log()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise InputError(f"format = {self.format} is not {FORMAT}, the one this version of afield reads")
        within("seed", self.seed, 0, 2**63)

    def table(self) -> Table:
        own = _NAMES.get(type(self.strategy))
        return encode(self, REGISTRIES if own is None else _registries(own, type(self.strategy)))

    def toml(self) -> str:
        return dumps(self.table())


@dataclass(frozen=True)
class Sweep:
    """How the runs of an experiment go: one after the other, or together, in common blocks (experiments/sweep.py)."""

    together: bool = False
    limit: int = 16  # at most so many at once: each holds its server's state and what is in flight

    def __post_init__(self) -> None:
        within("limit", self.limit, 1, math.inf)


@dataclass(frozen=True)
class Experiment:
    """Several runs that belong together: variants times seeds of one table, and the picture they make."""

    name: str = "experiment"  # of the folder, in runs/
    figure: str = "accuracy"  # or "trajectories", of the data "quadratic"
    target: float | None = None  # the accuracy whose time the table reports
    seeds: tuple[int, ...] = (0,)  # every variant runs with each
    sweep: Sweep = Sweep()
    runs: tuple[Config, ...] = field(default=())

    def __post_init__(self) -> None:
        one_of("figure", self.figure, ("accuracy", "trajectories"))
        if self.target is not None:
            within("target", self.target, 0, 1, above=True)
        if not self.seeds:
            raise InputError("seeds is empty: give at least one, such as seeds = [0]")


def read(path: Path) -> Table:
    """A TOML file as a table."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = presets()
        raise InputError(f"{path} is neither a file nor a preset{closest(str(path), names)}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give a TOML file or a preset") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}; correct it there") from None


def presets() -> dict[str, Path]:
    """The experiments that come with afield, by name."""
    folder = Path(str(resources.files("afield.experiments") / "presets"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def experiment(
    table: Mapping[str, Any],
    *,
    strategy: str | None = None,
    seed: int | None = None,
    settings: Sequence[str] = (),
) -> Experiment:
    """The runs that a table describes: every variant with every seed.

    `strategy` takes the place of all variants, `settings` (KEY=VALUE) are applied last, to every run.
    """
    if "paper" in table:
        if "rows" in table or "columns" in table:
            raise InputError("this preset makes a table or figure of a paper: afield reproduce runs it")
        table = {key: value for key, value in table.items() if key not in PAPERS}
    variants = variants_of(table)
    _check_keys(table, variants, settings)
    own: Table = {key: table[key] for key in OWN if key in table}
    shared = merge(_named_defaults(), {k: v for k, v in table.items() if k not in (*OWN, "variants")})
    if "seed" in shared:
        own.setdefault("seeds", [shared["seed"]])
    for setting in settings:
        if (key := _top(setting)) in OWN:
            own = assign(own, setting)
        elif key == "seed":
            own["seeds"] = [assign({}, setting)["seed"]]
    if seed is not None:
        own["seeds"] = [seed]
    group = decode(Experiment, own, REGISTRIES)
    if strategy is not None:
        alike = [v for v in variants if _name_of(merge(shared, v)) == strategy]
        if not alike:
            shared.pop("label", None)  # it named another strategy
        variants = [merge(alike[0] if alike else {}, {"strategy": {"name": strategy}})]
    runs = []
    for variant in variants:
        merged = merge(shared, variant)
        for setting in settings:
            if _top(setting) not in OWN:
                merged = assign(merged, setting)
        merged.setdefault("label", _name_of(merged).rpartition(":")[2])
        runs += [config({**merged, "seed": number}) for number in group.seeds]
    _check_labels(runs)
    return replace(group, runs=tuple(runs))


def variants_of(table: Mapping[str, Any]) -> list[Any]:
    """The variants of a table; where it names none, one that changes nothing."""
    variants = table.get("variants", [{}])
    if not isinstance(variants, list) or not variants or not all(isinstance(v, Mapping) for v in variants):
        raise InputError("variants is not an array of tables: write [[variants]] before each")
    return variants


def settled(table: Mapping[str, Any], settings: Sequence[str]) -> Table:
    """A table of a run with `settings` applied, as `experiment` does it: more can be laid over the outcome."""
    _check_keys(table, [], settings)
    found = merge(_named_defaults(), table)
    for setting in settings:
        found = assign(found, setting)
    return found


def config(table: Mapping[str, Any]) -> Config:
    """One run from its table."""
    name = _name_of(table)
    if ".py:" not in name:
        return decode(Config, table, REGISTRIES)
    found = load_class(name)
    try:
        made = decode(Config, table, _registries(name, found))
        made.table()  # it can be written too
    except InputError:
        raise
    except Exception as error:  # of the user's own code, or of a field's type that TOML cannot hold
        raise InputError(f"strategy {name} cannot be made: {type(error).__name__}: {error}") from error
    return made


def _check_keys(table: Mapping[str, Any], variants: list[Any], settings: Sequence[str]) -> None:
    """Raise at the first key that neither an experiment nor its runs have."""
    runs = [column.name for column in fields(Config)]
    for keys, known in ((table, (*runs, *OWN, "variants")), (map(_top, settings), (*runs, *OWN))):
        for key in keys:
            if key not in known:
                raise InputError(f"{key} is not a key{closest(key, known)}")
    for number, variant in enumerate(variants):
        for key in variant:
            if key in (*OWN, "seed"):
                raise InputError(f"variants[{number}].{key} is for all variants: write it above [[variants]]")
            if key not in runs:
                raise InputError(f"variants[{number}].{key} is not a key{closest(key, runs)}")


def _top(setting: str) -> str:
    """The first part of the key of KEY=VALUE."""
    return next(iter(assign({}, setting)))


def _check_labels(runs: Sequence[Config]) -> None:
    seen = [(run.label, run.seed) for run in runs]
    for label, seed in seen:
        if seen.count((label, seed)) > 1:
            raise InputError(
                f"two runs are labelled {label!r} with seed {seed}: give each variant its own label"
            )


def _named_defaults() -> Table:
    """The default choices, so that a table or --set may give a parameter without repeating the name."""
    defaults = Config().table()
    return {key: defaults[key] for key in ("strategy", "model", "scenario")}


def _name_of(table: Mapping[str, Any]) -> str:
    given = table.get("strategy", {})
    return str(given.get("name", "") if isinstance(given, Mapping) else given)


def _registries(name: str, found: type) -> dict[Any, Mapping[str, type]]:
    """The registries, with a user's own strategy under its FILE.py:CLASS."""
    return {**REGISTRIES, Strategy: {**STRATEGIES, name: found}}


_LOADED: dict[tuple[Path, int, str], type] = {}  # by file, when that was changed, and class
_NAMES: dict[type, str] = {}  # how a user's class was named, so that config.toml can name it again


def load_class(name: str) -> type:
    """A class from a file of the user's: FILE.py:CLASS. This runs the file: only name files that you trust."""
    path, _, attribute = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"strategy file {path} is not there: give FILE.py:CLASS")
    key = (file.resolve(), file.stat().st_mtime_ns, attribute)
    if key not in _LOADED:
        found = _imported(file, attribute)
        for needed in ("__dataclass_fields__", *INTERFACE):
            if not hasattr(found, needed):
                what = "is not a dataclass" if needed.startswith("__") else f"has no {needed!r}"
                wanted = ", ".join(INTERFACE)
                raise InputError(f"{name} {what}: a strategy is a frozen dataclass with {wanted}")
        _LOADED[key] = found
        _NAMES[found] = name
    return _LOADED[key]


def load_module(name: str) -> type:
    """A network's class from a file of the user's: FILE.py:CLASS. This runs the file, too."""
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise InputError(f"--model {name} is not FILE.py:CLASS of a file that is there")
    return _imported(Path(path), attribute)


def _imported(file: Path, attribute: str) -> type:
    """The class that a file defines."""
    spec = importlib.util.spec_from_file_location(f"afield_user_{len(_LOADED)}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{file} cannot be imported: {reason}; correct it there") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        names = [key for key, value in vars(module).items() if isinstance(value, type)]
        own = [key for key in names if getattr(module, key).__module__ == spec.name]
        raise InputError(f"{file} has no class {attribute!r}{closest(attribute, own or names)}")
    return found
