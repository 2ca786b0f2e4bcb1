// Tables that a reader can sort and filter.
"use strict";

const tables = {
  table(block) {
    const state = remembered(block.id);
    const numeric = block.columns.map((_, i) => block.rows.some((row) => typeof row[i] === "object"));
    const lines = block.rows.map((row) => ({ row, element: tables.line(row, numeric) }));
    const body = make("tbody");
    const count = make("span", { class: "count", "aria-live": "polite" });

    const headings = block.columns.map((name, index) => {
      const button = make("button", { type: "button", id: `${block.id}-sort-${index}`, onclick: () => sort(index) }, name);
      return make("th", { scope: "col", class: numeric[index] ? "number" : null }, button);
    });

    function sort(index) {
      const first = numeric[index] ? -1 : 1;
      state.way = state.sort === index ? -state.way : first;
      state.sort = index;
      show();
    }

    function show() {
      const words = (state.words || "").toLowerCase().split(/\s+/).filter(Boolean);
      const kept = lines.filter(({ row }) => {
        const text = row.filter((_, i) => !numeric[i]).join(" ").toLowerCase();
        return words.every((word) => text.includes(word));
      });
      if (state.sort !== undefined) kept.sort((a, b) => tables.compare(a.row[state.sort], b.row[state.sort], state.way));
      body.replaceChildren(...kept.map(({ element }) => element));
      headings.forEach((heading, index) => {
        const sorted = state.sort === index ? (state.way > 0 ? "ascending" : "descending") : "none";
        heading.setAttribute("aria-sort", sorted);
      });
      count.textContent = words.length ? `${kept.length} of ${lines.length}` : "";
    }

    show();
    const table = make("table", { id: `table-${block.id}` }, make("thead", {}, make("tr", {}, ...headings)), body);
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": block.heading || block.caption.split(".")[0] || block.columns[0] }, table);
    return make("div", { class: "table" }, block.heading ? make("h3", {}, block.heading) : null, block.filter ? tables.filter(block, state, show, count) : null, scroll,
      block.caption ? make("p", { class: "caption" }, block.caption) : null);
  },

  filter(block, state, show, count) {
    const input = make("input", { type: "search", id: `${block.id}-filter`, autocomplete: "off", oninput: () => {
      state.words = input.value;
      show();
    } });
    input.value = state.words || "";
    return make("div", { class: "controls" }, make("label", { class: "control" }, make("span", {}, "Filter"), input), count);
  },

  /** Names and values, where sorting would help nobody. */
  facts(block) {
    const pairs = block.rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    return make("div", { class: "table" }, block.caption ? make("h3", {}, block.caption) : null, make("dl", {}, ...pairs));
  },

  line(row, numeric) {
    const cells = row.map((cell, index) => {
      const kind = numeric[index] ? "number" : null;
      return index ? make("td", { class: kind }, tables.text(cell)) : make("th", { scope: "row", class: kind }, ...breakable(tables.text(cell)));
    });
    return make("tr", {}, ...cells);
  },

  text: (cell) => (typeof cell === "object" ? cell.text : String(cell)),

  /** Numbers by value, text as people order it; what has no value comes last, either way. */
  compare(a, b, way) {
    if (typeof a !== "object") return way * String(a).localeCompare(String(b), "en", { numeric: true });
    if (a.value === null || b.value === null) return (a.value === null) - (b.value === null);
    return way * (a.value - b.value);
  },
};
