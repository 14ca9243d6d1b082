"""The trackers by name: tools that people keep open, each of them imported here and nowhere else."""

from __future__ import annotations

import csv
import importlib
import logging
import os
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from afield.core.errors import InputError, one_of, within

STORE = "sqlite:///mlflow.db"  # where neither log.uri nor MLFLOW_TRACKING_URI says; file stores are refused by mlflow
BATCH = 100  # parameters that mlflow takes at once
LONGEST = 6000  # letters of a parameter that mlflow takes
DAY = 86_400.0  # seconds

# several runs may begin at once: one makes mlflow's tables, starts wandb's service
_BEGINNING = threading.Lock()


@dataclass(frozen=True)
class Log:
    """Which trackers a run tells, besides its folder."""

    to: tuple[str, ...] = ()
    project: str = "afield"  # the project of wandb, the experiment of mlflow
    group: str = ""  # empty: the name of the folder that the run folder is in
    uri: str | None = None  # of mlflow; left out: MLFLOW_TRACKING_URI, else mlflow.db in this folder
    offline: bool = False  # wandb writes into the run folder, for `wandb sync`
    patience: float = 30.0  # seconds that the end of a run waits for a tracker

    def __post_init__(self) -> None:
        for name in self.to:
            one_of("to", name, TRACKERS)
            if self.to.count(name) > 1:
                raise InputError(f"to = {list(self.to)} names {name!r} twice: name it once")
        within("patience", self.patience, 0, DAY)
        if not self.project:
            raise InputError("project is empty: give it a name")
        kind = "" if self.uri is None else self.uri.partition(":")[0]
        if kind != "databricks" and kind in ("file", self.uri):
            raise InputError(
                f"uri = {self.uri!r} is a folder, which mlflow refuses: give a server, or a database as {STORE!r}"
            )


@dataclass(frozen=True)
class Told:
    """What a tracker is told of a run before its first row."""

    folder: Path
    text: str  # config.toml
    log: Log

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def group(self) -> str:
        return self.log.group or self.folder.resolve().parent.name

    @property
    def config(self) -> dict[str, Any]:
        return tomllib.loads(self.text)


class Tracker(Protocol):
    """Opened with what it is to know and what it remembers of an earlier opening; used by one thread."""

    @staticmethod
    def place(log: Log) -> str:
        """Where its runs go: what it remembers of one place does not hold for another."""

    def __init__(self, told: Told, memory: dict[str, Any]) -> None: ...

    def row(self, number: int, row: Mapping[str, Any]) -> None: ...

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """The end; without a summary the run was stopped before its own."""


class Csv:
    """metrics.csv in the run folder: a line per measurement, a column per number."""

    package = "csv"

    @staticmethod
    def place(log: Log) -> str:
        return "folder"

    def __init__(self, told: Told, memory: dict[str, Any]) -> None:
        memory["rows"] = 0  # made anew whenever it is opened: it is small, and cannot be torn then
        self._path = told.folder / "metrics.csv"
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._path.write_text("", encoding="utf-8")

    def row(self, number: int, row: Mapping[str, Any]) -> None:
        values = dict(flat(row))
        self._rows.append(values)
        if new := [name for name in values if name not in self._columns]:
            self._columns += new
            self._write("w", self._rows)
        else:
            self._write("a", [values])

    def _write(self, mode: str, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._path.open(mode, encoding="utf-8", newline="") as file:
            lines = csv.DictWriter(file, self._columns, lineterminator="\n")
            if mode == "w":
                lines.writeheader()
            lines.writerows(rows)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        pass


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir runs` shows all runs below, by folder."""

    package = "tensorboard"

    @staticmethod
    def place(log: Log) -> str:
        return "folder"

    def __init__(self, told: Told, memory: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(told.folder / "tensorboard")
        self._config = told.config
        self._last: dict[str, float] = {}
        self._step = 0
        if not memory["rows"]:
            self._writer.add_text("config", "".join(f"    {line}\n" for line in told.text.splitlines()), 0)

    def row(self, number: int, row: Mapping[str, Any]) -> None:
        self._step = int(row["updates"])
        self._last = {name: float(value) for name, value in flat(row)}
        for name, value in self._last.items():
            self._writer.add_scalar(name, value, self._step)
        self._writer.flush()

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            from torch.utils.tensorboard.summary import hparams

            for name, value in flat(summary):
                self._writer.add_scalar(f"summary/{name}", float(value), self._step)
            shown = {name: value for name, value in self._last.items() if name in ("accuracy", "loss")}
            # as add_hparams, which would make a second run of it
            for part in hparams(dict(flat(self._config, every=True)), shown):
                self._writer.file_writer.add_summary(part)
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; its own step is the row's number, its plots are over `updates`."""

    package = "wandb"

    @staticmethod
    def place(log: Log) -> str:
        return f"{_mode(log)} {log.project}"

    def __init__(self, told: Told, memory: dict[str, Any]) -> None:
        import wandb

        with _BEGINNING:
            wandb.setup()
        mode: Any = _mode(told.log)
        self._run: Any = wandb.init(
            project=told.log.project,
            group=told.group,
            name=told.name,
            id=memory.get("id"),
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=told.folder,
            config=told.config,
            reinit="create_new",  # several runs of a sweep may go on at once
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        memory["id"] = self._run.id
        self._run.define_metric("*", step_metric="updates")

    def row(self, number: int, row: Mapping[str, Any]) -> None:
        self._run.log(dict(flat(row)), step=number)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._run.summary.update({f"summary.{name}": value for name, value in flat(summary, every=True)})
        self._run.finish(exit_code=0 if summary is not None else 1)


class Mlflow:
    """A run of MLflow, in a database or on a server; parameters are the config, steps are updates."""

    package = "mlflow"

    @staticmethod
    def place(log: Log) -> str:
        return log.uri or os.environ.get("MLFLOW_TRACKING_URI") or STORE

    def __init__(self, told: Told, memory: dict[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else a line for each table that it makes
        self._metric = Metric
        uri = self.place(told.log)
        self._client = MlflowClient(tracking_uri=uri)
        self._step = 0
        if "id" in memory:
            self._id = str(memory["id"])
            self._client.update_run(self._id, status="RUNNING")
            return
        # a server may hang, and nobody shall wait for that with the lock; it has its tables already
        server = uri.startswith(("http", "databricks"))
        guard: AbstractContextManager[Any] = nullcontext() if server else _BEGINNING
        with guard:
            number = self._experiment(told.log.project)
        self._id = self._client.create_run(number, run_name=told.name).info.run_id
        memory["id"] = self._id
        params = [Param(name, str(value)[:LONGEST]) for name, value in flat(told.config, every=True)]
        for start in range(0, len(params), BATCH):
            self._client.log_batch(self._id, params=params[start : start + BATCH])
        tags = {"group": told.group, "folder": str(told.folder.resolve())}
        self._client.log_batch(self._id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run was faster
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)

    def row(self, number: int, row: Mapping[str, Any]) -> None:
        self._step = int(row["updates"])
        self._send(dict(flat(row)))

    def _send(self, values: Mapping[str, float]) -> None:
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        metrics = [self._metric(name, float(value), now, self._step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._send({f"summary.{name}": value for name, value in flat(summary)})
            self._client.set_tag(self._id, "ended", str(summary["ended"]))
        self._client.set_terminated(self._id, "FINISHED" if summary is not None else "KILLED")


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "csv": Csv}


def _mode(log: Log) -> str:
    return "offline" if log.offline else os.environ.get("WANDB_MODE", "online")


def check(log: Log) -> None:
    """Raise where a tracker cannot be used at all, before a run has cost anything."""
    for name in log.to:
        try:
            # here and not by the thread that uses it: training may fork while that is importing
            found = importlib.import_module(TRACKERS[name].package)
        except ImportError as error:
            raise InputError(
                f"log.to names {name!r}, and its package is not installed ({error}): "
                f"pip install 'afield[{name}]', or take it out of log.to"
            ) from None
        if name == "wandb" and _mode(log) == "online" and found.api.api_key is None:
            raise InputError(
                "log.to names 'wandb', which has no key here: wandb login, or log.offline = true"
            )


def flat(table: Mapping[str, Any], every: bool = False, path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of nested tables and lists by dotted names; `every`: texts and switches too. Nothing for None."""
    for key, value in table.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, every, f"{name}.")
        elif isinstance(value, list | tuple) and not every:
            yield from flat({str(number): part for number, part in enumerate(value)}, every, f"{name}.")
        elif every and value is not None:
            yield name, str(value) if isinstance(value, list | tuple) else value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
