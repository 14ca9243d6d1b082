// What is known of the run, from rows. Nothing here touches the document.

const BARS = 60000; // tasks kept for the timeline
const MEASURED = 20000;
const SLOTS = 240; // of the rate's axis

// Staleness falls into six classes, the same for the timeline, its legend and the histogram. Each entry: the first
// value of every class. The first entry whose last class holds less than a twentieth of all updates is used.
const CLASSES = [
  [0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 6, 9], [0, 1, 3, 6, 11, 16], [0, 1, 6, 11, 21, 36], [0, 1, 11, 26, 51, 101],
  [0, 1, 26, 76, 151, 301], [0, 1, 101, 301, 601, 1001], [0, 1, 501, 1501, 3001, 6001], [0, 1, 5001, 15001, 30001, 60001],
];

export function rowTime(kind, values) {
  return kind === "task" ? values.started : kind === "measurement" ? values.time : values.arrived;
}

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

// Versions over time in slots of one width; when there are too many of them, two become one.
export class Slots {
  constructor(width) {
    this.width = width;
    this.first = null; // the number of the first slot
    this.ends = []; // the newest version at the end of each
    this.before = 0; // the version before the first
  }

  add(time, version) {
    let slot = Math.floor(time / this.width);
    if (this.first === null) {
      this.first = slot;
      this.before = version;
    }
    if (slot < this.first) return;
    while (slot - this.first >= SLOTS) {
      this.halve();
      slot = Math.floor(time / this.width);
    }
    const ends = this.ends;
    const last = ends.length ? ends[ends.length - 1] : this.before;
    while (ends.length <= slot - this.first) ends.push(last);
    for (let at = slot - this.first; at < ends.length; at++) ends[at] = Math.max(ends[at], version);
  }

  halve() {
    const merged = [];
    const odd = ((this.first % 2) + 2) % 2;
    for (let at = 0; at < this.ends.length; at++) {
      const place = Math.floor((at + odd) / 2);
      merged[place] = this.ends[at];
    }
    this.first = Math.floor(this.first / 2);
    this.ends = merged;
    this.width *= 2;
  }

  // Points {x, y}: time in the middle of a slot, versions per `unit` of time. The slot that is not over is left out.
  points(now, unit) {
    const found = [];
    let last = this.before;
    for (let at = 0; at < this.ends.length; at++) {
      const end = (this.first + at + 1) * this.width;
      if (end > now && at) break;
      found.push({ x: end - this.width / 2, y: ((this.ends[at] - last) / this.width) * unit });
      last = this.ends[at];
    }
    return found;
  }
}

export class State {
  constructor(slot = 1) {
    this.clear(slot);
  }

  clear(slot = this.slot) {
    this.slot = slot;
    this.rows = 0;
    this.measured = [];
    this.version = 0;
    this.told = 0; // updates, as the last measurement has it ...
    this.since = 0; // ... and those that arrived after it
    this.last = 0; // the newest time seen
    this.bars = new Map(); // client -> its tasks, oldest first
    this.queue = []; // all of them, oldest first
    this.head = 0;
    this.open = new Map(); // by client: one task at a time, as long as it is out
    this.done = new Set(); // numbers of tasks that were answered: after a restart rows may come again
    this.doneQueue = [];
    this.counts = new Map(); // staleness -> updates
    this.counted = 0;
    this.recent = []; // staleness of the last updates
    this.refusals = new Map();
    this.shares = null;
    this.slots = new Slots(slot);
    this.classes = CLASSES[0];
    this.grew = true; // a client is new
  }

  add(kind, values) {
    this.rows++;
    if (kind === "task") this.task(values);
    else if (kind === "receipt") this.receipt(values);
    else if (kind === "refusal") this.refusal(values);
    else if (kind === "ended") this.ended(values);
    else if (kind === "measurement") this.measurement(values);
    else if (kind === "shares") this.shares = values;
    else if (kind === "reset") this.clear();
    const time = number(rowTime(kind, values));
    if (time !== null && time > this.last) this.last = time;
  }

  task(values) {
    if (this.done.has(values.number) || this.open.get(values.client)?.number === values.number) return;
    const old = this.open.get(values.client);
    if (old) this.close(old, values.started, "lost"); // its end was not told
    const bar = { client: values.client, number: values.number, base: values.version, start: values.started, end: null, stale: 0, how: "out" };
    this.keep(bar);
    this.open.set(bar.client, bar);
    this.step(values.started, values.version);
  }

  receipt(values) {
    if (this.done.has(values.number)) return;
    this.remember(values.number);
    this.finish(values, "done");
    this.counted++;
    if (!this.measured.length || values.arrived > this.measured[this.measured.length - 1].time) this.since++;
    this.counts.set(values.staleness, (this.counts.get(values.staleness) ?? 0) + 1);
    this.recent.push(values.staleness);
    if (this.recent.length > 200) this.recent.shift();
    this.step(values.arrived, values.version);
  }

  refusal(values) {
    const why = String(values.refused);
    this.refusals.set(why, (this.refusals.get(why) ?? 0) + 1);
    const bar = this.open.get(values.client);
    if (bar?.number === values.number) this.close(bar, values.arrived, why);
  }

  ended(values) {
    const bar = this.open.get(values.client);
    if (bar?.number === values.number) this.close(bar, Math.max(this.last, bar.start), String(values.why));
  }

  finish(values, how) {
    let bar = this.open.get(values.client);
    if (bar?.number !== values.number) {
      bar = { client: values.client, number: values.number, base: values.base, start: values.started, end: null, stale: 0, how };
      this.keep(bar);
    }
    bar.stale = values.staleness;
    bar.weight = values.weight;
    this.close(bar, values.arrived, how);
  }

  close(bar, end, how) {
    bar.end = end;
    bar.how = how;
    if (this.open.get(bar.client) === bar) this.open.delete(bar.client);
  }

  keep(bar) {
    let list = this.bars.get(bar.client);
    if (!list) {
      this.bars.set(bar.client, (list = []));
      this.grew = true;
    }
    list.push(bar);
    this.queue.push(bar);
    if (this.queue.length - this.head > BARS) {
      const oldest = this.queue[this.head];
      this.queue[this.head++] = undefined;
      this.bars.get(oldest.client).shift();
      if (this.head > BARS) {
        this.queue = this.queue.slice(this.head);
        this.head = 0;
      }
    }
  }

  remember(task) {
    this.done.add(task);
    this.doneQueue.push(task);
    if (this.doneQueue.length > 2 * BARS) {
      for (const old of this.doneQueue.splice(0, BARS)) this.done.delete(old);
    }
  }

  measurement(values) {
    const last = this.measured[this.measured.length - 1];
    if (last && values.time <= last.time) return; // told again after a restart
    this.measured.push(values);
    if (this.measured.length > MEASURED) this.measured.shift();
    if (number(values.updates) !== null) [this.told, this.since] = [values.updates, 0];
    this.step(values.time, values.version);
  }

  // Receipts may be missing (before the page was opened), or come after a measurement that counts them.
  get updates() {
    return Math.max(this.counted, this.told + this.since);
  }

  step(time, version) {
    if (number(version) === null) return;
    this.slots.add(time, Math.max(version, this.version));
    this.version = Math.max(this.version, version);
  }

  // The points of a measured quantity.
  series(key) {
    const found = [];
    for (const row of this.measured) if (number(row[key]) !== null) found.push({ x: row.time, y: row[key], version: row.version });
    return found;
  }

  classify() {
    for (const classes of CLASSES) {
      let beyond = 0;
      for (const [stale, count] of this.counts) if (stale >= classes[5]) beyond += count;
      this.classes = classes;
      if (beyond * 20 <= this.counted) break;
    }
  }

  level(stale) {
    const classes = this.classes;
    let level = 5;
    while (level > 0 && stale < classes[level]) level--;
    return level;
  }

  meanStaleness() {
    return this.recent.length ? this.recent.reduce((a, b) => a + b, 0) / this.recent.length : null;
  }
}
