/* Figures of the report that can be read and zoomed. They are drawn from the numbers beside each printed figure, which
   remains where there is no script and on paper. */
const PLOT = { left: 52, right: 12, top: 10, bottom: 30, title: 20, key: 20, label: 20 };
const FIGURE_TEXT = { "font-size": 12 };
const measured = document.createElement("canvas").getContext("2d");
const textWidth = (text) => { measured.font = "12px system-ui, sans-serif"; return measured.measureText(text).width; };
const short = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(Math.abs(value) >= 100 ? 4 : 3))).replace("-", "−"));
const nearest = (values, at) => values.reduce((best, value, k) => (value !== null && Math.abs(value - at) < Math.abs(values[best] - at) ? k : best), 0);

/** A point in the shape of the printed figure; corners in units of its radius, a circle where a shape has none. */
const CORNERS = {
  s: [-0.9, -0.9, 0.9, -0.9, 0.9, 0.9, -0.9, 0.9], D: [0, -1.25, 1.25, 0, 0, 1.25, -1.25, 0],
  "^": [0, -1.2, 1.15, 0.9, -1.15, 0.9], v: [0, 1.2, 1.15, -0.9, -1.15, -0.9], "<": [-1.2, 0, 0.9, 1.15, 0.9, -1.15], ">": [1.2, 0, -0.9, 1.15, -0.9, -1.15],
  P: [-0.4, -1.2, 0.4, -1.2, 0.4, -0.4, 1.2, -0.4, 1.2, 0.4, 0.4, 0.4, 0.4, 1.2, -0.4, 1.2, -0.4, 0.4, -1.2, 0.4, -1.2, -0.4, -0.4, -0.4],
  X: [-1.1, -0.6, -0.6, -1.1, 0, -0.5, 0.6, -1.1, 1.1, -0.6, 0.5, 0, 1.1, 0.6, 0.6, 1.1, 0, 0.5, -0.6, 1.1, -1.1, 0.6, -0.5, 0],
  "*": [0, -1.4, 0.35, -0.45, 1.33, -0.43, 0.57, 0.17, 0.82, 1.13, 0, 0.6, -0.82, 1.13, -0.57, 0.17, -1.33, -0.43, -0.35, -0.45],
};
const symbol = (marker, cx, cy, fill) => (CORNERS[marker]
  ? s("polygon", { points: CORNERS[marker].map((value) => 3.2 * value).join(" "), transform: `translate(${cx} ${cy})`, fill })
  : s("circle", { cx, cy, r: 3, fill }));
/** Whether the ticks of a panel name something else than their place, such as strengths on a logarithmic axis. */
const isMapped = (panel) => (panel.xTicks ?? []).some(([value, text]) => Number(text) !== value);
/** A place on the x axis in words: its tick, or its number where the axis is a plain one. */
const placeText = (panel, at) => panel.xTicks?.find(([value]) => Math.abs(value - at) < 1e-6)?.[1] ?? (isMapped(panel) ? "between ticks" : short(at));

/** The numbers of a figure as rows of a table. */
function figureTable(chart) {
  const mapped = chart.panels.some(isMapped) ? " (place on the axis)" : "";
  const rows = [["panel", "curve", `${chart.xLabel ?? "x"}${mapped}`, chart.yLabel ?? "y", "low", "high"]];
  chart.panels.forEach((panel, p) => {
    const name = panel.title ?? panel.yLabel ?? (chart.panels.length > 1 ? `${p + 1}` : "");
    for (const line of panel.lines ?? []) line.x.forEach((x, k) => rows.push([name, line.label ?? panel.yLabel ?? "", x, line.y[k], line.low?.[k] ?? "", line.high?.[k] ?? ""]));
    for (const histogram of panel.histograms ?? []) histogram.counts.forEach((value, k) => rows.push([name, histogram.label ?? "",
      `${histogram.edges[k]} to ${histogram.edges[k + 1]}`, value, "", ""]));
    for (const point of panel.points ?? []) rows.push([name, point.text, point.x, point.y, "", ""]);
  });
  return rows;
}

function liveFigure(figure) {
  const chart = JSON.parse(figure.dataset.chart), { panels } = chart, name = chart.name;
  const marks = (panel) => [...(panel.lines ?? []), ...(panel.histograms ?? [])];
  const keys = [...new Map(panels.flatMap((panel) => marks(panel).filter((mark) => mark.label).map((mark) => [mark.label, mark]))).values()];
  const lines = panels.flatMap((panel) => panel.lines ?? []);
  // One reading for all curves at an x, or of the nearest point where points do not share their x.
  const together = lines.every((line) => !line.marker || line.x.join() === lines[0].x.join());
  const extentOf = (panel) => {
    const values = [...(panel.lines ?? []).flatMap((line) => line.x), ...(panel.histograms ?? []).flatMap((own) => own.edges),
                    ...(panel.points ?? []).map((point) => point.x)].filter((value) => value !== null);
    if (panel.xRange) return panel.xRange;
    if (!values.length) return [0, 1];
    const low = Math.min(...values), high = Math.max(...values), more = (panel.points || lines.some((line) => line.texts) ? 0.07 : 0.03) * (high - low) || 0.5;
    return [low - more, high + more];
  };
  const full = panels.map(extentOf), whole = [Math.min(...full.map((own) => own[0])), Math.max(...full.map((own) => own[1]))];
  const shared = !chart.beside;  // panels below each other have one x axis
  const places = [...new Set(panels.flatMap((panel) => [...(panel.lines ?? []).flatMap((line) => line.x),
    ...(panel.histograms ?? []).flatMap((own) => own.counts.map((_, k) => (own.edges[k] + own.edges[k + 1]) / 2))]))].filter((x) => x !== null).sort((a, b) => a - b);
  let range = whole, hidden = new Set(), at = null, drag = null, picked = null, areas = [];
  const box = h("div", { class: "live chart" }), reading = h("p", { class: "reading", role: "status" });
  const address = () => {
    const state = new URLSearchParams({ figure: name });
    if (range !== whole) state.set("x", range.map((value) => Number(value.toPrecision(5))).join(":"));
    if (hidden.size) state.set("hide", [...hidden].map((label) => keys.findIndex((key) => key.label === label)).join("."));
    if (at !== null) state.set("at", Number(at.toPrecision(5)));
    history.replaceState(null, "", `#${state}`);
  };
  const readAddress = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    if (given.get("figure") !== name) return false;
    const [low, high] = (given.get("x") ?? "").split(":").map(Number);
    range = low < high ? [low, high] : whole;
    hidden = new Set((given.get("hide") ?? "").split(".").filter(Boolean).map((k) => keys[k]?.label).filter(Boolean));
    at = given.has("at") && Number.isFinite(Number(given.get("at"))) && places.length ? places[nearest(places, Number(given.get("at")))] : null;
    return true;
  };
  const zoom = (low, high) => {
    range = high - low >= 0.999 * (whole[1] - whole[0]) ? whole : [Math.max(whole[0], low), Math.min(whole[1], high)];
    address();
    draw();
  };
  const zoomBy = (factor) => {
    const middle = at !== null && at >= range[0] && at <= range[1] ? at : (range[0] + range[1]) / 2;
    zoom(middle - (middle - range[0]) * factor, middle + (range[1] - middle) * factor);
  };
  const visible = (mark) => !mark.label || !hidden.has(mark.label);
  const inRange = (x) => x !== null && x >= range[0] - 1e-9 && x <= range[1] + 1e-9;

  /** The y axis of a panel: as printed, or what is left after zooming or hiding curves. */
  function heightOf(panel, x0, x1) {
    if (panel.yRange && range === whole && !hidden.size) return panel.yRange;
    const values = (panel.points ?? []).map((point) => point.y);
    for (const line of (panel.lines ?? []).filter(visible)) line.x.forEach((x, k) => {
      if (x !== null && x >= x0 - 1e-9 && x <= x1 + 1e-9) for (const own of [line.y, line.low, line.high]) if (own?.[k] !== undefined && own[k] !== null) values.push(own[k]);
    });
    if (panel.histograms) return [0, 1.05 * Math.max(1e-9, ...panel.histograms.filter(visible).flatMap((own) => own.counts))];
    if (!values.length) return panel.yRange ?? [0, 1];
    const low = Math.min(...values), high = Math.max(...values), more = 0.06 * (high - low) || 0.5;
    return [low >= 0 ? Math.max(0, low - more) : low - more, high + more];
  }
  function drawLine(line, x, y, tint, right) {
    const points = line.x.map((value, k) => [value, line.y[k], line.low?.[k], line.high?.[k]]).filter(([a, b]) => a !== null && b !== null);
    const path = (pick, backwards) => {
      const own = backwards ? [...points].reverse() : points;
      return own.map((point, k) => (k === 0 ? `${backwards ? "L" : "M"}${x(point[0])},${y(point[pick])}`
        : line.steps ? (backwards ? `H${x(point[0])}V${y(point[pick])}` : `V${y(point[pick])}H${x(point[0])}`) : `L${x(point[0])},${y(point[pick])}`)).join("");
    };
    const parts = [], style = { stroke: tint, "stroke-width": line.width ?? 1.8, "stroke-dasharray": line.dash, opacity: line.opacity, fill: "none" };
    if (line.low && !line.bars) parts.push(s("path", { d: `${path(3)}${path(2, true)}Z`, fill: tint, opacity: 0.13 }));
    if (line.low && line.bars) parts.push(points.map((point) => s("line", { x1: x(point[0]), x2: x(point[0]), y1: y(point[2]), y2: y(point[3]), stroke: tint, "stroke-width": 1, opacity: 0.4 })));
    (line.xLow ?? []).forEach((low, k) => parts.push(s("line", { x1: x(low), x2: x(line.xHigh[k]), y1: y(line.y[k]), y2: y(line.y[k]), stroke: tint, "stroke-width": 1, opacity: 0.4 })));
    parts.push(s("path", { d: path(1), ...style }));
    if (line.marker) parts.push(points.map((point) => symbol(line.marker, x(point[0]), y(point[1]), tint)));
    const fits = (text, k) => x(line.x[k]) + 6 + 7 * text.length <= right;  // else it stands to the left of its point
    (line.texts ?? []).forEach((text, k) => parts.push(s("text", { x: x(line.x[k]) + (fits(text, k) ? 6 : -6), "text-anchor": fits(text, k) ? "start" : "end", y: y(line.y[k]) - 6, fill: color("ink"), "font-size": 11, stroke: color("paper"),
      "stroke-width": 3, "paint-order": "stroke" }, text)));
    return parts;
  }
  function drawPanel(panel, p, left, top, width, height, last) {
    const [x0, x1] = shared ? range : panel.xRange ?? full[p], [y0, y1] = heightOf(panel, x0, x1);
    const x = scale(x0, x1, left, left + width), y = scale(y0, y1, top + height, top), muted = color("muted"), rule = color("rule");
    const grid = ticks(y0, y1, Math.max(2, Math.floor(height / 40)));
    const given = (panel.xTicks ?? []).filter(([value]) => value >= x0 - 1e-9 && value <= x1 + 1e-9);
    const xTicks = given.length ? given : ticks(x0, x1, Math.max(2, Math.floor(width / 90))).map((value) => [value, tickText(value)]);
    const dotted = panel.title && (panel.titleColor ?? "ink") !== "ink";
    const parts = [dotted ? s("circle", { cx: left + 5, cy: top - 12, r: 5, fill: color(panel.titleColor) }) : null,
      panel.title ? s("text", { x: left + (dotted ? 15 : 0), y: top - 8, fill: color("ink"), ...FIGURE_TEXT }, panel.title) : null,
      grid.map((value) => [s("line", { x1: left, x2: left + width, y1: y(value), y2: y(value), stroke: rule }),
        s("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end", fill: muted, ...FIGURE_TEXT }, tickText(value))]),
      last || !shared ? xTicks.map(([value, text]) =>
        s("text", { x: x(value), y: top + height + 17, "text-anchor": "middle", fill: muted, ...FIGURE_TEXT }, text)) : null,
      panel.yLabel ? s("text", { transform: `translate(12 ${top + height / 2}) rotate(-90)`, "text-anchor": "middle", fill: muted, ...FIGURE_TEXT }, panel.yLabel) : null];
    const inside = [];
    for (const reference of panel.references ?? []) {
      const place = reference.x !== undefined ? { x1: x(reference.x), x2: x(reference.x), y1: top, y2: top + height } : { x1: left, x2: left + width, y1: y(reference.y), y2: y(reference.y) };
      const late = place.x1 > left + width / 2;  // words stay inside
      const words = reference.x === undefined ? { x: left + 4, y: place.y1 - 4 } : { x: place.x1 + (late ? -5 : 5), y: top + 12, "text-anchor": late ? "end" : "start" };
      if (reference.interval) inside.push(s("rect", { x: x(reference.interval[0]), y: top, width: x(reference.interval[1]) - x(reference.interval[0]), height, fill: muted, opacity: 0.1 }));
      inside.push(s("line", { ...place, stroke: muted, "stroke-dasharray": "2 3" }),
        reference.text ? s("text", { ...words, fill: muted, "font-size": 11 }, reference.text) : null);
    }
    for (const own of (panel.histograms ?? []).filter(visible)) {
      const tint = color(own.color), outline = own.counts.map((value, k) => `${k ? "L" : "M"}${x(own.edges[k])},${y(value)}H${x(own.edges[k + 1])}`).join("");
      const bar = (value, k) => ({ x: x(own.edges[k]), y: y(value), width: Math.max(0, x(own.edges[k + 1]) - x(own.edges[k])), height: Math.max(0, y(0) - y(value)) });
      inside.push(own.filled ? own.counts.map((value, k) => s("rect", { ...bar(value, k), fill: tint, opacity: 0.35 }))
        : s("path", { d: outline, fill: "none", stroke: tint, "stroke-width": 1.4, "stroke-dasharray": own.dash }));
    }
    for (const line of (panel.lines ?? []).filter(visible)) inside.push(drawLine(line, x, y, color(line.color), left + width));
    for (const point of panel.points ?? []) inside.push(s("rect", { x: x(point.x) - 5, y: y(point.y) - 5, width: 10, height: 10, fill: color(point.color) }),
      s("text", { x: x(point.x), y: y(point.y) - 10, "text-anchor": "middle", fill: color("ink"), ...FIGURE_TEXT }, point.text));
    const part = { x: left, y: top - 4, width, height: height + 8 };  // an inner drawing cuts off what leaves it
    parts.push(s("svg", { ...part, viewBox: Object.values(part).join(" ") }, inside));
    return { nodes: parts, x, y, left, top, width, height, p, range: [x0, x1] };
  }
  /** Where the figure is read, or which part is selected. */
  function drawReading() {
    fill($(".mark", box), areas.map(({ x, y, left, top, width, height, p }) => [
      together && at !== null && x(at) >= left && x(at) <= left + width ? s("line", { x1: x(at), x2: x(at), y1: top, y2: top + height, stroke: color("ink"), opacity: 0.6 }) : null,
      picked && picked.p === p ? s("circle", { cx: x(picked.x), cy: y(picked.y), r: 7, fill: "none", stroke: color("ink"), "stroke-width": 1.5 }) : null,
      drag && shared ? s("rect", { x: Math.min(drag.from, drag.to), y: top, width: Math.abs(drag.to - drag.from), height, fill: color("accurate"), opacity: 0.15 }) : null]));
    read();
    const plot = $(".plot", box);
    if (plot && at !== null) { plot.setAttribute("aria-valuenow", at); plot.setAttribute("aria-valuetext", reading.textContent); }
  }

  // ---------------------------------------------------------------- reading
  const phrase = (panel, line, k) => `${short(line.y[k])}${line.low ? ` [${short(line.low[k])}, ${short(line.high[k])}]` : ""}${panel.yLabel && !line.label ? ` ${panel.yLabel}` : ""}`;
  function read() {
    const entry = (mark, text, label) => h("span", {}, h("span", { class: "dot", style: { background: `var(--${mark.color})` } }), label ? `${label} ` : "", h("strong", {}, text));
    if (at === null) { fill(reading, places.length ? h("span", { class: "quiet" }, `Move over the figure, or use the arrow keys, to read it${shared ? "; drag to zoom" : ""}.`) : ""); return; }
    if (!together) {
      if (!picked) { fill(reading, ""); return; }
      const { mark, panel, k } = picked;
      const spread = mark.xLow ? ` [${short(mark.xLow[k])}, ${short(mark.xHigh[k])}]` : "", more = mark.texts?.[k] ? ` (${mark.texts[k]})` : "";
      fill(reading, entry(mark, `${chart.yLabel ?? panel.yLabel ?? "y"} ${phrase(panel, mark, k)} at ${chart.xLabel ?? "x"} ${placeText(panel, mark.x[k])}${spread}${more}`, mark.label));
      return;
    }
    const parts = [];
    panels.forEach((panel) => {
      const named = panels.length > 1 && panel.title ? [h("span", { class: "quiet" }, `${panel.title}:`)] : [];
      const own = [...(panel.lines ?? []).filter((line) => visible(line) && (line.label || panel.lines.length === 1)).map((line) => {
          const k = nearest(line.x, at);  // a curve without a point here is read at its nearest one
          return entry(line, `${phrase(panel, line, k)}${line.x[k] === at ? "" : ` at ${placeText(panel, line.x[k])}`}`, line.label);
        }),
        ...(panel.histograms ?? []).filter(visible).map((histogram) => {
          const k = histogram.edges.findIndex((edge, e) => at >= edge && at <= histogram.edges[e + 1]);
          return k < 0 ? null : entry(histogram, short(histogram.counts[k]), histogram.label);
        })];
      if (own.length) parts.push(named, own);
    });
    fill(reading, h("span", { class: "quiet" }, `${chart.xLabel ?? "x"} ${placeText(panels[0], at)}`), parts);
  }
  function pick(area, px, py) {
    let best = null;
    (panels[area.p].lines ?? []).filter(visible).forEach((line) => line.x.forEach((value, k) => {
      const distance = Math.hypot(area.x(value) - px, area.y(line.y[k]) - py);
      if (!best || distance < best.distance) best = { distance, mark: line, panel: panels[area.p], p: area.p, k, x: value, y: line.y[k] };
    }));
    if (best) { picked = best; at = best.x; }
  }
  const points = () => panels.flatMap((panel, p) => (panel.lines ?? []).filter(visible).flatMap((line) => line.x.map((x, k) => ({ mark: line, panel, p, k, x, y: line.y[k] }))));
  function key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "+" || event.key === "-") zoomBy(event.key === "+" ? 0.5 : 2);
    else if (event.key === "Escape" && range !== whole) zoom(...whole);
    else if (move || event.key === "Home" || event.key === "End") {
      const listed = together ? places.filter(inRange) : points();
      if (!listed.length) return;
      const now = together ? (at === null ? -1 : nearest(listed, at)) : listed.findIndex((item) => picked && item.mark === picked.mark && item.k === picked.k);
      const next = event.key === "Home" ? 0 : event.key === "End" ? listed.length - 1 : Math.max(0, Math.min(listed.length - 1, now + move));
      if (together) at = listed[next]; else { picked = listed[next]; at = picked.x; }
      address();
      drawReading();
    } else return;
    event.preventDefault();
  }

  // ---------------------------------------------------------------- the whole figure
  function draw() {
    const width = Math.max(300, Math.min(760, box.clientWidth || figure.clientWidth || 640)), focused = box.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    const columns = chart.beside && width > 560 ? panels.length : 1, rows = Math.ceil(panels.length / columns);
    const each = Math.max(120, Math.min(280, 90 * chart.height / rows)), titled = panels.some((panel) => panel.title) ? PLOT.title : 0, below = !shared ? PLOT.bottom : titled ? 8 : 20;
    const cellWidth = (width - PLOT.left - PLOT.right - (columns - 1) * 40) / columns;
    areas = panels.map((panel, p) => drawPanel(panel, p, PLOT.left + (p % columns) * (cellWidth + 40),
      PLOT.top + titled + Math.floor(p / columns) * (each + titled + below), cellWidth, each, p >= panels.length - columns));
    let bottom = PLOT.top + rows * (each + titled + below) - below + PLOT.bottom + PLOT.label, x = PLOT.left;
    const keyNodes = keys.map((mark, k) => {
      const room = 34 + textWidth(mark.label);
      if (x > PLOT.left && x + room > width) { x = PLOT.left; bottom += PLOT.key; }
      const on = visible(mark), left = x, tint = color(panels.filter((panel) => marks(panel).some((own) => own.label === mark.label && own.color !== mark.color)).length ? "muted" : mark.color);
      x += room + 14;
      const toggle = () => { hidden = new Set(hidden); if (on) hidden.add(mark.label); else hidden.delete(mark.label); address(); draw(); };
      return s("g", { class: "key", role: "button", tabindex: 0, "data-focus": `key${k}`, "aria-pressed": String(on), "aria-label": `Curve ${mark.label}`, opacity: on ? 1 : 0.4,
                      on: { click: toggle, keydown: (event) => { if (event.key === "Enter" || event.key === " ") { toggle(); event.preventDefault(); } } } },
        s("rect", { x: left, y: bottom - 12, width: room, height: 18, fill: "transparent" }),
        mark.filled ? s("rect", { x: left, y: bottom - 8, width: 20, height: 9, fill: tint, opacity: 0.35 })
          : s("line", { x1: left, x2: left + 22, y1: bottom - 4, y2: bottom - 4, stroke: tint, "stroke-width": Math.min(3, mark.width ?? 1.8),
                        "stroke-dasharray": mark.dash, opacity: mark.opacity }),
        mark.marker ? symbol(mark.marker, left + 11, bottom - 4, tint) : null,
        s("text", { x: left + 28, y: bottom, fill: color("ink"), "text-decoration": on ? null : "line-through", ...FIGURE_TEXT }, mark.label));
    });
    const height = bottom + (keys.length ? 10 : -8), axisY = PLOT.top + rows * (each + titled + below) - below + PLOT.bottom + 4;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": chart.alt || name }, areas.map((area) => area.nodes),
      chart.xLabel ? s("text", { x: PLOT.left + (width - PLOT.left - PLOT.right) / 2, y: axisY, "text-anchor": "middle", fill: color("muted"), ...FIGURE_TEXT }, chart.xLabel) : null,
      chart.yLabel ? s("text", { transform: `translate(12 ${PLOT.top + (axisY - PLOT.bottom) / 2}) rotate(-90)`, "text-anchor": "middle", fill: color("muted"), ...FIGURE_TEXT }, chart.yLabel) : null,
      places.length ? s("g", { class: "plot", role: "slider", tabindex: 0, "data-focus": "plot", "aria-label": `Read the figure ${name} along ${chart.xLabel ?? "x"}`,
        "aria-orientation": "horizontal", "aria-valuemin": range[0], "aria-valuemax": range[1],
        "aria-valuenow": at ?? range[0], "aria-valuetext": `${chart.xLabel ?? "x"} ${short(at ?? range[0])}`, on: { keydown: key } },
        s("rect", { x: PLOT.left, y: areas[0].top, width: width - PLOT.left - PLOT.right, height: areas.at(-1).top + each - areas[0].top, fill: "transparent" })) : null,
      s("g", { class: "mark" }), keyNodes);
    fill(box, svg);
    drawReading();
    if (focused) $(`[data-focus="${focused}"]`, box)?.focus();
    zoomed.forEach((button) => { button.disabled = range === whole; });
  }
  const position = (event) => {
    const svg = $("svg", box), size = svg.getBoundingClientRect(), { width, height } = svg.viewBox.baseVal;
    return [(event.clientX - size.left) * width / size.width, (event.clientY - size.top) * height / size.height];
  };
  const areaAt = ([px, py]) => areas.find(({ left, top, width, height }) => px >= left && px <= left + width && py >= top - 4 && py <= top + height + 4);
  box.addEventListener("pointermove", (event) => {
    const spot = position(event), area = areaAt(spot);
    if (drag) drag.to = Math.max(areas[0].left, Math.min(areas[0].left + areas[0].width, spot[0]));
    else if (area && !together) pick(area, ...spot);
    else if (area) {
      const listed = places.filter((place) => place >= area.range[0] && place <= area.range[1]);
      if (listed.length) at = listed[nearest(listed, scale(area.left, area.left + area.width, ...area.range)(spot[0]))];
    }
    drawReading();
  });
  box.addEventListener("pointerdown", (event) => {
    const spot = position(event);
    if (event.pointerType !== "mouse" || event.button !== 0 || !shared || !areaAt(spot)) return;
    drag = { from: spot[0], to: spot[0] };
    event.preventDefault();
  });
  box.addEventListener("pointerleave", () => { if (!drag) { at = picked = null; readAddress(); drawReading(); } });
  document.addEventListener("pointerup", () => {
    if (!drag) return;
    const { from, to } = drag, back = scale(areas[0].left, areas[0].left + areas[0].width, ...range);
    drag = null;
    if (Math.abs(to - from) > 6) zoom(back(Math.min(from, to)), back(Math.max(from, to))); else drawReading();
  });
  const zoomOut = tool("−", `Zoom out of the figure ${name}`, () => zoomBy(2)), all = tool("all", `Show all of the figure ${name}`, () => zoom(...whole)), zoomed = [zoomOut, all];
  const tools = chartTools(name, () => $("svg", box));
  tools.prepend(...(shared && places.length > 2 ? [tool("+", `Zoom into the figure ${name}`, () => zoomBy(0.5)), zoomOut, all, h("span", { class: "gap" })] : []));
  tools.append(tool("CSV", `Download the numbers of the figure ${name} as CSV`, () => saveCsv(name, figureTable(chart))));
  figure.classList.add("has-live");
  figure.append(box, reading, tools);
  if (readAddress()) { draw(); figure.scrollIntoView(); } else draw();
  window.addEventListener("hashchange", () => { if (readAddress()) { draw(); figure.scrollIntoView(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let wide = box.clientWidth;
  new ResizeObserver(() => { if (box.clientWidth !== wide) { wide = box.clientWidth; draw(); } }).observe(box);
}
