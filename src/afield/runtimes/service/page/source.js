// Where rows come from: the token, requests, the stream of events, and the player of a finished run.

import { rowTime } from "./state.js";

const KEY = "afield-token";
const SILENCE = 45000; // milliseconds without a byte after which a connection counts as dead
const PAGE = 10000; // rows asked for at a time

export class Denied extends Error {}

// The token: of the address (which is then cleaned of it), or of this tab.
export function foundToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem(KEY);
}

export function keepToken(token) {
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...options.headers };
  const reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  if (reply.ok) return reply;
  const told = await reply.json().catch(() => ({}));
  const text = typeof told.message === "string" ? told.message : `the server answered ${reply.status}`;
  if (reply.status === 401 || reply.status === 403) throw new Denied(text);
  const error = new Error(text);
  error.after = Number(reply.headers.get("Retry-After")) || 0;
  throw error;
}

export async function get(path) {
  return (await ask(path)).json();
}

// Server-sent events by fetch, since EventSource cannot send a token. Goes on after the last row seen, for ever.
export class Stream {
  constructor(after, take, told) {
    this.after = after;
    this.take = take; // (kind, values)
    this.told = told; // (state): "live", "away", or a Denied
    this.ended = false;
    this.pause = 500;
    addEventListener("online", () => this.wake?.());
    document.addEventListener("visibilitychange", () => document.hidden || this.wake?.());
  }

  async run() {
    while (!this.ended) {
      try {
        await this.read();
      } catch (error) {
        if (error instanceof Denied) return this.told(error);
        this.pause = Math.max(this.pause, 1000 * (error.after ?? 0));
      }
      this.told("away");
      await this.rest();
    }
  }

  async rest() {
    await new Promise((go) => {
      this.wake = go;
      setTimeout(go, this.pause * (0.75 + Math.random() / 2));
    });
    this.wake = null;
    this.pause = Math.min(10000, this.pause * 2);
  }

  async read() {
    const abort = new AbortController();
    let watchdog = setTimeout(() => abort.abort(), SILENCE);
    try {
      const reply = await ask("/v1/events", { headers: { "Last-Event-ID": String(this.after) }, signal: abort.signal });
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENCE);
        this.pause = 500;
        this.told("live");
        const parts = (text + value).split("\n\n");
        text = parts.pop();
        for (const part of parts) this.event(part);
      }
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  event(text) {
    let kind = "";
    let data = "";
    let id = null;
    for (const line of text.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
      else if (line.startsWith("id: ")) id = Number(line.slice(4));
    }
    if (!kind || !data) return;
    this.take(kind, JSON.parse(data));
    if (id !== null) this.after = id;
  }
}

// Plays the rows of a run by a clock of its own; time goes from 0 to `end`.
export class Player {
  constructor(state, end, failed) {
    this.state = state;
    this.end = end;
    this.failed = failed;
    this.speed = end / 60;
    this.playing = false;
    this.turn = 0; // a newer seek ends an older one
    this.seeking = false;
    this.broken = false; // the server did not answer
    this.rewind();
  }

  rewind() {
    this.time = 0;
    this.after = 0;
    this.all = false; // the last row was fetched
    this.queue = [];
    this.at = 0;
    this.fetching = null;
    this.state.clear();
  }

  fill() {
    if (this.all || this.fetching || this.broken) return this.fetching;
    const turn = this.turn;
    const asked = get(`/v1/history?first=1&limit=${PAGE}&after=${this.after}`).then(
      ({ rows, last }) => {
        if (turn !== this.turn) return;
        this.queue = this.queue.slice(this.at).concat(rows);
        this.at = 0;
        if (rows.length) this.after = rows[rows.length - 1].id;
        this.all = this.after >= last || !rows.length;
        this.fetching = null;
      },
      (error) => {
        this.fetching = null;
        this.playing = false;
        this.broken = true;
        this.failed(error);
      },
    );
    this.fetching = asked;
    return asked;
  }

  // Take the rows up to a time, as far as they are here; whether all were.
  take(time) {
    while (this.at < this.queue.length) {
      const row = this.queue[this.at];
      const when = rowTime(row.kind, row.values);
      if (when > time) return true; // shares have no time of their own: they go with the row before
      this.state.add(row.kind, row.values);
      this.at++;
    }
    return this.all;
  }

  tick(seconds) {
    if (this.seeking) return;
    if (this.queue.length - this.at < PAGE / 2) this.fill();
    if (!this.playing) return;
    const wanted = Math.min(this.end, this.time + seconds * this.speed);
    if (this.take(wanted)) this.time = wanted;
    else this.time = Math.max(this.time, Math.min(wanted, this.state.last)); // rows are on their way
    if (this.all && this.time >= this.end) this.playing = false;
  }

  // Go to a time. Back is from the beginning: so all that is shown is what the rows up to then make of it.
  async seek(time) {
    const turn = ++this.turn;
    if (time < this.time) this.rewind();
    this.time = time;
    this.fetching = null;
    this.seeking = true;
    while (turn === this.turn && !this.take(time)) {
      await this.fill();
      if (this.broken) break;
    }
    if (turn === this.turn) this.seeking = false;
  }
}
