/** Texts for the feed's identifiers: kinds of work, waiting reasons, finish reasons. */

import { outputAt, segmentAt } from "./tracks.js";

/** What a request does during a segment. */
export const KIND_WORDS = {
  waiting: "waiting",
  prefill: "prefill chunk",
  decode: "decode",
  drafts: "decode, drafts accepted",
  recompute: "recompute",
  preempted: "preempted",
  recovering: "engine recovering",
};

/** Letters drawn on segments that are wide enough, so that they can be told apart without colours. */
export const KIND_LETTERS = { prefill: "P", decode: "D", drafts: "+", recompute: "R", preempted: "X", recovering: "E" };

const REASON_WORDS = {
  max_num_seqs: "the batch is full (max_num_seqs)",
  kv_blocks: "no free KV blocks",
  state_slots: "no free slot for a recurrent state",
  token_budget: "the step's token budget is spent",
  prefix: "another request is computing their shared prefix",
  long_prefill: "another long prompt is being prefilled",
  grammar: "its grammar is being compiled",
  engine: "the engine is starting or recovering",
};

const SHORT_REASONS = {
  max_num_seqs: "batch full",
  kv_blocks: "KV full",
  state_slots: "states full",
  token_budget: "token budget",
  prefix: "shared prefix",
  long_prefill: "long prefill",
  grammar: "grammar",
  engine: "engine",
};

export function reasonWords(reason) {
  return REASON_WORDS[reason] ?? (reason || "not scheduled yet");
}

export function shortReason(reason) {
  return SHORT_REASONS[reason] ?? (reason || "queued");
}

/** A duration in a suitable unit. */
export function durationText(ms) {
  if (ms < 10) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

/** A count with few digits: 950, 1.2k, 34k, 1.5M. */
export function countText(value) {
  if (value < 1000) return String(Math.round(value));
  if (value < 1e6) return `${(value / 1000).toFixed(value < 10_000 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(1)}M`;
}

/** Output tokens at `time`, such as "34/64", or only the first number if the maximum is unknown. */
export function progressText(track, time, between = "/") {
  const output = outputAt(track, time);
  return track.maxTokens === null ? String(output) : `${output}${between}${track.maxTokens}`;
}

/** The state of one request at a time, in words. */
export function stateWords(track, nowS) {
  if (track.ended && track.ended.time <= nowS) return `ended: ${track.ended.finishReason || "unknown"}`;
  const last = segmentAt(track, nowS);
  const kind = last ? last.kind : track.state;
  if (kind === "waiting")
    return `waiting ${durationText(Math.max(0, (nowS - last.start) * 1000))}: ${reasonWords(last.reason)}`;
  if (kind === "preempted") return `preempted, waiting: ${reasonWords(last.reason || "kv_blocks")}`;
  if (kind === "recovering") return "waiting for the engine to recover";
  return kind === "prefill" || kind === "recompute" ? KIND_WORDS[kind] : "decoding";
}
