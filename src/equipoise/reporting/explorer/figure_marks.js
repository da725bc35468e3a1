/* What a figure of the report is made of: its numbers as a table, and each panel with its curves as SVG. */
const GAP = { left: 52, right: 12, top: 10, bottom: 30, title: 20, key: 20, label: 20 };  // around panels, in pixels
const measuring = document.createElement("canvas").getContext("2d");
const textWidth = (text) => {
  measuring.font = "12px system-ui, sans-serif";
  return measuring.measureText(text).width;
};
const short = (value) => {
  if (value === null || value === undefined) return "–";
  return tickText(Number(value.toPrecision(Math.abs(value) >= 100 ? 4 : 3)));
};
/** The position of the value that is nearest. */
const nearest = (values, at) => values.reduce(
  (best, value, k) => (value !== null && Math.abs(value - at) < Math.abs(values[best] - at) ? k : best), 0);
const isBetween = (value, [low, high]) => value !== null && value >= low - 1e-9 && value <= high + 1e-9;

/** A point in the shape of the printed figure; corners in units of its radius, a circle where a shape has none. */
const CORNERS = {
  s: [-0.9, -0.9, 0.9, -0.9, 0.9, 0.9, -0.9, 0.9],
  D: [0, -1.25, 1.25, 0, 0, 1.25, -1.25, 0],
  "^": [0, -1.2, 1.15, 0.9, -1.15, 0.9],
  v: [0, 1.2, 1.15, -0.9, -1.15, -0.9],
  "<": [-1.2, 0, 0.9, 1.15, 0.9, -1.15],
  ">": [1.2, 0, -0.9, 1.15, -0.9, -1.15],
  P: [-0.4, -1.2, 0.4, -1.2, 0.4, -0.4, 1.2, -0.4, 1.2, 0.4, 0.4, 0.4,
      0.4, 1.2, -0.4, 1.2, -0.4, 0.4, -1.2, 0.4, -1.2, -0.4, -0.4, -0.4],
  X: [-1.1, -0.6, -0.6, -1.1, 0, -0.5, 0.6, -1.1, 1.1, -0.6, 0.5, 0,
      1.1, 0.6, 0.6, 1.1, 0, 0.5, -0.6, 1.1, -1.1, 0.6, -0.5, 0],
  "*": [0, -1.4, 0.35, -0.45, 1.33, -0.43, 0.57, 0.17, 0.82, 1.13, 0, 0.6,
        -0.82, 1.13, -0.57, 0.17, -1.33, -0.43, -0.35, -0.45],
};
function symbol(marker, cx, cy, fill) {
  if (!CORNERS[marker]) return s("circle", { cx, cy, r: 3, fill });
  const points = CORNERS[marker].map((value) => 3.2 * value).join(" ");
  return s("polygon", { points, transform: `translate(${cx} ${cy})`, fill });
}

/** Whether the ticks of a panel name something else than their place, such as strengths on a logarithmic axis. */
const isMapped = (panel) => (panel.xTicks ?? []).some(([value, text]) => Number(text) !== value);
/** A place on the x axis in words: its tick, or its number where the axis is a plain one. */
const placeText = (panel, at) =>
  panel.xTicks?.find(([value]) => Math.abs(value - at) < 1e-6)?.[1] ?? (isMapped(panel) ? "between ticks" : short(at));

/** The numbers of a figure as rows of a table. */
function figureTable(chart) {
  const mapped = chart.panels.some(isMapped) ? " (place on the axis)" : "";
  const rows = [["panel", "curve", `${chart.xLabel ?? "x"}${mapped}`, chart.yLabel ?? "y", "low", "high"]];
  chart.panels.forEach((panel, p) => {
    const name = panel.title ?? panel.yLabel ?? (chart.panels.length > 1 ? `${p + 1}` : "");
    for (const line of panel.lines ?? []) {
      const curve = line.label ?? panel.yLabel ?? "";
      line.x.forEach((x, k) => rows.push([name, curve, x, line.y[k], line.low?.[k] ?? "", line.high?.[k] ?? ""]));
    }
    for (const { label, edges, counts } of panel.histograms ?? []) {
      counts.forEach((value, k) => rows.push([name, label ?? "", `${edges[k]} to ${edges[k + 1]}`, value, "", ""]));
    }
    for (const point of panel.points ?? []) rows.push([name, point.text, point.x, point.y, "", ""]);
  });
  return rows;
}

/** All places of a panel that have a number: points of curves, and the middles of bars. */
const placesOf = (panel) => [
  ...(panel.lines ?? []).flatMap((line) => line.x),
  ...(panel.histograms ?? []).flatMap(({ edges, counts }) => counts.map((_, k) => (edges[k] + edges[k + 1]) / 2)),
].filter((x) => x !== null);

/** The x axis of a panel: as printed, or a little wider than what it shows. */
function xRangeOf(panel, hasTexts) {
  if (panel.xRange) return panel.xRange;
  const values = [
    ...(panel.lines ?? []).flatMap((line) => line.x),
    ...(panel.histograms ?? []).flatMap((histogram) => histogram.edges),
    ...(panel.points ?? []).map((point) => point.x),
  ].filter((value) => value !== null);
  if (!values.length) return [0, 1];
  const low = Math.min(...values);
  const high = Math.max(...values);
  const more = (panel.points || hasTexts ? 0.07 : 0.03) * (high - low) || 0.5;
  return [low - more, high + more];
}
/** The y axis that shows the visible marks within a range of x. */
function yRangeOf(panel, xRange, visible) {
  if (panel.histograms) {
    return [0, 1.05 * Math.max(1e-9, ...panel.histograms.filter(visible).flatMap((histogram) => histogram.counts))];
  }
  const values = (panel.points ?? []).map((point) => point.y);
  for (const line of (panel.lines ?? []).filter(visible)) {
    line.x.forEach((x, k) => {
      if (isBetween(x, xRange)) values.push(line.y[k], line.low?.[k], line.high?.[k]);
    });
  }
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return panel.yRange ?? [0, 1];
  const low = Math.min(...known);
  const high = Math.max(...known);
  const more = 0.06 * (high - low) || 0.5;
  return [low >= 0 ? Math.max(0, low - more) : low - more, high + more];
}

/** A curve with its interval, markers and texts; texts stay left of `right`. */
function drawLine(line, x, y, right) {
  const tint = color(line.color);
  const points = line.x.map((value, k) => ({ x: value, y: line.y[k], low: line.low?.[k], high: line.high?.[k] }))
    .filter((point) => point.x !== null && point.y !== null);
  const path = (key, start = "M") => points.map((point, k) => {
    const [px, py] = [x(point.x), y(point[key])];
    if (k === 0) return `${start}${px},${py}`;
    return line.steps ? `V${py}H${px}` : `L${px},${py}`;
  }).join("");
  const backwards = (key) => [...points].reverse().map((point, k) => {
    const [px, py] = [x(point.x), y(point[key])];
    return k && line.steps ? `H${px}V${py}` : `L${px},${py}`;
  }).join("");
  const bar = { stroke: tint, "stroke-width": 1, opacity: 0.4 };
  const text = (words, k) => {
    const [px, py] = [x(line.x[k]), y(line.y[k]) - 6];
    const fits = px + 6 + 7 * words.length <= right;  // else it stands to the left of its point
    const halo = { stroke: color("paper"), "stroke-width": 3, "paint-order": "stroke" };
    const style = { "text-anchor": fits ? "start" : "end", "font-size": 11, fill: color("ink"), ...halo };
    return textAt(px + (fits ? 6 : -6), py, words, style);
  };
  return [
    line.low && !line.bars ? s("path", { d: `${path("high")}${backwards("low")}Z`, fill: tint, opacity: 0.13 }) : null,
    line.low && line.bars
      ? points.map((point) => segment(x(point.x), y(point.low), x(point.x), y(point.high), bar)) : null,
    (line.xLow ?? []).map((low, k) => segment(x(low), y(line.y[k]), x(line.xHigh[k]), y(line.y[k]), bar)),
    s("path", {
      d: path("y"), stroke: tint, "stroke-width": line.width ?? 1.8, "stroke-dasharray": line.dash,
      opacity: line.opacity, fill: "none",
    }),
    line.marker ? points.map((point) => symbol(line.marker, x(point.x), y(point.y), tint)) : null,
    (line.texts ?? []).map(text),
  ];
}
function drawHistogram({ edges, counts, filled, dash, color: name }, x, y) {
  const tint = color(name);
  if (!filled) {
    const d = counts.map((value, k) => `${k ? "L" : "M"}${x(edges[k])},${y(value)}H${x(edges[k + 1])}`).join("");
    return s("path", { d, fill: "none", stroke: tint, "stroke-width": 1.4, "stroke-dasharray": dash });
  }
  return counts.map((value, k) => s("rect", {
    x: x(edges[k]), y: y(value), width: Math.max(0, x(edges[k + 1]) - x(edges[k])),
    height: Math.max(0, y(0) - y(value)), fill: tint, opacity: 0.35,
  }));
}
/** A dotted line across a panel at an x or a y, with its interval and its words, which stay inside. */
function drawReference(reference, x, y, { left, top, width, height }) {
  const muted = color("muted");
  const style = { stroke: muted, "stroke-dasharray": "2 3" };
  const words = (px, py, anchor) =>
    reference.text ? textAt(px, py, reference.text, { "text-anchor": anchor, "font-size": 11 }) : null;
  if (reference.x === undefined) {
    const at = y(reference.y);
    return [segment(left, at, left + width, at, style), words(left + 4, at - 4, "start")];
  }
  const at = x(reference.x);
  const isRight = at > left + width / 2;
  const [low, high] = (reference.interval ?? []).map(x);
  return [
    reference.interval
      ? s("rect", { x: low, y: top, width: high - low, height, fill: muted, opacity: 0.1 }) : null,
    segment(at, top, at, top + height, style),
    words(at + (isRight ? -5 : 5), top + 12, isRight ? "end" : "start"),
  ];
}
function drawPoint(point, x, y) {
  const [px, py] = [x(point.x), y(point.y)];
  return [
    s("rect", { x: px - 5, y: py - 5, width: 10, height: 10, fill: color(point.color) }),
    textAt(px, py - 10, point.text, { fill: color("ink") }),
  ];
}
/** One panel in its frame; `visible` says which curves are shown, `hasTicks` whether its x axis has numbers. */
function drawPanel(panel, frame, xRange, yRange, visible, hasTicks) {
  const { left, top, width, height } = frame;
  const x = scale(...xRange, left, left + width);
  const y = scale(...yRange, top + height, top);
  const given = (panel.xTicks ?? []).filter(([value]) => isBetween(value, xRange));
  const plain = () => ticks(...xRange, Math.max(2, Math.floor(width / 90))).map((value) => [value, tickText(value)]);
  const xTicks = given.length ? given : plain();
  const hasDot = panel.title && (panel.titleColor ?? "ink") !== "ink";
  const titleStyle = { "text-anchor": "start", fill: color("ink") };
  const shown = { x: left, y: top - 4, width, height: height + 8 };  // an inner drawing cuts off what leaves it
  const nodes = [
    hasDot ? s("circle", { cx: left + 5, cy: top - 12, r: 5, fill: color(panel.titleColor) }) : null,
    panel.title ? textAt(left + (hasDot ? 15 : 0), top - 8, panel.title, titleStyle) : null,
    ticks(...yRange, Math.max(2, Math.floor(height / 40)))
      .map((value) => gridLine(left, left + width, y(value), tickText(value))),
    hasTicks ? xTicks.map(([value, text]) => textAt(x(value), top + height + 17, text)) : null,
    panel.yLabel ? sideLabel(top + height / 2, panel.yLabel) : null,
    s("svg", { ...shown, viewBox: Object.values(shown).join(" ") },
      (panel.references ?? []).map((reference) => drawReference(reference, x, y, frame)),
      (panel.histograms ?? []).filter(visible).map((histogram) => drawHistogram(histogram, x, y)),
      (panel.lines ?? []).filter(visible).map((line) => drawLine(line, x, y, left + width)),
      (panel.points ?? []).map((point) => drawPoint(point, x, y))),
  ];
  return { ...frame, nodes, x, y, range: xRange };
}
