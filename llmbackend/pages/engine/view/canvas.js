/** Canvases at the screen's resolution, and text that fits its space. */

export const FONT = "Inter, Roboto, system-ui, sans-serif";

/** Sizes the canvas for the screen's pixel ratio and clears it. Returns its context, scaled to CSS pixels. */
export function prepare(canvas, width, height, background) {
  const ratio = window.devicePixelRatio || 1;
  const [pixelsWide, pixelsHigh] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelsWide || canvas.height !== pixelsHigh) {
    canvas.width = pixelsWide;
    canvas.height = pixelsHigh;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = background;
  context.fillRect(0, 0, width, height);
  context.textBaseline = "middle";
  return context;
}

const MAX_WIDTHS = 5000;
const widths = new Map(); // by font and text

/** The width of a text in the context's font; cached, because the same texts are drawn repeatedly. */
export function textWidth(context, text) {
  const key = `${context.font} ${text}`;
  let width = widths.get(key);
  if (width === undefined) {
    if (widths.size >= MAX_WIDTHS) widths.clear();
    width = context.measureText(text).width;
    widths.set(key, width);
  }
  return width;
}

/** The text, truncated with "…" if it is too wide; "" if not even that fits. */
export function fitText(context, text, room) {
  if (textWidth(context, text) <= room) return text;
  let length = Math.floor((text.length * room) / Math.max(1, textWidth(context, text))) - 1;
  while (length > 0 && textWidth(context, `${text.slice(0, length)}…`) > room) length--;
  return length > 0 ? `${text.slice(0, length)}…` : "";
}

/** Bands across all lanes or charts: times without a feed, and times without the engine. */
export function drawBands(context, scale, top, height, engine, theme, hatching, labels) {
  for (const { start, end } of engine.unwatched) {
    const [x, width] = span(scale, start, end);
    if (width <= 0) continue;
    context.fillStyle = hatching(context, "unwatched", theme.grid);
    context.fillRect(x, top, width, height);
    if (labels) bandLabel(context, "not watched", x, top, width, theme.muted, { theme, scale });
  }
  for (const recovery of engine.recoveries) {
    const [x, width] = span(scale, recovery.start, recovery.end);
    if (x >= scale.left + scale.width || x + width < scale.left || recovery.end < scale.start) continue;
    context.fillStyle = theme.recovering;
    context.globalAlpha = 0.14;
    context.fillRect(x, top, Math.max(2, width), height);
    context.globalAlpha = 1;
    if (recovery.start >= scale.start) context.fillRect(x, top, 1.5, height);
    if (recovery.end <= scale.end) context.fillRect(x + width - 1.5, top, 1.5, height);
    if (labels) bandLabel(context, labels(recovery), x, top, scale.width, theme.recovering, { theme, scale });
  }
}

function span(scale, start, end) {
  const x = Math.max(scale.left, scale.x(start));
  return [x, Math.min(scale.left + scale.width, end === Infinity ? Infinity : scale.x(end)) - x];
}

/** boxed: {theme, scale} for a label in its own box, left of the band if there is no space to its right */
function bandLabel(context, text, x, top, room, colour, boxed = null) {
  context.font = `600 10.5px ${FONT}`;
  context.textAlign = "left";
  const shown = fitText(context, text, room - 8);
  if (!shown) return;
  const width = textWidth(context, shown);
  let left = x + 5;
  if (boxed) {
    const { theme, scale } = boxed;
    if (left + width + 4 > scale.left + scale.width) left = Math.max(scale.left + 4, x - width - 6);
    context.fillStyle = theme.background;
    context.globalAlpha = 0.9;
    context.fillRect(left - 3, top + 1, width + 6, 14);
    context.globalAlpha = 1;
  }
  context.fillStyle = colour;
  context.fillText(shown, left, top + 8);
}
