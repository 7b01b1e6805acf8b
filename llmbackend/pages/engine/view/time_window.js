/** The visible time window: live, or paused in the history; and its width. */

export const WIDTHS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300];

export class TimeWindow {
  /** widthS: one of WIDTHS_S */
  constructor(widthS = 10) {
    this.widthS = widthS;
    this.pausedAt = null; // unix seconds of the right edge; null: live
  }

  get paused() {
    return this.pausedAt !== null;
  }

  /** The right edge, given the live edge. */
  end(live) {
    return this.pausedAt ?? live;
  }

  pause(live) {
    this.pausedAt ??= live;
  }

  resume() {
    this.pausedAt = null;
  }

  toggle(live) {
    if (this.paused) this.resume();
    else this.pause(live);
  }

  /** Moves by seconds and pauses; becomes live again at the live edge. */
  scrub(seconds, first, live) {
    this.moveTo(this.end(live) + seconds, first, live);
  }

  moveTo(end, first, live) {
    this.pausedAt = end >= live ? null : Math.max(first, end);
  }

  /** Pauses at the oldest window of the history; if the history is shorter than the window, at once. */
  moveToFirst(first, live) {
    this.pausedAt = Math.min(first + this.widthS, live);
  }

  /** direction: 1 shows less time, -1 more. The right edge stays fixed. */
  zoom(direction) {
    const at = WIDTHS_S.indexOf(this.widthS) - direction;
    this.widthS = WIDTHS_S[Math.min(WIDTHS_S.length - 1, Math.max(0, at))];
  }
}

/** Applies a key (KeyboardEvent.key) to the window; returns false if the key has no effect. */
export function applyKey(window, key, shift, first, live) {
  const stride = window.widthS * (shift ? 1 : 0.1);
  if (key === " ") window.toggle(live);
  else if (key === "ArrowLeft") window.scrub(-stride, first, live);
  else if (key === "ArrowRight") window.scrub(stride, first, live);
  else if (key === "Home") window.moveToFirst(first, live);
  else if (key === "End") window.resume();
  else if (key === "+" || key === "=") window.zoom(1);
  else if (key === "-" || key === "_") window.zoom(-1);
  else return false;
  return true;
}

/** Maps time to pixels and back: x(time) and time(x), between `left` and `left + width`. */
export function timeScale(end, widthS, left, width) {
  const perSecond = width / widthS;
  const start = end - widthS;
  return {
    start,
    end,
    left,
    width,
    perSecond,
    x: (time) => left + (time - start) * perSecond,
    time: (x) => start + (x - left) / perSecond,
  };
}

/** About `wanted` round times for ticks on the axis. */
export function axisTicks(scale, wanted = 8) {
  const step =
    [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120].find((s) => (scale.end - scale.start) / s <= wanted) ?? 120;
  const ticks = [];
  for (let time = Math.ceil(scale.start / step) * step; time < scale.end; time += step) ticks.push(time);
  return { ticks, step };
}
