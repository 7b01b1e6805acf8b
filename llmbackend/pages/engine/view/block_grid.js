/** Lays out the blocks of a KV map in a rectangle; each cell shows the same number of adjacent blocks. */

const CELL_SIZES = [14, 12, 10, 9, 8, 7, 6, 5, 4, 3];

/** {cell (px), columns, rows, perCell (blocks)} for numBlocks blocks in width × height pixels */
export function blockGrid(numBlocks, width, height) {
  for (let perCell = 1; ; perCell *= 2) {
    const cells = Math.ceil(numBlocks / perCell);
    for (const cell of CELL_SIZES) {
      const columns = Math.floor(width / cell);
      const rows = Math.ceil(cells / Math.max(1, columns));
      if (columns > 0 && rows * cell <= height) return { cell, columns, rows, perCell };
    }
    if (perCell > numBlocks) return { cell: 3, columns: 1, rows: 1, perCell };
  }
}

/** The first block at a point, or -1. */
export function blockAt(grid, numBlocks, x, y) {
  const column = Math.floor(x / grid.cell);
  const row = Math.floor(y / grid.cell);
  if (column < 0 || column >= grid.columns || row < 0 || row >= grid.rows) return -1;
  const block = (row * grid.columns + column) * grid.perCell;
  return block < numBlocks ? block : -1;
}

/** Calls visit(column, row, length) for each horizontal run of cells with the run's blocks. */
export function eachStretch(grid, first, count, visit) {
  let cell = Math.floor(first / grid.perCell);
  const end = Math.floor((first + count - 1) / grid.perCell) + 1;
  while (cell < end) {
    const row = Math.floor(cell / grid.columns);
    const column = cell % grid.columns;
    const length = Math.min(end - cell, grid.columns - column);
    visit(column, row, length);
    cell += length;
  }
}
