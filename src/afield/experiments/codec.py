"""TOML tables <-> frozen dataclasses. Strict, driven by type hints alone: it knows no concrete config.

A field whose annotation is a key of `registries` (a Protocol such as Delay) holds one of several classes:
its table says which by `name` and else has that class's fields; a bare string is short for a table that
has only a name. `None` is a key left out; where the default is something else, it is the string "none".
"""

from __future__ import annotations

import copy
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from afield.core.errors import InputError, closest

T = TypeVar("T")
Table = dict[str, Any]
# Keys are annotations: Protocol classes, which mypy does not count as `type`, or aliases.
Registries = Mapping[Any, Mapping[str, type]]
# Decodes or encodes a value of a kind at a path; what arrays and unions do is the same both ways.
_Step = Callable[[Any, Any, str], Any]

_ARRAYS = (tuple, list, Sequence)
_TABLES = (dict, Mapping)
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


class _MisfitError(InputError):
    """The value at this very path is of another kind (in a union, another arm may still take it)."""

    def __init__(self, path: str, message: str, key: str = "") -> None:
        super().__init__(f"{key or path or 'the top table'}{message}")
        self.path = path


def decode(cls: type[T], table: Mapping[str, Any], registries: Registries, path: str = "") -> T:
    """The instance of `cls` that `table` describes. Every InputError starts with the dotted key."""
    return cast(T, _decode(cls, table, path, registries))


def encode(instance: object, registries: Registries, kind: Any = None) -> Table:
    """The complete table of `instance`, with every default: `decode` gives back an equal instance.

    `kind`: a key of the registries, where the table shall carry the instance's name.
    """
    return cast(Table, _encode(type(instance) if kind is None else kind, instance, "", registries))


def _decode(kind: Any, value: Any, path: str, registries: Registries) -> Any:
    origin = get_origin(kind)
    step: _Step = partial(_decode, registries=registries)
    if kind in registries:
        return _decode_named(registries[kind], value, path, registries)
    if is_dataclass(kind):
        what = path.rpartition(".")[2]
        return _decode_fields(cast(type, kind), value, path, registries, f" of {what}" if what else "")
    if origin in (Union, UnionType):
        return _first_fit(kind, value, path, registries, step)
    if kind is NoneType:
        if value != "none":
            raise _MisfitError(path, f" = {_shown(value)} is not none")
        return None
    if origin in _ARRAYS:
        entries = _entries(kind, value, path, step)
        return entries if origin is list else tuple(entries)
    if origin in _TABLES:
        named, held = get_args(kind)
        if not isinstance(value, Mapping):
            raise _MisfitError(path, f" = {_shown(value)} is not a table")
        return {_key(named, key, path): step(held, entry, _join(path, key)) for key, entry in value.items()}
    return _leaf(kind, value, path)


def _encode(kind: Any, value: Any, path: str, registries: Registries) -> Any:
    origin = get_origin(kind)
    step: _Step = partial(_encode, registries=registries)
    if kind in registries:
        registry = registries[kind]
        name = next((name for name, cls in registry.items() if cls is type(value)), None)
        if name is None:
            raise _MisfitError(
                path, f" = {value!r} is of no registered class; they are {', '.join(registry)}"
            )
        return {"name": name, **_encode_fields(value, path, registries)}
    if is_dataclass(kind):
        if type(value) is not kind:
            raise _MisfitError(path, f" = {value!r} is not of the class {cast(type, kind).__name__}")
        return _encode_fields(value, path, registries)
    if origin in (Union, UnionType):
        return _first_fit(kind, value, path, registries, step)
    if kind is NoneType:
        if value is not None:
            raise _MisfitError(path, f" = {value!r} is not none")
        return "none"
    if origin in _ARRAYS:
        return _entries(kind, value, path, step)
    if origin in _TABLES:
        if not isinstance(value, Mapping):
            raise _MisfitError(path, f" = {value!r} is not a table")
        return {str(key): step(get_args(kind)[1], value[key], _join(path, str(key))) for key in value}
    return _leaf(kind, value, path)


def _decode_named(registry: Mapping[str, type], value: Any, path: str, registries: Registries) -> Any:
    """One of the registry's classes, from its table or its bare name."""
    if not isinstance(value, str | Mapping):
        raise _MisfitError(
            path, f" = {_shown(value)} is not one of {', '.join(registry)}, nor a table with its name"
        )
    table = {"name": value} if isinstance(value, str) else dict(value)
    if "name" not in table:
        raise InputError(f"{_join(path, 'name')} is missing; choose from {', '.join(registry)}")
    name = table.pop("name")
    if not isinstance(name, str) or name not in registry:
        key = path if isinstance(value, str) else _join(path, "name")
        raise _MisfitError(path, f" = {name!r} is not known{closest(str(name), registry)}", key)
    if any(field.name == "name" for field in fields(registry[name])):
        raise TypeError(
            f"{registry[name].__name__} has a field `name`, which its table needs to name its class"
        )
    return _decode_fields(registry[name], table, path, registries, f" of {name}")


def _decode_fields(cls: type, value: Any, path: str, registries: Registries, what: str) -> Any:
    if not isinstance(value, Mapping):
        raise _MisfitError(path, f" = {_shown(value)} is not a table")
    known = _fields(cls)
    for key in value:
        if key not in known:
            names = closest(key, known) if known else ", which has none"
            raise InputError(f"{_join(path, key)} is not a key{what}{names}")
    given = {}
    for key, (field, kind) in known.items():
        if key in value:
            given[key] = _decode(kind, value[key], _join(path, key), registries)
        elif _default(field) is MISSING:
            raise InputError(f"{_join(path, key)} is missing; it takes {_describe(kind, registries)}")
    try:
        return cls(**given)
    except ValueError as error:
        # The class names its own field; only the reader of the table knows where that table is.
        message = " ".join(str(error).split())
        starts_with_key = re.split(r"[ .=\[]", message, maxsplit=1)[0] in known
        raise InputError(_join(path, message, "." if starts_with_key else ": ")) from error


def _encode_fields(value: Any, path: str, registries: Registries) -> Table:
    table = {}
    for key, (field, kind) in _fields(cast(Any, type(value))).items():
        held, here = getattr(value, key), _join(path, key)
        if held is None and _default(field) is None:
            continue
        table[key] = _encode(kind, held, here, registries)
        if held is None and _decode(kind, "none", here, registries) is not None:
            raise InputError(f"{here} = None cannot be written: 'none' would be read as a string")
    return table


def _first_fit(kind: Any, value: Any, path: str, registries: Registries, step: _Step) -> Any:
    """The value as the first arm of the union that takes it."""
    errors: list[InputError] = []
    arms = get_args(kind)
    for arm in arms:
        try:
            return step(arm, value, path)
        except InputError as error:
            errors.append(error)
    # An arm that failed further down, or the only one there is, tells more than the list of all arms.
    telling = [error for error in errors if not (isinstance(error, _MisfitError) and error.path == path)]
    if not telling:
        telling = [error for arm, error in zip(arms, errors, strict=True) if arm is not NoneType]
    if len(telling) == 1:
        raise telling[0]
    tried = "; ".join(_describe(arm, registries) for arm in arms)
    raise _MisfitError(path, f" = {_shown(value)} fits none of what it may be: {tried}")


def _entries(kind: Any, value: Any, path: str, step: _Step) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _MisfitError(path, f" = {_shown(value)} is not an array")
    held = get_args(kind)
    if get_origin(kind) is not tuple or held[-1] is Ellipsis:
        held = (held[0],) * len(value)
    if len(value) != len(held):
        raise _MisfitError(path, f" = {_shown(value)} has {len(value)} entries, not {len(held)}")
    return [step(held[i], entry, f"{path}[{i}]") for i, entry in enumerate(value)]


def _key(kind: Any, key: str, path: str) -> str | int:
    """A key of a table as the mapping's key: TOML has strings only."""
    if kind is str or kind is Any:
        return key
    if kind is not int:
        raise TypeError(f"{path}: keys of the type {kind} are not supported")
    # Canonical only, so that "1" and "01" are not two spellings of one key.
    if not re.fullmatch(r"0|-?[1-9][0-9]*", key):
        raise InputError(f"{_join(path, key)}: the key {_text(key)} is not a whole number")
    return int(key)


def _leaf(kind: Any, value: Any, path: str) -> Any:
    if kind is Any:
        return copy.deepcopy(value)
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if type(choice) is type(value) and choice == value:
                return choice
        raise _MisfitError(path, f" = {value!r} is not known{closest(str(value), get_args(kind))}")
    if kind not in _SCALARS:
        raise TypeError(f"{path}: fields of the type {kind} are not supported")
    if kind is float and isinstance(value, str) and value in ("inf", "+inf", "-inf"):
        return float(value)
    if kind is float and isinstance(value, float | int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _MisfitError(path, " has more digits than a number can hold") from None
    # A bool is an int to Python; nobody who writes `batch = true` means 1.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _MisfitError(path, f" = {_shown(value)} is not {_SCALARS[kind]}")
    return value


@cache
def _fields(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in fields(cls) if field.init}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _describe(kind: Any, registries: Registries) -> str:
    origin, arms = get_origin(kind), get_args(kind)
    if kind in registries:
        return f"one of {', '.join(registries[kind])}"
    if origin in (Union, UnionType):
        return " or ".join(_describe(arm, registries) for arm in arms)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in arms)
    if origin in _ARRAYS:
        return "an array"
    return _SCALARS.get(kind, "none" if kind is NoneType else "a table")


def _join(path: str, key: str, dot: str = ".") -> str:
    return f"{path}{dot}{key}" if path else key


def _shown(value: Any) -> str:
    """A value in a message: as TOML has it, in one line of bounded length."""
    try:
        text = _text(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def dumps(table: Mapping[str, Any]) -> str:
    """`table` as TOML. Own writer, because the standard library only reads TOML."""
    return "\n".join(_lines(table, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for key, value in table.items():
        if not _is_section(value):
            yield f"{_quoted(key)} = {_text(value)}"
    # Sections come last: a plain key below a header would belong to that header.
    for key, value in table.items():
        inner = (*path, key)
        header = ".".join(_quoted(part) for part in inner)
        if isinstance(value, Mapping):
            if not value or not all(_is_section(entry) for entry in value.values()):
                yield from ("", f"[{header}]")
            yield from _lines(value, inner)
        elif _is_section(value):
            for row in value:
                yield from ("", f"[[{header}]]")
                yield from _lines(row, inner)


def _is_section(value: Any) -> bool:
    rows = isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value)
    return isinstance(value, Mapping) or bool(rows)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f"{float(value)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(entry) for entry in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)} = {_text(entry)}" for key, entry in value.items()) + "}"
    raise TypeError(f"{value!r} has no TOML form")


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def assign(table: Mapping[str, Any], text: str) -> Table:
    """`table` with one KEY=VALUE applied, as `--set` gives it. Nothing of `table` changes."""
    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"{text!r} is not KEY=VALUE; write for example scenario.delay.mean=5")
    keys: list[str] = []
    try:
        nested: Any = tomllib.loads(f"{key} = 0")
        while isinstance(nested, dict):
            ((part, nested),) = nested.items()
            keys.append(part)
    except ValueError:  # no TOML, or no key at all (a comment)
        raise InputError(f"{key.strip()!r} is not a key; write for example scenario.delay.mean=5") from None
    value = _parsed(written)

    result = here = copy.deepcopy(dict(table))
    for depth, part in enumerate(keys[:-1], start=1):
        inner = here.get(part, {})
        if isinstance(inner, str):
            inner = {"name": inner}
        if not isinstance(inner, dict):
            where = ".".join(keys[:depth])
            raise InputError(f"{where} = {_shown(inner)} is not a table; it has no key {keys[depth]!r}")
        here[part] = inner
        here = inner
    if keys[-1] == "name" and len(keys) > 1 and here.get("name", value) != value:
        here.clear()  # another class: the keys of the old one mean nothing to it (see merge)
    here[keys[-1]] = value
    return result


def _parsed(written: str) -> Any:
    """The TOML value that was written; whatever is none is a plain string."""
    try:
        parsed = tomllib.loads(f"value = {written}")
    except tomllib.TOMLDecodeError:
        return written.strip()
    value = parsed.get("value")
    plain = len(parsed) == 1 and isinstance(value, bool | int | float | str | list | dict)
    return value if plain else written.strip()  # a second line, or a date


def merge(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> Table:
    """`table` overlaid with `overrides`, tables within tables. A table of another `name` replaces whole."""
    result = copy.deepcopy(dict(table))
    for key, new in overrides.items():
        old = result.get(key)
        # A bare string is a table with that name, wherever the other side is such a table.
        if isinstance(old, str) and isinstance(new, Mapping):
            old = {"name": old}
        elif isinstance(new, str) and isinstance(old, Mapping) and "name" in old:
            new = {"name": new}
        if isinstance(old, Mapping) and isinstance(new, Mapping) and _same_name(old, new):
            result[key] = merge(old, new)
        else:
            result[key] = copy.deepcopy(new)
    return result


def _same_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "name" not in old or "name" not in new or bool(old["name"] == new["name"])
