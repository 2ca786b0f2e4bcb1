// Drawings on a canvas: sharp, as wide as there is room, in the colours of the day, with a word at the pointer.
"use strict";

const repaints = new Set();

/** The page's colours as they are now. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ink: colour("ink"), soft: colour("soft"), grid: colour("grid"), paper: colour("paper"), points: colour("points") };
}

function lineColour(index, now) {
  const colour = palette.lines[index % palette.lines.length];
  return colour === "#000000" ? now.ink : colour;
}

function repaintAll() {
  for (const one of repaints) one.paint();
}

/** Forget drawings that are no longer on the page. */
function forgetGone() {
  for (const one of repaints) {
    if (one.holder.isConnected) continue;
    one.drop();
    repaints.delete(one);
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
 * A canvas in a holder. `height(width)`, `draw(context, width, height, theme)`, and `hover(x, y)`, which says what
 * is there or nothing.
 */
function drawing(text, { height, draw, hover }) {
  const canvas = make("canvas", { role: "img", "aria-label": text });
  const tip = make("div", { class: "tip", hidden: true });
  const holder = make("div", { class: "drawing" }, canvas, tip);
  const one = { holder, paint, drop() {} };

  function paint() {
    const width = holder.clientWidth;
    if (!width) return;
    const high = Math.round(height(width));
    const scale = Math.max(2, window.devicePixelRatio || 1);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(high * scale);
    canvas.style.height = `${high}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    draw(context, width, high, theme());
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const words = hover && hover(x, y);
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words;
    const right = Math.max(0, holder.clientWidth - tip.offsetWidth - 2);
    tip.style.left = `${Math.min(Math.max(0, x + 12), right)}px`;
    tip.style.top = `${Math.max(0, y - tip.offsetHeight - 8)}px`;
  }

  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  new ResizeObserver(paint).observe(holder);
  repaints.add(one);
  return one;
}

/** Round numbers between two, about so many. */
function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Which of `count` places get a name, if each needs so many dots. */
function every(count, room, needed) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
  return steps.find((step) => (step * room) / Math.max(1, count) >= needed) || 1000;
}

// Cividis, which colour-blind readers see as others do.
const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];

function cividis(share) {
  const at = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(at));
  const mixed = CIVIDIS[low].map((value, i) => Math.round(value + (at - low) * (CIVIDIS[low + 1][i] - value)));
  return `rgb(${mixed.join(",")})`;
}
