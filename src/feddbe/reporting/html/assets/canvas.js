// Drawings on a canvas: sharp, as wide as the page, in the colors of the theme, with a tooltip.
"use strict";

const repaints = new Set();

/** Return the colors of the current theme. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: color("ink"),
    soft: color("soft"),
    grid: color("grid"),
    paper: color("paper"),
    points: color("points"),
  };
}

function lineColor(index, colors) {
  const color = palette.lines[index % palette.lines.length];
  return color === "#000000" ? colors.ink : color;
}

function repaintAll() {
  for (const drawn of repaints) drawn.paint();
}

/** Drop drawings that are no longer on the page. */
function dropDetached() {
  for (const drawn of repaints) {
    if (drawn.holder.isConnected) continue;
    drawn.drop();
    repaints.delete(drawn);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintAll);
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("printed"); // paper is white
  repaintAll();
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printed");
  repaintAll();
});

/**
 * Create a canvas in a holder. `height(width)` returns its height, `draw(context, width, height, theme)` paints it,
 * and `hover(x, y)` returns the text of the tooltip or null.
 */
function drawing(text, { height, draw, hover }) {
  const canvas = createNode("canvas", { role: "img", "aria-label": text });
  const tip = createNode("div", { class: "tip", hidden: true });
  const holder = createNode("div", { class: "drawing" }, canvas, tip);
  const result = { holder, paint, drop() {} };

  function paint() {
    const width = holder.clientWidth;
    if (!width) return;
    const pixels = Math.round(height(width));
    const scale = Math.max(2, window.devicePixelRatio || 1);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(pixels * scale);
    canvas.style.height = `${pixels}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    draw(context, width, pixels, theme());
  }

  function showTip(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const message = hover && hover(x, y);
    tip.hidden = !message;
    if (!message) return;
    tip.textContent = message;
    const right = Math.max(0, holder.clientWidth - tip.offsetWidth - 2);
    tip.style.left = `${Math.min(Math.max(0, x + 12), right)}px`;
    tip.style.top = `${Math.max(0, y - tip.offsetHeight - 8)}px`;
  }

  canvas.addEventListener("pointermove", showTip);
  canvas.addEventListener("pointerdown", showTip);
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  new ResizeObserver(paint).observe(holder);
  repaints.add(result);
  return result;
}

/** Return about `count` round numbers between two numbers. */
function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++)
    values.push(Number((i * step).toPrecision(12)));
  return values;
}

/** Return the step between labeled cells, if `count` cells share `room` pixels and a label needs `needed`. */
function labelStep(count, room, needed) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
  return steps.find((step) => (step * room) / Math.max(1, count) >= needed) || 1000;
}

// Cividis, which is readable with color blindness.
const CIVIDIS = [
  [0, 34, 78],
  [18, 53, 112],
  [59, 73, 108],
  [87, 93, 109],
  [112, 113, 115],
  [138, 134, 120],
  [165, 156, 116],
  [195, 179, 105],
  [225, 204, 85],
  [254, 232, 56],
];

function cividis(share) {
  const position = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(position));
  const mixed = CIVIDIS[low].map((value, i) =>
    Math.round(value + (position - low) * (CIVIDIS[low + 1][i] - value)),
  );
  return `rgb(${mixed.join(",")})`;
}
