/** Colours and marks for light and dark pages. Kinds of work differ by mark, not only by colour (palette of Okabe and Ito). */

const LIGHT = {
  dark: false,
  background: "#ffffff",
  stripe: "#f5f6f8",
  grid: "#dfe3e8",
  text: "#15191e",
  muted: "#57606a",
  mark: "rgba(255,255,255,0.55)",
  onKind: "#ffffff",
  prefill: "#2f6fd6",
  decode: "#14936f",
  drafts: "#5f8f0e",
  recompute: "#c9700a",
  preempted: "#c8324a",
  waiting: "#98a2b3",
  recovering: "#8f4cc0",
  schedule: "#c9700a",
  run: "#14936f",
  commit: "#2f6fd6",
  free: "#e9ecf1",
  cached: "#a9c4e8",
  used: "#14936f",
  selected: "#d9167f",
};

const DARK = {
  dark: true,
  background: "#101316",
  stripe: "#171b20",
  grid: "#2c333b",
  text: "#e7eaee",
  muted: "#9ba6b2",
  mark: "rgba(10,14,20,0.5)",
  onKind: "#0d1117",
  prefill: "#6ea2ff",
  decode: "#34b98f",
  drafts: "#a3d13b",
  recompute: "#f2a33c",
  preempted: "#ff7286",
  waiting: "#7d8796",
  recovering: "#c48bea",
  schedule: "#f2a33c",
  run: "#34b98f",
  commit: "#6ea2ff",
  free: "#262b34",
  cached: "#3f5f8a",
  used: "#34b98f",
  selected: "#ff5fb0",
};

export function theme(dark) {
  return dark ? DARK : LIGHT;
}

/** Fraction of a lane's height that a kind fills: prefill is higher than decode. */
export const KIND_HEIGHTS = {
  prefill: 1,
  recompute: 1,
  decode: 0.62,
  drafts: 0.82,
  preempted: 0.62,
  waiting: 0.3,
  recovering: 0.62,
};

const HATCHES = {
  prefill: (c) => line(c, 0, 6, 6, 0),
  recompute: (c) => {
    line(c, 0, 6, 6, 0);
    line(c, 0, 0, 6, 6);
  },
  drafts: (c) => {
    c.beginPath();
    c.arc(3, 3, 1.1, 0, 7);
    c.fill();
  },
  recovering: (c) => line(c, 3, 0, 3, 6),
  cached: (c) => line(c, 0, 6, 6, 0),
  unwatched: (c) => line(c, 0, 6, 6, 0),
};

const patterns = new Map();

/** The hatch pattern of a kind, or null for kinds without one. */
export function hatching(context, kind, colour) {
  if (!HATCHES[kind]) return null;
  const key = `${kind} ${colour}`;
  if (!patterns.has(key)) patterns.set(key, context.createPattern(tile(HATCHES[kind], colour), "repeat"));
  return patterns.get(key);
}

function tile(paint, colour) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 6;
  const context = canvas.getContext("2d");
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1;
  paint(context);
  return canvas;
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
