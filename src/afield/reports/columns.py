"""A comparison in columns, the best of each and its ties marked: on the screen, and as LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from afield.reports.noise import Spread, ties_of
from afield.reports.tables import Comparison

NOTHING = "-"
LABEL = 20  # characters of a label that are never given up to other columns
BEST, TIE = "*", "~"
SPARK = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    cells: list[str]
    ranks: list[float]  # smaller is better; infinite never wins; NaN takes no part
    spreads: Sequence[Spread | None] = ()
    spare: int = 0  # on a narrow screen columns are left out in this order; those of 0 never
    picture: bool = False  # drawn with letters

    @property
    def width(self) -> int:
        marked = [cell + self.mark(i) for i, cell in enumerate(self.cells)]
        return max(len(line) for line in (*self.title.split("\n"), *marked))

    @property
    def best(self) -> set[int]:
        """The rows with the best value; none where there is nothing to compare."""
        taking_part = [rank for rank in self.ranks if not math.isnan(rank)]
        if len(taking_part) < 2 or min(taking_part) in (math.inf, max(taking_part)):
            return set()
        return {i for i, rank in enumerate(self.ranks) if rank == min(taking_part)}

    @property
    def ties(self) -> set[int]:
        """Rows that noise cannot tell from the best, among those that may win."""
        best = self.best
        if not best or not self.spreads:
            return set()
        found = ties_of(self.spreads, min(best)) - best
        return {i for i in found if math.isfinite(self.ranks[i])}

    def mark(self, row: int) -> str:
        """After the value of a row. Nothing in a column that is neither good nor bad."""
        if not self.best:
            return ""
        return BEST if row in self.best else TIE if row in self.ties else " "


def to_rich(comparison: Comparison, width: int = 100) -> Table:
    """The comparison in `width` columns, where they are enough for the main ones."""
    rows = comparison.rows
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    label = max((len(row.label) for row in rows), default=0)
    table.add_column("label", overflow="fold", min_width=min(label, LABEL))
    columns = columns_of(comparison)
    spares = sorted((column for column in columns if column.spare), key=lambda column: column.spare)
    while spares and min(label, LABEL) + sum(1 + column.width for column in columns) > width:
        columns.remove(spares.pop(0))
    for column in columns:
        # Only the label may wrap: half a number is worse than none.
        table.add_column(column.title, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        cells = [
            Text(column.cells[i] + column.mark(i), style="bold" if i in column.best | column.ties else "")
            for column in columns
        ]
        table.add_row(Text(row.label), *cells)
    table.caption = Text(" · ".join(notes(comparison, columns)), style="dim")
    table.caption_justify = "left"
    return table


def notes(comparison: Comparison, columns: Sequence[Column]) -> list[str]:
    """What a reader must know of the marks, and of what is missing."""
    found = []
    if any(column.best for column in columns):
        found.append(f"{BEST} best")
        if any(column.ties for column in columns):
            found.append(f"{TIE} within noise of it (Welch's t over seeds, 95 %)")
        if any(row.runs == 1 for row in comparison.rows):
            found.append("one seed: its noise is unknown")
    unfinished = sum(row.unfinished for row in comparison.rows)
    if unfinished:
        found.append(f"{unfinished} of {sum(row.runs for row in comparison.rows)} runs unfinished")
    return found


def columns_of(comparison: Comparison) -> list[Column]:
    rows = comparison.rows
    time, updates = short(comparison.time), short(comparison.updates)
    columns = [Column("runs", [str(row.runs) for row in rows], [math.nan] * len(rows))]
    accurate = any(row.final_accuracy for row in rows)
    if accurate:
        columns.append(_accuracies("final\nacc %", [row.final_accuracy for row in rows]))
        columns.append(_accuracies("best\nacc %", [row.best_accuracy for row in rows], spare=3))
    columns.append(_losses("final\nloss", [row.final_loss for row in rows], spare=2 if accurate else 0))
    if accurate:
        at_time = [row.accuracy_at_time for row in rows]
        at_updates = [row.accuracy_at_updates for row in rows]
        columns.append(_accuracies(f"acc %\nat time\n{time}", at_time))
        columns.append(_accuracies(f"acc %\nat {updates}\nupdates", at_updates, spare=7))
        columns.append(_times(comparison))
    else:
        columns.append(_losses(f"loss\nat time\n{time}", [row.loss_at_time for row in rows]))
        columns.append(
            _losses(f"loss\nat {updates}\nupdates", [row.loss_at_updates for row in rows], spare=7)
        )
    columns.append(_plain("stale-\nness", [row.staleness for row in rows], spare=6))
    columns.append(_plain("up-\ndates", [row.updates for row in rows], spare=5))
    columns.append(_plain("ver-\nsions", [row.versions for row in rows], spare=4))
    if any(row.curve for row in rows):
        title = f"{'accuracy' if accurate else 'loss'}\nto {time}"
        cells = sparklines([row.curve for row in rows])
        columns.append(Column(title, cells, [math.nan] * len(rows), spare=1, picture=True))
    return columns


def sparklines(curves: Sequence[Sequence[float]]) -> list[str]:
    """Curves as lines of text, all to one scale, so that a higher mark is a higher value in any row."""
    finite = [value for line in curves for value in line if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / len(SPARK) or 1.0

    def spark(value: float) -> str:
        return SPARK[min(int((value - low) / step), len(SPARK) - 1)] if math.isfinite(value) else "?"

    return ["".join(map(spark, line)) for line in curves]


def _accuracies(title: str, spreads: list[Spread | None], spare: int = 0) -> Column:
    cells = [
        NOTHING if s is None else _with_std(s, f"{s.mean:.1%}"[:-1], f"{s.std:.1%}"[:-1]) for s in spreads
    ]
    return Column(title, cells, [_rank(s, -1) for s in spreads], spreads, spare)


def _losses(title: str, spreads: list[Spread | None], spare: int = 0) -> Column:
    cells = [NOTHING if s is None else _with_std(s, f"{s.mean:.3g}", f"{s.std:.2g}") for s in spreads]
    return Column(title, cells, [_rank(s, 1) for s in spreads], spreads, spare)


def _plain(title: str, spreads: list[Spread | None], spare: int) -> Column:
    """Facts about a run that are neither good nor bad: the mean, and nothing bold."""
    cells = [NOTHING if s is None else short(s.mean) for s in spreads]
    return Column(title, cells, [math.nan] * len(spreads), spare=spare)


def _times(comparison: Comparison) -> Column:
    cells, ranks = [], []
    most = max(
        (row.time_to_target.count / row.runs for row in comparison.rows if row.time_to_target), default=0
    )
    for row in comparison.rows:
        spread = row.time_to_target
        if spread is None:
            cells.append(NOTHING if row.final_accuracy is None else "never")
        elif row.runs == 1:
            cells.append(short(spread.mean))
        else:
            cells.append(
                f"{_with_std(spread, short(spread.mean), short(spread.std, 2))} {spread.count}/{row.runs}"
            )
        # A mean over the few seeds that made it does not beat one over all of them.
        fair = spread is not None and spread.count / row.runs == most
        ranks.append(_rank(spread, 1) if fair else math.inf)
    title = f"time\nto {100 * (comparison.target or 0):.4g} %"
    return Column(title, cells, ranks, [row.time_to_target for row in comparison.rows])


def _with_std(spread: Spread, mean: str, std: str) -> str:
    return f"{mean}±{std}" if spread.count > 1 else mean


def _rank(spread: Spread | None, sign: int) -> float:
    if spread is None:
        return math.nan
    return math.inf if math.isnan(spread.mean) else sign * spread.mean


def short(number: float, digits: int = 3) -> str:
    """A number in five characters or so: 0.123, 12.3, 1234, 12.3k, 1.23M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Four digits are as short as three and a suffix, and exact.
        if abs(number) >= (1e4 if suffix == "k" and digits > 2 else size):
            return f"{float(f'{number / size:.{digits}g}'):g}{suffix}"
    return f"{number:.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


# -- as LaTeX ---------------------------------------------------------------------------------------

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def to_latex(comparison: Comparison) -> str:
    """A `table` for a paper (booktabs): the best is bold, what noise cannot tell from it is underlined."""
    columns = [c for c in columns_of(comparison) if not c.picture and {*c.cells} != {NOTHING}]
    runs = sorted({row.runs for row in comparison.rows})
    if len(runs) == 1:
        columns = columns[1:]  # the caption says it
    seeds = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    told = f"Mean{' and standard deviation' if runs[-1] > 1 else ''} over {seeds} seed{'s' * (runs[-1] > 1)}."
    marks = "" if not any(column.best for column in columns) else " Bold: the best"
    if any(column.ties for column in columns):
        marks += r"; underlined: not told apart from it (Welch's $t$, 95\,\%)"
    lines = [r"\begin{table}", r"  \centering", rf"  \caption{{{told}{marks + '.' if marks else ''}}}"]
    lines += [rf"  \begin{{tabular}}{{l{'r' * len(columns)}}}", r"    \toprule"]
    titles = [latex(" ".join(column.title.replace("-\n", "").split())) for column in columns]
    lines += [f"    {' & '.join(['', *titles])} \\\\", r"    \midrule"]
    for i, row in enumerate(comparison.rows):
        cells = [latex(row.label), *(_latex_cell(column, i) for column in columns)]
        lines.append(f"    {' & '.join(cells)} \\\\")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _latex_cell(column: Column, row: int) -> str:
    text = latex(column.cells[row]).replace("±", r" \(\pm\) ") if column.cells[row] != NOTHING else "--"
    if row in column.best:
        return rf"\textbf{{{text}}}"
    return rf"\underline{{{text}}}" if row in column.ties else text


def latex(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
