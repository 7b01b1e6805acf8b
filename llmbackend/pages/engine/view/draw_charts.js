/** Draws the charts above the lanes, on the same time axis: each a row with its name and latest values at the left. */

import { FONT, drawBands, fitText, prepare, textWidth } from "./canvas.js";
import { loadColumns, stepColumns, usualHighest } from "./chart_columns.js";
import { hatching } from "./theme.js";
import { countText, durationText } from "./words.js";

const CHART_HEIGHT = 46;
const COLUMN_HEIGHT = CHART_HEIGHT - 13; // the rest is the line with the name and the space below

/** Series are stacked from first to last; `colour` names a colour of the theme, `hatch` the mark that goes with it. */
const CHARTS = [
  {
    title: "Step time",
    columns: "steps",
    series: [
      { field: "run", colour: "run", hatch: null },
      { field: "schedule", colour: "schedule", hatch: "prefill" },
      { field: "commit", colour: "commit", hatch: "recovering" },
    ],
    text: (column) => durationText(column.run + column.schedule + column.commit),
    detail: (column) =>
      `run ${column.run.toFixed(2)} · schedule ${column.schedule.toFixed(2)} · commit ${column.commit.toFixed(2)} ms`,
    top: (highest) => durationText(highest),
  },
  {
    title: "Tokens per step",
    columns: "steps",
    series: [
      { field: "decode", colour: "decode", hatch: null },
      { field: "prefill", colour: "prefill", hatch: "prefill" },
    ],
    text: (column) => countText(column.decode + column.prefill),
    detail: (column) => `decode ${countText(column.decode)} · prefill ${countText(column.prefill)} tokens`,
    top: countText,
  },
  {
    title: "Tokens/s",
    columns: "load",
    series: [
      { field: "outputRate", colour: "decode", hatch: null },
      { field: "prefillRate", colour: "prefill", hatch: "prefill" },
    ],
    text: (column) => countText(column.outputRate),
    detail: (column) => `generated ${countText(column.outputRate)}/s · prefill ${countText(column.prefillRate)}/s`,
    top: countText,
  },
  {
    title: "Batch and queue",
    columns: "load",
    series: [
      { field: "running", colour: "decode", hatch: null },
      { field: "waiting", colour: "waiting", hatch: "recovering" },
    ],
    text: (column) => `${column.running} + ${column.waiting}`,
    detail: (column) => `running ${column.running} · waiting ${column.waiting}`,
    top: countText,
  },
  {
    title: "KV blocks",
    columns: "load",
    series: [
      { field: "used", colour: "used", hatch: null },
      { field: "cached", colour: "cached", hatch: "cached" },
    ],
    text: (column) => `${Math.round((100 * column.used) / Math.max(1, column.used + column.cached + column.free))} %`,
    detail: (column) => `used ${column.used} · cached ${column.cached} · free ${column.free}`,
    top: countText,
    highest: (columns) => (columns.length ? columns.at(-1).used + columns.at(-1).cached + columns.at(-1).free : 1),
  },
];

/** view: {width, scale, engine, theme, hoverTime} */
export function drawCharts(canvas, view) {
  const { scale, theme, engine } = view;
  const height = CHARTS.length * CHART_HEIGHT;
  const context = prepare(canvas, view.width, height, theme.background);
  const columns = { steps: stepColumns(engine, scale), load: loadColumns(engine, scale) };
  CHARTS.forEach((chart, index) => drawChart(context, chart, columns[chart.columns], index * CHART_HEIGHT, view));
  drawBands(context, scale, 0, height, engine, theme, hatching, null);
  if (view.hoverTime !== null) drawHover(context, columns, view, height);
}

function drawChart(context, chart, columns, top, { scale, theme, width, hoverTime }) {
  const bottom = top + CHART_HEIGHT - 5;
  const highest = chart.highest?.(columns) ?? usualHighest(columns.map((column) => stacked(chart, column)));
  context.fillStyle = theme.grid;
  context.fillRect(0, bottom, width, 1);
  for (const column of columns) drawColumn(context, chart, column, bottom, COLUMN_HEIGHT / highest, scale, theme);
  const latest = columnAt(columns, hoverTime ?? scale.end) ?? (hoverTime === null ? columns.at(-1) : null);
  drawTitle(context, chart, latest, highest, top, scale, theme);
}

function stacked(chart, column) {
  return chart.series.reduce((sum, { field }) => sum + column[field], 0);
}

function drawColumn(context, chart, column, bottom, perUnit, scale, theme) {
  const x = Math.max(scale.left, scale.x(column.start));
  const width = Math.max(
    1,
    Math.min(scale.left + scale.width, scale.x(column.end)) - x - (chart.columns === "steps" ? 0.6 : 0),
  );
  let y = bottom;
  for (const { field, colour, hatch } of chart.series) {
    const height = Math.min(y - (bottom - COLUMN_HEIGHT), column[field] * perUnit);
    if (height <= 0) continue;
    y -= height;
    context.fillStyle = theme[colour];
    context.fillRect(x, y, width, height);
    if (!hatch || width * height < 12) continue;
    context.fillStyle = hatching(context, hatch, theme.mark);
    context.fillRect(x, y, width, height);
  }
  if (stacked(chart, column) * perUnit > COLUMN_HEIGHT + 1) cutMark(context, x, bottom, width, theme);
}

/** Marks a column that is higher than the chart. */
function cutMark(context, x, bottom, width, theme) {
  context.fillStyle = theme.text;
  context.fillRect(x, bottom - COLUMN_HEIGHT - 2, Math.max(2, width), 2);
}

function drawTitle(context, chart, latest, highest, top, scale, theme) {
  const narrow = scale.left < 120;
  context.textAlign = "left";
  context.font = `${narrow ? 10 : 11}px ${FONT}`;
  context.fillStyle = theme.muted;
  context.fillText(fitText(context, chart.title, scale.left - 12), 8, top + 13);
  context.font = `600 ${narrow ? 12 : 14}px ${FONT}`;
  context.fillStyle = theme.text;
  context.fillText(latest ? chart.text(latest) : "–", 8, top + 30);
  context.font = `9.5px ${FONT}`;
  context.fillStyle = theme.muted;
  context.fillText(chart.top(highest), scale.left + 3, top + 9);
}

function columnAt(columns, time) {
  return columns.find((column) => column.start <= time && time < column.end) ?? null;
}

function drawHover(context, columns, { scale, theme, hoverTime }, height) {
  const x = scale.x(hoverTime);
  if (x < scale.left || x > scale.left + scale.width) return;
  context.fillStyle = theme.muted;
  context.fillRect(Math.round(x), 0, 1, height);
  CHARTS.forEach((chart, index) => {
    const column = columnAt(columns[chart.columns], hoverTime);
    if (column) hoverText(context, chart.detail(column), x, index * CHART_HEIGHT + 9, scale, theme);
  });
}

function hoverText(context, text, x, y, scale, theme) {
  context.font = `10px ${FONT}`;
  const width = textWidth(context, text) + 8;
  const left = x + width + 6 < scale.left + scale.width ? x + 4 : Math.max(scale.left, x - width - 4);
  context.fillStyle = theme.background;
  context.globalAlpha = 0.9;
  context.fillRect(left, y - 7, width, 14);
  context.globalAlpha = 1;
  context.fillStyle = theme.text;
  context.textAlign = "left";
  context.fillText(text, left + 4, y);
}
