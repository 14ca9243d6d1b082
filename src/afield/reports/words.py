"""The paragraph at the top of a report. A sentence is there only if the data make it true."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from afield.reports.columns import short
from afield.reports.digest import Digest, Facts
from afield.reports.noise import Spread, apart

POINT = 0.01  # accuracies nearer than a point are called alike
CLEARLY = 0.5  # a term of the error above this share of the three is "most"
BUSY = 2  # the busiest tenth is worth a word when it sent twice its part


def paragraph(facts: Facts) -> list[str]:
    return [text for sentence in SENTENCES.values() if (text := sentence(facts)) is not None]


def first_to_target(facts: Facts) -> str | None:
    """Who reached the target first, and in which part of the time of the slowest that did in every seed."""
    times = _by_time(facts)
    if len(times) < 2:
        return None
    (first, quick), (last, slow) = times[0], times[-1]
    if quick.mean == slow.mean or apart(quick, slow) is False:
        return None
    near = [d.label for d, s in times[1:] if s.mean == quick.mean or apart(quick, s) is False]
    share = f"in {_percent(quick.mean / slow.mean)} of {last.label}'s time" if slow.mean else ""
    against = f"({_told(quick)} against {_told(slow)} in virtual time)"
    if near:
        text = f"{first.label} reached {_target(facts)} {share} {against}"
        return f"{text}; {_and(near)} cannot be told apart from it over these seeds."
    return f"{first.label} was first to reach {_target(facts)}, {share} {against}."


def no_first(facts: Facts) -> str | None:
    """Nobody was first: all times are alike within what the seeds show."""
    times = _by_time(facts)
    if len(times) < 2:
        return None
    (_, quick), (_, slow) = times[0], times[-1]
    if quick.mean != slow.mean and apart(quick, slow) is not False:
        return None
    names = _and([d.label for d, _ in times])
    return f"These seeds cannot tell who of {names} was first to reach {_target(facts)}."


def never(facts: Facts) -> str | None:
    """Who did not get there, in any or in some seeds."""
    if facts.comparison.target is None:
        return None
    judged = [d for d in facts.digests if d.row.final_accuracy is not None]
    none = [d.label for d in judged if d.row.time_to_target is None]
    some = [d for d in judged if d.row.time_to_target is not None and d.row.time_to_target.count < d.row.runs]
    parts = [f"{_and(none)} never reached {_target(facts)}"] if none else []
    for digest in some:
        assert digest.row.time_to_target is not None
        count = digest.row.time_to_target.count
        parts.append(f"{digest.label} reached it in {count} of {digest.row.runs} seeds only")
    if not none and some:
        parts[0] = parts[0].replace("reached it", f"reached {_target(facts)}")
    return "; ".join(parts) + "." if parts else None


def best_at_the_end(facts: Facts) -> str | None:
    """The best final accuracy, and who cannot be told from it."""
    ends = [(d, s) for d in facts.digests if (s := d.row.final_accuracy) and math.isfinite(s.mean)]
    if len(ends) < 2:
        return None
    ends.sort(key=lambda pair: -pair[1].mean)
    (best, top), others = ends[0], ends[1:]
    tied = [d.label for d, s in others if s.mean == top.mean or apart(top, s) is False]
    if len(tied) == len(others):
        return f"At the end none can be told apart from the best mean, {_accuracy(top)}, over these seeds."
    text = f"At the end {best.label} had the best accuracy, {_accuracy(top)}"
    if tied:
        return f"{text}; {_and(tied)} cannot be told apart from it over these seeds."
    second, next_best = others[0]
    return f"{text}, {_points(top.mean - next_best.mean)} ahead of {second.label}."


def cheapest(facts: Facts) -> str | None:
    """Who received the fewest bytes until the target, where that is not the one that was first."""
    found = [
        (d, d.bytes_to_target)
        for d in facts.digests
        if d.bytes_to_target is not None and d.bytes_to_target.count == d.row.runs
    ]
    times = _by_time(facts)
    if len(found) < 2 or not times:
        return None
    found.sort(key=lambda pair: pair[1].mean)
    (frugal, few), first = found[0], times[0][0]
    many = first.bytes_to_target
    if frugal is first or many is None or not few.mean or apart(few, many) is False or many.mean == few.mean:
        return None
    times_as_many = f"{first.label} received {many.mean / few.mean:.1f} times as many"
    return f"{frugal.label} needed the fewest bytes for it: {times_as_many}."


def left_behind(facts: Facts) -> str | None:
    """Under whom the slowest tenth lost most, against the mean client."""
    found = [(d, d.behind) for d in facts.digests if d.behind is not None and d.behind.mean <= -POINT]
    found = [(d, s) for d, s in found if s.margin is None or s.mean + s.margin < 0]
    if not found:
        return None
    digest, gap = min(found, key=lambda pair: pair[1].mean)
    assert digest.slowest is not None and digest.everyone is not None
    return (
        f"The slowest tenth of the clients lost {_points(-gap.mean)} under {digest.label}: its model is right on "
        f"{digest.slowest.mean:.1%} of data like theirs, on {digest.everyone.mean:.1%} for the mean client."
    )


def nobody_left_behind(facts: Facts) -> str | None:
    """No label leaves the slowest tenth a point behind, nor could: not even at the lower end of its interval."""
    known = [d.behind for d in facts.digests if d.behind is not None]
    if not known or len(known) < len(facts.digests) or any(s.mean - (s.margin or 0) <= -POINT for s in known):
        return None
    return "Nobody left the slowest tenth of the clients a point or more behind the mean client."


def busiest(facts: Facts) -> str | None:
    """Whose updates came from a few."""
    found = [(d, d.busiest) for d in facts.digests if d.busiest is not None and d.busiest.mean >= BUSY * 0.1]
    found = [(d, s) for d, s in found if d.seen[0].clients.count >= 10]
    if not found:
        return None
    digest, share = max(found, key=lambda pair: pair[1].mean)
    return f"Under {digest.label} a tenth of the clients sent {_percent(share.mean)} of the updates."


def silent(facts: Facts) -> str | None:
    """Who never heard of some clients."""
    found = [(d, d.silent) for d in facts.digests if d.silent is not None and d.silent.mean > 0]
    if not found:
        return None
    digest, count = max(found, key=lambda pair: pair[1].mean)
    mean = " on average" if count.count > 1 else ""
    return f"{digest.label} used nothing from {short(count.mean)} of {digest.seen[0].clients.count} clients{mean}."


def why_steps_err(facts: Facts) -> str | None:
    """The term that is most of the error, where that was recorded."""
    parts = []
    for digest in facts.digests:
        if digest.terms is not None:
            term, share = max(digest.terms.items(), key=lambda pair: pair[1])
            if share > CLEARLY:
                parts.append(f"{term} for {digest.label} ({_percent(share)})")
    return f"Most of the error of the steps in the second half was {_and(parts)}." if parts else None


def diverged(facts: Facts) -> str | None:
    """Whose loss or accuracy ended as no number."""
    lost = [
        d.label
        for d in facts.digests
        if any(s is not None and not math.isfinite(s.mean) for s in (d.row.final_accuracy, d.row.final_loss))
    ]
    return f"{_and(lost)} diverged: a loss or accuracy ended as no finite number." if lost else None


def one_seed(facts: Facts) -> str | None:
    """With one seed a lead may be luck."""
    lone = [d.label for d in facts.digests if d.row.runs == 1]
    if not lone or len(facts.digests) < 2:
        return None
    who = (
        "Each was"
        if len(lone) == len(facts.digests)
        else f"{_and(lone)} {'were' if len(lone) > 1 else 'was'}"
    )
    return f"{who} run with one seed, so nobody knows how much of a difference is luck."


def unfinished(facts: Facts) -> str | None:
    count = sum(d.row.unfinished for d in facts.digests)
    total = sum(d.row.runs for d in facts.digests)
    if not count:
        return None
    return (
        f"{count} of {total} runs {'are' if count > 1 else 'is'} unfinished: these numbers may still change."
    )


def mixed_settings(facts: Facts) -> str | None:
    """Runs of one label that differ in more than the seed."""
    if not facts.mixed:
        return None
    label, keys = next(iter(facts.mixed.items()))
    return f"Runs labelled {label} differ in {_and(keys[:3])}, so that their mean mixes settings."


SENTENCES: dict[str, Callable[[Facts], str | None]] = {
    "first_to_target": first_to_target,
    "no_first": no_first,
    "never": never,
    "best_at_the_end": best_at_the_end,
    "cheapest": cheapest,
    "left_behind": left_behind,
    "nobody_left_behind": nobody_left_behind,
    "busiest": busiest,
    "silent": silent,
    "why_steps_err": why_steps_err,
    "diverged": diverged,
    "one_seed": one_seed,
    "unfinished": unfinished,
    "mixed_settings": mixed_settings,
}


def _by_time(facts: Facts) -> list[tuple[Digest, Spread]]:
    """Who reached the target in every seed, quickest first."""
    found = [(d, s) for d in facts.digests if (s := d.row.time_to_target) and s.count == d.row.runs]
    return sorted(found, key=lambda pair: pair[1].mean)


def _target(facts: Facts) -> str:
    return f"{100 * (facts.comparison.target or 0):.4g} %"


def _told(spread: Spread) -> str:
    """A mean with its 95 % interval, where there is one."""
    margin = spread.margin
    return short(spread.mean) if margin is None else f"{short(spread.mean)} ± {short(margin, 2)}"


def _accuracy(spread: Spread) -> str:
    margin = spread.margin
    return (
        f"{100 * spread.mean:.1f} %" if margin is None else f"{100 * spread.mean:.1f} ± {100 * margin:.1f} %"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
