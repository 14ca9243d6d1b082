// The cards: tiles, curves, histogram, shares, refusals.

import { columns, line } from "./charts.js";
import { $, clock, label, now, percent, real, significant, view, whole, write } from "./view.js";

const RULES = {
  mixed: "the product of all mixing weights",
  replaced: "the weight of each client's newest model",
  tabled: "every client counts alike from its first update on",
  rounds: "weights within each round, summed",
  summed: "the part of all weight that came from each client",
};

function rates() {
  return view.state.slots.points(now(), real() ? 60 : 1);
}

function tiles(points) {
  const last = (key) => view.state.series(key).at(-1)?.y;
  const tail = points.slice(-Math.max(3, Math.round((real() ? 60 : view.state.slots.width * 12) / view.state.slots.width)));
  const rate = tail.length ? tail.reduce((sum, point) => sum + point.y, 0) / tail.length : null;
  const list = [
    ["Accuracy", percent(last("accuracy") ?? NaN)],
    ["Loss", significant(last("loss") ?? last("train_loss"))],
    ["Version", whole(view.player ? view.state.version : Math.max(view.state.version, view.status?.version ?? 0))],
    [real() ? "Versions / min" : "Versions / time", significant(rate)],
    ["Updates", whole(view.player ? view.state.updates : Math.max(view.state.updates, view.status?.updates ?? 0))],
    ["Staleness", significant(view.state.meanStaleness(), 2)],
    ["Tasks out", whole(view.player ? view.state.open.size : view.status?.tasks ?? view.state.open.size)],
    [view.status?.clients ? `Clients of ${whole(view.status.clients)}` : "Clients", whole(view.state.bars.size)],
  ];
  list.push(["Did not count", whole(refused().reduce((sum, [, count]) => sum + count, 0))]);
  const epsilon = view.player ? last("epsilon") : view.status?.privacy?.epsilon;
  if (epsilon !== undefined && epsilon !== null) list.push(["Epsilon", significant(epsilon)]);
  const box = $("tiles");
  while (box.children.length > list.length) box.lastChild.remove();
  list.forEach(([name, value], at) => {
    let tile = box.children[at];
    if (!tile) {
      tile = document.createElement("div");
      tile.append(document.createElement("dt"), document.createElement("dd"));
      box.append(tile);
    }
    write(tile.firstChild, name);
    write(tile.lastChild, value);
  });
}

export function head() {
  const strategy = view.status?.strategy ?? {};
  const rest = Object.entries(strategy).filter(([key, value]) => key !== "name" && ["number", "string", "boolean"].includes(typeof value));
  write($("name"), String(view.status?.name ?? "afield"));
  write($("strategy"), [strategy.name, ...rest.slice(0, 4).map(([key, value]) => `${key} ${value}`)].filter(Boolean).map(String).join(" · "));
  document.title = `${view.status?.name ?? "run"} · afield`;
  const pill = $("state");
  let text = view.connection === "away" ? "reconnecting" : String(view.status?.state ?? "not connected");
  if (view.player) text = view.player.seeking ? "seeking" : view.player.playing ? "replay" : view.player.time >= view.player.end ? "finished" : "paused";
  if (view.connection === "failed") text = "out of reach";
  write(pill, text);
  pill.classList.toggle("good", text === "serving" || text === "running" || text === "replay");
  pill.classList.toggle("bad", view.connection === "away" || view.connection === "failed" || text === "broken");
}

export function cards() {
  const points = rates();
  tiles(points);
  charts(points);
  shares();
  refusals();
}

const cursors = new Map(); // canvas id -> x, or null

for (const canvas of document.querySelectorAll(".chart")) {
  const move = (x) => {
    cursors.set(canvas.id, x);
    view.dirty = true;
  };
  canvas.addEventListener("pointermove", (event) => move(event.offsetX));
  canvas.addEventListener("pointerleave", () => move(null));
  canvas.addEventListener("blur", () => move(null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
    if (!step) return;
    event.preventDefault();
    const width = canvas.clientWidth;
    move(Math.min(width, Math.max(0, (cursors.get(canvas.id) ?? width) + step)));
  });
}

function chart(id, lines, options) {
  const begin = options.begin ?? 0;
  const range = view.player ? [begin, view.player.end] : undefined;
  const found = line($(id), lines, { range, clock: view.status?.clock ?? "real", formatX: clock, cursor: cursors.get(id) ?? null, ...options }, view.theme);
  const shown = lines.filter((one) => one.points.length);
  const text = found
    ? `${clock(found[0].x)}: ${found.map((point) => `${point.label} ${options.format(point.y)}`).join(", ")}`
    : options.note ?? "";
  write($(`n-${id}`), text);
  const spoken = shown.map((one) => `${one.label} ${options.format(one.points.at(-1).y)} at ${clock(one.points.at(-1).x)}`).join(", ");
  label(id, spoken || options.empty);
}

function charts(points) {
  const accuracy = view.state.series("accuracy");
  const best = accuracy.reduce((top, point) => (top && top.y >= point.y ? top : point), null);
  chart("accuracy", [{ points: accuracy, colour: view.theme.accent, fill: true, label: "accuracy" }], {
    from: 0, to: 1, format: percent, formatY: (y) => `${Math.round(100 * y)} %`, empty: "no accuracy was measured yet",
    note: best ? `best ${percent(best.y)} at ${clock(best.x)} · ${whole(view.state.measured.length)} measurement${view.state.measured.length === 1 ? "" : "s"}` : "",
  });
  const [loss, train] = [view.state.series("loss"), view.state.series("train_loss")];
  const lines = [{ points: loss, colour: view.theme.accent, label: "test loss" }, { points: train, colour: view.theme.second, dash: [5, 4], label: "clients' loss" }];
  chart("loss", lines, {
    from: 0, format: (y) => significant(y), empty: "no loss was measured yet",
    note: [loss.length && `test ${significant(loss.at(-1).y)} (line)`, train.length && `clients' own ${significant(train.at(-1).y)} (dashed)`].filter(Boolean).join(" · "),
  });
  write($("h-rate"), real() ? "Versions per minute" : "Versions per unit of time");
  const peak = points.reduce((top, point) => Math.max(top, point.y), 0);
  chart("rate", [{ points, colour: view.theme.accent, fill: true, label: "versions" }], {
    from: 0, format: (y) => significant(y), empty: "no version yet",
    note: points.length ? `peak ${significant(peak)} · steps of ${real() ? clock(view.state.slots.width) : significant(view.state.slots.width)}` : "",
  });
  const epsilon = view.state.series("epsilon");
  const told = view.status?.privacy;
  $("privacy").hidden = !epsilon.length && !told;
  if (!$("privacy").hidden) {
    const terms = told?.delta ? `δ ${told.delta} · clip ${told.clip} · noise ${told.noise} · ${whole(told.steps)} steps of one client` : "";
    chart("epsilon", [{ points: epsilon, colour: view.theme.second, fill: true, label: "epsilon" }], {
      from: 0, format: (y) => significant(y), empty: "nothing was spent yet",
      note: `ε ${significant(view.player ? epsilon.at(-1)?.y : told?.epsilon)} of the client with the most steps${terms ? ` · ${terms}` : ""}`,
    });
  }
  histogram();
}

function histogram() {
  view.state.classify();
  let most = 0;
  for (const stale of view.state.counts.keys()) most = Math.max(most, stale);
  const width = Math.max(1, Math.ceil((most + 1) / 32));
  const bars = [];
  for (let from = 0; view.state.counted && from <= most; from += width) {
    bars.push({ label: width === 1 ? String(from) : `${from}–${from + width - 1}`, from, value: 0, colour: view.theme[`s${view.state.level(from + Math.floor(width / 2))}`] });
  }
  for (const [stale, count] of view.state.counts) bars[Math.floor(stale / width)].value += count;
  const hit = columns($("staleness"), bars, { format: whole, cursor: cursors.get("staleness") ?? null, empty: "no update yet" }, view.theme);
  const mean = view.state.counted ? [...view.state.counts].reduce((sum, [stale, count]) => sum + stale * count, 0) / view.state.counted : null;
  const note = view.state.counted ? `mean ${significant(mean)} · largest ${whole(most)} · ${whole(view.state.counted)} updates` : "";
  write($("n-staleness"), hit ? `staleness ${hit.label}: ${whole(hit.value)} updates (${percent(hit.value / view.state.counted)})` : note);
  label("staleness", note || "no update yet");
}

// Bars in a list: [name, value, text, class].
function list(id, rows) {
  const box = $(id);
  box.hidden = !rows.length;
  while (box.children.length > rows.length) box.lastChild.remove();
  const most = Math.max(1e-12, ...rows.map((row) => row[1]));
  rows.forEach(([name, value, text, kind], at) => {
    let item = box.children[at];
    if (!item) {
      item = document.createElement("li");
      const track = document.createElement("i");
      track.append(document.createElement("b"));
      item.append(document.createElement("span"), track, document.createElement("span"));
      box.append(item);
    }
    item.className = kind;
    write(item.children[0], name);
    item.children[0].title = name;
    write(item.children[2], text);
    const width = `${((100 * value) / most).toFixed(2)}%`;
    const bar = item.children[1].firstChild;
    if (bar.style.width !== width) bar.style.width = width;
  });
}

function shares() {
  const told = view.state.shares;
  const rows = [];
  if (told) {
    for (const [client, share] of told.top.slice(0, 8)) rows.push([`client ${client}`, share, percent(share), ""]);
    const rest = told.rest + told.top.slice(8).reduce((sum, [, share]) => sum + share, 0);
    const others = told.clients - Math.min(8, told.top.length);
    if (others > 0) rows.push([`${whole(others)} other${others > 1 ? "s" : ""}`, rest, percent(rest), "other"]);
    if (told.initial > 0.0005) rows.push(["initial model", told.initial, percent(told.initial), "other"]);
  }
  list("shares", rows);
  write($("n-shares"), told?.top.length ? `${RULES[told.rule] ?? ""}; over ${whole(told.updates)} updates` : "no update yet");
}

// [reason, count], the most frequent first. A live server knows of refusals that are no row: of strangers, say.
function refused() {
  const told = view.player ? {} : view.status?.refusals;
  return Object.entries({ ...Object.fromEntries(view.state.refusals), ...told }).sort((a, b) => b[1] - a[1]);
}

function refusals() {
  const found = refused();
  const total = found.reduce((sum, [, count]) => sum + count, 0);
  list("refusals", found.slice(0, 9).map(([why, count]) => [why, count, whole(count), ""]));
  write($("n-refusals"), total ? `${whole(total)} in all, by reason` : "everything counted");
}
