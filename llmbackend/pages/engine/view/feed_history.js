/** The last minutes of the feed, per engine, in bounded memory; the page draws only this data. */

import { BlockMaps } from "./block_maps.js";
import { Buckets } from "./buckets.js";
import { StepRing } from "./step_ring.js";
import { Tracks } from "./tracks.js";

export const HISTORY_S = 300;
const MAX_INSTANCES = 32;
const MAX_MARKS = 200;

/** One engine: an instance of a version of a model. */
export class EngineHistory {
  constructor(instance) {
    this.key = instanceKey(instance);
    this.model = instance.model;
    this.version = instance.version;
    this.instance = instance.instance;
    this.limits = null;
    this.state = "starting";
    this.pid = null;
    this.numRestarts = 0;
    this.tracks = new Tracks({ historyS: HISTORY_S });
    this.steps = new StepRing();
    this.buckets = new Buckets(HISTORY_S);
    this.blockMaps = new BlockMaps();
    this.recoveries = []; // {start, end (Infinity while it lasts), reason, recoveryMs}
    this.unwatched = []; // {start, end}: when the feed was not read
    this.lastTime = 0; // how far the feed has progressed
    this.lastActivity = 0; // time of the latest activity
    this.firstTime = 0; // start of the history
  }

  /** unreadSince: when the feed was last read, if there was a gap before this snapshot; else null */
  snapshot(instance, time, unreadSince) {
    if (this.firstTime === 0) this.firstTime = time;
    else if (unreadSince !== null && time - unreadSince > 1)
      pushBounded(this.unwatched, { start: unreadSince, end: time });
    Object.assign(this, {
      state: instance.state,
      pid: instance.pid,
      numRestarts: instance.num_restarts,
      limits: instance.limits,
    });
    const listed = new Set(instance.requests.map((request) => request.request));
    for (const track of [...this.tracks.live()])
      if (!listed.has(track.request)) this.tracks.end({ request: track.request, time });
    for (const request of instance.requests) this.tracks.add(request, time);
    if (instance.state === "recovering") this.#recoveryBegins(time, "");
    else this.#recoveryEnds(time, null);
    this.lastTime = time;
  }

  requests({ received, ended }) {
    for (const request of received ?? []) {
      this.tracks.add(request, Math.max(request.received, this.lastTime));
      this.#happened(request.received);
    }
    for (const request of ended ?? []) {
      this.tracks.end(request);
      this.#happened(request.time);
    }
  }

  addSteps({ steps }) {
    for (const step of steps) {
      const end = step.time + step.duration_ms / 1000;
      this.steps.push(step);
      this.buckets.push(step);
      for (const row of step.rows) this.tracks.row(row, step.time, end);
      for (const request of step.preempted ?? []) this.tracks.preempted(request, end);
      for (const [request, reason] of step.waiting ?? []) this.tracks.waiting(request, end, reason);
      this.#happened(end);
    }
  }

  engine(event) {
    Object.assign(this, { state: event.state, pid: event.pid, numRestarts: event.num_restarts });
    if (event.state === "recovering" || event.state === "failed") this.#recoveryBegins(event.time, event.reason);
    else this.#recoveryEnds(event.time, event.recovery_ms);
    this.#happened(event.time);
  }

  forget(now) {
    const horizon = now - HISTORY_S;
    this.tracks.forget(now);
    this.blockMaps.forget(horizon);
    for (const name of ["recoveries", "unwatched"]) this[name] = this[name].filter((mark) => mark.end > horizon);
    this.firstTime = Math.max(this.firstTime, horizon);
  }

  #happened(time) {
    this.lastTime = Math.max(this.lastTime, time);
    this.lastActivity = this.lastTime;
  }

  #recoveryBegins(time, reason) {
    const last = this.recoveries.at(-1);
    if (last?.end === Infinity) return void (last.reason ||= reason);
    pushBounded(this.recoveries, { start: time, end: Infinity, reason, recoveryMs: null });
    this.tracks.recovering(time);
  }

  #recoveryEnds(time, recoveryMs) {
    const last = this.recoveries.at(-1);
    if (last?.end !== Infinity) return;
    last.end = Math.max(last.start, time);
    last.recoveryMs = recoveryMs ?? (last.end - last.start) * 1000;
    this.tracks.recovered(last.end);
  }
}

/** All engines, from the events of the feed. */
export class FeedHistory {
  constructor() {
    this.engines = new Map();
    this.scope = "all";
    this.allowsKill = false;
    this.droppedEvents = 0;
    this.#unreadSince = null;
    this.models = new Map(); // name/version -> {state, reason, stage, done, total}
  }

  #unreadSince;

  /** The feed is not read until the next snapshot. */
  feedEnds(time) {
    this.#unreadSince ??= time;
  }

  /** Applies one event of the feed. Returns the event's time, or null. */
  apply(event, data) {
    if (event === "snapshot") this.#snapshot(data);
    else if (event === "dropped") this.droppedEvents += data.events;
    else if (event === "model" || event === "load") this.#model(data);
    else this.#ofEngine(event, data);
    return data.time ?? lastTimeOf(data);
  }

  #snapshot(data) {
    Object.assign(this, { scope: data.scope, allowsKill: data.allows_kill });
    this.models.clear(); // events of models may have been missed
    const listed = new Set(data.instances.map(instanceKey));
    for (const key of this.engines.keys()) if (!listed.has(key)) this.engines.delete(key);
    for (const instance of data.instances) this.#engineOf(instance)?.snapshot(instance, data.time, this.#unreadSince);
    this.#unreadSince = null;
  }

  #ofEngine(event, data) {
    const engine = this.#engineOf(data);
    if (!engine) return;
    if (event === "requests") this.#requests(engine, data);
    else if (event === "steps") this.#steps(engine, data);
    else if (event === "engine") engine.engine(data);
    else if (event === "blocks") engine.blockMaps.push(data);
  }

  #requests(engine, data) {
    for (const { request } of data.received ?? []) this.#leavesOthers(engine, request);
    engine.requests(data);
  }

  /** Handles rows of a request from another instance than announced: events may be out of order. */
  #steps(engine, data) {
    if (this.engines.size > 1) {
      for (const { rows } of data.steps) for (const [request] of rows) this.#goesOnIn(engine, request);
    }
    engine.addSteps(data);
  }

  #goesOnIn(engine, request) {
    if (engine.tracks.isLive(request)) return;
    const track = this.#leavesOthers(engine, request);
    if (track) engine.tracks.add(toldAgain(track), track.received);
  }

  /** Ends a request on all instances except the one that has it now. Returns its former track, if there is one. */
  #leavesOthers(engine, request) {
    for (const other of this.engines.values()) {
      if (other === engine || !other.tracks.isLive(request)) continue;
      const track = other.tracks.byRequest.get(request);
      other.tracks.moved(request, other.lastTime);
      return track;
    }
    return null;
  }

  #model(data) {
    const key = `${data.model}/${data.version}`;
    this.models.set(key, { ...this.models.get(key), ...data });
  }

  #engineOf(instance) {
    const key = instanceKey(instance);
    if (!this.engines.has(key) && this.engines.size < MAX_INSTANCES) this.engines.set(key, new EngineHistory(instance));
    return this.engines.get(key) ?? null;
  }

  forget(now) {
    for (const engine of this.engines.values()) {
      engine.forget(now);
      if (engine.state === "stopped" && engine.lastActivity < now - HISTORY_S) this.engines.delete(engine.key);
    }
  }
}

export function instanceKey({ model, version, instance }) {
  return `${model}/${version}/${instance}`;
}

/** A track as a request of the feed. */
function toldAgain({ request, id, key, received, promptTokens, maxTokens, outputTokens }) {
  const tokens = { prompt_tokens: promptTokens, max_tokens: maxTokens, output_tokens: outputTokens };
  return { request, id, key, received, ...tokens, state: "running", reason: "" };
}

function lastTimeOf({ steps, received, ended }) {
  const step = steps?.at(-1);
  if (step) return step.time + step.duration_ms / 1000;
  return ended?.at(-1)?.time ?? received?.at(-1)?.received ?? null;
}

function pushBounded(list, mark) {
  list.push(mark);
  if (list.length > MAX_MARKS) list.shift();
}
