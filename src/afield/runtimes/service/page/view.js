// What all parts of the page share: the run as it is known, how it is looked at, and how things are written.

import { colours } from "./charts.js";
import { State } from "./state.js";

export const $ = (id) => document.getElementById(id);
export const DASH = "–";

export const view = {
  state: new State(),
  status: null, // as the server told it last
  asked: 0, // when that was
  player: null, // of a finished run
  connection: "", // "live", "away", "failed"
  theme: colours(),
  dirty: true, // something is to be drawn anew
  visible: new Set(), // canvases
};

export function now() {
  if (view.player) return view.player.time;
  if (!view.status) return view.state.last;
  if (view.status.clock === "virtual") return Math.max(view.state.last, view.status.now ?? 0);
  return Math.max(view.state.last, (view.status.now ?? 0) + (view.connection === "live" ? (performance.now() - view.asked) / 1000 : 0));
}

export const real = () => (view.status?.clock ?? "real") === "real";

export function clock(time) {
  if (!real()) return significant(time, 4);
  const seconds = Math.max(0, time);
  const [h, m] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  const s = seconds % 60;
  if (h >= 48) return `${significant(seconds / 86400, 3)} d`;
  if (h) return `${h}:${String(m).padStart(2, "0")} h`;
  return `${m}:${s % 1 ? s.toFixed(1).padStart(4, "0") : String(s).padStart(2, "0")}`;
}

export function significant(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  if (Math.abs(value) >= 10 ** digits) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)} %` : DASH);
export const whole = (value) => (Number.isFinite(value) ? value.toLocaleString("en") : DASH);

// As text: what comes from elsewhere is never markup.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// What a screen reader is told of a canvas; not more often than it can be read.
export function label(id, text) {
  const canvas = $(id);
  const at = performance.now();
  if (!canvas.hasAttribute("aria-label") || at - (canvas.told ?? 0) > 5000) {
    canvas.setAttribute("aria-label", text);
    canvas.told = at;
  }
}
