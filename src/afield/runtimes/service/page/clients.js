// The card with the timeline: its choices, its legend, and what is under the pointer.

import { Timeline } from "./timeline.js";
import { $, clock, label, now, real, significant, view, whole, write } from "./view.js";

const timeline = new Timeline($("timeline"), $("scroller"), $("spacer"));
let windowed = "";

export function windows() {
  const end = view.player ? view.player.end : now();
  const choices = real() && !view.player
    ? [["30", "last 30 s"], ["120", "last 2 min"], ["600", "last 10 min"], ["3600", "last hour"], ["", "all"]]
    : [[String(end / 20), "1/20 of the run"], [String(end / 5), "1/5 of the run"], ["", "all"]];
  if (!view.player && !real()) choices.splice(0, 2, ["5", "last 5"], ["20", "last 20"]);
  const key = JSON.stringify(choices);
  if (key === windowed) return;
  windowed = key;
  $("window").replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  $("window").value = choices[view.player ? 1 : real() ? 0 : 2][0];
  timeline.window = $("window").value ? Number($("window").value) : null;
}

export function drawTimeline() {
  const first = view.state.queue[view.state.head];
  const begin = view.player ? 0 : first ? first.start : 0;
  const empty = view.status?.state === "running" ? "receipts are not written yet: a simulation writes them by the 50,000, and at its end" : "no task yet";
  const found = timeline.draw(view.state, now(), view.theme, { begin, clock: view.status?.clock ?? "real", formatX: clock, empty });
  $("fit").hidden = timeline.clients.length < 20;
  const text = `${whole(found.rows)} clients · ${whole(found.bars)} tasks in view · ${whole(view.state.open.size)} out`;
  write($("n-timeline"), text);
  label("timeline", text);
}

export function legend() {
  const marks = view.state.classes;
  const items = [["", "staleness"]];
  items.push(...marks.map((from, at) => [`s${at}`, at === 5 ? `${from}+` : marks[at + 1] - from > 1 ? `${from}–${marks[at + 1] - 1}` : String(from)]));
  items.push(["out", "out"], ["gone", "did not count"]);
  const box = $("legend");
  if (box.dataset.key === JSON.stringify(items)) return;
  box.dataset.key = JSON.stringify(items);
  box.replaceChildren(...items.map(([kind, text]) => {
    const [item, mark] = [document.createElement("li"), document.createElement("i")];
    mark.className = kind;
    item.append(...(kind ? [mark] : []), text);
    return item;
  }));
}

$("scroller").addEventListener("scroll", () => (view.dirty = true), { passive: true });
$("timeline").addEventListener("pointermove", (event) => tip(event.offsetX, event.offsetY));
$("timeline").addEventListener("pointerleave", () => ($("tip").hidden = true));
$("timeline").addEventListener("pointerdown", (event) => tip(event.offsetX, event.offsetY));

function tip(x, y) {
  const bar = timeline.at(view.state, x, y);
  const box = $("tip");
  box.hidden = !bar;
  if (!bar) return;
  const took = (bar.end ?? now()) - bar.start;
  const lines = [`client ${bar.client}, task ${bar.number}`, `from version ${bar.base}, ${bar.how === "out" ? "out for" : "took"} ${real() ? `${significant(took)} s` : significant(took)}`];
  if (bar.how === "done") lines.push(`staleness ${bar.stale}, weight ${significant(bar.weight)}`);
  else if (bar.how !== "out") lines.push(bar.how);
  write(box, lines.join("\n"));
  const card = box.parentElement.getBoundingClientRect();
  const area = $("timeline").getBoundingClientRect();
  const left = Math.min(area.left - card.left + x + 14, card.width - box.offsetWidth - 8);
  box.style.left = `${Math.max(8, left)}px`;
  box.style.top = `${Math.max(4, area.top - card.top + y - box.offsetHeight - 12)}px`;
}

$("order").addEventListener("change", (event) => {
  timeline.order = event.target.value;
  view.state.grew = view.dirty = true;
});
$("window").addEventListener("change", (event) => {
  timeline.window = event.target.value ? Number(event.target.value) : null;
  view.dirty = true;
});
$("fit").addEventListener("click", () => {
  timeline.fit = !timeline.fit;
  $("fit").setAttribute("aria-pressed", String(timeline.fit));
  $("scroller").scrollTop = 0;
  view.dirty = true;
});
