/** What the view keeps of a feed: streams in any chunks, requests, steps, sums, blocks; always within bounds. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { BlockMaps, countBlocks, runOf } from "../../../llmbackend/pages/engine/view/block_maps.js";
import { Buckets } from "../../../llmbackend/pages/engine/view/buckets.js";
import { FeedHistory, HISTORY_S } from "../../../llmbackend/pages/engine/view/feed_history.js";
import { LiveClock } from "../../../llmbackend/pages/engine/view/live_clock.js";
import { SseParser } from "../../../llmbackend/pages/engine/view/sse.js";
import { statusOf } from "../../../llmbackend/pages/engine/view/status.js";
import { StepRing } from "../../../llmbackend/pages/engine/view/step_ring.js";
import { TimeWindow } from "../../../llmbackend/pages/engine/view/time_window.js";
import { Tracks, outputAt, segmentAt } from "../../../llmbackend/pages/engine/view/tracks.js";
import { INSTANCE, random, simulatedFeed, snapshot } from "./simulated_feed.mjs";

const START = 1_700_000_000;

function fed(options) {
  const history = new FeedHistory();
  const told = [];
  for (const [event, data] of simulatedFeed(options)) {
    history.apply(event, data);
    told.push([event, data]);
  }
  return { history, told, engine: history.engines.values().next().value };
}

function request(number, received, more = {}) {
  return {
    request: number,
    id: "",
    received,
    prompt_tokens: 8,
    max_tokens: 4,
    state: "waiting",
    reason: "",
    output_tokens: 0,
    ...more,
  };
}

test("a stream gives the same events, however it is cut", () => {
  const text =
    'event: steps\r\ndata: {"a":\r\ndata: 1}\r\nid: 1-2\r\n\r\n: comment\n\ndata:"ü"\n\nevent: empty\n\ndata: 3\r\r';
  const whole = new SseParser().push(`${text}\n`);
  assert.deepEqual(whole, [
    { event: "steps", data: { a: 1 }, id: "1-2" },
    { event: "message", data: "ü", id: "1-2" }, // an id holds until the next one
    { event: "message", data: 3, id: "1-2" },
  ]);
  const draw = random(5);
  for (let round = 0; round < 200; round++) {
    const parser = new SseParser();
    const events = [];
    for (let at = 0; at < text.length;) {
      const size = 1 + Math.floor(draw() * 9);
      events.push(...parser.push(text.slice(at, at + size)));
      at += size;
    }
    assert.deepEqual([...events, ...parser.push("\n")], whole);
  }
});

test("the ring of steps keeps the latest within both bounds", () => {
  const ring = new StepRing(8, 32);
  for (let step = 0; step < 100; step++) {
    const rows = Array.from({ length: step % 7 }, (_, row) => [row, "decode", 1, 0, 1]);
    ring.push({ step, time: START + step, duration_ms: 500, rows });
    assert.ok(ring.end - ring.first <= 8);
  }
  const kept = [];
  for (let index = ring.first; index < ring.end; index++) {
    let rows = 0;
    ring.eachRow(index, (number) => assert.equal(number, rows++));
    assert.equal(rows, ring.number[index % 8] % 7);
    kept.push(ring.number[index % 8]);
  }
  assert.equal(kept.at(-1), 99);
});

test("the row of a request at a time is that of the step then in progress", () => {
  const ring = new StepRing(16, 64);
  ring.push({
    step: 4,
    time: START,
    duration_ms: 100,
    rows: [
      [7, "prefill", 64, 0, 0],
      [8, "decode", 3, 2, 3],
    ],
  });
  ring.push({ step: 5, time: START + 0.2, duration_ms: 100, rows: [[8, "decode", 1, 0, 1]] });
  assert.deepEqual(ring.rowAt(8, START + 0.05), {
    step: 4,
    kind: "decode",
    tokens: 3,
    drafts: 2,
    rows: 2,
    durationMs: 100,
  });
  assert.equal(ring.rowAt(8, START + 0.15), null); // between the two
  assert.equal(ring.rowAt(7, START + 0.25), null); // not in that step
});

test("a request's life: waits with a reason, prefill chunks, decodes, is preempted, recomputes, ends", () => {
  const tracks = new Tracks();
  tracks.add(request(1, START), START);
  tracks.waiting(1, START + 0.1, "kv_blocks");
  tracks.row([1, "prefill", 5, 0, 0], START + 0.2, START + 0.21);
  tracks.row([1, "prefill", 3, 0, 0], START + 0.21, START + 0.22);
  tracks.row([1, "decode", 1, 0, 1], START + 0.22, START + 0.23);
  tracks.row([1, "decode", 1, 0, 1], START + 0.23, START + 0.24);
  tracks.preempted(1, START + 0.24);
  tracks.waiting(1, START + 0.25, "kv_blocks");
  tracks.row([1, "recompute", 10, 0, 0], START + 0.3, START + 0.31);
  tracks.row([1, "decode", 3, 2, 3], START + 0.31, START + 0.32);
  tracks.end({ request: 1, time: START + 0.32, finish_reason: "stop", output_tokens: 5, num_preemptions: 1 });
  const track = tracks.byRequest.get(1);
  const told = track.segments.map(({ kind, steps, tokens, drafts, reason }) => [kind, steps, tokens, drafts, reason]);
  assert.deepEqual(told, [
    ["waiting", 0, 0, 0, ""],
    ["waiting", 0, 0, 0, "kv_blocks"],
    ["prefill", 1, 5, 0, ""],
    ["prefill", 1, 3, 0, ""],
    ["decode", 2, 2, 0, ""],
    ["preempted", 0, 0, 0, "kv_blocks"],
    ["recompute", 1, 10, 0, ""],
    ["drafts", 1, 3, 2, ""],
  ]);
  assert.equal(track.ended.finishReason, "stop");
  const output = [0.21, 0.225, 0.24, 0.27, 0.305, 0.32].map((after) => outputAt(track, START + after));
  assert.deepEqual(output, [0, 0, 2, 2, 2, 5]);
  assert.equal(segmentAt(track, START + 0.26).kind, "preempted");
  assert.equal(segmentAt(track, START - 1), undefined);
  assert.equal(tracks.numLive, 0);
});

test("steps that are told after their engine's death come before the wait for the next one", () => {
  const tracks = new Tracks();
  tracks.add(request(1, START, { state: "running" }), START);
  tracks.recovering(START + 1);
  tracks.row([1, "decode", 1, 0, 1], START + 0.98, START + 1.01);
  tracks.recovered(START + 1.5);
  tracks.row([1, "recompute", 9, 0, 0], START + 2, START + 2.1);
  const told = tracks.byRequest.get(1).segments.map(({ kind, start, end }) => [kind, start - START, end - START]);
  assert.deepEqual(
    told.map(([kind]) => kind),
    ["decode", "recovering", "waiting", "recompute"],
  );
  assert.ok(told.every(([, , end], at) => at === 3 || end <= told[at + 1][1]));
});

test("rows of several choices of a request in one step are one", () => {
  const tracks = new Tracks();
  tracks.add(request(1, START), START);
  tracks.row([1, "decode", 1, 0, 1], START + 1, START + 1.1);
  tracks.row([1, "decode", 3, 2, 3], START + 1, START + 1.1);
  tracks.row([1, "decode", 1, 0, 1], START + 1.1, START + 1.2);
  const [, decode, ...more] = tracks.byRequest.get(1).segments;
  assert.deepEqual([decode.steps, decode.tokens, decode.drafts, more.length], [2, 5, 2, 0]);
  assert.equal(tracks.byRequest.get(1).outputTokens, 5);
});

test("a request that its engine gives back waits again; one that another instance takes goes on there", () => {
  const history = new FeedHistory();
  history.apply("snapshot", snapshot(START));
  history.apply("requests", { ...INSTANCE, received: [request(1, START)], ended: [] });
  const [engine] = history.engines.values();
  engine.tracks.row([1, "decode", 1, 0, 1], START + 1, START + 1.1);
  history.apply("requests", {
    ...INSTANCE,
    received: [request(1, START, { reason: "engine", output_tokens: 1 })],
    ended: [],
  });
  const last = engine.tracks.byRequest.get(1).segments.at(-1);
  assert.deepEqual([last.kind, last.reason, last.end], ["waiting", "engine", Infinity]);
  const other = { ...INSTANCE, instance: "demo_1" };
  history.apply("requests", { ...other, received: [request(1, START, { output_tokens: 1 })], ended: [] });
  assert.equal(engine.tracks.byRequest.get(1).ended.finishReason, "moved");
  assert.ok(history.engines.get("demo/1/demo_1").tracks.isLive(1));
  const step = {
    step: 1,
    time: START + 2,
    duration_ms: 1,
    rows: [[1, "decode", 1, 0, 1]],
    num_running: 1,
    num_waiting: 0,
  };
  history.apply("requests", { ...INSTANCE, received: [request(1, START)], ended: [] }); // told too late
  history.apply("steps", { ...other, steps: [step] });
  assert.ok(history.engines.get("demo/1/demo_1").tracks.isLive(1));
  assert.ok(!engine.tracks.isLive(1));
  history.apply("requests", { ...other, received: [], ended: [{ request: 77, time: START + 2 }] }); // unknown: nothing happens
  assert.equal(history.engines.get("demo/1/demo_1").tracks.numLive, 1);
  assert.equal(engine.tracks.numLive, 0);
  history.apply("requests", { ...INSTANCE, received: [request(2, START + 3)], ended: [] });
  history.apply("requests", { ...other, received: [request(2, START + 3)], ended: [] });
  assert.ok(!engine.tracks.byRequest.has(2)); // it was never computed there
  assert.equal(engine.tracks.numLive, 0);
});

test("two requests share a lane only one after the other, and segments follow each other", () => {
  const { engine } = fed({ seed: 3, concurrency: 64, seconds: 20, killAt: 7 });
  const lanes = new Map();
  for (const track of engine.tracks.byRequest.values()) {
    lanes.set(track.lane, [...(lanes.get(track.lane) ?? []), track]);
    track.segments.forEach((segment, at) => {
      assert.ok(segment.end >= segment.start);
      if (at > 0) assert.ok(segment.start >= track.segments[at - 1].end - 1e-6);
    });
  }
  for (const tracks of lanes.values()) {
    tracks.sort((a, b) => a.received - b.received);
    for (let at = 1; at < tracks.length; at++) assert.ok(tracks[at - 1].ended.time <= tracks[at].received);
  }
  assert.ok(lanes.size >= 64);
});

test("nothing that the feed told is lost: tokens, drafts and ends", () => {
  const { engine, told } = fed({ seed: 9, concurrency: 16, seconds: 10 });
  const steps = told.filter(([event]) => event === "steps").flatMap(([, data]) => data.steps);
  const rows = steps.flatMap((step) => step.rows);
  const segments = [...engine.tracks.byRequest.values()].flatMap((track) => track.segments);
  const computed = segments.reduce((sum, { tokens }) => sum + tokens, 0);
  assert.equal(
    computed,
    rows.reduce((sum, [, , tokens]) => sum + tokens, 0),
  );
  const total = engine.buckets.total(START, START + 20);
  assert.equal(total.steps, steps.length);
  assert.equal(
    total.outputTokens,
    rows.reduce((sum, row) => sum + row[4], 0),
  );
  const ended = told.flatMap(([event, data]) => (event === "requests" ? data.ended : []));
  for (const { request: number, output_tokens } of ended)
    assert.equal(engine.tracks.byRequest.get(number).outputTokens, output_tokens);
  assert.ok(ended.length > 20);
});

test("tokens per second are those of whole intervals", () => {
  const history = new FeedHistory();
  history.apply("snapshot", snapshot(START));
  const steps = Array.from({ length: 500 }, (_, number) => ({
    step: number,
    time: START + number / 100 + 0.005,
    duration_ms: 10,
    rows: [[1, "decode", 1, 0, 1]],
    preempted: [],
    waiting: [],
    num_running: 1,
    num_waiting: 0,
  }));
  history.apply("steps", { ...INSTANCE, steps });
  const engine = history.engines.values().next().value;
  for (const live of [3, 3.01, 3.05, 3.099, 4.2]) {
    const view = { history, engine, window: new TimeWindow(), live: START + live, numHidden: 0, wantsTable: false };
    const { figures } = statusOf(view, {}, []);
    assert.equal(figures.find(({ name }) => name === "tokens/s").value, "100");
  }
});

test("memory is bounded after more than the history's length", () => {
  const history = new FeedHistory();
  for (const [event, data] of simulatedFeed({ seed: 2, concurrency: 8, seconds: HISTORY_S + 60 }))
    history.apply(event, data);
  const engine = history.engines.values().next().value;
  history.forget(engine.lastTime);
  for (const track of engine.tracks.byRequest.values()) {
    assert.ok(!track.ended || track.ended.time >= engine.lastTime - HISTORY_S);
  }
  assert.ok(engine.firstTime >= engine.lastTime - HISTORY_S);
  assert.ok(engine.steps.end - engine.steps.first <= engine.steps.maxSteps);
});

test("more requests than tracks may be kept: ended ones go first", () => {
  const tracks = new Tracks({ maxTracks: 10 });
  tracks.add(request(1, START), START);
  for (let number = 2; number < 50; number++) {
    tracks.add(request(number, START + number), START + number);
    tracks.end({ request: number, time: START + number + 0.5 });
    assert.ok(tracks.byRequest.size <= 10);
  }
  assert.ok(tracks.byRequest.has(1));
  for (let number = 50; number < 90; number++) tracks.add(request(number, START + number), START + number);
  assert.equal(tracks.byRequest.size, 10);
  assert.equal(tracks.numLive, [...tracks.live()].length);
});

test("sums of a reused interval start at zero", () => {
  const buckets = new Buckets(1);
  const step = (time) => ({
    step: 1,
    time,
    duration_ms: 1,
    parts_ms: { schedule: 0, run: 1, commit: 0 },
    rows: [[1, "decode", 1, 0, 1]],
    num_running: 1,
    num_waiting: 0,
  });
  for (let round = 0; round < 5; round++) buckets.push(step(START + round * 1.1));
  const at = buckets.cellAt(START + 4.4 + 0.001);
  assert.equal(buckets.steps[at], 1);
  assert.equal(buckets.cellAt(START), -1);
});

test("an engine's death and recovery are marks with reason and duration", () => {
  const { engine } = fed({ seed: 4, concurrency: 4, seconds: 6, killAt: 2 });
  const [mark] = engine.recoveries;
  assert.equal(mark.reason, "killed by signal 9");
  assert.equal(mark.recoveryMs, 1000);
  assert.ok(Math.abs(mark.end - mark.start - 1) < 1e-6);
  assert.equal(engine.numRestarts, 1);
  const waits = [...engine.tracks.byRequest.values()]
    .flatMap((track) => track.segments)
    .filter(({ kind }) => kind === "recovering");
  assert.equal(waits.length, 4);
});

test("a snapshot after a gap ends what is gone, takes up what is new, and marks the gap", () => {
  const { history, engine } = fed({ seed: 6, concurrency: 3, seconds: 2 });
  const [lives] = engine.tracks.live();
  const later = engine.lastTime + 5;
  history.apply("dropped", { events: 12 });
  history.feedEnds(engine.lastTime + 1);
  history.apply(
    "snapshot",
    snapshot(later, [request(lives.request, lives.received), request(900, later - 1, { state: "running" })]),
  );
  assert.deepEqual(
    [...engine.tracks.live()].map((track) => track.request),
    [lives.request, 900],
  );
  assert.equal(history.droppedEvents, 12);
  assert.deepEqual(engine.unwatched, [{ start: later - 4, end: later }]);
  history.apply("snapshot", { ...snapshot(later), instances: [] });
  assert.equal(history.engines.size, 0);
});

test("a snapshot discards what was known of models, because their events may have been missed", () => {
  const history = new FeedHistory();
  history.apply("model", { model: "m", version: "1", state: "LOADING", reason: "", time: START });
  assert.equal(history.models.get("m/1").state, "LOADING");
  history.apply("snapshot", snapshot(START + 60));
  assert.equal(history.models.size, 0);
});

test("events of an engine that no snapshot named begin its history", () => {
  const history = new FeedHistory();
  history.apply("snapshot", { ...snapshot(START), instances: [] });
  history.apply("requests", { ...INSTANCE, received: [request(1, START)], ended: [] });
  assert.equal(history.engines.get("demo/1/demo_0").tracks.numLive, 1);
});

test("maps of blocks: the last one at a time, runs and counts", () => {
  const maps = new BlockMaps(3);
  for (let at = 0; at < 5; at++)
    maps.push({
      time: START + at,
      num_blocks: 10,
      runs: [
        [0, 2, "used", 7, 2],
        [2, 3, "used", at, 1],
        [5, 1, "cached", null, 0],
        [6, 4, "free", null, 0],
      ],
    });
  assert.equal(maps.at(START).runs[1][3], 2); // older ones are forgotten
  const map = maps.at(START + 3.5);
  assert.equal(map.runs[1][3], 3);
  assert.deepEqual(runOf(map, 4), { first: 2, count: 3, state: "used", request: 3, references: 1 });
  assert.equal(runOf(map, 10), null);
  assert.deepEqual(countBlocks(map, 7), { free: 4, cached: 1, used: 5, shared: 2, selected: 2 });
});

test("the server's time follows from the event that came fastest", () => {
  const clock = new LiveClock();
  clock.observe(1000, 50.4); // 0.4 s late
  clock.observe(1001, 51.1); // 0.1 s late
  assert.ok(Math.abs(clock.at(52) - 1001.9) < 1e-9);
});
