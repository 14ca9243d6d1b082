// The page: where its rows come from, when it is drawn. view.js holds what all parts share.

import { cards, head } from "./cards.js";
import { colours } from "./charts.js";
import { drawTimeline, legend, windows } from "./clients.js";
import { Denied, foundToken, get, keepToken, Player, Stream } from "./source.js";
import { $, clock, real, significant, view, write } from "./view.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

// -- drawing, as often as there is something to see --------------------------------------------------------------

const drawn = { slow: 0, fast: 0, rows: -1 };
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.isIntersecting ? view.visible.add(entry.target) : view.visible.delete(entry.target);
  view.dirty = true;
});
const resized = new ResizeObserver(() => (view.dirty = true));
for (const canvas of document.querySelectorAll("canvas")) {
  observer.observe(canvas);
  resized.observe(canvas);
}

let before = performance.now();

function frame(at) {
  requestAnimationFrame(frame);
  const seconds = Math.min(0.25, (at - before) / 1000);
  before = at;
  if (view.player) view.player.tick(seconds);
  const moving = (view.player?.playing || (!view.player && real() && view.connection === "live")) && !still.matches;
  const changed = view.dirty || view.state.rows !== drawn.rows;
  const rest = still.matches ? 1000 : 0;
  if ((changed && at - drawn.slow > Math.max(rest, 180)) || (view.dirty && !rest)) {
    drawn.slow = at;
    drawn.rows = view.state.rows;
    view.dirty = false;
    head();
    cards();
    legend();
    windows();
    drawTimeline();
    controls();
  } else if (moving && at - drawn.fast > 33) {
    if (view.visible.has($("timeline"))) drawTimeline();
    controls();
  } else return;
  drawn.fast = at;
}

// -- themes ------------------------------------------------------------------------------------------------------

function paint(choice) {
  if (choice) document.documentElement.dataset.theme = choice;
  else delete document.documentElement.dataset.theme;
  view.theme = colours();
  view.dirty = true;
}

$("theme").addEventListener("click", () => {
  const shown = document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  const choice = shown === "dark" ? "light" : "dark";
  localStorage.setItem("afield-theme", choice);
  paint(choice);
});
dark.addEventListener("change", () => paint(localStorage.getItem("afield-theme")));
paint(localStorage.getItem("afield-theme"));

// -- the player -----------------------------------------------------------------------------------------------------

const faster = (slider) => (view.player.end / 600) * 200 ** (slider / 100); // the whole run in ten minutes to three seconds

function controls() {
  if (!view.player) return;
  write($("play"), view.player.playing ? "Pause" : view.player.time >= view.player.end ? "Again" : "Play");
  write($("at"), `${clock(view.player.time)} of ${clock(view.player.end)}`);
  write($("pace"), real() ? `${significant(view.player.speed, 2)}×` : `${significant(view.player.speed, 2)} per second`);
  if (document.activeElement !== $("position") || view.player.playing) $("position").value = String((1000 * view.player.time) / view.player.end);
  $("position").setAttribute("aria-valuetext", `${clock(view.player.time)} of ${clock(view.player.end)}`);
  $("speed").setAttribute("aria-valuetext", $("pace").textContent);
}

$("play").addEventListener("click", async () => {
  view.player.broken = false; // try again
  view.connection = "";
  if (!view.player.playing && view.player.time >= view.player.end) await view.player.seek(0);
  view.player.playing = !view.player.playing;
  view.dirty = true;
});
$("position").addEventListener("input", async (event) => {
  view.player.playing = false;
  await view.player.seek((view.player.end * Number(event.target.value)) / 1000);
  view.dirty = true;
});
$("speed").addEventListener("input", (event) => {
  view.player.speed = faster(Number(event.target.value));
  view.dirty = true;
});

// -- beginning ---------------------------------------------------------------------------------------------------

function door(text = "") {
  $("page").hidden = true;
  $("door").hidden = false;
  $("certificate").hidden = location.protocol !== "https:";
  write($("wrong"), text);
  view.connection = "";
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
  view.status = await get("/v1/status");
  view.asked = performance.now();
  view.dirty = true;
}

async function begin() {
  try {
    await refresh();
    $("door").hidden = true;
    $("page").hidden = false;
    if (view.status.state === "finished") await replay();
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
    view.connection = "failed";
    view.dirty = true;
    if (!view.status) door(`The server cannot be reached: ${error.message}`);
  }
}

async function replay() {
  view.state.clear((view.status.now || 1) / 60);
  view.player = new Player(view.state, view.status.now || 1, failed);
  $("player").hidden = false;
  view.player.speed = faster(Number($("speed").value));
  if (still.matches) await view.player.seek(view.player.end);
  else view.player.playing = true;
  view.dirty = true;
}

async function follow() {
  if (view.status.clock === "virtual") view.state.clear(Math.max(view.status.now || 0, 1) / 120);
  const { rows, last } = await get("/v1/history?limit=20000");
  for (const row of rows) view.state.add(row.kind, row.values);
  view.state.shares = (await get("/v1/shares")) ?? view.state.shares;
  const stream = new Stream(rows.at(-1)?.id ?? last, (kind, values) => view.state.add(kind, values), (told) => {
    if (told instanceof Denied) failed(told);
    else if (told !== view.connection) {
      view.connection = told;
      view.dirty = true;
    }
  });
  stream.run();
  poll();
}

// What rows do not tell: the clock, refusals of all kinds, shares, privacy.
async function poll() {
  for (;;) {
    await new Promise((go) => setTimeout(go, document.hidden ? 10000 : 2000));
    if (view.connection !== "live") continue;
    try {
      await refresh();
      view.state.shares = await get("/v1/shares");
    } catch (error) {
      if (error instanceof Denied) return failed(error);
    }
  }
}

requestAnimationFrame(frame);
if (foundToken()) begin();
else door();
addEventListener("hashchange", () => foundToken() && location.reload());
