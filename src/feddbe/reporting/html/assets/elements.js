// Creation of elements, and functions shared by all parts of the page. Text is inserted as text, never as markup.
"use strict";

let palette = { lines: [], dashes: [], labels: [] };

/** Create an element with attributes (functions such as `onclick` are listeners) and children; a string becomes text. */
function createNode(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Return a name with line breaks allowed before + and ( and after punctuation. */
function breakable(name) {
  return name.split(/(?=[+(])|(?<=[,_/])/).flatMap((piece, i) => (i ? [createNode("wbr"), piece] : [piece]));
}

const states = new Map();

/** Return the reader's choices in a block, which are kept when the page is updated. */
function getState(id) {
  if (!states.has(id)) states.set(id, {});
  return states.get(id);
}

/** Create a selection among names, or null if there is only one. */
function selectBox(id, label, names, selected, onchange) {
  if (names.length < 2) return null;
  const select = createNode("select", { id: `${id}-choice`, onchange: () => onchange(select.selectedIndex) });
  for (const name of names) select.append(createNode("option", {}, name));
  select.selectedIndex = selected;
  return createNode("label", { class: "control" }, createNode("span", {}, label), select);
}

function checkbox(id, label, checked, onchange) {
  const box = createNode("input", { type: "checkbox", id, onchange: () => onchange(box.checked) });
  box.checked = checked;
  return createNode("label", { class: "control" }, box, ` ${label}`);
}

/** Create a collapsible part, filled when it is first opened. */
function collapsible(id, title, fill) {
  const state = getState(id);
  const body = createNode("div", { class: "opened" });
  const details = createNode("details", { id }, createNode("summary", {}, title), body);
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

/** Return a number with about four significant digits; percentages (by unit) with two decimals. */
function formatNumber(value, unit = "") {
  if (value === null || value === undefined) return "–";
  if (unit === "%") return value.toFixed(2);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return value.toFixed(size >= 1000 ? 0 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

/** Create a figure: its drawing, the caption, and its numbers as a table. */
function figure(block, parts, numbers) {
  const table = () => {
    const { columns, rows } = numbers();
    return [tables.table({ id: `${block.id}-numbers-table`, caption: "", columns, rows, footer: [], filter: false })];
  };
  return createNode(
    "figure",
    { id: `figure-${block.id}` },
    ...parts,
    createNode("figcaption", {}, block.caption),
    collapsible(`${block.id}-numbers`, "Numbers as a table", table),
  );
}
