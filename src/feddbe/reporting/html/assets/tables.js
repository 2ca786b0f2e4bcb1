// Tables that can be sorted and filtered.
"use strict";

/** Letters of a text from which its column is wide. */
const LONG_TEXT = 20;

const tables = {
  table(block) {
    const state = getState(block.id);
    const numeric = block.columns.map((_, i) => block.rows.some((row) => typeof row[i] === "object"));
    const lines = block.rows.map((row) => ({ row, element: tables.line(row, numeric) }));
    const body = createNode("tbody");
    const count = createNode("span", { class: "count", "aria-live": "polite" });

    const headings = block.columns.map((name, index) => {
      const button = createNode(
        "button",
        { type: "button", id: `${block.id}-sort-${index}`, onclick: () => sort(index) },
        name,
      );
      return createNode("th", { scope: "col", class: numeric[index] ? "number" : null }, button);
    });

    function sort(index) {
      const initial = numeric[index] ? -1 : 1;
      state.direction = state.sort === index ? -state.direction : initial;
      state.sort = index;
      show();
    }

    function show() {
      const words = (state.words || "").toLowerCase().split(/\s+/).filter(Boolean);
      const kept = lines.filter(({ row }) => {
        const text = row
          .filter((_, i) => !numeric[i])
          .join(" ")
          .toLowerCase();
        return words.every((word) => text.includes(word));
      });
      if (state.sort !== undefined)
        kept.sort((a, b) => tables.compare(a.row[state.sort], b.row[state.sort], state.direction));
      body.replaceChildren(...kept.map(({ element }) => element));
      headings.forEach((heading, index) => {
        const sorted = state.sort === index ? (state.direction > 0 ? "ascending" : "descending") : "none";
        heading.setAttribute("aria-sort", sorted);
      });
      count.textContent = words.length ? `${kept.length} of ${lines.length}` : "";
    }

    show();
    const table = createNode(
      "table",
      { id: `table-${block.id}` },
      createNode("thead", {}, createNode("tr", {}, ...headings)),
      body,
      createNode("tfoot", {}, ...block.footer.map((row) => tables.line(row, numeric))),
    );
    const scroll = createNode(
      "div",
      {
        class: "scroll",
        tabindex: 0,
        role: "region",
        "aria-label": block.heading || block.caption.split(".")[0] || block.columns[0],
      },
      table,
    );
    return createNode(
      "div",
      { class: "table" },
      block.heading ? createNode("h3", {}, block.heading) : null,
      block.filter ? tables.filter(block, state, show, count) : null,
      scroll,
      block.caption ? createNode("p", { class: "caption" }, block.caption) : null,
    );
  },

  filter(block, state, show, count) {
    const input = createNode("input", {
      type: "search",
      id: `${block.id}-filter`,
      autocomplete: "off",
      oninput: () => {
        state.words = input.value;
        show();
      },
    });
    input.value = state.words || "";
    return createNode(
      "div",
      { class: "controls" },
      createNode("label", { class: "control" }, createNode("span", {}, "Filter"), input),
      count,
    );
  },

  /** Create a list of names and values that cannot be sorted. */
  facts(block) {
    const pairs = block.rows.map(([name, value]) =>
      createNode("div", {}, createNode("dt", {}, name), createNode("dd", {}, value)),
    );
    return createNode(
      "div",
      { class: "table" },
      block.caption ? createNode("h3", {}, block.caption) : null,
      createNode("dl", {}, ...pairs),
    );
  },

  line(row, numeric) {
    const cells = row.map((cell, index) => {
      const text = tables.text(cell);
      const textKind = text.length > LONG_TEXT ? "long" : null;
      const kind = numeric[index] ? "number" : textKind;
      const pieces = breakable(text);
      return index
        ? createNode("td", { class: kind }, ...pieces)
        : createNode("th", { scope: "row", class: kind }, ...pieces);
    });
    return createNode("tr", {}, ...cells);
  },

  text: (cell) => (typeof cell === "object" ? cell.text : String(cell)),

  /** Compare numbers by value and text alphabetically; cells without a value come last in both directions. */
  compare(a, b, direction) {
    if (typeof a !== "object") return direction * String(a).localeCompare(String(b), "en", { numeric: true });
    if (a.value === null || b.value === null) return (a.value === null) - (b.value === null);
    return direction * (a.value - b.value);
  },
};
