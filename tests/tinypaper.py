"""A preset of a paper that runs in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from afield.experiments.codec import dumps, merge

TABLE: dict[str, Any] = {
    "name": "tiny",
    "seeds": [0, 1],
    "paper": {
        "citation": "Nobody: Nothing (2020)",
        "what": "Table 9",
        "about": "two rules, two partitions",
        "metric": "best",
        "extras": ["contributors", "staleness"],
        "open": ["Everything; we chose."],
    },
    "model": {"name": "linear"},
    "local": {"batch": 8, "rate": 0.2},
    "scenario": {
        "clients": 6,
        "data": {"name": "digits", "limit": 120},
        "partition": "iid",
        "scheduler": {"name": "concurrency", "limit": 4},
    },
    "measure": {"versions": 5},
    "stop": {"updates": 20},
    "rows": [
        {"label": "mixing", "strategy": {"name": "fedasync", "alpha": 0.5}},
        {
            "label": "rolling",
            "strategy": {"name": "twafl", "decay": 0.9},
            "at": {"uneven": {"strategy": {"decay": 0.7}}},
        },
        {"label": "adding", "strategy": {"name": "asgd", "lr": 0.01}, "only": ["even"]},
    ],
    "columns": [
        {"label": "even"},
        {"label": "uneven", "scenario": {"partition": {"name": "dirichlet", "alpha": 0.3}}},
    ],
    "theirs": {"mixing": [[80.0, 1.0], [70.0, 2.0]], "rolling": [60.5, []], "adding": [10.0, []]},
    "scales": {
        "smoke": {"seeds": [3], "stop": {"updates": 8}, "rows": {"rolling": {"local": {"rate": 0.1}}}},
        "small": {"only": ["mixing", "even"]},
    },
}


def written(folder: Path, **changes: Any) -> str:
    """The table as a file; its path is a preset's name."""
    file = folder / "tiny.toml"
    file.write_text(dumps(merge(TABLE, changes)))
    return str(file)


def quiet(_: str) -> None:
    pass
