// Lines and bars on a canvas, in the page's colours.

const probe = document.createElement("i");

// The colours of the theme, as the style sheet has them now.
export function colours() {
  document.body.append(probe);
  const found = {};
  for (const name of ["card", "ink", "soft", "grid", "edge", "accent", "second", "gone", "s0", "s1", "s2", "s3", "s4", "s5"]) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

const LEAST = { width: 120, height: 60 }; // axes and their numbers need as much

// A canvas of the size that it is shown in, in device pixels; its context draws in CSS pixels. Where it is not shown, or
// all but (a browser can draw a frame before it has laid out the page), it draws as if it had the least room.
export function sized(canvas) {
  const box = canvas.getBoundingClientRect();
  const [width, height] = [Math.max(box.width, LEAST.width), Math.max(box.height, LEAST.height)];
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(box.width * scale), Math.round(box.height * scale)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  return { context, width, height };
}

// Round values that divide [low, high] into about `count` parts.
export function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step + 0); // not -0
  return found;
}

// The same for times, which are read in minutes and hours.
export function timeTicks(low, high, count, clock) {
  if (clock !== "real") return ticks(low, high, count);
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const place = steps.findIndex((value) => value >= (high - low) / Math.max(1, count));
  if (place < 0 || high - low < count) return ticks(low, high, count);
  const marks = (step) => {
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
    return found;
  };
  const found = marks(steps[place]);
  return found.length > 1 || place === 0 ? found : marks(steps[place - 1]); // one mark alone tells no scale
}

const LEFT = 46;
const BOTTOM = 22;
const TOP = 8;

// lines: [{points, colour, fill, dash, label}]. options: {format, formatX, clock, from (lowest y that is always
// shown), to, range: [x0, x1], cursor (x in pixels, or null), empty}. Gives what the cursor is at.
export function line(canvas, lines, options, theme) {
  const { context: c, width, height } = sized(canvas);
  const all = lines.flatMap((one) => one.points);
  if (!all.length) {
    blank(c, width, height, options.empty, theme);
    return null;
  }
  let [x0, x1] = options.range ?? [Math.min(...ends(lines, 0)), Math.max(...ends(lines, 1))];
  if (!(x1 > x0)) [x0, x1] = [x0 - 0.5, x0 + 0.5];
  let low = options.from ?? Infinity;
  let high = options.to ?? -Infinity;
  for (const point of all) {
    if (point.y < low) low = point.y;
    if (point.y > high) high = point.y;
  }
  if (!(high > low)) high = low + (Math.abs(low) || 1) * 0.5;
  const marks = ticks(low, high, 4);
  const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
  if (options.to === undefined) high = Math.max(high + step * 0.15, marks[marks.length - 1]);
  if (options.from === undefined) low = Math.min(low - step * 0.15, marks[0]);
  const right = width - 10;
  const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (right - LEFT);
  const Y = (y) => height - BOTTOM - ((y - low) / (high - low)) * (height - BOTTOM - TOP);
  axes(c, { marks, X, Y, x0, x1, right, width, height, options, theme });
  for (const one of lines) stroke(c, thinned(one.points, X), one, X, Y, height - BOTTOM);
  return options.cursor === null || options.cursor === undefined ? null : crosshair(c, lines, options, X, Y, height, theme);
}

function ends(lines, which) {
  return lines.filter((one) => one.points.length).map((one) => one.points[which ? one.points.length - 1 : 0].x);
}

export function blank(c, width, height, text, theme) {
  c.fillStyle = theme.soft;
  c.textAlign = "center";
  c.textBaseline = "middle";
  c.fillText(text ?? "nothing yet", width / 2, height / 2);
}

function axes(c, { marks, X, Y, x0, x1, right, width, height, options, theme }) {
  c.lineWidth = 1;
  c.textBaseline = "middle";
  c.textAlign = "right";
  for (const mark of marks) {
    const y = Math.round(Y(mark)) + 0.5;
    c.strokeStyle = theme.grid;
    c.beginPath();
    c.moveTo(LEFT, y);
    c.lineTo(right, y);
    c.stroke();
    c.fillStyle = theme.soft;
    c.fillText((options.formatY ?? options.format)(mark), LEFT - 8, y);
  }
  c.textBaseline = "alphabetic";
  c.textAlign = "center";
  if (!X) return;
  for (const mark of timeTicks(x0, x1, Math.max(2, Math.floor(width / 110)), options.clock)) {
    const text = options.formatX(mark);
    const half = c.measureText(text).width / 2;
    c.fillText(text, Math.min(Math.max(X(mark), LEFT + half - 12), width - half - 2), height - 5);
  }
}

// At most two points per pixel, the lowest and the highest: the line looks the same.
function thinned(points, X) {
  if (points.length < 1500) return points;
  const found = [];
  let column = null;
  for (const point of points) {
    const at = Math.floor(X(point.x));
    if (!column || column.at !== at) {
      if (column) found.push(...column.both());
      column = { at, low: point, high: point, both() { return this.low === this.high ? [this.low] : this.low.x < this.high.x ? [this.low, this.high] : [this.high, this.low]; } };
    } else if (point.y < column.low.y) column.low = point;
    else if (point.y > column.high.y) column.high = point;
  }
  if (column) found.push(...column.both());
  return found;
}

function stroke(c, points, one, X, Y, floor) {
  if (!points.length) return;
  c.beginPath();
  points.forEach((point, at) => (at ? c.lineTo(X(point.x), Y(point.y)) : c.moveTo(X(point.x), Y(point.y))));
  c.strokeStyle = one.colour;
  c.lineWidth = 2;
  c.lineJoin = "round";
  c.setLineDash(one.dash ?? []);
  c.stroke();
  c.setLineDash([]);
  if (one.fill && points.length > 1) {
    c.lineTo(X(points[points.length - 1].x), floor);
    c.lineTo(X(points[0].x), floor);
    c.closePath();
    c.globalAlpha = 0.13;
    c.fillStyle = one.colour;
    c.fill();
    c.globalAlpha = 1;
  }
  const last = points[points.length - 1];
  c.beginPath();
  c.arc(X(last.x), Y(last.y), 3, 0, 7);
  c.fillStyle = one.colour;
  c.fill();
}

function crosshair(c, lines, options, X, Y, height, theme) {
  const found = [];
  for (const one of lines) {
    let best = null;
    for (const point of one.points) if (!best || Math.abs(X(point.x) - options.cursor) < Math.abs(X(best.x) - options.cursor)) best = point;
    if (best) found.push({ ...best, label: one.label, colour: one.colour });
  }
  if (!found.length) return null;
  const x = Math.round(X(found[0].x)) + 0.5;
  c.strokeStyle = theme.soft;
  c.lineWidth = 1;
  c.beginPath();
  c.moveTo(x, TOP);
  c.lineTo(x, height - BOTTOM);
  c.stroke();
  for (const point of found) {
    c.beginPath();
    c.arc(X(point.x), Y(point.y), 4.5, 0, 7);
    c.fillStyle = point.colour;
    c.fill();
    c.strokeStyle = theme.card;
    c.lineWidth = 2;
    c.stroke();
  }
  return found;
}

// bars: [{label, value, colour}]; gives the one under the cursor.
export function columns(canvas, bars, options, theme) {
  const { context: c, width, height } = sized(canvas);
  if (!bars.length) {
    blank(c, width, height, options.empty, theme);
    return null;
  }
  const high = Math.max(...bars.map((bar) => bar.value)) || 1;
  const marks = ticks(0, high, 4);
  const top = Math.max(high, marks[marks.length - 1]);
  const right = width - 10;
  const Y = (y) => height - BOTTOM - (y / top) * (height - BOTTOM - TOP);
  axes(c, { marks, Y, right, width, height, theme, options });
  const slot = (right - LEFT) / bars.length;
  const gap = slot > 6 ? 2 : 0;
  let hit = null;
  c.textAlign = "center";
  const widest = Math.max(...bars.map((bar) => c.measureText(bar.label).width)) + 10;
  const every = Math.max(1, Math.ceil(widest / slot));
  bars.forEach((bar, at) => {
    const x = LEFT + at * slot;
    const y = bar.value ? Math.min(Y(bar.value), height - BOTTOM - 1.5) : height - BOTTOM;
    c.fillStyle = bar.colour;
    c.beginPath();
    c.roundRect(x + gap / 2, y, Math.max(1, slot - gap), height - BOTTOM - y, [Math.min(3, slot / 4), Math.min(3, slot / 4), 0, 0]);
    c.fill();
    if (options.cursor !== null && options.cursor >= x && options.cursor < x + slot) hit = bar;
    if (at % every === 0) {
      c.fillStyle = theme.soft;
      c.fillText(bar.label, Math.min(x + slot / 2, width - 2 - c.measureText(bar.label).width / 2), height - 5);
    }
  });
  return hit;
}
