/** Draws the strip of the whole history: tokens per second, recoveries, and the time window shown below. */

import { drawBands, prepare } from "./canvas.js";
import { loadColumns } from "./chart_columns.js";
import { HISTORY_S } from "./feed_history.js";
import { timeScale } from "./time_window.js";
import { hatching } from "./theme.js";

export const OVERVIEW_HEIGHT = 34;

/** The strip's time scale: the five minutes before the live edge. */
export function overviewScale(live, width) {
  return timeScale(live, HISTORY_S, 0, width);
}

/** view: {width, live, scale (of the lanes), engine, theme} */
export function drawOverview(canvas, { width, live, scale, engine, theme }) {
  const context = prepare(canvas, width, OVERVIEW_HEIGHT, theme.stripe);
  const all = overviewScale(live, width);
  const columns = loadColumns(engine, all);
  const highest = Math.max(1, ...columns.map((column) => column.outputRate + column.prefillRate));
  for (const column of columns) {
    const height = ((OVERVIEW_HEIGHT - 6) * (column.outputRate + column.prefillRate)) / highest;
    context.fillStyle = theme.decode;
    context.globalAlpha = 0.6;
    context.fillRect(
      all.x(column.start),
      OVERVIEW_HEIGHT - height,
      Math.max(1, all.x(column.end) - all.x(column.start)),
      height,
    );
  }
  context.globalAlpha = 1;
  drawBands(context, all, 0, OVERVIEW_HEIGHT, engine, theme, hatching, null);
  const x = Math.max(0, all.x(scale.start));
  const right = Math.max(x + 4, all.x(scale.end));
  context.fillStyle = theme.dark ? "rgba(255,255,255,0.1)" : "rgba(16,24,40,0.08)";
  context.fillRect(x, 0, right - x, OVERVIEW_HEIGHT);
  context.strokeStyle = theme.text;
  context.lineWidth = 1.5;
  context.strokeRect(x + 0.75, 0.75, right - x - 1.5, OVERVIEW_HEIGHT - 1.5);
}
