/** Where things are drawn: the window of time, lanes, chart columns, the grid of blocks; and the words beside them. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { blockAt, blockGrid, eachStretch } from "../../../llmbackend/pages/engine/view/block_grid.js";
import {
  loadColumns,
  niceCeiling,
  stepColumns,
  usualHighest,
} from "../../../llmbackend/pages/engine/view/chart_columns.js";
import { FeedHistory } from "../../../llmbackend/pages/engine/view/feed_history.js";
import {
  hit,
  laneLabels,
  segmentBoxes,
  showsSteps,
  stepBoxes,
  visibleTracks,
  MAX_LANES,
} from "../../../llmbackend/pages/engine/view/lane_layout.js";
import { laneTip } from "../../../llmbackend/pages/engine/view/status.js";
import {
  TimeWindow,
  WIDTHS_S,
  applyKey,
  axisTicks,
  timeScale,
} from "../../../llmbackend/pages/engine/view/time_window.js";
import { countText, durationText, stateWords } from "../../../llmbackend/pages/engine/view/words.js";
import { simulatedFeed } from "./simulated_feed.mjs";

const START = 1_700_000_000;

function engineAfter(options) {
  const history = new FeedHistory();
  for (const [event, data] of simulatedFeed(options)) history.apply(event, data);
  return history.engines.values().next().value;
}

test("keys pause, scrub, zoom and return to live", () => {
  const [first, live] = [1000, 1100];
  const window = new TimeWindow(10);
  const press = (key, shift = false) => applyKey(window, key, shift, first, live);
  assert.ok(press(" "));
  assert.equal(window.end(live + 5), live); // paused: it stays while time goes on
  press("ArrowLeft");
  assert.equal(window.end(live), live - 1);
  press("ArrowLeft", true);
  assert.equal(window.end(live), live - 11);
  press("Home");
  assert.equal(window.end(live), first + 10);
  press("ArrowLeft", true);
  press("ArrowLeft", true);
  assert.equal(window.end(live), first); // not beyond the history
  press("+");
  assert.equal(window.widthS, 5);
  for (let times = 0; times < 20; times++) press("-");
  assert.equal(window.widthS, WIDTHS_S.at(-1));
  press("End");
  assert.ok(!window.paused);
  assert.ok(!press("x"));
});

test("a history shorter than the window can be paused and scrubbed", () => {
  const window = new TimeWindow(10);
  applyKey(window, "Home", false, 1000, 1004);
  assert.equal(window.end(1005), 1004);
  applyKey(window, "ArrowLeft", false, 1000, 1005);
  assert.equal(window.end(1005), 1003);
});

test("scrubbing past the live edge goes on live", () => {
  const window = new TimeWindow(10);
  window.scrub(-3, 0, 100);
  assert.ok(window.paused);
  window.scrub(5, 0, 100);
  assert.ok(!window.paused);
});

for (const concurrency of [1, 64]) {
  test(`boxes of ${concurrency} requests stay within the drawing and do not overlap`, () => {
    const engine = engineAfter({ seed: 8, concurrency, seconds: 6, killAt: 3 });
    for (const widthS of [0.5, 5, 60]) {
      const scale = timeScale(engine.lastTime, widthS, 150, 900);
      const { shown, numLanes } = visibleTracks(engine.tracks, scale);
      assert.ok(numLanes >= concurrency);
      const boxes = showsSteps(engine.steps, scale)
        ? stepBoxes(shown, engine.steps, scale)
        : segmentBoxes(shown, scale);
      assert.ok(boxes.length > 0);
      const rightOf = new Map();
      for (const box of [...boxes].sort((a, b) => a.x - b.x)) {
        assert.ok(box.x >= 150 && box.x + box.width <= 1050 + 1e-6);
        assert.ok(box.x >= (rightOf.get(box.lane) ?? 0) - 0.01, `${box.kind} overlaps`);
        rightOf.set(box.lane, box.x + box.width);
      }
    }
  });
}

test("single steps are drawn when they are wide enough, and hold the same tokens", () => {
  const engine = engineAfter({ seed: 8, concurrency: 4, seconds: 3 });
  const near = timeScale(engine.lastTime, 0.5, 0, 1000);
  assert.ok(showsSteps(engine.steps, near));
  assert.ok(!showsSteps(engine.steps, timeScale(engine.lastTime, 60, 0, 100)));
  const all = timeScale(engine.lastTime + 1, 10, 0, 1000);
  const { shown } = visibleTracks(engine.tracks, all);
  const sum = (boxes) => boxes.reduce((tokens, box) => tokens + box.tokens, 0);
  assert.equal(sum(stepBoxes(shown, engine.steps, all)), sum(segmentBoxes(shown, all)));
});

test("the thing under the pointer is that request, and its tip says what it does", () => {
  const engine = engineAfter({ seed: 8, concurrency: 2, seconds: 4 });
  const scale = timeScale(engine.lastTime, 4, 0, 1000);
  const { shown } = visibleTracks(engine.tracks, scale);
  const track = shown.find((each) => each.segments.some(({ kind }) => kind === "decode"));
  const segment = track.segments.find(({ kind }) => kind === "decode");
  const time = segment.start + 0.001;
  assert.equal(hit(shown, track.lane, time).track, track);
  const tip = laneTip(engine, { track, segment, time }).join("\n");
  assert.match(tip, new RegExp(`#${track.request} r${track.request}`));
  assert.match(tip, /decode: \d+ tokens in \d+ steps/);
  assert.match(tip, /step \d+: 1 tokens/);
  assert.equal(hit(shown, MAX_LANES, time), null);
  assert.equal(laneLabels(shown, engine.lastTime).get(track.lane).lane, track.lane);
});

test("requests beyond the lanes are counted", () => {
  const engine = engineAfter({ seed: 1, concurrency: MAX_LANES + 9, seconds: 0.001 });
  const { shown, numLanes, numHidden } = visibleTracks(engine.tracks, timeScale(engine.lastTime, 5, 0, 900));
  assert.equal(numLanes, MAX_LANES);
  assert.equal(shown.length, MAX_LANES);
  assert.equal(numHidden, 9);
});

test("columns of the charts hold what the steps held", () => {
  const engine = engineAfter({ seed: 8, concurrency: 8, seconds: 5 });
  const near = stepColumns(engine, timeScale(engine.lastTime, 0.2, 0, 1000));
  assert.ok(near.every(({ run, schedule, commit }) => Math.abs(run + schedule + commit - 7.5) < 2.6));
  const far = timeScale(engine.lastTime, 300, 0, 900);
  for (const column of [...stepColumns(engine, far), ...loadColumns(engine, far)]) assert.ok(column.end > column.start);
  assert.ok(
    loadColumns(engine, far).every(({ running, waiting }) => running <= 8 && waiting <= 8 && running + waiting >= 8),
  );
});

test("one outlier does not make the other columns invisible", () => {
  assert.equal(usualHighest([...Array(50).fill(9), 1000]), 50);
  assert.equal(usualHighest([1, 2, 3]), 5);
  assert.equal(usualHighest([]), 1);
});

test("columns stay where they are in time while the window moves", () => {
  const engine = engineAfter({ seed: 8, concurrency: 8, seconds: 5 });
  const at = (end) => stepColumns(engine, timeScale(end, 60, 0, 400)).map(({ start, run }) => `${start} ${run}`);
  const later = new Set(at(engine.lastTime + 0.37));
  assert.ok(at(engine.lastTime).every((column) => later.has(column)));
});

test("every block has a cell that leads back to it", () => {
  for (const numBlocks of [1, 16, 4096, 100_000, 3_000_000]) {
    const grid = blockGrid(numBlocks, 276, 300);
    assert.ok(grid.rows * grid.cell <= 300 && grid.columns * grid.cell <= 276);
    assert.ok(grid.rows * grid.columns * grid.perCell >= numBlocks);
    for (const block of [0, Math.floor(numBlocks / 2), numBlocks - 1]) {
      eachStretch(grid, block, 1, (column, row, length) => {
        assert.equal(length, 1);
        const found = blockAt(grid, numBlocks, (column + 0.5) * grid.cell, (row + 0.5) * grid.cell);
        assert.equal(found, Math.floor(block / grid.perCell) * grid.perCell);
      });
    }
  }
});

test("a run of blocks is drawn whole, over several rows of cells", () => {
  const grid = { cell: 3, columns: 10, rows: 10, perCell: 1 };
  const cells = [];
  eachStretch(grid, 7, 25, (column, row, length) =>
    cells.push(...Array.from({ length }, (_, at) => row * 10 + column + at)),
  );
  assert.deepEqual(
    cells,
    Array.from({ length: 25 }, (_, at) => 7 + at),
  );
});

test("the axis has round marks", () => {
  for (const widthS of WIDTHS_S) {
    const { ticks, step } = axisTicks(timeScale(START, widthS, 0, 900), 8);
    assert.ok(ticks.length >= 2 && ticks.length <= 9, `${widthS}: ${ticks.length}`);
    assert.ok(ticks.every((tick) => Math.abs(tick / step - Math.round(tick / step)) < 1e-3));
  }
  assert.deepEqual([0, 3, 20, 21, 999].map(niceCeiling), [1, 5, 20, 50, 1000]);
});

test("states are told in words", () => {
  const track = { segments: [{ kind: "waiting", start: START, end: Infinity, reason: "kv_blocks" }], ended: null };
  assert.equal(stateWords(track, START + 2), "waiting 2.00 s: no free KV blocks");
  track.segments = [{ kind: "prefill", start: START, end: START + 1 }];
  assert.equal(stateWords(track, START + 2), "prefill chunk");
  track.ended = { time: START + 2, finishReason: "length" };
  assert.equal(stateWords(track, START + 2), "ended: length");
  const texts = [5, 999.6, 1500, 65_000, 119_700].map(durationText);
  assert.deepEqual(texts, ["5.00 ms", "1000 ms", "1.50 s", "1 min 5 s", "2 min 0 s"]);
  assert.deepEqual([7, 1234, 45_678, 2_500_000].map(countText), ["7", "1.2k", "46k", "2.5M"]);
});
