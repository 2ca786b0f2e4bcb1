// Curves over rounds, by uPlot: pointer or arrow keys read values, names toggle curves, axes can be logarithmic.
"use strict";

// Steps between ticks: rounds are integers.
const INTEGER_STEPS = [0, 1, 2, 3, 4, 5, 6].flatMap((zeros) => [1, 2, 5].map((digit) => digit * 10 ** zeros));

const curves = {
  figure(block) {
    const state = getState(block.id);
    state.choice = Math.min(state.choice || 0, block.panels.length - 1);
    state.hidden = state.hidden || {};
    const plot = createNode("div", {
      class: "plot",
      tabindex: 0,
      role: "img",
      "aria-label": block.text,
      id: `${block.id}-plot`,
    });
    const position = createNode("p", { class: "position" });
    const keys = createNode("div", { class: "keys" });
    const note = createNode("p", { class: "note" });
    const spoken = createNode("p", { class: "visually-hidden", role: "status" });
    let drawn = null;

    function build() {
      if (drawn) drawn.destroy();
      const panel = block.panels[state.choice];
      drawn = curves.plot(panel, state, plot, (index) => curves.read(panel, index, position, keys));
      plot.chart = drawn; // for tests
      keys.replaceChildren(...curves.keys(panel, state, build));
      note.textContent = [panel.band && `${panel.band}.`, panel.note].filter(Boolean).join(" ");
      curves.read(panel, null, position, keys);
    }

    const chart = {
      holder: plot,
      paint: () => plot.clientWidth && build(),
      drop: () => drawn && drawn.destroy(),
    };
    let width = 0;
    new ResizeObserver(() => {
      if (plot.clientWidth === width) return;
      width = plot.clientWidth;
      chart.paint();
    }).observe(plot);
    repaints.add(chart);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !drawn) return;
      event.preventDefault();
      const x = drawn.data[0];
      const index = Math.min(x.length - 1, Math.max(0, (drawn.cursor.idx ?? -1) + step));
      drawn.setCursor({ left: drawn.valToPos(x[index], "x"), top: 20 });
      spoken.textContent = `${position.textContent} ${[...keys.children].map((key) => key.textContent).join("; ")}`;
    });

    const update = (name) => (value) => {
      state[name] = value;
      chart.paint();
    };
    const controls = createNode(
      "div",
      { class: "controls" },
      selectBox(
        block.id,
        "Show",
        block.panels.map((panel) => panel.name),
        state.choice,
        update("choice"),
      ),
      checkbox(`${block.id}-logy`, "log values", Boolean(state.logy), update("logy")),
      block.panels[0].is_stepped
        ? null
        : checkbox(
            `${block.id}-logx`,
            `log ${block.panels[0].x_axis.label}s`,
            Boolean(state.logx),
            update("logx"),
          ),
    );
    return figure(block, [controls, plot, position, keys, note, spoken], () =>
      curves.numbers(block.panels[state.choice]),
    );
  },

  /** Create the chart; uPlot draws the edges of the bands first, so that the curves are on top. */
  plot(panel, state, holder, onread) {
    const colors = theme();
    const from = state.logx ? panel.x.findIndex((x) => x > 0) : 0;
    const clean = (values) =>
      values.slice(from).map((value) => (state.logy && value !== null && value <= 0 ? null : value));
    const data = [panel.x.slice(from)];
    const series = [{}];
    const bands = [];
    const isVisible = (line) => !state.hidden[line.name];
    const paths = panel.is_stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
    for (const line of panel.series.filter((line) => line.low && isVisible(line))) {
      const color = lineColor(line.color, colors);
      for (const side of [line.high, line.low]) {
        data.push(clean(side));
        series.push({ width: 0, spanGaps: true, paths, points: { show: false } });
      }
      bands.push({ series: [series.length - 2, series.length - 1], fill: curves.pale(color) });
    }
    for (const line of panel.series.filter(isVisible)) {
      data.push(clean(line.y));
      series.push(curves.line(line, paths, colors));
    }
    const axis = {
      stroke: colors.soft,
      grid: { stroke: colors.grid, width: 1 },
      ticks: { stroke: colors.grid, width: 1 },
      font: "12px system-ui, sans-serif",
    };
    const percent = panel.y_axis.unit === "%";
    const options = {
      width: holder.clientWidth,
      height: Math.round(Math.min(380, Math.max(240, holder.clientWidth * 0.5))),
      scales: {
        x: { time: false, distr: state.logx ? 3 : 1 },
        y: {
          distr: state.logy ? 3 : 1,
          range: (_, low, high) => curves.range(low, high, panel, state.logy, percent),
        },
      },
      axes: [
        {
          ...axis,
          label: panel.x_axis.label,
          labelSize: 22,
          labelFont: axis.font,
          size: 34,
          space: 60,
          incrs: INTEGER_STEPS,
        },
        {
          ...axis,
          label: panel.y_axis.label,
          labelSize: 20,
          labelFont: axis.font,
          size: (u, values) =>
            22 + 7 * Math.max(2, ...(values || []).map((value) => String(value ?? "").length)),
        },
      ],
      series,
      bands,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 8 } },
      hooks: {
        drawAxes: [(u) => curves.background(u, panel, colors)],
        draw: [(u) => curves.marks(u, panel.series.filter(isVisible), colors)],
        setCursor: [
          (u) => onread(u.cursor.idx === null || u.cursor.idx === undefined ? null : u.cursor.idx + from),
        ],
      },
    };
    return new uPlot(options, data, holder);
  },

  line(line, paths, colors) {
    const color = lineColor(line.color, colors);
    const isSingle = line.y.filter((value) => value !== null).length < 2;
    return {
      label: line.name,
      stroke: color,
      width: 2,
      spanGaps: true,
      paths,
      dash: palette.dashes[line.color % palette.dashes.length].map((length) => 2 * length),
      points: isSingle ? { show: true, size: 8, fill: color } : { show: false },
    };
  },

  /** Draw marked points as dots, and a cross at the end of a curve that ends early. */
  marks(u, series, colors) {
    const { ctx } = u;
    const pixel = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
    for (const line of series) {
      const scale = devicePixelRatio;
      ctx.save();
      ctx.fillStyle = lineColor(line.color, colors);
      ctx.strokeStyle = colors.paper;
      ctx.lineWidth = 1.5 * scale;
      const [x, y] = line.mark ? pixel(line.mark.x, line.mark.y) : [NaN, NaN];
      if (Number.isFinite(x + y) && x >= u.bbox.left) {
        ctx.beginPath();
        ctx.arc(x, y, 5 * scale, 0, 7);
        ctx.fill();
        ctx.stroke();
      }
      const last = line.y.findLastIndex((value) => value !== null);
      if (line.ending && last >= 0) {
        const [cx, cy] = pixel(u.data[0][u.data[0].length - line.y.length + last], line.y[last]);
        ctx.strokeStyle = lineColor(line.color, colors);
        ctx.lineWidth = 3 * scale;
        ctx.beginPath();
        for (const sign of [1, -1]) {
          ctx.moveTo(cx - 5 * scale, cy - sign * 5 * scale);
          ctx.lineTo(cx + 5 * scale, cy + sign * 5 * scale);
        }
        ctx.stroke();
      }
      ctx.restore();
    }
  },

  range(low, high, panel, log, percent) {
    if (low === null || high === null) return log ? [0.1, 1] : [0, 1];
    const marks = panel.series.filter((line) => line.mark).map((line) => line.mark.y);
    const lines = [...panel.references.map((line) => line.y), ...marks].filter((value) => !log || value > 0);
    const [a, b] = [Math.min(low, ...lines), Math.max(high, ...lines)];
    if (log) return a === b ? [a / 2, b * 2] : [a / 1.1, b * 1.1];
    const room = (b - a || Math.abs(a) || 1) * 0.06;
    return percent ? [Math.max(0, a - room), Math.min(100, b + room)] : [a - room, b + room]; // a band may exceed these limits
  },

  /** Draw the shaded range of x, and the reference lines. */
  background(u, panel, colors) {
    const { ctx, bbox } = u;
    ctx.save();
    if (panel.shaded) {
      const [left, right] = panel.shaded.map((x) => u.valToPos(x, "x", true));
      ctx.fillStyle = "rgba(128, 128, 128, 0.16)";
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
    }
    ctx.strokeStyle = colors.soft;
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

  pale: (color) => (color.length === 7 ? `${color}33` : "rgba(128, 128, 128, 0.2)"),

  /** Create a button for each curve, with its line style and value, and a text for each reference line. */
  keys(panel, state, build) {
    const buttons = panel.series.map((line) => {
      const toggle = () => {
        state.hidden[line.name] = !state.hidden[line.name];
        build();
      };
      const pressed = state.hidden[line.name] ? "false" : "true";
      return createNode(
        "button",
        { type: "button", class: "key", "aria-pressed": pressed, onclick: toggle },
        curves.swatch(line.color),
        createNode("span", {}, line.name),
        createNode("b", { class: "value" }),
      );
    });
    return [
      ...buttons,
      ...panel.references.map((line) => createNode("span", { class: "key" }, `┄ ${line.text}`)),
    ];
  },

  swatch(index) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    const line = document.createElementNS(space, "line");
    const set = (element, values) =>
      Object.entries(values).forEach(([name, value]) => element.setAttribute(name, value));
    set(svg, { width: 30, height: 10, "aria-hidden": "true" });
    const dash = palette.dashes[index % palette.dashes.length].map((length) => 2 * length).join(" ");
    set(line, {
      x1: 0,
      x2: 30,
      y1: 5,
      y2: 5,
      "stroke-width": 2.5,
      "stroke-dasharray": dash,
      stroke: lineColor(index, theme()),
    });
    svg.append(line);
    return svg;
  },

  /** Show the values at the pointer; without a pointer, each curve's mark and why it ends early. */
  read(panel, index, position, keys) {
    position.textContent = index === null ? "" : `${panel.x_axis.label} ${panel.x[index]}`;
    panel.series.forEach((line, i) => {
      const value = keys.children[i] && keys.children[i].querySelector(".value");
      if (!value) return;
      value.textContent =
        index === null
          ? [line.mark && line.mark.text, line.ending].filter(Boolean).join(", ")
          : curves.cell(line, index, panel.y_axis.unit);
    });
  },

  cell(line, index, unit) {
    const band =
      line.low && line.low[index] !== null
        ? ` (${formatNumber(line.low[index], unit)} to ${formatNumber(line.high[index], unit)})`
        : "";
    return `${formatNumber(line.y[index], unit)}${band}`;
  },

  numbers(panel) {
    const columns = [panel.x_axis.label, ...panel.series.map((line) => line.name)];
    const rows = panel.x.map((x, i) => [
      { text: String(x), value: x },
      ...panel.series.map((line) => ({ text: curves.cell(line, i, panel.y_axis.unit), value: line.y[i] })),
    ]);
    return { columns, rows };
  },
};
