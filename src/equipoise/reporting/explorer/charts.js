/* Scales, ticks and axes of all charts that the script draws. */
const scale = (from, to, low, high) => (value) => low + ((value - from) / (to - from || 1)) * (high - low);
const ticks = (low, high, most = 6) => {
  const raw = (high - low) / most;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((k) => k * unit).find((k) => k >= raw);
  const values = [];
  for (let k = Math.ceil(low / size - 1e-9); k * size <= high + 1e-9; k++) {
    values.push(Number((k * size).toPrecision(12)));
  }
  return values;
};
const tickText = (value) => String(value).replace("-", "−");
const textAt = (x, y, text, properties = {}) =>
  s("text", { x, y, "text-anchor": "middle", "font-size": 12, fill: color("muted"), ...properties }, text);
/** The label of a y axis, along the left edge; `middle` is the height of its centre. */
const sideLabel = (middle, text) => textAt(0, 0, text, { transform: `translate(13 ${middle}) rotate(-90)` });
const segment = (x1, y1, x2, y2, properties) => s("line", { x1, y1, x2, y2, ...properties });
/** A line of the grid with its value on the left. */
const gridLine = (left, right, y, text) => [
  segment(left, y, right, y, { stroke: color("rule") }),
  textAt(left - 8, y + 4, text, { "text-anchor": "end" }),
];
function axes(width, height, box, x, y, labels) {
  return [
    ticks(...box.y).map((value) => gridLine(box.left, width - box.right, y(value), tickText(value))),
    ticks(...box.x).map((value) => textAt(x(value), height - box.bottom + 18, tickText(value))),
    textAt((box.left + width - box.right) / 2, height - 6, labels[0]),
    sideLabel((height - box.bottom + box.top) / 2, labels[1]),
  ];
}
const chartWidth = (parent) => Math.max(320, Math.min(760, parent.clientWidth || 760));
/** The range of an axis in percent: wider than the values, and at least `least` points. */
const extent = (values, least) => {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const more = Math.max(0.06 * (high - low), (least - (high - low)) / 2);
  return [Math.max(0, low - more), Math.min(100, high + more)];
};
/** Draw again when the colours or the width change. */
function keepDrawn(box, draw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = box.clientWidth;
  new ResizeObserver(() => {
    if (box.clientWidth === width) return;
    width = box.clientWidth;
    draw();
  }).observe(box);
}
