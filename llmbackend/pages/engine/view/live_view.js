/** Reads the feed, maintains the history, and draws it on canvases, unless nothing changes or the tab is hidden. */

import { blockAt } from "./block_grid.js";
import { runOf } from "./block_maps.js";
import { drawBlocks } from "./draw_blocks.js";
import { drawCharts } from "./draw_charts.js";
import { AXIS_HEIGHT, drawLaneLabels, drawLanes } from "./draw_lanes.js";
import { drawOverview, overviewScale } from "./draw_overview.js";
import { FeedClient } from "./feed_client.js";
import { FeedHistory } from "./feed_history.js";
import { hit, laneHeight, laneLabels, visibleTracks } from "./lane_layout.js";
import { LiveClock } from "./live_clock.js";
import { statusOf } from "./status.js";
import { theme } from "./theme.js";
import { TimeWindow, applyKey, timeScale } from "./time_window.js";

/** How far the right edge lags behind the server's time, so that events have arrived when their time becomes visible. */
const DELAY_S = 0.15;
const STATUS_MS = 250;
const SLOW_DRAW_MS = 500; // overview and map of blocks
/** A hidden tab stops reading the feed after this time, because engines create reports while someone reads them. */
const HIDDEN_MS = 30_000;
const KINDS = ["requests", "steps", "engine", "model", "load"];

export class LiveView {
  #client = null;
  #frame = 0;
  #timer = 0;
  #clock = new LiveClock();
  #epoch = "";
  #lastDraw = 0;
  #lastStatus = 0;
  #lastSlowDraw = 0;
  #lastForget = 0;
  #lastLabels = 0;
  #labelled = 0;
  #shown = [];
  #blockGrid = null;
  #hiddenTimer = 0;
  #connection = { state: "connecting", text: "", wasLost: false };

  /**
   * canvases: {overview, charts, lanes, labels, blocks}
   * headers(): of requests to the server
   * onStatus(status): at most four times a second while something changes
   */
  constructor(canvases, { headers, onStatus }) {
    Object.assign(this, { canvases, headers, onStatus });
    this.history = new FeedHistory();
    this.window = new TimeWindow(window.innerWidth < 700 ? 5 : 10);
    this.engineKey = null;
    this.selected = null;
    this.hoverTime = null;
    this.numLanes = 0;
    this.numHidden = 0; // requests without a lane
    this.wantsBlocks = true;
    this.wantsTable = false;
    this.onVisibility = () => this.#visibilityChanged();
    document.addEventListener("visibilitychange", this.onVisibility);
    this.resizes = new ResizeObserver(() => this.invalidate());
    this.resizes.observe(canvases.lanes.parentElement);
    this.themes = new MutationObserver(() => this.invalidate());
    this.themes.observe(document.body, { attributes: true, attributeFilter: ["class"] });
    this.connect();
  }

  stop() {
    this.#client?.close();
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#hiddenTimer);
    clearTimeout(this.#timer);
    this.resizes.disconnect();
    this.themes.disconnect();
    document.removeEventListener("visibilitychange", this.onVisibility);
  }

  /** Discards everything and restarts the feed: for another key, which may see other requests. */
  restart() {
    this.#forgetAll();
    this.connect();
  }

  #forgetAll() {
    this.history = new FeedHistory();
    this.selected = null;
    for (const canvas of Object.values(this.canvases)) canvas.getContext("2d").reset();
  }

  /** (Re)starts the feed with the kinds that are needed now. */
  connect() {
    this.#disconnect();
    const kinds = this.wantsBlocks ? [...KINDS, "blocks"] : KINDS;
    this.#client = new FeedClient(`/v2/engine/events?kinds=${kinds.join(",")}&interval_ms=100`, {
      headers: this.headers,
      onEvent: (event, data, id) => this.#received(event, data, id),
      onState: (state, text) => {
        const wasLost = state === "lost" || (state === "connecting" && this.#connection.wasLost);
        if (state === "lost") this.history.feedEnds(this.live + DELAY_S);
        const reason = state === "connecting" ? this.#connection.text : text; // stays shown during the next attempt
        this.#connection = { state, text: reason, wasLost };
        this.invalidate();
      },
    });
  }

  get engine() {
    const engines = this.history.engines;
    const first = () => [...engines.values()].find(({ state }) => state !== "stopped") ?? engines.values().next().value;
    return engines.get(this.engineKey) ?? first() ?? null;
  }

  /** The latest time that can be shown. */
  get live() {
    return this.#clock.at(performance.now() / 1000) - DELAY_S;
  }

  key(name, shift) {
    const done = applyKey(this.window, name, shift, this.engine?.firstTime ?? 0, this.live);
    if (done) this.invalidate();
    return done;
  }

  change(change) {
    change(this.window, this.engine?.firstTime ?? 0, this.live);
    this.invalidate();
  }

  select(request) {
    this.selected = request === this.selected ? null : request;
    this.#lastSlowDraw = 0;
    this.invalidate();
  }

  /** Draws at the next frame, and continues as long as something moves. */
  invalidate() {
    if (this.#frame || document.hidden) return;
    this.#frame = requestAnimationFrame((now) => this.#onFrame(now));
  }

  /** Draws when the picture has moved by about a pixel; while paused, occasionally, for the figures and the overview. */
  #drawSoon() {
    if (this.#timer || this.#frame || document.hidden) return;
    const interval = this.window.paused ? SLOW_DRAW_MS : Math.min(100, Math.max(40, 1200 / this.#scale().perSecond));
    const wait = this.#lastDraw + interval - performance.now();
    this.#timer = setTimeout(
      () => {
        this.#timer = 0;
        this.invalidate();
      },
      Math.max(0, wait - 8),
    );
  }

  /** What is at a point of the lanes' canvas: {track, segment, time} or null. */
  atLanes(x, y) {
    const scale = this.#scale();
    const time = Math.max(scale.start, Math.min(scale.end, scale.time(x)));
    const found = hit(this.#shown, this.#laneAt(y), time);
    return found && { ...found, time };
  }

  /** The request at a point of the lanes, or else the one named by the row's label; null if there is none. */
  trackAt(x, y) {
    return this.atLanes(x, y)?.track ?? laneLabels(this.#shown, this.#scale().end).get(this.#laneAt(y)) ?? null;
  }

  #laneAt(y) {
    return y < AXIS_HEIGHT ? -1 : Math.floor((y - AXIS_HEIGHT) / laneHeight(this.numLanes));
  }

  atBlocks(x, y) {
    const map = this.blockMap;
    const block = map && this.#blockGrid ? blockAt(this.#blockGrid, map.numBlocks, x, y) : -1;
    return block < 0 ? null : { block, ...runOf(map, block) };
  }

  get blockMap() {
    return this.engine?.blockMaps.at(this.window.end(this.live)) ?? null;
  }

  timeAt(x) {
    return this.#scale().time(x);
  }

  get secondsPerPixel() {
    return 1 / this.#scale().perSecond;
  }

  /** Moves the window so that its middle is at a point of the overview. */
  overviewTo(x) {
    const middle = overviewScale(this.live, this.canvases.overview.clientWidth).time(x);
    this.change((window, first, live) => window.moveTo(middle + window.widthS / 2, first, live));
  }

  #disconnect() {
    if (this.#client) this.history.feedEnds(this.live + DELAY_S);
    this.#client?.close();
    this.#client = null;
  }

  #received(event, data, id) {
    const [epoch] = id.split("-");
    // The server was restarted: it numbers its requests from the beginning.
    if (this.#epoch !== epoch) this.#forgetAll();
    this.#epoch = epoch;
    const map = this.blockMap;
    const time = this.history.apply(event, data);
    const arrival = performance.now() / 1000;
    if (time !== null && event !== "blocks") this.#clock.observe(time, arrival);
    if (arrival - this.#lastForget > 2) {
      this.#lastForget = arrival;
      this.history.forget(this.live);
    }
    if (event !== "blocks" || this.blockMap !== map) this.#drawSoon();
  }

  #visibilityChanged() {
    clearTimeout(this.#hiddenTimer);
    if (document.hidden) {
      this.#hiddenTimer = setTimeout(() => this.#disconnect(), HIDDEN_MS);
    } else {
      if (!this.#client) this.connect();
      this.invalidate();
    }
  }

  #onFrame(now) {
    this.#frame = 0;
    this.#lastDraw = now;
    this.#draw(now);
    if (this.#moves()) this.#drawSoon();
  }

  /** Whether the picture changes without an event: time passes, and something visible moves with it. */
  #moves() {
    const engine = this.engine;
    if (this.window.paused || !engine || this.#connection.state !== "open") return false;
    return (
      engine.tracks.numLive > 0 ||
      engine.recoveries.at(-1)?.end === Infinity ||
      this.live - engine.lastActivity < this.window.widthS + 2
    );
  }

  #scale() {
    const width = this.canvases.lanes.clientWidth;
    const left = width < 600 ? 104 : 176;
    return timeScale(this.window.end(this.live), this.window.widthS, left, Math.max(50, width - left - 6));
  }

  #draw(now) {
    const engine = this.engine;
    const width = this.canvases.lanes.clientWidth;
    if (engine && width > 0) this.#drawEngine(engine, width, now);
    else this.#shown = [];
    if (now - this.#lastStatus < STATUS_MS && this.#moves()) return;
    this.#lastStatus = now;
    this.onStatus(statusOf(this, this.#connection, this.#shown));
  }

  #drawEngine(engine, width, now) {
    const colours = theme(document.body.classList.contains("body--dark"));
    const scale = this.#scale();
    const { shown, numLanes, numHidden } = visibleTracks(engine.tracks, scale);
    Object.assign(this, { numLanes, numHidden });
    this.#shown = shown;
    const view = { width, scale, engine, theme: colours, hoverTime: this.hoverTime };
    drawCharts(this.canvases.charts, view);
    const lanes = { ...view, shown, numLanes, laneHeight: laneHeight(numLanes), selected: this.selected };
    drawLanes(this.canvases.lanes, lanes);
    if (numLanes !== this.#labelled || now - this.#lastLabels >= STATUS_MS || !this.#moves()) {
      this.#lastLabels = now;
      this.#labelled = numLanes;
      drawLaneLabels(this.canvases.labels, lanes);
    }
    if (now - this.#lastSlowDraw < SLOW_DRAW_MS && this.#moves()) return;
    this.#lastSlowDraw = now;
    const overviewWidth = this.canvases.overview.clientWidth;
    drawOverview(this.canvases.overview, { width: overviewWidth, live: this.live, scale, engine, theme: colours });
    this.#drawBlockMap(colours);
  }

  #drawBlockMap(colours) {
    const { blocks } = this.canvases;
    const map = this.blockMap;
    blocks.hidden = map === null;
    const width = blocks.clientWidth; // 0 while it is collapsed
    if (map && width > 0) this.#blockGrid = drawBlocks(blocks, map, { width, theme: colours, selected: this.selected });
  }
}
