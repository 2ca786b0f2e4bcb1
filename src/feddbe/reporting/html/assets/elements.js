// Making elements, and what all parts of the page share. Text goes in as text, never as markup.
"use strict";

let palette = { lines: [], dashes: [], labels: [] };

/** An element with attributes (`onclick` and the like are listeners) and children; a string becomes text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A name that may break before + and ( and after a comma rather than anywhere. */
function breakable(name) {
  return name.split(/(?=[+(])|(?<=[,_/])/).flatMap((piece, i) => (i ? [make("wbr"), piece] : [piece]));
}

const memory = new Map();

/** What a reader has chosen in a block; it outlives news. */
function remembered(id) {
  if (!memory.has(id)) memory.set(id, {});
  return memory.get(id);
}

/** A choice among names; nothing where there is only one. */
function chooser(id, label, names, chosen, onchange) {
  if (names.length < 2) return null;
  const select = make("select", { id: `${id}-choice`, onchange: () => onchange(select.selectedIndex) });
  for (const name of names) select.append(make("option", {}, name));
  select.selectedIndex = chosen;
  return make("label", { class: "control" }, make("span", {}, label), select);
}

function checkbox(id, label, checked, onchange) {
  const box = make("input", { type: "checkbox", id, onchange: () => onchange(box.checked) });
  box.checked = checked;
  return make("label", { class: "control" }, box, ` ${label}`);
}

/** A part that opens; it is filled when it is first opened. */
function opening(id, words, fill) {
  const state = remembered(id);
  const body = make("div", { class: "opened" });
  const details = make("details", { id }, make("summary", {}, words), body);
  const show = () => {
    state.open = details.open;
    if (details.open && !body.hasChildNodes()) body.append(...fill());
  };
  details.addEventListener("toggle", show);
  if (state.open) {
    details.open = true;
    show();
  }
  return details;
}

/** A number with as many digits as it deserves; of percent (by its unit) always two. */
function shown(value, unit = "") {
  if (value === null || value === undefined) return "–";
  if (unit === "%") return value.toFixed(2);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return value.toFixed(size >= 1000 ? 0 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

/** A figure: its drawing, the caption, and its numbers as a table. */
function figure(block, parts, numbers) {
  const table = () => {
    const { columns, rows } = numbers();
    return [tables.table({ id: `${block.id}-numbers-table`, caption: "", columns, rows, filter: false })];
  };
  return make(
    "figure", { id: `figure-${block.id}` }, ...parts,
    make("figcaption", {}, block.caption),
    opening(`${block.id}-numbers`, "Numbers as a table", table),
  );
}
