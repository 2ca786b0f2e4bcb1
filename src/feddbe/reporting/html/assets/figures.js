// The other kinds of figures, each on a canvas, with a function for each kind.
"use strict";

/** Create a figure that shows one of several panels. */
function panelSelector(block, switches, createDrawing, numbers) {
  const state = getState(block.id);
  state.choice = Math.min(state.choice || 0, block.panels.length - 1);
  const selected = () => block.panels[state.choice];
  const note = createNode("p", { class: "note" });
  const drawn = createDrawing(selected, state);
  const update = (name) => (value) => {
    state[name] = value;
    note.textContent = selected().note;
    drawn.paint();
  };
  note.textContent = selected().note;
  const names = block.panels.map((panel) => panel.name);
  const boxes = switches.map(([name, label]) =>
    checkbox(`${block.id}-${name}`, label, Boolean(state[name]), update(name)),
  );
  const controls = createNode(
    "div",
    { class: "controls" },
    names.length < 2
      ? createNode("b", {}, names[0])
      : selectBox(block.id, "Show", names, state.choice, update("choice")),
    ...boxes,
  );
  return figure(block, [controls, drawn.holder, note], () => numbers(selected(), state));
}

/** Return a name, shortened to fit into `room` pixels. */
function truncateText(context, text, room) {
  let short = String(text);
  while (short.length > 1 && context.measureText(short).width > room) short = `${short.slice(0, -2)}…`;
  return short;
}

const figures = {
  curves: (block) => curves.figure(block),
  table: (block) => tables.table(block),
  facts: (block) => tables.facts(block),

  /** Create a grid of colored cells. */
  heatmap(block) {
    const low = Math.min(...block.panels.map((panel) => panel.limits[0])); // one scale for all panels
    const high = Math.max(...block.panels.map((panel) => panel.limits[1]));
    const share = (value) => (value - low) / (high - low || 1);
    const order = (panel, state) => {
      const rows = panel.rows.map((_, i) => i);
      const last = (i) => panel.values[i][panel.columns.length - 1] ?? -Infinity;
      return state.sorted ? rows.sort((a, b) => last(b) - last(a)) : rows;
    };
    const layout = (context, width, height, panel) => {
      const left =
        14 + Math.min(width / 4, Math.max(...panel.rows.map((name) => context.measureText(name).width)));
      return {
        left,
        top: 6,
        cell: (width - left - 4) / panel.columns.length,
        row: (height - 78) / panel.rows.length,
      };
    };

    return panelSelector(
      block,
      [["sorted", "highest first"]],
      (selected, state) => {
        let box = null;
        return drawing(block.text, {
          height: () => 78 + Math.min(560, Math.max(120, 15 * selected().rows.length)),
          draw(context, width, height, colors) {
            const panel = selected();
            box = layout(context, width, height, panel);
            const rows = order(panel, state);
            rows.forEach((row, i) => {
              panel.values[row].forEach((value, j) => {
                if (value === null) return;
                context.fillStyle = cividis(share(value));
                context.fillRect(
                  box.left + j * box.cell,
                  box.top + i * box.row,
                  box.cell + 0.3,
                  box.row + 0.3,
                );
              });
            });
            const bottom = box.top + rows.length * box.row;
            context.fillStyle = colors.soft;
            context.textAlign = "right";
            const tall = labelStep(rows.length, bottom - box.top, 13);
            rows.forEach((row, i) => {
              if (i % tall === 0)
                context.fillText(
                  truncateText(context, panel.rows[row], box.left - 8),
                  box.left - 6,
                  box.top + (i + 0.5) * box.row,
                );
            });
            context.textAlign = "center";
            const wide = labelStep(panel.columns.length, width - box.left, 32);
            panel.columns.forEach((name, j) => {
              if (j % wide === 0) context.fillText(name, box.left + (j + 0.5) * box.cell, bottom + 11);
            });
            figures.scale(
              context,
              box.left,
              bottom + 44,
              Math.min(260, width - 60),
              [low, high],
              panel.value_axis,
              colors,
            );
            context.textAlign = "left";
            context.fillText(
              `${panel.y_axis.label} (vertical), ${panel.x_axis.label} (horizontal)`,
              box.left,
              bottom + 28,
            );
          },
          hover(x, y) {
            const panel = selected();
            const [j, i] = [Math.floor((x - box.left) / box.cell), Math.floor((y - box.top) / box.row)];
            if (j < 0 || i < 0 || j >= panel.columns.length || i >= panel.rows.length) return null;
            const row = order(panel, state)[i];
            const value = panel.values[row][j];
            return `${panel.y_axis.label} ${panel.rows[row]}, ${panel.x_axis.label} ${panel.columns[j]}: ${value === null ? "no value" : `${formatNumber(value)} ${panel.value_axis.unit}`}`;
          },
        });
      },
      (panel) => ({
        columns: [panel.y_axis.label, ...panel.columns.map((name) => `${panel.x_axis.label} ${name}`)],
        rows: panel.rows.map((name, i) => [
          name,
          ...panel.values[i].map((value) => ({ text: formatNumber(value), value })),
        ]),
      }),
    );
  },

  scale(context, left, top, width, [low, high], axis, colors) {
    for (let i = 0; i < width; i++) {
      context.fillStyle = cividis(i / width);
      context.fillRect(left + i, top, 1.3, 9);
    }
    context.fillStyle = colors.soft;
    for (const share of [0, 0.5, 1]) {
      context.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
      context.fillText(
        `${formatNumber(low + share * (high - low))} ${axis.unit}`,
        left + share * width,
        top + 19,
      );
    }
  },

  /** Create a grid of bubbles. */
  bubbles(block) {
    return panelSelector(
      block,
      [],
      (selected) => {
        let box = null;
        const count = () => selected().rows.length;
        return drawing(block.text, {
          height: () => 40 + Math.min(900, Math.max(100, count() * Math.max(5, Math.min(26, 900 / count())))),
          draw(context, width, high, colors) {
            const { columns, rows, counts, x_axis, y_axis } = selected();
            const left =
              14 + Math.min(width / 4, Math.max(20, ...rows.map((name) => context.measureText(name).width)));
            box = { left, top: 6, cell: (width - left - 6) / columns.length, row: (high - 46) / count() };
            const most = Math.max(1, ...counts.map((column) => Math.max(...column)));
            const largest = Math.min(18, 0.56 * Math.max(Math.min(box.cell, box.row), Math.min(8, box.row)));
            const bottom = box.top + count() * box.row;
            context.strokeStyle = colors.grid;
            for (let j = 0; j < count(); j++) {
              context.beginPath();
              context.moveTo(box.left, box.top + (j + 0.5) * box.row);
              context.lineTo(width - 6, box.top + (j + 0.5) * box.row);
              context.stroke();
            }
            context.fillStyle = palette.lines[0];
            counts.forEach((column, i) =>
              column.forEach((value, j) => {
                if (!value) return;
                context.beginPath();
                context.arc(
                  box.left + (i + 0.5) * box.cell,
                  bottom - (j + 0.5) * box.row,
                  Math.max(0.7, largest * Math.sqrt(value / most)),
                  0,
                  7,
                );
                context.fill();
              }),
            );
            context.fillStyle = colors.soft;
            context.textAlign = "right";
            const tall = labelStep(count(), bottom - box.top, 14);
            for (let j = 0; j < count(); j += tall)
              context.fillText(
                truncateText(context, rows[j], box.left - 10),
                box.left - 8,
                bottom - (j + 0.5) * box.row,
              );
            context.textAlign = "center";
            const longest = Math.max(20, ...columns.map((name) => context.measureText(name).width));
            const wide = labelStep(columns.length, width - box.left, Math.min(90, longest + 6));
            columns.forEach((name, i) => {
              if (i % wide === 0)
                context.fillText(
                  truncateText(context, name, 84),
                  box.left + (i + 0.5) * box.cell,
                  bottom + 12,
                );
            });
            context.textAlign = "left";
            context.fillText(
              `${x_axis.label} (horizontal), ${y_axis.label} (vertical)`,
              box.left,
              bottom + 30,
            );
          },
          hover(x, y) {
            const { columns, rows, counts, x_axis, y_axis, size_axis } = selected();
            const [i, j] = [
              Math.floor((x - box.left) / box.cell),
              count() - 1 - Math.floor((y - box.top) / box.row),
            ];
            return i >= 0 && i < columns.length && j >= 0 && j < count()
              ? `${x_axis.label} ${columns[i]}, ${y_axis.label} ${rows[j]}: ${counts[i][j]} ${size_axis.label}`
              : null;
          },
        });
      },
      ({ columns, rows, counts, x_axis, y_axis, size_axis }) => ({
        columns: [x_axis.label, size_axis.label, ...rows.map((name) => `${y_axis.label} ${name}`)],
        rows: columns.map((name, i) => [
          name,
          ...[counts[i].reduce((a, b) => a + b, 0), ...counts[i]].map((value) => ({
            text: String(value),
            value,
          })),
        ]),
      }),
    );
  },

  /** Create groups of bars. */
  bars(block) {
    const panels = block.panels.map((panel) => {
      const keys = panel.series.map((series, s) =>
        createNode("span", { class: "key" }, figures.patch(lineColor(s, theme())), series.name),
      );
      return createNode(
        "div",
        { class: "panel" },
        drawing(block.text, figures.groupedBars(panel)).holder,
        createNode("div", { class: "keys" }, ...keys),
      );
    });
    return figure(block, [createNode("div", { class: "panels wide" }, ...panels)], () => ({
      columns: ["value", "series", ...new Set(block.panels.flatMap((panel) => panel.groups))],
      rows: block.panels.flatMap((panel) =>
        panel.series.map((series) => [
          panel.y_axis.label,
          series.name,
          ...series.values.map((value, g) => ({ text: figures.formatBar(series, g), value })),
        ]),
      ),
    }));
  },

  formatBar: (series, g) =>
    `${formatNumber(series.values[g])}${series.spreads[g] === null ? "" : ` ± ${formatNumber(series.spreads[g])}`}`,

  groupedBars(panel) {
    const tops = panel.series.flatMap((series) =>
      series.values.map((value, i) => (value || 0) + (series.spreads[i] || 0)),
    );
    const most = 1.05 * Math.max(1e-9, ...tops);
    let boxes = [];
    return {
      height: (width) => Math.min(340, Math.max(240, width * 0.5)),
      draw(context, width, high, colors) {
        const [left, top, bottom] = [52, 22, high - 24];
        const y = (value) => bottom - ((bottom - top) * value) / most;
        context.strokeStyle = colors.grid;
        context.fillStyle = colors.soft;
        context.textAlign = "left";
        context.fillText(panel.y_axis.label, 0, 8);
        context.textAlign = "right";
        for (const tick of ticks(0, most, 5)) {
          context.beginPath();
          context.moveTo(left, y(tick));
          context.lineTo(width, y(tick));
          context.stroke();
          context.fillText(tick, left - 6, y(tick));
        }
        const room = (width - left) / panel.groups.length;
        const bar = Math.min(46, (0.84 * room) / panel.series.length);
        boxes = [];
        panel.groups.forEach((group, g) => {
          const start = left + (g + 0.5) * room - (bar * panel.series.length) / 2;
          panel.series.forEach((series, s) => {
            const value = series.values[g];
            if (value === null) return;
            const x = start + s * bar;
            context.fillStyle = lineColor(s, colors);
            context.fillRect(x + 1, y(value), bar - 2, bottom - y(value));
            boxes.push({
              x,
              bar,
              top: y(value),
              bottom,
              text: `${series.name}, ${group}: ${figures.formatBar(series, g)}`,
            });
            if (series.spreads[g]) {
              context.strokeStyle = colors.ink;
              context.beginPath();
              context.moveTo(x + bar / 2, y(value + series.spreads[g]));
              context.lineTo(x + bar / 2, y(Math.max(0, value - series.spreads[g])));
              context.stroke();
            }
          });
          context.fillStyle = colors.ink;
          context.textAlign = "center";
          context.fillText(group, left + (g + 0.5) * room, high - 10, room);
        });
      },
      hover(x, y) {
        const hit = boxes.find((box) => x >= box.x && x < box.x + box.bar && y <= box.bottom);
        return hit ? hit.text : null;
      },
    };
  },

  patch(color) {
    const patch = createNode("i", { class: "patch", "aria-hidden": "true" });
    patch.style.backgroundColor = color;
    return patch;
  },

  /** Create rows of dots, with a panel for each quantity. */
  dots(block) {
    const panels = block.panels.map((panel) => {
      const drawn = drawing(
        `${panel.name}: ${panel.rows.map((row) => `${row.name} ${formatNumber(row.mean)}`).join("; ")}`,
        figures.dotRows(panel),
      );
      return createNode("div", { class: "panel" }, createNode("h4", {}, panel.name), drawn.holder);
    });
    const rows = block.panels.flatMap((panel) =>
      panel.rows.map((row) => [
        panel.name,
        row.name,
        { text: formatNumber(row.mean), value: row.mean },
        ...[Math.min, Math.max].map((pick) => {
          const known = row.values.filter((value) => value !== null);
          const value = known.length ? pick(...known) : null;
          return { text: formatNumber(value), value };
        }),
      ]),
    );
    return figure(block, [createNode("div", { class: "panels wide" }, ...panels)], () => ({
      columns: ["value", "series", "mean of clients", "lowest", "highest"],
      rows,
    }));
  },

  dotRows(panel) {
    const all = panel.rows
      .flatMap((row) => [
        ...row.values,
        ...row.expected,
        ...row.spreads.flatMap((spread, i) => [row.values[i] - spread, row.values[i] + spread]),
      ])
      .filter((value) => value !== null);
    const [low, high] = [Math.min(0, ...all), Math.max(1e-9, ...all)];
    const room = 0.03 * (high - low);
    const ROW = 46;
    const x = (value, width) => 8 + ((width - 16) * (value - low + room)) / (high - low + 2 * room);
    const offsetOf = (index, count) => (count > 1 ? -9 + (18 * index) / (count - 1) : 0);
    const middle = (r) => r * ROW + 30;
    return {
      height: () => panel.rows.length * ROW + 26,
      draw(context, width, height, colors) {
        context.textAlign = "center";
        for (const tick of ticks(low, high, width / 90)) {
          context.strokeStyle = tick === 0 ? colors.soft : colors.grid;
          context.beginPath();
          context.moveTo(x(tick, width), 0);
          context.lineTo(x(tick, width), height - 20);
          context.stroke();
          context.fillStyle = colors.soft;
          context.fillText(tick, Math.min(width - 12, Math.max(12, x(tick, width))), height - 9);
        }
        panel.rows.forEach((row, r) => {
          const color = lineColor(row.color, colors);
          const title = row.note ? `${row.name} (${row.note})` : row.name;
          context.textAlign = "left";
          context.fillStyle = colors.paper;
          context.fillRect(2, r * ROW + 2, Math.min(width - 4, context.measureText(title).width + 4), 15);
          context.fillStyle = colors.ink;
          context.fillText(title, 4, r * ROW + 10, width - 8);
          context.strokeStyle = colors.soft;
          row.expected.forEach((value, i) => {
            if (value === null) return;
            const y = middle(r) + offsetOf(i, row.expected.length);
            context.beginPath();
            context.moveTo(x(value, width), y - 2.5);
            context.lineTo(x(value, width), y + 2.5);
            context.stroke();
          });
          context.strokeStyle = color;
          context.globalAlpha = 0.4;
          row.spreads.forEach((spread, i) => {
            if (row.values[i] === null || spread === null) return;
            const y = middle(r) + offsetOf(i, row.values.length);
            context.beginPath();
            context.moveTo(x(row.values[i] - spread, width), y);
            context.lineTo(x(row.values[i] + spread, width), y);
            context.stroke();
          });
          context.fillStyle = color;
          context.globalAlpha = 0.75;
          row.values.forEach((value, i) => {
            if (value === null) return;
            context.beginPath();
            context.arc(x(value, width), middle(r) + offsetOf(i, row.values.length), 3, 0, 7);
            context.fill();
          });
          context.globalAlpha = 1;
          if (row.mean !== null) {
            context.fillStyle = colors.ink;
            context.fillRect(x(row.mean, width) - 1.2, middle(r) - 13, 2.4, 26);
          }
        });
      },
      hover(px, py) {
        const row = panel.rows[Math.floor(py / ROW)];
        return row ? `${row.name}: mean ${formatNumber(row.mean)} of ${row.values.length} clients` : null;
      },
    };
  },

  /** Create scatter plots; their background is light in both themes, for dark label colors. */
  scatter(block) {
    const state = getState(block.id);
    const holder = createNode("div", { class: "panels" });
    const keys = createNode("div", { class: "keys" });
    const values = (name) => [...new Set(block.panels.flatMap((panel) => panel[name]))].sort((a, b) => a - b);
    function build() {
      const name = state.clients ? "clients" : "labels";
      const known = values(name);
      const color = (value) =>
        known.length <= palette.labels.length
          ? palette.labels[known.indexOf(value)]
          : cividis(known.indexOf(value) / (known.length - 1));
      holder.replaceChildren(
        ...block.panels.map((panel) =>
          createNode(
            "div",
            { class: "panel" },
            createNode("h4", {}, panel.name),
            drawing(`${panel.name}: ${panel.x.length} points`, figures.scatterPlot(panel, name, color))
              .holder,
          ),
        ),
      );
      if (holder.isConnected) dropDetached();
      const shades =
        known.length <= palette.labels.length
          ? known
          : known.filter((_, i) => i % Math.ceil(known.length / 10) === 0);
      keys.replaceChildren(
        createNode("span", { class: "key" }, `${state.clients ? "client" : "label"}:`),
        ...shades.map((value) =>
          createNode("span", { class: "key" }, figures.patch(color(value)), String(value)),
        ),
      );
    }
    build();
    const controls = createNode(
      "div",
      { class: "controls" },
      checkbox(`${block.id}-clients`, "color by client", Boolean(state.clients), (value) => {
        state.clients = value;
        build();
      }),
    );
    return figure(block, [controls, holder, keys], () => ({
      columns: ["panel", "points", "labels", "clients"],
      rows: block.panels.map((panel) => [
        panel.name,
        ...[panel.x.length, new Set(panel.labels).size, new Set(panel.clients).size].map((value) => ({
          text: String(value),
          value,
        })),
      ]),
    }));
  },

  scatterPlot(panel, name, color) {
    const size = Math.min(4, Math.max(1.6, 60 / Math.sqrt(panel.x.length)));
    let scale = 1;
    return {
      height: (width) => Math.min(width, 420),
      draw(context, width, high, colors) {
        const side = Math.min(width, high);
        scale = { side: side - 16, left: (width - side) / 2 + 8, top: 8 };
        context.fillStyle = colors.points;
        context.fillRect(0, 0, width, high);
        context.strokeStyle = colors.grid;
        context.strokeRect(0.5, 0.5, width - 1, high - 1);
        context.globalAlpha = 0.8;
        panel.x.forEach((x, i) => {
          context.fillStyle = color(panel[name][i]);
          context.beginPath();
          context.arc(
            scale.left + (scale.side * x) / 1000,
            scale.top + scale.side * (1 - panel.y[i] / 1000),
            size,
            0,
            7,
          );
          context.fill();
        });
        context.globalAlpha = 1;
      },
      hover(px, py) {
        const [x, y] = [(1000 * (px - scale.left)) / scale.side, 1000 * (1 - (py - scale.top) / scale.side)];
        let [nearest, distance] = [-1, 900];
        panel.x.forEach((value, i) => {
          const squared = (value - x) ** 2 + (panel.y[i] - y) ** 2;
          if (squared < distance) [nearest, distance] = [i, squared];
        });
        return nearest < 0 ? null : `label ${panel.labels[nearest]}, client ${panel.clients[nearest]}`;
      },
    };
  },
};
