/* Scales, ticks and axes of all charts that the script draws. */
const scale = (from, to, low, high) => (value) => low + (value - from) / (to - from || 1) * (high - low);
const ticks = (low, high, most = 6) => {
  const raw = (high - low) / most, unit = 10 ** Math.floor(Math.log10(raw)), size = [1, 2, 5, 10].map((k) => k * unit).find((k) => k >= raw);
  const found = [];
  for (let k = Math.ceil(low / size - 1e-9); k * size <= high + 1e-9; k++) found.push(Number((k * size).toPrecision(12)));
  return found;
};
const tickText = (value) => String(value).replace("-", "−");
function axes(width, height, box, x, y, labels) {
  const muted = color("muted"), rule = color("rule"), parts = [];
  for (const value of ticks(...box.y)) parts.push(s("line", { x1: box.left, x2: width - box.right, y1: y(value), y2: y(value), stroke: rule, "stroke-width": 1 }),
    s("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end", "font-size": 12, fill: muted }, tickText(value)));
  for (const value of ticks(...box.x)) parts.push(s("text", { x: x(value), y: height - box.bottom + 18, "text-anchor": "middle", "font-size": 12, fill: muted }, tickText(value)));
  parts.push(s("text", { x: (box.left + width - box.right) / 2, y: height - 6, "text-anchor": "middle", "font-size": 12, fill: muted }, labels[0]),
    s("text", { x: 0, y: 0, transform: `translate(13 ${(height - box.bottom + box.top) / 2}) rotate(-90)`, "text-anchor": "middle", "font-size": 12, fill: muted }, labels[1]));
  return parts;
}
const chartWidth = (parent) => Math.max(320, Math.min(760, parent.clientWidth || 760));
const extent = (values, least) => {
  let low = Math.min(...values), high = Math.max(...values);
  const more = Math.max(0.06 * (high - low), (least - (high - low)) / 2);
  low = Math.max(0, low - more); high = Math.min(100, high + more);
  return [low, high];
};
