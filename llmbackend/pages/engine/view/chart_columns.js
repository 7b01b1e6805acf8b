/** The columns of the charts: single steps if wide enough, else sums over intervals aligned to absolute time. */

import { BUCKET_S } from "./buckets.js";
import { showsSteps } from "./lane_layout.js";

const MIN_COLUMN_PX = 3;
/** Averaging time for tokens per second, since a single step does not give a rate. */
const RATE_S = 0.5;

/** Columns {start, end, schedule, run, commit (ms per step), prefill, decode (tokens per step)} */
export function stepColumns(engine, scale) {
  return showsSteps(engine.steps, scale) ? singleSteps(engine, scale) : sums(engine.buckets, scale, perStep);
}

/** Columns {start, end, prefillRate, outputRate, running, waiting, used, cached, free} */
export function loadColumns(engine, scale) {
  return sums(engine.buckets, scale, (total, start, end) => ({ ...load(total), ...rates(engine.buckets, start, end) }));
}

function singleSteps({ steps }, scale) {
  const columns = [];
  for (
    let index = steps.firstEndingAfter(scale.start);
    index < steps.end && steps.startOf(index) < scale.end;
    index++
  ) {
    const at = index % steps.maxSteps;
    const column = { start: steps.startOf(index), end: steps.endOf(index), prefill: 0, decode: 0 };
    Object.assign(column, { schedule: steps.scheduleMs[at], run: steps.runMs[at], commit: steps.commitMs[at] });
    steps.eachRow(index, (_, kind, tokens) => {
      column[kind === "decode" ? "decode" : "prefill"] += tokens;
    });
    columns.push(column);
  }
  return columns;
}

function sums(buckets, scale, describe) {
  const perColumn = Math.max(1, Math.ceil(MIN_COLUMN_PX / (BUCKET_S * scale.perSecond)));
  const span = perColumn * BUCKET_S;
  const columns = [];
  for (let number = Math.floor(scale.start / span); number * span < scale.end; number++) {
    const total = buckets.total(number * span + BUCKET_S / 2, (number + 1) * span - BUCKET_S / 2);
    if (total.steps > 0)
      columns.push({
        start: number * span,
        end: (number + 1) * span,
        ...describe(total, number * span, (number + 1) * span),
      });
  }
  return columns;
}

function perStep({ steps, scheduleMs, runMs, commitMs, prefillTokens, decodeTokens }) {
  return {
    schedule: scheduleMs / steps,
    run: runMs / steps,
    commit: commitMs / steps,
    prefill: prefillTokens / steps,
    decode: decodeTokens / steps,
  };
}

function load({ maxRunning, maxWaiting, blocksUsed, blocksCached, blocksFree }) {
  return { running: maxRunning, waiting: maxWaiting, used: blocksUsed, cached: blocksCached, free: blocksFree };
}

function rates(buckets, start, end) {
  const from = Math.min(start, end - RATE_S);
  const { prefillTokens, outputTokens } = buckets.total(from + BUCKET_S / 2, end - BUCKET_S / 2);
  return { prefillRate: prefillTokens / (end - from), outputRate: outputTokens / (end - from) };
}

/** The maximum of a chart; a single column much higher than the others is clipped. */
export function usualHighest(values) {
  if (values.length === 0) return 1;
  const sorted = [...values].sort((a, b) => a - b);
  return niceCeiling(Math.min(sorted.at(-1), 2.5 * sorted[Math.floor(0.95 * (sorted.length - 1))]));
}

/** The smallest of 1, 2, 5, 10, 20, 50, … that is at least the value. */
export function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999999) * power;
}
