/** Draws KV blocks: free ones empty, cached hatched, used filled, shared with a white bar, the selected request's framed. */

import { prepare } from "./canvas.js";
import { blockGrid, eachStretch } from "./block_grid.js";
import { hatching } from "./theme.js";

export const MAX_MAP_HEIGHT = 300;

/** Returns the grid, to find the block under the pointer. selected: a request's number or null */
export function drawBlocks(canvas, map, { width, theme, selected }) {
  const grid = blockGrid(map.numBlocks, width, MAX_MAP_HEIGHT);
  const context = prepare(canvas, width, grid.rows * grid.cell, theme.background);
  // If a cell stands for several blocks, used ones are drawn last, so that they are visible.
  for (const state of ["free", "cached", "used"]) {
    for (const run of map.runs) if (run[2] === state) drawRun(context, grid, run, theme, selected);
  }
  return grid;
}

function drawRun(context, grid, [first, count, state, request, references], theme, selected) {
  const gap = grid.cell >= 5 ? 1 : grid.cell >= 4 ? 0.5 : 0;
  const isSelected = selected !== null && request === selected;
  eachStretch(grid, first, count, (column, row, length) => {
    for (let at = column; at < column + length; at++) {
      const [x, y, size] = [at * grid.cell, row * grid.cell, grid.cell - gap];
      context.fillStyle = isSelected ? theme.selected : theme[state];
      context.fillRect(x, y, size, size);
      if (state === "cached" && size >= 4) hatchCell(context, x, y, size, theme);
      if (references > 1) sharedMark(context, x, y, size, theme);
    }
  });
}

function hatchCell(context, x, y, size, theme) {
  context.fillStyle = hatching(context, "cached", theme.mark);
  context.fillRect(x, y, size, size);
}

function sharedMark(context, x, y, size, theme) {
  context.fillStyle = theme.onKind;
  const bar = Math.max(1, size / 4);
  context.fillRect(x + bar, y + (size - bar) / 2, size - 2 * bar, bar);
}
