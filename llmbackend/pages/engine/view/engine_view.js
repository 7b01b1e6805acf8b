/** The Engine page as a Vue component: engine selector, controls, canvases, and text. Client data is only inserted as text. */

import { LiveView, TABLE_COLUMNS, WIDTHS_S, blockTip, laneTip } from "llmbackend-engine";
import { cancelRequest, killEngine, sendDemoRequests } from "llmbackend-engine/actions.js";
import { TEMPLATE } from "llmbackend-engine/template.js";

/** Request headers with the viewer's key, which static/shell.js stores. */
function headers() {
  const key = window.llmbackend.key();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export default {
  template: TEMPLATE,
  data: () => ({
    status: null,
    tip: null,
    message: "",
    sending: false,
    tableOpen: false,
    blocksOpen: true,
    widths: WIDTHS_S,
    columns: TABLE_COLUMNS,
  }),
  mounted() {
    const { overview, charts, lanes, labels, blocks } = this.$refs;
    // Not reactive: Vue would wrap typed arrays and maps that change a thousand times a second.
    this.view = Object.freeze({
      live: new LiveView(
        { overview, charts, lanes, labels, blocks },
        { headers, onStatus: (status) => this.onStatus(status) },
      ),
    });
    this.onKeyDown = (event) => this.keyDown(event);
    this.onKeyChanged = () => this.view.live.restart();
    window.addEventListener("keydown", this.onKeyDown);
    window.addEventListener("llmbackend-key", this.onKeyChanged);
  },
  beforeUnmount() {
    this.view.live.stop();
    window.removeEventListener("keydown", this.onKeyDown);
    window.removeEventListener("llmbackend-key", this.onKeyChanged);
  },
  computed: {
    refused() {
      return this.status?.connection.state === "refused" ? this.status.connection.text : "";
    },
    needsKey() {
      return this.refused.startsWith("401");
    },
    wasLost() {
      return this.status?.connection.wasLost ?? false;
    },
    lostText() {
      if (!this.wasLost) return "Connecting to the server.";
      const { text } = this.status.connection;
      return `${text ? `The server sends no engine events (${text}).` : "The server does not respond."} Trying again.`;
    },
    lost() {
      return this.wasLost || (this.status?.connection.state === "connecting" && !this.status.engine);
    },
    stateText() {
      const { engine, recovery } = this.status;
      if (recovery?.lasts && recovery.reason) return `${engine.state}: ${recovery.reason}`;
      return engine.pid ? `${engine.state} · pid ${engine.pid}` : engine.state;
    },
    timeText() {
      if (this.status?.paused) return "paused";
      return this.wasLost ? "no connection" : "live";
    },
    mayKill() {
      return Boolean(this.status?.allowsKill && this.status.scope === "all" && this.status.engine?.pid);
    },
    empty() {
      return this.status?.engine && this.status.numShown === 0;
    },
    emptyText() {
      if (this.status.numLive) return "Nothing in this stretch of time.";
      const { widthS } = this.status;
      return `No requests in ${widthS < 60 ? `these ${widthS} seconds` : `the last ${widthS / 60} minutes`}.`;
    },
    behind() {
      const seconds = Math.round(this.status?.behindS ?? 0);
      if (seconds < 1) return "";
      return seconds < 60 ? `${seconds} s ago` : `${Math.floor(seconds / 60)} min ${seconds % 60} s ago`;
    },
    announcement() {
      const recovery = this.status?.recovery;
      if (recovery?.lasts) return `The engine is recovering: ${recovery.reason}`;
      if (this.status?.paused) return "Paused";
      return recovery ? `The engine recovered in ${Math.round(recovery.recoveryMs)} milliseconds` : "";
    },
  },
  methods: {
    onStatus(status) {
      const neededKey = this.needsKey;
      this.status = Object.freeze(status);
      if (this.needsKey && !neededKey) this.askForKey();
    },
    choose(key) {
      this.view.live.engineKey = key;
      this.view.live.select(null);
    },
    pause() {
      this.view.live.key(" ", false);
    },
    zoomTo(widthS) {
      this.view.live.change((window) => {
        window.widthS = Number(widthS);
      });
    },
    keyDown(event) {
      const typing = event.target.closest?.("input, textarea, select, dialog, [contenteditable], [role=dialog]");
      const pressing = event.key === " " && event.target.closest?.("button, a, summary");
      if (event.ctrlKey || event.metaKey || event.altKey || typing || pressing) return;
      if (event.key === "Escape") this.view.live.select(null);
      else if (this.view.live.key(event.key, event.shiftKey)) event.preventDefault();
    },
    loadText({ state, stage, done, total }) {
      if (state !== "LOADING" || !stage) return "";
      return total ? `(${stage}, ${Math.round((100 * done) / total)} %)` : `(${stage})`;
    },
    toggleTable(event) {
      this.view.live.wantsTable = this.tableOpen = event.target.open;
      this.view.live.invalidate();
    },
    toggleBlocks(event) {
      if (this.view.live.wantsBlocks === event.target.open) return;
      this.view.live.wantsBlocks = this.blocksOpen = event.target.open;
      this.view.live.connect();
    },
    lanesDown(event) {
      this.drag = { x: event.clientX, moved: false };
      event.currentTarget.setPointerCapture(event.pointerId);
    },
    chartsMove(event) {
      this.view.live.hoverTime = this.view.live.timeAt(event.offsetX);
      this.view.live.invalidate();
    },
    lanesMove(event) {
      if (this.drag && event.buttons) return this.lanesDrag(event);
      const { offsetX: x, offsetY: y } = event;
      this.view.live.hoverTime = this.view.live.timeAt(x);
      const found = this.view.live.atLanes(x, y);
      this.tip = found ? { ...at(event), lines: laneTip(this.view.live.engine, found) } : null;
      this.view.live.invalidate();
    },
    lanesDrag(event) {
      const moved = event.clientX - this.drag.x;
      if (!this.drag.moved && Math.abs(moved) < 4) return;
      this.drag = { x: event.clientX, moved: true };
      this.tip = null;
      this.view.live.change((window, first, live) =>
        window.scrub(-moved * this.view.live.secondsPerPixel, first, live),
      );
    },
    lanesUp(event) {
      if (this.drag && !this.drag.moved) {
        const track = this.view.live.trackAt(event.offsetX, event.offsetY);
        if (track) this.view.live.select(track.request);
      }
      this.drag = null;
    },
    leave() {
      this.view.live.hoverTime = null;
      this.tip = null;
      this.view.live.invalidate();
    },
    wheel(event) {
      if (event.ctrlKey) {
        event.preventDefault();
        this.view.live.change((window) => window.zoom(event.deltaY < 0 ? 1 : -1));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        this.view.live.change((window, first, live) =>
          window.scrub(event.deltaX * this.view.live.secondsPerPixel, first, live),
        );
      }
    },
    overviewPoint(event) {
      if (event.type === "pointermove" && !event.buttons) return;
      this.view.live.overviewTo(event.offsetX);
    },
    blocksMove(event) {
      const found = this.view.live.atBlocks(event.offsetX, event.offsetY);
      this.tip = found ? { ...at(event), lines: blockTip(found) } : null;
    },
    blocksClick(event) {
      const found = this.view.live.atBlocks(event.offsetX, event.offsetY);
      if (found?.request != null) this.view.live.select(found.request);
    },
    async sendDemo() {
      this.sending = true;
      this.message = "";
      this.message = await sendDemoRequests(this.status.engine, headers());
      this.sending = false;
    },
    async kill() {
      this.$refs.confirmKill.close();
      this.$el.focus(); // not the button: the next Space must pause, not kill again
      this.message = await killEngine(this.status.engine, headers());
    },
    async cancel(request) {
      this.message = await cancelRequest(request, headers());
    },
    askForKey() {
      window.llmbackend.askForKey();
    },
  },
};

/** Position of a tooltip: next to the pointer, on the side with more space. */
function at(event) {
  const left = event.clientX > window.innerWidth - 300;
  const above = event.clientY > window.innerHeight - 140;
  return {
    style: {
      [left ? "right" : "left"]: `${left ? window.innerWidth - event.clientX + 12 : event.clientX + 12}px`,
      [above ? "bottom" : "top"]: `${above ? window.innerHeight - event.clientY + 12 : event.clientY + 14}px`,
    },
  };
}
