// Curves over rounds, by uPlot: hover or arrow keys read values, names switch lines, axes may be logarithmic.
"use strict";

// Steps between ticks: there is no half of a round.
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((zeros) => [1, 2, 5].map((digit) => digit * 10 ** zeros));

const curves = {
  figure(block) {
    const state = remembered(block.id);
    state.choice = Math.min(state.choice || 0, block.panels.length - 1);
    state.hidden = state.hidden || {};
    const plot = make("div", { class: "plot", tabindex: 0, role: "img", "aria-label": block.text, id: `${block.id}-plot` });
    const at = make("p", { class: "at" });
    const keys = make("div", { class: "keys" });
    const note = make("p", { class: "note" });
    const spoken = make("p", { class: "unseen", role: "status" });
    let drawn = null;

    function build() {
      if (drawn) drawn.destroy();
      const panel = block.panels[state.choice];
      drawn = curves.plot(panel, state, plot, (index) => curves.read(panel, index, at, keys));
      plot.chart = drawn; // for who looks at it from outside
      keys.replaceChildren(...curves.keys(panel, state, build));
      note.textContent = [panel.band && `${panel.band}.`, panel.note].filter(Boolean).join(" ");
      curves.read(panel, null, at, keys);
    }

    const one = { holder: plot, paint: () => plot.clientWidth && build(), drop: () => drawn && drawn.destroy() };
    let width = 0;
    new ResizeObserver(() => {
      if (plot.clientWidth === width) return;
      width = plot.clientWidth;
      one.paint();
    }).observe(plot);
    repaints.add(one);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !drawn) return;
      event.preventDefault();
      const x = drawn.data[0];
      const index = Math.min(x.length - 1, Math.max(0, (drawn.cursor.idx ?? -1) + step));
      drawn.setCursor({ left: drawn.valToPos(x[index], "x"), top: 20 });
      spoken.textContent = `${at.textContent} ${[...keys.children].map((key) => key.textContent).join("; ")}`;
    });

    const again = (name) => (value) => { state[name] = value; one.paint(); };
    const controls = make("div", { class: "controls" },
      chooser(block.id, "Show", block.panels.map((panel) => panel.name), state.choice, again("choice")),
      checkbox(`${block.id}-logy`, "log values", Boolean(state.logy), again("logy")),
      block.panels[0].is_stepped ? null : checkbox(`${block.id}-logx`, `log ${block.panels[0].x_axis.label}s`, Boolean(state.logx), again("logx")));
    return figure(block, [controls, plot, at, keys, note, spoken], () => curves.numbers(block.panels[state.choice]));
  },

  /** uPlot's own lines: first those of the bands, then the curves, so that these lie on top. */
  plot(panel, state, holder, onread) {
    const now = theme();
    const from = state.logx ? panel.x.findIndex((x) => x > 0) : 0;
    const clean = (values) => values.slice(from).map((value) => (state.logy && value !== null && value <= 0 ? null : value));
    const data = [panel.x.slice(from)];
    const series = [{}];
    const bands = [];
    const seen = (one) => !state.hidden[one.name];
    const paths = panel.is_stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
    for (const one of panel.series.filter((each) => each.low && seen(each))) {
      const colour = lineColour(one.color, now);
      for (const side of [one.high, one.low]) {
        data.push(clean(side));
        series.push({ width: 0, spanGaps: true, paths, points: { show: false } });
      }
      bands.push({ series: [series.length - 2, series.length - 1], fill: curves.pale(colour) });
    }
    for (const one of panel.series.filter(seen)) {
      data.push(clean(one.y));
      series.push(curves.line(one, paths, now));
    }
    const axis = { stroke: now.soft, grid: { stroke: now.grid, width: 1 }, ticks: { stroke: now.grid, width: 1 }, font: "12px system-ui, sans-serif" };
    const percent = panel.y_axis.unit === "%";
    const options = {
      width: holder.clientWidth,
      height: Math.round(Math.min(380, Math.max(240, holder.clientWidth * 0.5))),
      scales: {
        x: { time: false, distr: state.logx ? 3 : 1 },
        y: { distr: state.logy ? 3 : 1, range: (_, low, high) => curves.range(low, high, panel, state.logy, percent) },
      },
      axes: [
        { ...axis, label: panel.x_axis.label, labelSize: 22, labelFont: axis.font, size: 34, space: 60, incrs: WHOLE },
        { ...axis, label: panel.y_axis.label, labelSize: 20, labelFont: axis.font, size: (u, values) => 22 + 7 * Math.max(2, ...(values || []).map((value) => String(value ?? "").length)) },
      ],
      series, bands,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 8 } },
      hooks: {
        drawAxes: [(u) => curves.background(u, panel, now)],
        draw: [(u) => curves.marks(u, panel.series.filter(seen), now)],
        setCursor: [(u) => onread(u.cursor.idx === null || u.cursor.idx === undefined ? null : u.cursor.idx + from)],
      },
    };
    return new uPlot(options, data, holder);
  },

  line(one, paths, now) {
    const colour = lineColour(one.color, now);
    const alone = one.y.filter((value) => value !== null).length < 2;
    return {
      label: one.name, stroke: colour, width: 2, spanGaps: true, paths,
      dash: palette.dashes[one.color % palette.dashes.length].map((length) => 2 * length),
      points: alone ? { show: true, size: 8, fill: colour } : { show: false },
    };
  },

  /** Marked points as dots, and a cross where a curve ends early. */
  marks(u, series, now) {
    const { ctx } = u;
    const place = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
    for (const one of series) {
      const scale = devicePixelRatio;
      ctx.save();
      ctx.fillStyle = lineColour(one.color, now);
      ctx.strokeStyle = now.paper;
      ctx.lineWidth = 1.5 * scale;
      const [x, y] = one.mark ? place(one.mark.x, one.mark.y) : [NaN, NaN];
      if (Number.isFinite(x + y) && x >= u.bbox.left) {
        ctx.beginPath();
        ctx.arc(x, y, 5 * scale, 0, 7);
        ctx.fill();
        ctx.stroke();
      }
      const last = one.y.findLastIndex((value) => value !== null);
      if (one.ending && last >= 0) {
        const [cx, cy] = place(u.data[0][u.data[0].length - one.y.length + last], one.y[last]);
        ctx.strokeStyle = lineColour(one.color, now);
        ctx.lineWidth = 3 * scale;
        ctx.beginPath();
        for (const way of [1, -1]) {
          ctx.moveTo(cx - 5 * scale, cy - way * 5 * scale);
          ctx.lineTo(cx + 5 * scale, cy + way * 5 * scale);
        }
        ctx.stroke();
      }
      ctx.restore();
    }
  },

  range(low, high, panel, log, percent) {
    if (low === null || high === null) return log ? [0.1, 1] : [0, 1];
    const lines = panel.references.map((line) => line.y).filter((value) => !log || value > 0);
    const [a, b] = [Math.min(low, ...lines), Math.max(high, ...lines)];
    if (log) return a === b ? [a / 2, b * 2] : [a / 1.1, b * 1.1];
    const room = (b - a || Math.abs(a) || 1) * 0.06;
    return percent ? [Math.max(0, a - room), Math.min(100, b + room)] : [a - room, b + room]; // a band may go beyond
  },

  /** The shaded range of x, and lines to compare with. */
  background(u, panel, now) {
    const { ctx, bbox } = u;
    ctx.save();
    if (panel.shaded) {
      const [left, right] = panel.shaded.map((x) => u.valToPos(x, "x", true));
      ctx.fillStyle = "rgba(128, 128, 128, 0.16)";
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
    }
    ctx.strokeStyle = now.soft;
    ctx.lineWidth = 1.2 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const line of panel.references) {
      const y = u.valToPos(line.y, "y", true);
      if (!Number.isFinite(y)) continue;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  },

  pale: (colour) => (colour.length === 7 ? `${colour}33` : "rgba(128, 128, 128, 0.2)"),

  /** A button for each curve, with a piece of it and room for its value; then the lines to compare with. */
  keys(panel, state, build) {
    const buttons = panel.series.map((one) => {
      const toggle = () => {
        state.hidden[one.name] = !state.hidden[one.name];
        build();
      };
      const pressed = state.hidden[one.name] ? "false" : "true";
      return make("button", { type: "button", class: "key", "aria-pressed": pressed, onclick: toggle },
        curves.swatch(one.color), make("span", {}, one.name), make("b", { class: "value" }));
    });
    return [...buttons, ...panel.references.map((line) => make("span", { class: "key" }, `┄ ${line.text}`))];
  },

  swatch(index) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    const line = document.createElementNS(space, "line");
    const set = (element, values) => Object.entries(values).forEach(([name, value]) => element.setAttribute(name, value));
    set(svg, { width: 30, height: 10, "aria-hidden": "true" });
    const dash = palette.dashes[index % palette.dashes.length].map((length) => 2 * length).join(" ");
    set(line, { x1: 0, x2: 30, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dash, stroke: lineColour(index, theme()) });
    svg.append(line);
    return svg;
  },

  /** Values at the pointer; without one the meaning of each curve's mark, and why it ends early. */
  read(panel, index, at, keys) {
    at.textContent = index === null ? "" : `${panel.x_axis.label} ${panel.x[index]}`;
    panel.series.forEach((one, i) => {
      const value = keys.children[i] && keys.children[i].querySelector(".value");
      if (!value) return;
      value.textContent = index === null ? [one.mark && one.mark.text, one.ending].filter(Boolean).join(", ") : curves.cell(one, index, panel.y_axis.unit);
    });
  },

  cell(one, index, unit) {
    const band = one.low && one.low[index] !== null ? ` (${shown(one.low[index], unit)} to ${shown(one.high[index], unit)})` : "";
    return `${shown(one.y[index], unit)}${band}`;
  },

  numbers(panel) {
    const columns = [panel.x_axis.label, ...panel.series.map((one) => one.name)];
    const rows = panel.x.map((x, i) => [{ text: String(x), value: x }, ...panel.series.map((one) => ({ text: curves.cell(one, i, panel.y_axis.unit), value: one.y[i] }))]);
    return { columns, rows };
  },
};
