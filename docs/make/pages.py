"""The pages that are made from the code: one per strategy, every key of a config, every command."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

import click
import typer
import weights

from afield.cli import app
from afield.cli.catalogue import KINDS
from afield.experiments.config import REGISTRIES, Config, Experiment, Runtime, Scenario, Sweep, presets
from afield.experiments.trackers import Log
from afield.runtimes.terms import Manners, Measuring, Stop
from afield.strategies import STRATEGIES
from afield.training.choose import Training
from afield.training.local import Local

SECTIONS = ("Paper", "Rule", "When", "Differs", "Parameters")
GROUPS = {
    "Updates used as they arrive": "arrival",
    "Updates gathered in a buffer": "buffer",
    "Synchronous rounds": "round",
}


@dataclass(frozen=True)
class Described:
    """A strategy's docstring, taken apart."""

    summary: str
    paper: str
    rule: str
    when: str
    differs: str
    parameters: dict[str, str]


def described(strategy: type) -> Described:
    """What the docstring says; a part that is missing is an error."""
    text = inspect.getdoc(strategy) or ""
    summary, _, rest = text.partition("\n\n")
    cut = re.split(rf"^({'|'.join(SECTIONS)}):", rest, flags=re.MULTILINE)
    found = {name: " ".join(body.split()) for name, body in zip(cut[1::2], cut[2::2], strict=True)}
    body = cut[-1] if found else ""
    if missing := [name for name in SECTIONS if name not in found]:
        raise ValueError(f"the docstring of {strategy.__name__} has no {', '.join(missing)}")
    parameters: dict[str, str] = {}
    for line in body.splitlines()[1:]:
        if started := re.match(r" {4}(\w+): (.*)", line):
            name = started[1]
            parameters[name] = started[2]
        elif line.strip():
            parameters[name] += " " + line.strip()
    return Described(
        " ".join(summary.split()), *(found[name] for name in SECTIONS[:-1]), parameters=parameters
    )


def pages() -> Iterator[tuple[str, str]]:
    """Every generated page: where it goes, and its text."""
    yield "strategies/index.md", _overview()
    for name in STRATEGIES:
        yield f"strategies/{name}.md", _strategy(name)
    yield "reference/config.md", _config()
    yield "reference/commands.md", _commands()


# -- strategies ---------------------------------------------------------------------------------------------


def _overview() -> str:
    lines = [
        "# Strategies\n",
        "Every algorithm by its key: what `--strategy` and `strategy.name` take. Which one suits your clients? "
        "`afield advise CONFIG.toml` probes them and says; each page has *when to use it*.\n",
    ]
    for title, kind in GROUPS.items():
        lines.append(f"## {title}\n\n| key | what it does |\n|---|---|")
        for name, cls in STRATEGIES.items():
            if _kind(cls) == kind:
                lines.append(f"| [`{name}`]({name}.md) | {described(cls).summary} |")
        lines.append("")
    return "\n".join(lines)


def _kind(cls: type) -> str:
    if getattr(cls(), "pace", "") == "round":
        return "round"
    return "buffer" if hasattr(cls(), "size") else "arrival"


def _strategy(name: str) -> str:
    cls = STRATEGIES[name]
    told = described(cls)
    found = weights.picture(name)
    used = [preset for preset, path in presets().items() if f'"{name}"' in path.read_text(encoding="utf-8")]
    named = ", ".join(f"`{preset}`" for preset in used)
    what = "the global model" if found.of == "model" else "the newest step"
    return f"""# {name}

{told.summary}

**Paper.** {_safe(told.paper)}

## Rule

```text
{_lines(told.rule)}
```

`w` the global model, `model` what a client sends back, `base` what it started from, `delta = model - base`,
`staleness` the server's version now minus that of the base, `N` the number of clients.

## When to use it

{_sentence(told.when)}

## Its weights over time

<figure markdown="0">{weights.svg(found)}</figure>

Ten clients, the fastest at the top; how much each counts in {what}, the darker the more. At the right: its part of
all weight over the whole time; 10 % each would be even. Made by running the strategy{_changed(name)}.

## Parameters

{_parameters(cls, told)}

## Where we differ from the paper

{_sentence(told.differs)}

## Try it

```sh
afield run --strategy {name}
```

{f"Presets that have it: {named}." if used else ""}
"""


def _lines(rule: str) -> str:
    """A rule as lines, one for each of its steps, none wider than the page."""
    steps = rule.rstrip(".").split("; ")
    return "\n".join(
        textwrap.fill(step, 72, subsequent_indent="    ", break_on_hyphens=False) for step in steps
    )


def _changed(name: str) -> str:
    strategy = STRATEGIES[name]()
    known = {field.name for field in fields(strategy)}
    changes = [f"`{key} = {value!r}`" for key, value in weights.SMALL.items() if key in known]
    return f" with {', '.join(changes)}" if changes else ""


def _sentence(text: str) -> str:
    return _safe(text[:1].upper() + text[1:])


def _parameters(cls: type, told: Described) -> str:
    rows = [
        f"| `{field.name}` | `{_default(field)}` | {_cell(told.parameters[field.name])} |"
        for field in fields(cls)
    ]
    return "\n".join(["| name | default | meaning |", "|---|---|---|", *rows]) if rows else "None."


def _safe(text: str) -> str:
    """Markdown would take these for emphasis or HTML; what is in backticks is left as it is."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def _cell(text: str) -> str:
    return _safe(text).replace("|", "\\|")


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return "required"
    if value is None:
        return "left out"
    if is_dataclass(value):
        return type(value).__name__.lower()
    value = list(value) if isinstance(value, tuple) else value
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


# -- the keys of a config -----------------------------------------------------------------------------------

TABLES: dict[str, type] = {
    "at the top": Config,
    "at the top, beside those of its runs": Experiment,
    "[scenario]": Scenario,
    "[local]": Local,
    "[training]": Training,
    "[server]": Manners,
    "[measure]": Measuring,
    "[stop]": Stop,
    "[runtime]": Runtime,
    "[log]": Log,
    "[sweep]": Sweep,
}


def _config() -> str:
    lines = [
        "# Every key of a config\n",
        "A config is TOML; its keys are the fields of classes, and `--set KEY=VALUE` overrides any of them. What is "
        "left out has its default; `config.toml` in a run folder has all of them. A table with a `name` chooses one "
        "of the things listed further down; the rest of it are that thing's parameters.\n",
    ]
    for title, cls in TABLES.items():
        lines.append(f"## {cls.__name__}: {title}\n\n{_safe(_first(cls))}\n\n{_fields(cls)}\n")
    for kind, protocol in KINDS.items():
        if kind == "strategies":
            continue  # they have pages of their own
        lines.append(f"## {kind}\n")
        for name, cls in REGISTRIES[protocol].items():
            lines.append(f"### {name}\n\n{_doc(cls)}\n\n{_fields(cls)}\n")
    return "\n".join(lines)


def _fields(cls: type) -> str:
    said = _comments(cls)
    rows = [
        f"| `{field.name}` | `{_default(field)}` | {_cell(said.get(field.name, ''))} |"
        for field in fields(cls)
        if field.init and field.name not in ("runs", "format") and type(field.default) not in TABLES.values()
    ]
    return "\n".join(["| key | default | |", "|---|---|---|", *rows]) if rows else ""


def _comments(cls: type) -> Mapping[str, str]:
    """What stands beside each field in the source."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if is_dataclass(part):
            found |= dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(part), re.MULTILINE))
    return found


def _first(cls: type) -> str:
    return _doc(cls).partition("\n")[0]


def _doc(cls: type) -> str:
    return _safe(inspect.getdoc(cls) or "")


# -- commands -----------------------------------------------------------------------------------------------


def _commands() -> str:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    lines = ["# Commands\n"]
    for name, command in group.commands.items():
        context = click.Context(command, info_name=f"afield {name}")
        usage = " ".join(command.collect_usage_pieces(context))
        lines.append(
            f"## afield {name}\n\n{_safe(command.help or '')}\n\n```text\nafield {name} {usage}\n```\n"
        )
        rows = []
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record is None:  # an argument
                record = (parameter.make_metavar(context), getattr(parameter, "help", "") or "")
            rows.append(f"| `{record[0]}` | {_cell(record[1])} |".replace("\n", " "))
        lines.append("\n".join(["| | |", "|---|---|", *rows]) + "\n")
    return "\n".join(lines)
