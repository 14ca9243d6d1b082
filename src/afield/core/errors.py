"""The one error that means "what you gave cannot be used", and the bounds check that raises it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message names the value, the bound and the remedy; the CLI prints it as one line."""


def within(
    name: str, value: float, low: float, high: float, *, above: bool = False, below: bool = False
) -> None:
    """Raise unless low <= value <= high (`above`, `below`: the end itself is excluded)."""
    if (low < value if above else low <= value) and (value < high if below else value <= high):
        return
    bound = f"{'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    remedy = "give a number" if math.isnan(value) else "raise it" if value <= low else "lower it"
    raise InputError(f"{name} = {value} is outside {bound}: {remedy}")


def one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise unless value is one of the choices; the closest one is suggested."""
    names = list(choices)
    if value not in names:
        raise InputError(f"{name} = {value!r} is not known{closest(str(value), names)}")


def closest(value: str, choices: Iterable[object]) -> str:
    """The end of a message: what was probably meant, else every choice."""
    names = [str(choice) for choice in choices]
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; choose from {', '.join(names)}"
