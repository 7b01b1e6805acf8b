/**
 * The requests of one engine as tracks: activities over time, and a lane; at most `maxTracks`, ended ones are removed first.
 * A segment is {kind (as in words.js), start, end (unix seconds; Infinity while it lasts), steps, tokens, drafts (accepted), reason to
 * wait, output (tokens of the request at its end)}.
 */

/** Seconds for which a lane stays empty after a request, so that its finish reason can be read. */
const LANE_GAP_S = 0.4;
/** Pauses between two steps of a request that are longer than this are shown as a gap. */
const MAX_MERGED_GAP_S = 0.05;
/** A run of accepted drafts ends after this time without one. */
const DRAFTS_STRETCH_S = 0.1;

/** Finish reason of a request that moved to another instance; it may come back. */
const MOVED = "moved";

const OPEN_KINDS = new Set(["waiting", "preempted", "recovering"]);

export class Tracks {
  #laneFreeAt = [];

  /** historyS: how long an ended track is retained */
  constructor({ historyS = 300, maxTracks = 20_000 } = {}) {
    this.historyS = historyS;
    this.maxTracks = maxTracks;
    this.byRequest = new Map();
    this.numLive = 0;
  }

  /** Adds or updates a request of the feed. */
  add(request, time) {
    const known = this.byRequest.get(request.request);
    if (known && !known.ended) return this.#putBack(known, request, time);
    if (known && known.ended.finishReason !== MOVED) return;
    const track = {
      request: request.request,
      id: request.id ?? "",
      key: request.key ?? "",
      received: request.received,
      promptTokens: request.prompt_tokens,
      maxTokens: request.max_tokens,
      outputTokens: request.output_tokens ?? 0,
      acceptedDrafts: 0,
      numPreemptions: 0,
      state: request.state,
      lane: this.#takeLane(request.received),
      segments: [],
      ended: null,
    };
    if (request.state === "waiting") open(track, "waiting", Math.min(request.received, time), request.reason);
    this.byRequest.set(track.request, track);
    this.numLive++;
    this.#bound();
  }

  /** Updates a known request; it is waiting again if its engine returned it. */
  #putBack(track, { state, reason, output_tokens: outputTokens }, time) {
    track.outputTokens = Math.max(track.outputTokens, outputTokens ?? 0);
    if (state === "waiting" && track.segments.at(-1)?.end !== Infinity) open(track, "waiting", time, reason);
  }

  /** One row of a step, as in the feed. A request with several choices has several rows in a step. */
  row([request, kind, tokens, drafts, outputTokens], start, end) {
    const track = this.byRequest.get(request);
    if (!track || track.ended) return;
    track.state = "running";
    track.outputTokens += outputTokens;
    track.acceptedDrafts += drafts;
    this.#rowSegment(track, kind, tokens, drafts, start, end);
    track.segments.at(-1).output = track.outputTokens;
  }

  #rowSegment(track, kind, tokens, drafts, start, end) {
    if (addToStep(track.segments.at(-1), tokens, drafts, end)) return;
    if (kind !== "decode") return void append(track, kind, start, end, tokens, 0);
    const last = track.segments.at(-1);
    const inStretch = last?.kind === "drafts" && start - (last.lastDraft ?? last.start) < DRAFTS_STRETCH_S;
    const shown = drafts > 0 || inStretch ? "drafts" : "decode";
    if (!extend(last, shown, start, end, tokens, drafts)) append(track, shown, start, end, tokens, drafts);
  }

  preempted(request, time) {
    const track = this.byRequest.get(request);
    if (!track || track.ended) return;
    track.numPreemptions++;
    open(track, "preempted", time, "kv_blocks");
  }

  waiting(request, time, reason) {
    const track = this.byRequest.get(request);
    if (!track || track.ended) return;
    const last = track.segments.at(-1);
    if (last?.end !== Infinity) return open(track, "waiting", time, reason);
    if (last.kind === "waiting" && last.reason !== reason) open(track, "waiting", time, reason);
    else last.reason = reason;
  }

  /** The engine died: no request continues until it is back. */
  recovering(time) {
    for (const track of this.live()) open(track, "recovering", time, "engine");
  }

  /** The engine is back: requests that it has not resumed yet are waiting. */
  recovered(time) {
    for (const track of this.live()) {
      const last = track.segments.at(-1);
      if (last?.kind === "recovering" && last.end === Infinity) open(track, "waiting", time, "");
    }
  }

  /** ended: as in the feed, or {request, time} if the end was not seen */
  end(ended) {
    const track = this.byRequest.get(ended.request);
    if (!track || track.ended) return;
    close(track, ended.time);
    track.ended = {
      time: ended.time,
      finishReason: ended.finish_reason ?? "",
      cachedTokens: ended.cached_tokens ?? 0,
    };
    track.outputTokens = ended.output_tokens ?? track.outputTokens;
    track.numPreemptions = ended.num_preemptions ?? track.numPreemptions;
    this.#laneFreeAt[track.lane] = ended.time + LANE_GAP_S;
    this.numLive--;
  }

  /** The request moved to another instance: it ends here, or is removed if nothing of it was computed here. */
  moved(request, time) {
    const track = this.byRequest.get(request);
    const wasHere = track.segments.some(({ steps }) => steps > 0);
    this.end({ request, time: Math.max(track.received, time), finish_reason: MOVED });
    if (wasHere) return;
    this.byRequest.delete(request);
    this.#laneFreeAt[track.lane] = track.received;
  }

  isLive(request) {
    return this.byRequest.get(request)?.ended === null;
  }

  *live() {
    for (const track of this.byRequest.values()) if (!track.ended) yield track;
  }

  /** The tracks with activity between `from` and `to`. */
  *between(from, to) {
    for (const track of this.byRequest.values()) {
      if (track.received < to && (!track.ended || track.ended.time > from)) yield track;
    }
  }

  /** Removes requests and segments that ended before the start of the history. */
  forget(now) {
    const horizon = now - this.historyS;
    for (const track of this.byRequest.values()) {
      if (track.ended && track.ended.time < horizon) this.byRequest.delete(track.request);
      else if (track.segments.length > 1 && track.segments[0].end < horizon) dropBefore(track, horizon);
    }
  }

  #bound() {
    if (this.byRequest.size <= this.maxTracks) return;
    for (const track of this.byRequest.values()) {
      if (track.ended) return void this.byRequest.delete(track.request);
    }
    const oldest = this.byRequest.values().next().value;
    this.end({ request: oldest.request, time: oldest.segments.at(-1)?.start ?? oldest.received });
    this.byRequest.delete(oldest.request);
  }

  #takeLane(time) {
    let lane = this.#laneFreeAt.findIndex((freeAt) => freeAt <= time);
    if (lane < 0) lane = this.#laneFreeAt.length;
    this.#laneFreeAt[lane] = Infinity;
    return lane;
  }
}

/** The request's activity at `time`, else the last one before it; undefined if unknown. */
export function segmentAt(track, time) {
  return track.segments.findLast((segment) => segment.start <= time);
}

/** How many output tokens a request has at `time`; interpolated within a run of steps. */
export function outputAt(track, time) {
  const at = track.segments.findLastIndex((segment) => segment.start <= time);
  const segment = track.segments[at];
  if (at === track.segments.length - 1 && (track.ended?.time ?? Infinity) <= time) return track.outputTokens;
  if (!segment || segment.end <= time || segment.steps === 0) return segment?.output ?? 0;
  const before = track.segments[at - 1]?.output ?? 0;
  const part = (time - segment.start) / (segment.end - segment.start);
  return Math.floor(before + part * (segment.output - before));
}

function close(track, time) {
  const last = track.segments.at(-1);
  if (last?.end === Infinity) last.end = Math.max(last.start, time);
}

function open(track, kind, time, reason) {
  const last = track.segments.at(-1);
  if (last?.kind === kind && last.end === Infinity && last.reason === reason) return;
  close(track, time);
  track.state = "waiting";
  track.segments.push({
    kind,
    start: Math.max(time, last?.end ?? time),
    end: Infinity,
    steps: 0,
    tokens: 0,
    drafts: 0,
    reason,
    output: track.outputTokens,
  });
}

function append(track, kind, start, end, tokens, drafts) {
  const segment = { kind, start, end, steps: 1, tokens, drafts, reason: "", output: track.outputTokens };
  if (drafts > 0) segment.lastDraft = end;
  const last = track.segments.at(-1);
  // The last steps of an engine may be reported after its death; they precede the wait for the next engine.
  if (last?.kind === "recovering" && last.end === Infinity && start < last.start) {
    segment.end = Math.min(end, last.start);
    track.segments.splice(-1, 0, segment);
    return;
  }
  close(track, start);
  track.segments.push(segment);
}

/** Another row of the same request in the step that created or extended its last segment. */
function addToStep(last, tokens, drafts, end) {
  if (!last?.steps || last.end !== end) return false;
  last.tokens += tokens;
  last.drafts += drafts;
  return true;
}

function extend(last, kind, start, end, tokens, drafts) {
  if (last?.kind !== kind || OPEN_KINDS.has(kind) || start - last.end > MAX_MERGED_GAP_S) return false;
  last.end = end;
  last.steps++;
  last.tokens += tokens;
  last.drafts += drafts;
  if (drafts > 0) last.lastDraft = end;
  return true;
}

function dropBefore(track, horizon) {
  const kept = track.segments.findIndex((segment) => segment.end >= horizon);
  track.segments.splice(0, kept < 0 ? track.segments.length - 1 : kept);
}
