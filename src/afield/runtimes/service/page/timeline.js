// Each client a row, each task a bar from checkout to arrival, coloured by its staleness. Only rows that are in view
// are drawn; "fit" puts neighbours into one row and shows the mean of their classes.

import { blank, sized, timeTicks } from "./charts.js";

const AXIS = 22;
const TALL = 24; // pixels of a row at most ...
const LOW = 7; // ... and at least
const FITTED = 3;

export class Timeline {
  constructor(canvas, scroller, spacer) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.spacer = spacer;
    this.clients = [];
    this.order = "number";
    this.fit = false;
    this.window = null; // seconds, or null: all
    this.sorted = 0;
    this.view = null;
  }

  // Clients in the chosen order; sorted anew when one is new, and now and then where the order can change.
  sort(state, now) {
    if (!state.grew && (this.order === "number" || now - this.sorted < 2000)) return;
    state.grew = false;
    this.sorted = now;
    const clients = [...state.bars.keys()];
    if (this.order === "number") clients.sort((a, b) => a - b);
    else {
      const measure = this.order === "slow" ? (bar) => (bar.end ?? state.last) - bar.start : (bar) => bar.stale;
      const mean = new Map();
      for (const client of clients) {
        const bars = state.bars.get(client).slice(-20);
        mean.set(client, bars.length ? bars.reduce((sum, bar) => sum + measure(bar), 0) / bars.length : 0);
      }
      clients.sort((a, b) => mean.get(b) - mean.get(a) || a - b);
    }
    this.clients = clients;
  }

  draw(state, end, theme, options) {
    this.sort(state, performance.now());
    const count = this.clients.length;
    const box = Math.max(170, Math.min(innerWidth > 720 ? 380 : 320, count * TALL + AXIS));
    const room = box - AXIS;
    if (this.box !== box) this.scroller.style.setProperty("--box", `${(this.box = box)}px`);
    const rows = this.fit ? Math.min(count, Math.floor(room / FITTED)) : count;
    const tall = this.fit ? Math.min(TALL, room / Math.max(1, rows)) : Math.max(LOW, Math.min(TALL, room / Math.max(1, rows)));
    const whole = this.fit ? box : Math.max(box, rows * tall + AXIS);
    if (this.spacer.style.height !== `${whole}px`) this.spacer.style.height = `${whole}px`;
    const { context: c, width, height } = sized(this.canvas);
    if (!count) {
      this.view = null;
      blank(c, width, height, options.empty, theme);
      return { rows: 0, bars: 0 };
    }
    const top = this.fit ? 0 : this.scroller.scrollTop;
    const per = this.fit ? Math.ceil(count / rows) : 1;
    const first = this.fit ? 0 : Math.floor(top / tall);
    const last = this.fit ? Math.ceil(count / per) : Math.min(count, Math.ceil((top + room) / tall));
    const label = `${Math.max(...this.clients.slice(0, 1), this.largest())}`;
    const left = Math.max(30, c.measureText(label).width + 20);
    const start = this.window === null ? options.begin : Math.max(options.begin, end - this.window);
    const gone = Math.max(end - start, 1e-9);
    const span = this.window === null ? gone : Math.min(this.window, Math.max(gone, this.window / 8));
    const X = (time) => left + ((time - start) / span) * (width - left - 10);
    this.view = { X, left, tall, top, per, start, span, width, room, end, fit: this.fit };
    this.axis(c, X, start, start + span, { left, width, height, room, theme, options });
    c.save();
    c.beginPath();
    c.rect(left, 0, width - left, room);
    c.clip();
    const drawn = this.fit ? this.drawFitted(c, state, theme, per, last, end) : this.drawRows(c, state, theme, first, last, end);
    if (end > start && X(end) < width) {
      c.fillStyle = theme.soft;
      c.fillRect(Math.round(X(end)), 0, 1, room);
    }
    c.restore();
    this.labels(c, first, last, theme);
    return { rows: count, bars: drawn };
  }

  largest() {
    let found = 0;
    for (const client of this.clients) if (client > found) found = client;
    return found;
  }

  axis(c, X, start, end, { left, width, height, room, theme, options }) {
    c.textAlign = "center";
    c.textBaseline = "alphabetic";
    for (const mark of timeTicks(start, end, Math.max(2, Math.floor(width / 120)), options.clock)) {
      const x = Math.round(X(mark)) + 0.5;
      if (x < left) continue;
      c.strokeStyle = theme.grid;
      c.lineWidth = 1;
      c.beginPath();
      c.moveTo(x, 0);
      c.lineTo(x, room);
      c.stroke();
      const text = options.formatX(mark);
      const half = c.measureText(text).width / 2;
      c.fillStyle = theme.soft;
      c.fillText(text, Math.min(Math.max(x, half + 2), width - half - 4), height - 6);
    }
  }

  drawRows(c, state, theme, first, last, end) {
    const { X, tall, top, start, span } = this.view;
    const until = start + span;
    const inner = tall > 9 ? tall - 3 : tall - 1.5;
    const round = Math.min(3, inner / 3);
    let drawn = 0;
    for (let row = first; row < last; row++) {
      const y = row * tall - top + (tall - inner) / 2;
      const bars = state.bars.get(this.clients[row]) ?? [];
      let pixel = -1; // where several bars share a pixel, the first of the same class is enough
      let shown = -1;
      for (let at = seen(bars, start); at < bars.length && bars[at].start <= until; at++) {
        const bar = bars[at];
        const x = X(bar.start);
        const wide = Math.max(1.5, X(bar.end ?? end) - x - 0.75);
        const level = state.level(bar.stale);
        if (wide < 2 && Math.floor(x) === pixel && level <= shown) continue;
        [pixel, shown] = [Math.floor(x), level];
        drawn++;
        if (bar.how === "out") outline(c, x, y, wide, inner, theme);
        else {
          c.fillStyle = bar.how === "done" ? theme[`s${level}`] : theme.gone;
          if (wide > 4) {
            c.beginPath();
            c.roundRect(x, y, wide, inner, round);
            c.fill();
          } else c.fillRect(x, y, wide, inner);
          if (bar.how !== "done" && wide > 6) crossed(c, x, y, wide, inner, theme);
        }
      }
    }
    return drawn;
  }

  // Several clients per row: a grid of pixels, each with the mean class of the bars over it.
  drawFitted(c, state, theme, per, last, end) {
    const { X, left, width, tall, start, span } = this.view;
    const columns = Math.ceil((width - left) / 2);
    const levels = new Uint8Array(columns); // 0: nothing, 1: out, 2: did not count, 3...: the classes
    const [sums, counts] = [new Float32Array(columns), new Float32Array(columns)];
    let drawn = 0;
    for (let row = 0; row < last; row++) {
      for (const each of [levels, sums, counts]) each.fill(0);
      for (let place = row * per; place < Math.min((row + 1) * per, this.clients.length); place++) {
        const bars = state.bars.get(this.clients[place]) ?? [];
        for (let at = seen(bars, start); at < bars.length && bars[at].start <= start + span; at++) {
          const bar = bars[at];
          const from = Math.max(0, Math.floor((X(bar.start) - left) / 2));
          const to = Math.min(columns - 1, Math.max(from, Math.floor((X(bar.end ?? end) - left) / 2)));
          const level = bar.how === "done" ? state.level(bar.stale) : -1;
          for (let column = from; column <= to; column++) {
            if (level < 0) levels[column] = Math.max(levels[column], bar.how === "out" ? 1 : 2);
            else {
              sums[column] += level;
              counts[column]++;
            }
          }
          drawn++;
        }
      }
      for (let column = 0; column < columns; column++) if (counts[column]) levels[column] = 3 + Math.round(sums[column] / counts[column]);
      const inner = Math.max(1, tall - (tall > 5 ? 1.5 : 0.5));
      for (let column = 0; column < columns; ) {
        const level = levels[column];
        let stop = column + 1;
        while (stop < columns && levels[stop] === level) stop++;
        if (level) {
          c.fillStyle = level === 1 ? theme.grid : level === 2 ? theme.gone : theme[`s${level - 3}`];
          c.fillRect(left + 2 * column, row * tall, 2 * (stop - column), inner);
        }
        column = stop;
      }
    }
    return drawn;
  }

  labels(c, first, last, theme) {
    const { left, tall, top, per, room } = this.view;
    const every = [1, 2, 5, 10, 20, 50].find((rows) => rows * tall >= 15) ?? 100;
    c.fillStyle = theme.soft;
    c.textAlign = "right";
    c.textBaseline = "middle";
    for (let row = Math.ceil(first / every) * every; row < last; row += every) {
      const y = row * tall - top + tall / 2;
      if (y > 4 && y < room - 2) c.fillText(String(this.clients[row * per]), left - 8, y);
    }
  }

  // The task under a point of the canvas.
  at(state, x, y) {
    const view = this.view;
    if (!view || view.fit || y > view.room || x < view.left) return null;
    const client = this.clients[Math.floor((y + view.top) / view.tall)];
    const bars = state.bars.get(client) ?? [];
    let best = null;
    for (let at = seen(bars, view.start); at < bars.length; at++) {
      const bar = bars[at];
      if (x >= view.X(bar.start) - 2 && x <= view.X(bar.end ?? view.end) + 2) best = bar;
    }
    return best;
  }
}

// The first bar that may reach into view: the bars of a client follow one another.
function seen(bars, start) {
  let low = 0;
  let high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle].start < start) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 2);
}

function outline(c, x, y, wide, tall, theme) {
  c.fillStyle = theme.grid;
  c.fillRect(x, y, wide, tall);
  if (wide < 3 || tall < 9) return;
  c.strokeStyle = theme.soft;
  c.globalAlpha = 0.55;
  c.lineWidth = 1;
  c.strokeRect(x + 0.5, y + 0.5, wide - 1, Math.max(1, tall - 1));
  c.globalAlpha = 1;
}

// Not by colour alone: what did not count is crossed through.
function crossed(c, x, y, wide, tall, theme) {
  c.strokeStyle = theme.card;
  c.lineWidth = 1.5;
  c.beginPath();
  c.moveTo(x + 2, y + tall / 2);
  c.lineTo(x + wide - 2, y + tall / 2);
  c.stroke();
}
