/** The page's text: figures, states, the table of requests, details at the pointer. */

import { countBlocks } from "./block_maps.js";
import { BUCKET_S } from "./buckets.js";
import { clockText } from "./draw_lanes.js";
import { KIND_WORDS, durationText, progressText, reasonWords, stateWords } from "./words.js";

const RATE_S = 2;
const MAX_TABLE_ROWS = 200;
const NUM_ENDED_ROWS = 20;

/** view: a LiveView. connection: {state, text, wasLost}. shown: the tracks in the window */
export function statusOf(view, connection, shown) {
  const { history, engine, window } = view;
  const common = {
    connection,
    scope: history.scope,
    allowsKill: history.allowsKill,
    droppedEvents: history.droppedEvents,
    engines: [...history.engines.values()].map(({ key, model, version, instance, state }) => ({
      key,
      model,
      version,
      instance,
      state,
    })),
    models: [...history.models.values()].filter(
      ({ state, reason }) => state === "LOADING" || (state === "UNAVAILABLE" && reason !== "unloaded"),
    ),
    paused: window.paused,
    widthS: window.widthS,
  };
  return engine ? { ...common, ...ofEngine(view, engine, shown) } : { ...common, engine: null };
}

function ofEngine(view, engine, shown) {
  const { live, window } = view;
  const end = window.end(live);
  const last = Math.floor(end / BUCKET_S) * BUCKET_S; // the end of the last complete interval
  const totals = engine.buckets.total(last - RATE_S + BUCKET_S / 2, last - BUCKET_S / 2);
  const recovery = engine.recoveries.at(-1) ?? null;
  return {
    engine: {
      key: engine.key,
      model: engine.model,
      version: engine.version,
      instance: engine.instance,
      state: engine.state,
      pid: engine.pid,
      numRestarts: engine.numRestarts,
      limits: engine.limits,
    },
    time: clockText(end, 0.1),
    behindS: Math.max(0, live - end),
    historyS: Math.max(0, live - engine.firstTime),
    numLive: engine.tracks.numLive,
    numShown: shown.length,
    numHidden: view.numHidden,
    figures: figures(engine, window, totals, recovery),
    recovery: recovery && {
      since: recovery.start,
      lasts: recovery.end === Infinity,
      reason: recovery.reason,
      recoveryMs: recovery.recoveryMs,
    },
    blocks: view.blockMap && {
      ...countBlocks(view.blockMap, view.selected),
      total: view.blockMap.numBlocks,
      truncated: view.blockMap.truncated,
    },
    selected: details(engine.tracks.byRequest.get(view.selected), end),
    table: view.wantsTable ? tableRows(engine, end) : [],
  };
}

function figures(engine, window, totals, recovery) {
  const stepMs = totals.steps ? (totals.scheduleMs + totals.runMs + totals.commitMs) / totals.steps : null;
  const blocks = totals.blocksUsed + totals.blocksCached + totals.blocksFree;
  const { running, waiting } = window.paused ? countAt(engine.buckets, window.pausedAt) : countLive(engine.tracks);
  return [
    { name: "running", value: String(running) },
    { name: "waiting", value: String(waiting) },
    { name: "tokens/s", value: Math.round(totals.outputTokens / RATE_S).toLocaleString("en") },
    { name: "ms per step", value: stepMs === null ? "–" : stepMs.toFixed(stepMs < 10 ? 2 : 1) },
    { name: "rows per step", value: totals.steps ? (totals.rows / totals.steps).toFixed(1) : "–" },
    { name: "KV used", value: blocks ? `${Math.round((100 * totals.blocksUsed) / blocks)} %` : "–" },
    { name: "restarts", value: String(engine.numRestarts ?? 0), title: recovery?.reason ?? "" },
  ];
}

function countAt(buckets, time) {
  const { maxRunning, maxWaiting } = buckets.total(time - 2 * BUCKET_S, time);
  return { running: maxRunning, waiting: maxWaiting };
}

function countLive(tracks) {
  let running = 0;
  for (const track of tracks.live()) if (track.state === "running") running++;
  return { running, waiting: tracks.numLive - running };
}

/** The selected request, as [name, value] pairs; null without one. */
function details(track, end) {
  if (!track) return null;
  return {
    request: track.request,
    live: !track.ended,
    rows: [
      ["Request", `#${track.request}`],
      ["Client's id", track.id || "none"],
      ...(track.key ? [["API key", track.key]] : []),
      ["State", stateWords(track, end)],
      ["Received", clockText(track.received, 0.1)],
      ["Lasted", durationText((Math.min(track.ended?.time ?? end, end) - track.received) * 1000)],
      [
        "Prompt",
        `${track.promptTokens ?? "?"} tokens${track.ended ? `, ${track.ended.cachedTokens} from the cache` : ""}`,
      ],
      ["Generated", `${progressText(track, end, " of at most ")} tokens`],
      ["Accepted drafts", String(track.acceptedDrafts)],
      ["Preemptions", String(track.numPreemptions)],
    ],
  };
}

/** The table's columns, and its rows in order: requests in flight, then those that ended last. */
export const TABLE_COLUMNS = ["Request", "Client's id", "State", "Prompt tokens", "Generated", "Preemptions"];

function tableRows(engine, end) {
  const [live, ended] = [[], []];
  for (const track of engine.tracks.byRequest.values()) {
    if (track.received <= end) (track.ended && track.ended.time <= end ? ended : live).push(track);
  }
  const rows = [...live.slice(0, MAX_TABLE_ROWS), ...ended.slice(-NUM_ENDED_ROWS).reverse()];
  return rows.map((track) => [
    track.request,
    track.id,
    stateWords(track, end),
    track.promptTokens,
    progressText(track, end, " of "),
    track.numPreemptions,
  ]);
}

/** Details at the pointer in the lanes, as lines. found: of LiveView.atLanes */
export function laneTip(engine, { track, segment, time }) {
  const lines = [`#${track.request}${track.id ? ` ${track.id}` : ""}`];
  const row = engine.steps.rowAt(track.request, time);
  if (segment && segment.steps === 0) {
    const lasted = durationText((Math.min(segment.end, time) - segment.start) * 1000);
    lines.push(`${KIND_WORDS[segment.kind]} for ${lasted}: ${reasonWords(segment.reason)}`);
  } else if (segment) {
    const drafts = segment.drafts ? `, ${segment.drafts} drafts accepted` : "";
    lines.push(`${KIND_WORDS[segment.kind]}: ${segment.tokens} tokens in ${segment.steps} steps${drafts}`);
  }
  if (row) {
    const drafts = row.drafts ? `, ${row.drafts} drafts accepted` : "";
    lines.push(`step ${row.step}: ${row.tokens} tokens${drafts}; ${durationText(row.durationMs)}, ${row.rows} rows`);
  }
  lines.push(`prompt ${track.promptTokens ?? "?"}, generated ${progressText(track, time, " of ")}`);
  if (track.ended && track.ended.time <= time) lines.push(`ended: ${track.ended.finishReason || "unknown"}`);
  return lines;
}

/** Lines about the block under the pointer. found: of LiveView.atBlocks */
export function blockTip({ block, state, request, references, count, first }) {
  if (!state) return [`block ${block}`, "not in the map"];
  const lines = [`block ${block}: ${state}`, `one of ${count} alike from ${first} on`];
  if (request !== null && request !== undefined) lines.push(`request #${request}`);
  if (references > 0) lines.push(references > 1 ? `shared: ${references} references` : "1 reference");
  return lines;
}
