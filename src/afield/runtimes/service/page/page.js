// The page: what is known (state.js), shown. Whatever comes from elsewhere is written as text, never as markup.

import { colours, columns, line } from "./charts.js";
import { Denied, foundToken, get, keepToken, Player, Stream } from "./source.js";
import { State } from "./state.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");
const DASH = "–";
const RULES = {
  mixed: "the product of all mixing weights",
  replaced: "the weight of each client's newest model",
  tabled: "every client counts alike from its first update on",
  rounds: "weights within each round, summed",
  summed: "the part of all weight that came from each client",
};

const state = new State();
const timeline = new Timeline($("timeline"), $("scroller"), $("spacer"));
let theme = colours();
let status = null; // as the server told it last
let asked = 0; // when that was
let player = null;
let stream = null;
let connection = "";
let drawn = { slow: 0, fast: 0, rows: -1, spoken: 0 };
let dirty = true;

// -- how things are written ------------------------------------------------------------------------------------

const real = () => (status?.clock ?? "real") === "real";

function clock(time) {
  if (!real()) return significant(time, 4);
  const seconds = Math.max(0, time);
  const [h, m] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  const s = seconds % 60;
  if (h >= 48) return `${significant(seconds / 86400, 3)} d`;
  if (h) return `${h}:${String(m).padStart(2, "0")} h`;
  return `${m}:${String(s % 1 ? s.toFixed(1) : s).padStart(2, "0")}`;
}

function significant(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  if (Math.abs(value) >= 10 ** digits) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %` : DASH);
const whole = (value) => (Number.isFinite(value) ? value.toLocaleString("en") : DASH);

// -- the head and the tiles ------------------------------------------------------------------------------------

function now() {
  if (player) return player.time;
  if (!status) return state.last;
  if (status.clock === "virtual") return Math.max(state.last, status.now ?? 0);
  return Math.max(state.last, (status.now ?? 0) + (connection === "live" ? (performance.now() - asked) / 1000 : 0));
}

function rates() {
  return state.slots.points(now(), real() ? 60 : 1);
}

function tiles(points) {
  const last = (key) => state.series(key).at(-1)?.y;
  const tail = points.slice(-Math.max(3, Math.round((real() ? 60 : state.slots.width * 12) / state.slots.width)));
  const rate = tail.length ? tail.reduce((sum, point) => sum + point.y, 0) / tail.length : null;
  const list = [
    ["Accuracy", percent(last("accuracy") ?? NaN)],
    ["Loss", significant(last("loss") ?? last("train_loss"))],
    ["Version", whole(player ? state.version : Math.max(state.version, status?.version ?? 0))],
    [real() ? "Versions / minute" : "Versions / time", significant(rate)],
    ["Updates", whole(player ? state.updates : Math.max(state.updates, status?.updates ?? 0))],
    ["Staleness", significant(state.meanStaleness(), 2)],
    ["Tasks out", whole(player ? state.open.size : status?.tasks ?? state.open.size)],
    ["Clients seen", `${whole(state.bars.size)}${status?.clients ? ` / ${whole(status.clients)}` : ""}`],
  ];
  const epsilon = player ? last("epsilon") : status?.privacy?.epsilon;
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

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function head() {
  const strategy = status?.strategy ?? {};
  const rest = Object.entries(strategy).filter(([key, value]) => key !== "name" && ["number", "string", "boolean"].includes(typeof value));
  write($("name"), String(status?.name ?? "afield"));
  write($("strategy"), [strategy.name, ...rest.slice(0, 4).map(([key, value]) => `${key} ${value}`)].filter(Boolean).map(String).join(" · "));
  document.title = `${status?.name ?? "run"} · afield`;
  const pill = $("state");
  let text = connection === "away" ? "reconnecting" : String(status?.state ?? "connecting");
  if (player) text = player.playing ? "replay" : player.time >= player.end ? "finished" : "paused";
  if (connection === "failed") text = "out of reach";
  write(pill, text);
  pill.classList.toggle("good", text === "serving" || text === "running" || text === "replay");
  pill.classList.toggle("bad", connection === "away" || connection === "failed" || text === "broken");
}

// -- charts ----------------------------------------------------------------------------------------------------

const cursors = new Map(); // canvas id -> x, or null

for (const canvas of document.querySelectorAll(".chart")) {
  const move = (x) => {
    cursors.set(canvas.id, x);
    dirty = true;
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
  if (!visible.has($(id))) return;
  const begin = options.begin ?? 0;
  const range = player ? [begin, player.end] : undefined;
  const found = line($(id), lines, { range, clock: status?.clock ?? "real", formatX: clock, cursor: cursors.get(id) ?? null, ...options }, theme);
  const shown = lines.filter((one) => one.points.length);
  const text = found
    ? `${clock(found[0].x)}: ${found.map((point) => `${point.label} ${options.format(point.y)}`).join(", ")}`
    : options.note ?? "";
  write($(`n-${id}`), text);
  const spoken = shown.map((one) => `${one.label} ${options.format(one.points.at(-1).y)} at ${clock(one.points.at(-1).x)}`).join(", ");
  label(id, spoken || options.empty);
}

// What a screen reader is told; not more often than it can be read.
function label(id, text) {
  const canvas = $(id);
  const at = performance.now();
  if (!canvas.hasAttribute("aria-label") || at - (canvas.told ?? 0) > 5000) {
    canvas.setAttribute("aria-label", text);
    canvas.told = at;
  }
}

function charts(points) {
  const accuracy = state.series("accuracy");
  const best = accuracy.reduce((top, point) => (top && top.y >= point.y ? top : point), null);
  chart("accuracy", [{ points: accuracy, colour: theme.accent, fill: true, label: "accuracy" }], {
    from: 0, to: 1, format: (y) => percent(y), empty: "no accuracy was measured yet",
    note: best ? `best ${percent(best.y)} at ${clock(best.x)} · ${whole(state.measured.length)} measurements` : "",
  });
  const [loss, train] = [state.series("loss"), state.series("train_loss")];
  const lines = [{ points: loss, colour: theme.accent, label: "test loss" }, { points: train, colour: theme.second, dash: [5, 4], label: "clients' loss" }];
  chart("loss", lines, {
    from: 0, format: (y) => significant(y), empty: "no loss was measured yet",
    note: [loss.length && `test ${significant(loss.at(-1).y)} (line)`, train.length && `clients' own ${significant(train.at(-1).y)} (dashed)`].filter(Boolean).join(" · "),
  });
  write($("h-rate"), real() ? "Versions per minute" : "Versions per unit of time");
  const peak = points.reduce((top, point) => Math.max(top, point.y), 0);
  chart("rate", [{ points, colour: theme.accent, fill: true, label: "versions" }], {
    from: 0, format: (y) => significant(y), empty: "no version yet",
    note: points.length ? `peak ${significant(peak)} · steps of ${real() ? clock(state.slots.width) : significant(state.slots.width)}` : "",
  });
  const epsilon = state.series("epsilon");
  const told = status?.privacy;
  $("privacy").hidden = !epsilon.length && !told;
  if (!$("privacy").hidden) {
    const terms = told?.delta ? `δ ${told.delta} · clip ${told.clip} · noise ${told.noise} · ${whole(told.steps)} steps of one client` : "";
    chart("epsilon", [{ points: epsilon, colour: theme.second, fill: true, label: "epsilon" }], {
      from: 0, format: (y) => significant(y), empty: "nothing was spent yet",
      note: `ε ${significant(player ? epsilon.at(-1)?.y : told?.epsilon)} of the client with the most steps${terms ? ` · ${terms}` : ""}`,
    });
  }
  histogram();
}

function histogram() {
  state.classify();
  if (!visible.has($("staleness"))) return;
  let most = 0;
  for (const stale of state.counts.keys()) most = Math.max(most, stale);
  const width = Math.max(1, Math.ceil((most + 1) / 32));
  const bars = [];
  for (let from = 0; state.counted && from <= most; from += width) {
    bars.push({ label: width === 1 ? String(from) : `${from}–${from + width - 1}`, from, value: 0, colour: theme[`s${state.level(from)}`] });
  }
  for (const [stale, count] of state.counts) bars[Math.floor(stale / width)].value += count;
  const hit = columns($("staleness"), bars, { format: whole, cursor: cursors.get("staleness") ?? null, empty: "no update yet" }, theme);
  const mean = state.counted ? [...state.counts].reduce((sum, [stale, count]) => sum + stale * count, 0) / state.counted : null;
  const note = state.counted ? `mean ${significant(mean)} · largest ${whole(most)} · ${whole(state.counted)} updates` : "";
  write($("n-staleness"), hit ? `staleness ${hit.label}: ${whole(hit.value)} updates (${percent(hit.value / state.counted)})` : note);
  label("staleness", note || "no update yet");
}

// Bars in a list: [name, value, text, class].
function list(id, rows) {
  const box = $(id);
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
  const told = state.shares;
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

function refusals() {
  const found = player || !status?.refusals ? [...state.refusals] : Object.entries({ ...Object.fromEntries(state.refusals), ...status.refusals });
  found.sort((a, b) => b[1] - a[1]);
  const total = found.reduce((sum, [, count]) => sum + count, 0);
  list("refusals", found.slice(0, 9).map(([why, count]) => [why, count, whole(count), ""]));
  write($("n-refusals"), total ? `${whole(total)} in all, by reason` : "nothing was refused");
}

// -- the timeline ----------------------------------------------------------------------------------------------

let windowed = "";

function windows() {
  const end = player ? player.end : now();
  const choices = real() && !player
    ? [["30", "last 30 s"], ["120", "last 2 min"], ["600", "last 10 min"], ["3600", "last hour"], ["", "all"]]
    : [[String(end / 20), "1/20 of the run"], [String(end / 5), "1/5 of the run"], ["", "all"]];
  if (!player && !real()) choices.splice(0, 2, ["5", "last 5"], ["20", "last 20"]);
  const key = JSON.stringify(choices);
  if (key === windowed) return;
  windowed = key;
  $("window").replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  $("window").value = choices[player ? 1 : real() ? 1 : 2][0];
  timeline.window = $("window").value ? Number($("window").value) : null;
}

function drawTimeline() {
  if (!visible.has($("timeline"))) return;
  const first = state.queue[state.head];
  const begin = player ? 0 : first ? first.start : 0;
  const empty = status?.state === "running" ? "receipts are not written yet: a simulation writes them by the 50,000, and at its end" : "no task yet";
  const found = timeline.draw(state, now(), theme, { begin, clock: status?.clock ?? "real", formatX: clock, empty });
  $("fit").hidden = timeline.clients.length < 20;
  const text = `${whole(found.rows)} clients · ${whole(found.bars)} tasks in view · ${whole(state.open.size)} out`;
  write($("n-timeline"), text);
  label("timeline", text);
}

function legend() {
  const marks = state.classes;
  const items = marks.map((from, at) => [`s${at}`, at === 5 ? `${from}+` : marks[at + 1] - from > 1 ? `${from}–${marks[at + 1] - 1}` : String(from)]);
  items.push(["out", "out"], ["gone", "did not count"]);
  const box = $("legend");
  if (box.dataset.key === JSON.stringify(items)) return;
  box.dataset.key = JSON.stringify(items);
  box.replaceChildren(...items.map(([kind, text]) => {
    const [item, mark] = [document.createElement("li"), document.createElement("i")];
    mark.className = kind;
    item.append(mark, text);
    return item;
  }));
}

$("scroller").addEventListener("scroll", () => (dirty = true), { passive: true });
$("timeline").addEventListener("pointermove", (event) => tip(event.offsetX, event.offsetY));
$("timeline").addEventListener("pointerleave", () => ($("tip").hidden = true));
$("timeline").addEventListener("pointerdown", (event) => tip(event.offsetX, event.offsetY));

function tip(x, y) {
  const bar = timeline.at(state, x, y);
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
  state.grew = dirty = true;
});
$("window").addEventListener("change", (event) => {
  timeline.window = event.target.value ? Number(event.target.value) : null;
  dirty = true;
});
$("fit").addEventListener("click", () => {
  timeline.fit = !timeline.fit;
  $("fit").setAttribute("aria-pressed", String(timeline.fit));
  $("scroller").scrollTop = 0;
  dirty = true;
});

// -- drawing, as often as there is something to see --------------------------------------------------------------

const visible = new Set();
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.isIntersecting ? visible.add(entry.target) : visible.delete(entry.target);
  dirty = true;
}, { rootMargin: "100px" });
const resized = new ResizeObserver(() => (dirty = true));
for (const canvas of document.querySelectorAll("canvas")) {
  observer.observe(canvas);
  resized.observe(canvas);
}

let before = performance.now();

function frame(at) {
  requestAnimationFrame(frame);
  const seconds = Math.min(0.25, (at - before) / 1000);
  before = at;
  if (player) player.tick(seconds);
  const moving = (player?.playing || (!player && real() && connection === "live")) && !still.matches;
  const changed = dirty || state.rows !== drawn.rows;
  const rest = still.matches ? 1000 : 0;
  if ((changed && at - drawn.slow > Math.max(rest, 180)) || (dirty && !rest)) {
    drawn.slow = at;
    drawn.rows = state.rows;
    dirty = false;
    const points = rates();
    head();
    tiles(points);
    charts(points);
    shares();
    refusals();
    legend();
    windows();
    drawTimeline();
    controls();
  } else if (moving && at - drawn.fast > 33) {
    drawTimeline();
    controls();
  } else return;
  drawn.fast = at;
}

// -- themes ------------------------------------------------------------------------------------------------------

function paint(choice) {
  if (choice) document.documentElement.dataset.theme = choice;
  else delete document.documentElement.dataset.theme;
  theme = colours();
  dirty = true;
}

$("theme").addEventListener("click", () => {
  const shown = document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  const choice = shown === "dark" ? "light" : "dark";
  localStorage.setItem("afield-theme", choice);
  paint(choice);
});
dark.addEventListener("change", () => paint(localStorage.getItem("afield-theme")));
paint(localStorage.getItem("afield-theme"));

// -- the player --------------------------------------------------------------------------------------------------

const faster = (slider) => (player.end / 600) * 200 ** (slider / 100); // the whole run in ten minutes to three seconds

function controls() {
  if (!player) return;
  write($("play"), player.playing ? "Pause" : player.time >= player.end ? "Again" : "Play");
  write($("at"), `${clock(player.time)} of ${clock(player.end)}`);
  write($("pace"), real() ? `${significant(player.speed, 2)}×` : `${significant(player.speed, 2)} per second`);
  if (document.activeElement !== $("position") || player.playing) $("position").value = String((1000 * player.time) / player.end);
  $("position").setAttribute("aria-valuetext", `${clock(player.time)} of ${clock(player.end)}`);
  $("speed").setAttribute("aria-valuetext", $("pace").textContent);
}

$("play").addEventListener("click", async () => {
  if (!player.playing && player.time >= player.end) await player.seek(0);
  player.playing = !player.playing;
  dirty = true;
});
$("position").addEventListener("input", async (event) => {
  player.playing = false;
  await player.seek((player.end * Number(event.target.value)) / 1000);
  dirty = true;
});
$("speed").addEventListener("input", (event) => {
  player.speed = faster(Number(event.target.value));
  dirty = true;
});

// -- beginning ---------------------------------------------------------------------------------------------------

function door(text = "") {
  $("page").hidden = true;
  $("door").hidden = false;
  $("certificate").hidden = location.protocol !== "https:";
  write($("wrong"), text);
  connection = "";
  write($("state"), "not connected");
  $("token").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value.trim());
  $("token").value = "";
  begin();
});
$("certificate").addEventListener("click", () => {
  keepToken(null);
  begin();
});

async function refresh() {
  status = await get("/v1/status");
  asked = performance.now();
  dirty = true;
}

async function begin() {
  try {
    await refresh();
    $("door").hidden = true;
    $("page").hidden = false;
    if (status.state === "finished") await replay();
    else await follow();
  } catch (error) {
    failed(error);
  }
}

function failed(error) {
  if (error instanceof Denied) {
    keepToken(null);
    door(error.message);
  } else {
    connection = "failed";
    dirty = true;
    if (!status) door(`The server cannot be reached: ${error.message}`);
  }
}

async function replay() {
  state.clear((status.now || 1) / 120);
  player = new Player(state, status.now || 1, failed);
  $("player").hidden = false;
  player.speed = faster(Number($("speed").value));
  if (still.matches) await player.seek(player.end);
  else player.playing = true;
  dirty = true;
}

async function follow() {
  if (status.clock === "virtual") state.clear(Math.max(status.now || 0, 1) / 120);
  const { rows, last } = await get("/v1/history?limit=20000");
  for (const row of rows) state.add(row.kind, row.values);
  state.shares = (await get("/v1/shares")) ?? state.shares;
  stream = new Stream(rows.at(-1)?.id ?? last, (kind, values) => state.add(kind, values), (told) => {
    if (told instanceof Denied) failed(told);
    else if (told !== connection) {
      connection = told;
      dirty = true;
    }
  });
  stream.run();
  poll();
}

// What rows do not tell: the clock, refusals of all kinds, shares, privacy.
async function poll() {
  for (;;) {
    await new Promise((go) => setTimeout(go, document.hidden ? 10000 : 2000));
    if (connection !== "live") continue;
    try {
      await refresh();
      state.shares = await get("/v1/shares");
    } catch (error) {
      if (error instanceof Denied) return failed(error);
    }
  }
}

requestAnimationFrame(frame);
if (foundToken()) begin();
else door();
addEventListener("hashchange", () => foundToken() && location.reload());
