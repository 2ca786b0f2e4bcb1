// The other kinds of figures, each on a canvas.
"use strict";

/** A figure of which one of several is shown. */
function choosing(block, label, switches, make_one, numbers) {
  const state = remembered(block.id);
  state.choice = Math.min(state.choice || 0, block.choices.length - 1);
  const chosen = () => block.choices[state.choice];
  const note = make("p", { class: "note" });
  const one = make_one(chosen, state);
  const again = (name) => (value) => {
    state[name] = value;
    note.textContent = chosen().note;
    one.paint();
  };
  note.textContent = chosen().note;
  const names = block.choices.map((choice) => choice.name);
  const boxes = switches.map(([name, words]) => checkbox(`${block.id}-${name}`, words, Boolean(state[name]), again(name)));
  const controls = make("div", { class: "controls" }, names.length < 2 ? make("b", {}, names[0]) : chooser(block.id, label, names, state.choice, again("choice")), ...boxes);
  return figure(block, [controls, one.holder, note], () => numbers(chosen(), state));
}

const figures = {
  curves: (block) => curves.figure(block),
  table: (block) => tables.table(block),
  facts: (block) => tables.facts(block),

  /** Clients by rounds. */
  heat(block) {
    const values = block.choices.flatMap((choice) => choice.values.flat()).filter((value) => value >= 0);
    const low = Math.floor(values.reduce((a, b) => Math.min(a, b), 1000) / 100) * 100;
    const share = (value) => (value - low) / (1000 - low || 1);
    const order = (choice, state) => {
      const rows = choice.clients.map((_, i) => i);
      const last = (i) => choice.values[i][choice.rounds.length - 1];
      return state.sorted ? rows.sort((a, b) => last(b) - last(a)) : rows;
    };
    const place = (context, width, high, choice) => {
      const left = 14 + context.measureText(Math.max(...choice.clients)).width;
      return { left, top: 6, cell: (width - left - 4) / choice.rounds.length, row: (high - 78) / choice.clients.length };
    };

    return choosing(block, "Run", [["sorted", "best clients first"]], (chosen, state) => {
      let box = null;
      const height = () => 78 + Math.min(560, Math.max(120, 15 * chosen().clients.length));
      return drawing(block.text, {
        height,
        draw(context, width, high, now) {
          const choice = chosen();
          box = place(context, width, high, choice);
          const rows = order(choice, state);
          rows.forEach((client, i) => {
            choice.values[client].forEach((value, j) => {
              if (value < 0) return;
              context.fillStyle = cividis(share(value));
              context.fillRect(box.left + j * box.cell, box.top + i * box.row, box.cell + 0.3, box.row + 0.3);
            });
          });
          const bottom = box.top + rows.length * box.row;
          context.fillStyle = now.soft;
          context.textAlign = "right";
          const tall = every(rows.length, bottom - box.top, 13);
          rows.forEach((client, i) => { if (i % tall === 0) context.fillText(choice.clients[client], box.left - 6, box.top + (i + 0.5) * box.row); });
          context.textAlign = "center";
          const wide = every(choice.rounds.length, width - box.left, 32);
          choice.rounds.forEach((round, j) => { if (j % wide === 0) context.fillText(round, box.left + (j + 0.5) * box.cell, bottom + 11); });
          figures.scale(context, box.left, bottom + 44, Math.min(260, width - 60), low / 10, now);
          context.textAlign = "left";
          context.fillText("clients down, rounds across", box.left, bottom + 28);
        },
        hover(x, y) {
          const choice = chosen();
          const [j, i] = [Math.floor((x - box.left) / box.cell), Math.floor((y - box.top) / box.row)];
          if (j < 0 || i < 0 || j >= choice.rounds.length || i >= choice.clients.length) return null;
          const client = order(choice, state)[i];
          const value = choice.values[client][j];
          return `client ${choice.clients[client]}, round ${choice.rounds[j]}: ${value < 0 ? "not evaluated" : `${(value / 10).toFixed(1)} %`}`;
        },
      });
    }, (choice) => ({
      columns: ["client", ...choice.rounds.map((round) => `round ${round}`)],
      rows: choice.clients.map((client, i) => [{ text: String(client), value: client }, ...choice.values[i].map((value) => ({ text: value < 0 ? "–" : (value / 10).toFixed(1), value: value < 0 ? null : value }))]),
    }));
  },

  scale(context, left, top, width, low, now) {
    for (let i = 0; i < width; i++) {
      context.fillStyle = cividis(i / width);
      context.fillRect(left + i, top, 1.3, 9);
    }
    context.fillStyle = now.soft;
    for (const [share, value] of [[0, low], [0.5, (low + 100) / 2], [1, 100]]) {
      context.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
      context.fillText(`${value} %`, left + share * width, top + 19);
    }
  },

  /** Clients by labels. */
  bubbles(block) {
    return choosing(block, "Split", [], (chosen) => {
      let box = null;
      const labels = () => chosen().counts[0].length;
      const height = () => 40 + Math.min(900, Math.max(100, labels() * Math.max(5, Math.min(26, 900 / labels()))));
      return drawing(block.text, {
        height,
        draw(context, width, high, now) {
          const { clients, counts } = chosen();
          box = { left: 34, top: 6, cell: (width - 40) / clients.length, row: (high - 46) / labels() };
          const most = Math.max(1, ...counts.map((row) => Math.max(...row)));
          const largest = Math.min(18, 0.56 * Math.max(Math.min(box.cell, box.row), Math.min(8, box.row)));
          const bottom = box.top + labels() * box.row;
          context.strokeStyle = now.grid;
          for (let j = 0; j < labels(); j++) {
            context.beginPath();
            context.moveTo(box.left, box.top + (j + 0.5) * box.row);
            context.lineTo(width - 6, box.top + (j + 0.5) * box.row);
            context.stroke();
          }
          context.fillStyle = palette.lines[0];
          counts.forEach((row, i) => row.forEach((count, j) => {
            if (!count) return;
            context.beginPath();
            context.arc(box.left + (i + 0.5) * box.cell, bottom - (j + 0.5) * box.row, Math.max(0.7, largest * Math.sqrt(count / most)), 0, 7);
            context.fill();
          }));
          context.fillStyle = now.soft;
          context.textAlign = "right";
          const tall = every(labels(), bottom - box.top, 14);
          for (let j = 0; j < labels(); j += tall) context.fillText(j, box.left - 8, bottom - (j + 0.5) * box.row);
          context.textAlign = "center";
          const wide = every(clients.length, width - 40, 26);
          clients.forEach((client, i) => { if (i % wide === 0) context.fillText(client, box.left + (i + 0.5) * box.cell, bottom + 12); });
          context.textAlign = "left";
          context.fillText("clients across, labels up", box.left, bottom + 30);
        },
        hover(x, y) {
          const { clients, counts } = chosen();
          const [i, j] = [Math.floor((x - box.left) / box.cell), labels() - 1 - Math.floor((y - box.top) / box.row)];
          return i >= 0 && i < clients.length && j >= 0 && j < labels() ? `client ${clients[i]}, label ${j}: ${counts[i][j]} samples` : null;
        },
      });
    }, ({ clients, counts }) => ({
      columns: ["client", "samples", ...counts[0].map((_, j) => `label ${j}`)],
      rows: clients.map((client, i) => [client, counts[i].reduce((a, b) => a + b, 0), ...counts[i]].map((value) => ({ text: String(value), value }))),
    }));
  },

  /** Groups of bars. */
  bars(block) {
    const tops = block.series.flatMap((one) => one.values.map((value, i) => (value || 0) + (one.spread[i] || 0)));
    const most = 1.05 * Math.max(1e-9, ...tops);
    let boxes = [];
    const one = drawing(block.text, {
      height: (width) => Math.min(340, Math.max(240, width * 0.5)),
      draw(context, width, high, now) {
        const [left, top, bottom] = [52, 22, high - 24];
        const y = (value) => bottom - ((bottom - top) * value) / most;
        context.strokeStyle = now.grid;
        context.fillStyle = now.soft;
        context.textAlign = "left";
        context.fillText(block.unit, 0, 8);
        context.textAlign = "right";
        for (const tick of ticks(0, most, 5)) {
          context.beginPath();
          context.moveTo(left, y(tick));
          context.lineTo(width, y(tick));
          context.stroke();
          context.fillText(tick, left - 6, y(tick));
        }
        const room = (width - left) / block.groups.length;
        const bar = Math.min(46, (0.84 * room) / block.series.length);
        boxes = [];
        block.groups.forEach((group, g) => {
          const begin = left + (g + 0.5) * room - (bar * block.series.length) / 2;
          block.series.forEach((series, s) => {
            const value = series.values[g];
            if (value === null) return;
            const x = begin + s * bar;
            context.fillStyle = lineColour(s, now);
            context.fillRect(x + 1, y(value), bar - 2, bottom - y(value));
            boxes.push({ x, bar, top: y(value), bottom, words: `${series.name}, ${group}: ${shown(value)}${series.spread[g] === null ? "" : ` ± ${shown(series.spread[g])}`}` });
            if (series.spread[g]) {
              context.strokeStyle = now.ink;
              context.beginPath();
              context.moveTo(x + bar / 2, y(value + series.spread[g]));
              context.lineTo(x + bar / 2, y(Math.max(0, value - series.spread[g])));
              context.stroke();
            }
          });
          context.fillStyle = now.ink;
          context.textAlign = "center";
          context.fillText(group, left + (g + 0.5) * room, high - 10, room);
        });
      },
      hover(x, y) {
        const found = boxes.find((box) => x >= box.x && x < box.x + box.bar && y <= box.bottom);
        return found ? found.words : null;
      },
    });
    const keys = make("div", { class: "keys" }, ...block.series.map((series, s) => make("span", { class: "key" }, figures.patch(lineColour(s, theme())), series.name)));
    return figure(block, [one.holder, keys], () => ({
      columns: ["", ...block.groups],
      rows: block.series.map((series) => [series.name, ...series.values.map((value, g) => ({ text: value === null ? "–" : `${shown(value)}${series.spread[g] === null ? "" : ` ± ${shown(series.spread[g])}`}`, value }))]),
    }));
  },

  patch(colour) {
    const patch = make("i", { class: "patch", "aria-hidden": "true" });
    patch.style.backgroundColor = colour;
    return patch;
  },

  /** Rows of dots, a panel for each measure. */
  dots(block) {
    const panels = block.panels.map((panel) => {
      const one = drawing(`${panel.name}: ${panel.rows.map((row) => `${row.name} ${shown(row.mean)}`).join("; ")}`, figures.dotted(panel));
      return make("div", { class: "panel" }, make("h4", {}, panel.name), one.holder);
    });
    const rows = block.panels.flatMap((panel) => panel.rows.map((row) => [panel.name, row.name, { text: shown(row.mean), value: row.mean },
      ...[Math.min, Math.max].map((pick) => {
        const there = row.values.filter((value) => value !== null);
        const value = there.length ? pick(...there) : null;
        return { text: shown(value), value };
      })]));
    return figure(block, [make("div", { class: "panels wide" }, ...panels)], () => ({ columns: ["measure", "of", "mean of clients", "lowest", "highest"], rows }));
  },

  dotted(panel) {
    const all = panel.rows.flatMap((row) => [...row.values, ...(row.chance || [])]).filter((value) => value !== null);
    const [low, high] = [Math.min(0, ...all), Math.max(1e-9, ...all)];
    const room = 0.03 * (high - low);
    const ROW = 46;
    const x = (value, width) => 8 + ((width - 16) * (value - low + room)) / (high - low + 2 * room);
    const height_of = (index, count) => (count > 1 ? -9 + (18 * index) / (count - 1) : 0);
    const middle = (r) => r * ROW + 30;
    return {
      height: () => panel.rows.length * ROW + 26,
      draw(context, width, height, now) {
        context.textAlign = "center";
        for (const tick of ticks(low, high, width / 90)) {
          context.strokeStyle = tick === 0 ? now.soft : now.grid;
          context.beginPath();
          context.moveTo(x(tick, width), 0);
          context.lineTo(x(tick, width), height - 20);
          context.stroke();
          context.fillStyle = now.soft;
          context.fillText(tick, Math.min(width - 12, Math.max(12, x(tick, width))), height - 9);
        }
        panel.rows.forEach((row, r) => {
          const colour = lineColour(row.colour, now);
          const words = row.note ? `${row.name} (${row.note})` : row.name;
          context.textAlign = "left";
          context.fillStyle = now.paper;
          context.fillRect(2, r * ROW + 2, Math.min(width - 4, context.measureText(words).width + 4), 15);
          context.fillStyle = now.ink;
          context.fillText(words, 4, r * ROW + 10, width - 8);
          context.strokeStyle = now.soft;
          (row.chance || []).forEach((value, i) => {
            if (value === null) return;
            const at = middle(r) + height_of(i, row.chance.length);
            context.beginPath();
            context.moveTo(x(value, width), at - 2.5);
            context.lineTo(x(value, width), at + 2.5);
            context.stroke();
          });
          context.fillStyle = colour;
          context.globalAlpha = 0.75;
          row.values.forEach((value, i) => {
            if (value === null) return;
            context.beginPath();
            context.arc(x(value, width), middle(r) + height_of(i, row.values.length), 3, 0, 7);
            context.fill();
          });
          context.globalAlpha = 1;
          if (row.mean !== null) {
            context.fillStyle = now.ink;
            context.fillRect(x(row.mean, width) - 1.2, middle(r) - 13, 2.4, 26);
          }
        });
      },
      hover(px, py) {
        const row = panel.rows[Math.floor(py / ROW)];
        return row ? `${row.name}: mean ${shown(row.mean)} of ${row.values.length} clients` : null;
      },
    };
  },

  /** Points in the plane, a panel for each layout; paper stays light, or dark labels would vanish. */
  scatter(block) {
    const state = remembered(block.id);
    const holder = make("div", { class: "panels" });
    const keys = make("div", { class: "keys" });
    const values = (name) => [...new Set(block.panels.flatMap((panel) => panel[name]))].sort((a, b) => a - b);
    function build() {
      const name = state.clients ? "client" : "label";
      const known = values(name);
      const colour = (value) => (known.length <= palette.labels.length ? palette.labels[known.indexOf(value)] : cividis(known.indexOf(value) / (known.length - 1)));
      holder.replaceChildren(...block.panels.map((panel) => make("div", { class: "panel" }, make("h4", {}, panel.name), drawing(`${panel.name}: ${panel.x.length} points`, figures.plane(panel, name, colour)).holder)));
      if (holder.isConnected) forgetGone();
      const shades = known.length <= palette.labels.length ? known : known.filter((_, i) => i % Math.ceil(known.length / 10) === 0);
      keys.replaceChildren(make("span", { class: "key" }, `${name}:`), ...shades.map((value) => make("span", { class: "key" }, figures.patch(colour(value)), String(value))));
    }
    build();
    const controls = make("div", { class: "controls" }, checkbox(`${block.id}-clients`, "colour by client", Boolean(state.clients), (value) => { state.clients = value; build(); }));
    return figure(block, [controls, holder, keys], () => ({
      columns: ["layout", "points", "labels", "clients"],
      rows: block.panels.map((panel) => [panel.name, ...[panel.x.length, new Set(panel.label).size, new Set(panel.client).size].map((value) => ({ text: String(value), value }))]),
    }));
  },

  plane(panel, name, colour) {
    const size = Math.min(4, Math.max(1.6, 60 / Math.sqrt(panel.x.length)));
    let scale = 1;
    return {
      height: (width) => Math.min(width, 420),
      draw(context, width, high, now) {
        const side = Math.min(width, high);
        scale = { side: side - 16, left: (width - side) / 2 + 8, top: 8 };
        context.fillStyle = now.points;
        context.fillRect(0, 0, width, high);
        context.strokeStyle = now.grid;
        context.strokeRect(0.5, 0.5, width - 1, high - 1);
        context.globalAlpha = 0.8;
        panel.x.forEach((x, i) => {
          context.fillStyle = colour(panel[name][i]);
          context.beginPath();
          context.arc(scale.left + (scale.side * x) / 1000, scale.top + scale.side * (1 - panel.y[i] / 1000), size, 0, 7);
          context.fill();
        });
        context.globalAlpha = 1;
      },
      hover(px, py) {
        const [x, y] = [(1000 * (px - scale.left)) / scale.side, 1000 * (1 - (py - scale.top) / scale.side)];
        let [best, near] = [-1, 900];
        panel.x.forEach((value, i) => {
          const away = (value - x) ** 2 + (panel.y[i] - y) ** 2;
          if (away < near) [best, near] = [i, away];
        });
        return best < 0 ? null : `label ${panel.label[best]}, client ${panel.client[best]}`;
      },
    };
  },
};
