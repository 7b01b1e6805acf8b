/** Draws the lanes of lane_layout.js: one row per request, with a box for each activity. */

import { FONT, drawBands, fitText, prepare, textWidth } from "./canvas.js";
import { laneLabels, segmentBoxes, showsSteps, stepBoxes } from "./lane_layout.js";
import { axisTicks } from "./time_window.js";
import { KIND_HEIGHTS, hatching } from "./theme.js";
import { KIND_LETTERS, durationText, progressText, shortReason } from "./words.js";

export const AXIS_HEIGHT = 20;
const MIN_HATCH_PX = 7;
const MIN_LETTER_PX = 15;

/** view: {width, laneHeight, numLanes, scale, shown, engine, theme, selected, hoverTime} */
export function drawLanes(canvas, view) {
  const { scale, theme, engine, laneHeight, numLanes } = view;
  const height = AXIS_HEIGHT + Math.max(1, numLanes) * laneHeight + 4;
  const context = prepare(canvas, view.width, height, theme.background);
  drawStripes(context, view);
  drawAxis(context, scale, height, theme);
  const detailed = showsSteps(engine.steps, scale);
  const boxes = detailed ? stepBoxes(view.shown, engine.steps, scale) : segmentBoxes(view.shown, scale);
  context.save();
  context.beginPath();
  context.rect(scale.left, 0, scale.width, height);
  context.clip();
  drawBoxes(context, boxes, view, detailed ? 1 : 0);
  drawEnds(context, view);
  drawBands(context, scale, 0, height, engine, theme, hatching, recoveryText);
  context.restore();
  if (view.hoverTime !== null) drawCrosshair(context, scale, view.hoverTime, height, theme);
}

export function recoveryText(recovery) {
  const reason = recovery.reason.replace(/^the engine process /, "") || "engine died";
  return recovery.end === Infinity
    ? `${reason}: recovering`
    : `${reason}: recovered in ${durationText(recovery.recoveryMs)}`;
}

function drawStripes(context, { width, laneHeight, numLanes, theme, selected, shown }) {
  context.fillStyle = theme.stripe;
  for (let lane = 0; lane < numLanes; lane += 2)
    context.fillRect(0, AXIS_HEIGHT + lane * laneHeight, width, laneHeight);
  const track = shown.find((each) => each.request === selected);
  if (!track) return;
  context.fillStyle = theme.selected;
  context.globalAlpha = 0.13;
  context.fillRect(0, AXIS_HEIGHT + track.lane * laneHeight, width, laneHeight);
  context.globalAlpha = 1;
}

function drawAxis(context, scale, height, theme) {
  const { ticks, step } = axisTicks(scale, Math.max(2, Math.floor(scale.width / 90)));
  context.font = `10.5px ${FONT}`;
  context.textAlign = "center";
  for (const time of ticks) {
    const x = Math.round(scale.x(time)) + 0.5;
    context.fillStyle = theme.grid;
    context.fillRect(x - 0.5, AXIS_HEIGHT - 4, 1, height);
    context.fillStyle = theme.muted;
    if (x > scale.left + 22 && x < scale.left + scale.width - 22) context.fillText(clockText(time, step), x, 8);
  }
}

/** The time of day, with tenths if the axis has them. */
export function clockText(time, step = 1) {
  const date = new Date(Math.round(time * 1000));
  const clock = date.toTimeString().slice(0, 8);
  return step < 1 ? `${clock}.${Math.floor(date.getMilliseconds() / 100)}` : clock;
}

function drawBoxes(context, boxes, view, gap) {
  const { laneHeight, theme, scale } = view;
  const inner = laneHeight - (laneHeight > 16 ? 6 : 3);
  for (const box of boxes) {
    const height = Math.max(3, inner * KIND_HEIGHTS[box.kind]);
    const y = AXIS_HEIGHT + box.lane * laneHeight + (laneHeight - height) / 2;
    const width = Math.max(1, box.width - gap);
    context.globalAlpha = opacity(box.track, scale.end);
    if (box.kind === "waiting") drawWaiting(context, box, y + height / 2, laneHeight, theme);
    else if (box.kind === "preempted") drawPreempted(context, box, y, height, laneHeight, theme);
    else drawWork(context, box, y, width, height, laneHeight, theme);
  }
  context.globalAlpha = 1;
}

function opacity(track, end) {
  if (!track.ended || track.ended.time > end) return 1;
  return Math.max(0.5, 1 - (end - track.ended.time) / 6);
}

function drawWork(context, box, y, width, height, laneHeight, theme) {
  if (box.kind === "recovering") context.globalAlpha *= 0.5;
  context.fillStyle = theme[box.kind];
  context.fillRect(box.x, y, width, height);
  if (width >= MIN_HATCH_PX && box.kind !== "decode") {
    context.fillStyle = hatching(context, box.kind, theme.mark);
    context.fillRect(box.x, y, width, height);
  }
  if (width < MIN_LETTER_PX || height < 7) return;
  letter(context, boxText(box), box.x, y, width, height, theme, laneHeight);
}

function boxText({ kind, tokens, drafts, steps }) {
  if (kind === "drafts") return `+${drafts}`;
  if (kind === "decode") return steps > 1 ? `${tokens}` : "D";
  return `${KIND_LETTERS[kind]} ${tokens || ""}`.trim();
}

function letter(context, text, x, y, width, height, theme, laneHeight) {
  context.font = `600 ${laneHeight > 16 ? 10.5 : 9}px ${FONT}`;
  context.textAlign = "left";
  if (textWidth(context, text) + 8 > width) return;
  context.fillStyle = theme.onKind;
  context.fillText(text, x + 4, y + height / 2 + 0.5);
}

function drawWaiting(context, box, middle, laneHeight, theme) {
  context.strokeStyle = theme.waiting;
  context.lineWidth = 1.5;
  context.setLineDash([4, 4]);
  context.beginPath();
  context.moveTo(box.x, middle);
  context.lineTo(box.x + box.width, middle);
  context.stroke();
  context.setLineDash([]);
  chip(context, `waits: ${shortReason(box.reason)}`, box, middle, laneHeight, theme, theme.muted);
}

function drawPreempted(context, box, y, height, laneHeight, theme) {
  context.strokeStyle = theme.preempted;
  context.lineWidth = 1.5;
  context.strokeRect(box.x + 0.75, y + 0.75, Math.max(1, box.width - 1.5), height - 1.5);
  chip(
    context,
    `X preempted: ${shortReason(box.reason || "kv_blocks")}`,
    box,
    y + height / 2,
    laneHeight,
    theme,
    theme.preempted,
  );
}

/** Text in an idle part of a lane, on its background colour. */
function chip(context, text, box, middle, laneHeight, theme, colour) {
  context.font = `${laneHeight > 16 ? 10.5 : 9}px ${FONT}`;
  const shown = fitText(context, text, box.width - 12);
  if (!shown || shown.length < 4) return;
  const width = textWidth(context, shown);
  context.fillStyle = box.lane % 2 ? theme.background : theme.stripe;
  context.fillRect(box.x + 5, middle - 6, width + 4, 12);
  context.fillStyle = colour;
  context.textAlign = "left";
  context.fillText(shown, box.x + 7, middle + 0.5);
}

function drawEnds(context, { shown, scale, laneHeight, theme }) {
  const nextStart = new Map();
  context.textAlign = "left";
  context.font = `${laneHeight > 16 ? 10.5 : 9}px ${FONT}`;
  for (const track of [...shown].sort((a, b) => b.received - a.received)) {
    const next = nextStart.get(track.lane) ?? Infinity;
    nextStart.set(track.lane, track.received);
    if (!track.ended || track.ended.time > scale.end || track.ended.time < scale.start) continue;
    const x = scale.x(track.ended.time);
    const top = AXIS_HEIGHT + track.lane * laneHeight;
    context.globalAlpha = Math.max(0.6, opacity(track, scale.end));
    context.fillStyle = theme.text;
    context.fillRect(x, top + 3, 1.5, laneHeight - 6);
    context.fillStyle = theme.muted;
    const room = Math.min(scale.x(next), scale.left + scale.width) - x - 8;
    context.fillText(fitText(context, track.ended.finishReason || "ended", room), x + 5, top + laneHeight / 2 + 0.5);
  }
  context.globalAlpha = 1;
}

/** The names of the rows, on a separate canvas, because they rarely change and text is expensive to draw. */
export function drawLaneLabels(canvas, { shown, numLanes, scale, laneHeight, theme, selected }) {
  const small = laneHeight <= 16;
  const width = scale.left - 4;
  canvas.style.width = `${width}px`;
  const context = prepare(canvas, width, AXIS_HEIGHT + Math.max(1, numLanes) * laneHeight, theme.background);
  drawStripes(context, { width, laneHeight, numLanes, theme, selected, shown });
  for (const [lane, track] of laneLabels(shown, scale.end)) {
    const middle = AXIS_HEIGHT + lane * laneHeight + laneHeight / 2 + 0.5;
    context.globalAlpha = track.ended && track.ended.time <= scale.end ? 0.55 : 1;
    context.font = `${small ? 10 : 11.5}px ${FONT}`;
    context.textAlign = "right";
    context.fillStyle = theme.muted;
    const tokens = progressText(track, scale.end);
    const tokensWidth = textWidth(context, tokens);
    context.fillText(tokens, width - 4, middle);
    context.textAlign = "left";
    context.fillStyle = track.request === selected ? theme.selected : theme.text;
    context.font = `600 ${small ? 10 : 11.5}px ${FONT}`;
    const name = width < 120 ? `#${track.request}` : `#${track.request} ${track.id}`.trim();
    context.fillText(fitText(context, name, width - tokensWidth - 20), 8, middle);
  }
  context.globalAlpha = 1;
}

function drawCrosshair(context, scale, time, height, theme) {
  const x = scale.x(time);
  if (x < scale.left || x > scale.left + scale.width) return;
  context.fillStyle = theme.muted;
  context.fillRect(Math.round(x), 0, 1, height);
}
