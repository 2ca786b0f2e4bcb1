// Curves over rounds, by uPlot: hover or arrow keys read values, names switch lines, axes may be logarithmic.
"use strict";

// Steps between ticks: there is no half of a round.
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((zeros) => [1, 2, 5].map((digit) => digit * 10 ** zeros));

const curves = {
  figure(block) {
    const state = remembered(block.id);
    state.choice = Math.min(state.choice || 0, block.choices.length - 1);
    state.hidden = state.hidden || {};
    const plot = make("div", { class: "plot", tabindex: 0, role: "img", "aria-label": block.text, id: `${block.id}-plot` });
    const at = make("p", { class: "at" });
    const keys = make("div", { class: "keys" });
    const spoken = make("p", { class: "unseen", role: "status" });
    let drawn = null;

    function build() {
      if (drawn) drawn.destroy();
      const choice = block.choices[state.choice];
      drawn = curves.plot(block, choice, state, plot, (index) => curves.read(block, choice, state, index, at, keys));
      plot.chart = drawn; // for who looks at it from outside
      keys.replaceChildren(...curves.keys(choice, state, build));
      curves.read(block, choice, state, null, at, keys);
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
      chooser(block.id, "Show", block.choices.map((choice) => choice.name), state.choice, again("choice")),
      checkbox(`${block.id}-logy`, "log values", Boolean(state.logy), again("logy")),
      block.stepped ? null : checkbox(`${block.id}-logx`, `log ${block.x}s`, Boolean(state.logx), again("logx")));
    return figure(block, [controls, plot, at, keys, spoken], () => curves.numbers(block, state));
  },

  /** uPlot's own lines: first those of the bands, then the curves, so that these lie on top. */
  plot(block, choice, state, holder, onread) {
    const now = theme();
    const from = state.logx ? choice.x.findIndex((x) => x > 0) : 0;
    const clean = (values) => values.slice(from).map((value) => (state.logy && value !== null && value <= 0 ? null : value));
    const data = [choice.x.slice(from)];
    const series = [{}];
    const bands = [];
    const seen = (one) => !state.hidden[one.name];
    for (const one of choice.series.filter((each) => each.low && seen(each))) {
      const colour = lineColour(one.colour, now);
      for (const side of [one.high, one.low]) {
        data.push(clean(side));
        series.push({ width: 0, spanGaps: true, paths: curves.path(block), points: { show: false } });
      }
      bands.push({ series: [series.length - 2, series.length - 1], fill: curves.pale(colour) });
    }
    for (const one of choice.series.filter(seen)) {
      data.push(clean(one.y));
      series.push(curves.line(one, from, block, now));
    }
    const axis = { stroke: now.soft, grid: { stroke: now.grid, width: 1 }, ticks: { stroke: now.grid, width: 1 }, font: "12px system-ui, sans-serif" };
    const percent = choice.unit === "%";
    const options = {
      width: holder.clientWidth,
      height: Math.round(Math.min(380, Math.max(240, holder.clientWidth * 0.5))),
      scales: {
        x: { time: false, distr: state.logx ? 3 : 1 },
        y: { distr: state.logy ? 3 : 1, range: (_, low, high) => curves.range(low, high, choice, state.logy, percent) },
      },
      axes: [
        { ...axis, label: block.x, labelSize: 22, labelFont: axis.font, size: 34, space: 60, incrs: WHOLE },
        { ...axis, size: (u, values) => 22 + 7 * Math.max(2, ...(values || []).map((value) => String(value ?? "").length)) },
      ],
      series, bands,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 8 } },
      hooks: {
        drawAxes: [(u) => curves.floors(u, choice.floors, now)],
        setCursor: [(u) => onread(u.cursor.idx === null || u.cursor.idx === undefined ? null : u.cursor.idx + from)],
      },
    };
    return new uPlot(options, data, holder);
  },

  line(one, from, block, now) {
    const colour = lineColour(one.colour, now);
    const alone = one.y.filter((value) => value !== null).length < 2;
    const marked = one.best === null || one.best === undefined ? [] : [one.best - from];
    return {
      label: one.name, stroke: colour, width: 2, spanGaps: true,
      dash: palette.dashes[one.colour % palette.dashes.length].map((length) => 2 * length),
      paths: curves.path(block),
      points: alone ? { show: true, size: 8, fill: colour } : { show: marked.length > 0, size: 10, fill: colour, stroke: now.paper, width: 1.5, filter: () => marked.filter((index) => index >= 0) },
    };
  },

  path: (block) => (block.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined),

  range(low, high, choice, log, percent) {
    if (low === null || high === null) return log ? [0.1, 1] : [0, 1];
    const floors = choice.floors.filter((value) => !log || value > 0);
    const [a, b] = [Math.min(low, ...floors), Math.max(high, ...floors)];
    if (log) return a === b ? [a / 2, b * 2] : [a / 1.1, b * 1.1];
    const room = (b - a || Math.abs(a) || 1) * 0.06;
    return percent ? [Math.max(0, a - room), Math.min(100, b + room)] : [a - room, b + room]; // a band may go beyond
  },

  floors(u, floors, now) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = now.soft;
    ctx.lineWidth = 1.2 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const floor of floors) {
      const y = u.valToPos(floor, "y", true);
      if (!Number.isFinite(y)) continue;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  },

  pale: (colour) => (colour.length === 7 ? `${colour}33` : "rgba(128, 128, 128, 0.2)"),

  /** A button for each line, with a piece of it and room for its value. */
  keys(choice, state, build) {
    return choice.series.map((one) => {
      const toggle = () => {
        state.hidden[one.name] = !state.hidden[one.name];
        build();
      };
      const pressed = state.hidden[one.name] ? "false" : "true";
      return make("button", { type: "button", class: "key", "aria-pressed": pressed, onclick: toggle },
        curves.swatch(one.colour), make("span", {}, one.name), make("b", { class: "value" }));
    });
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

  /** Values at the pointer; without one the best (or last) of each line. */
  read(block, choice, state, index, at, keys) {
    at.textContent = index === null ? "" : `${block.x} ${choice.x[index]}`;
    choice.series.forEach((one, i) => {
      const value = keys.children[i] && keys.children[i].querySelector(".value");
      if (!value) return;
      if (index !== null) value.textContent = curves.cell(one, index, choice.unit);
      else if (one.best !== null && one.best !== undefined) value.textContent = `best ${shown(one.y[one.best], choice.unit)} in ${block.x} ${choice.x[one.best]}`;
      else value.textContent = "";
    });
  },

  cell(one, index, unit) {
    const band = one.low && one.low[index] !== null ? ` (${shown(one.low[index], unit)} to ${shown(one.high[index], unit)})` : "";
    return `${shown(one.y[index], unit)}${band}`;
  },

  numbers(block, state) {
    const choice = block.choices[state.choice];
    const columns = [block.x, ...choice.series.map((one) => one.name)];
    const rows = choice.x.map((x, i) => [{ text: String(x), value: x }, ...choice.series.map((one) => ({ text: curves.cell(one, i, choice.unit), value: one.y[i] }))]);
    return { columns, rows };
  },
};
