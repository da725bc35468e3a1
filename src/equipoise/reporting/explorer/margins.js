/* Distributions of margins with a movable threshold. */
function marginsPanel(view) {
  const { n, models, roles, col, margin, marginClean, steps, stepPredicted, stepBits, marginText, state, set, choice } = view;
  const marginChart = h("div", { class: "chart" }), readout = h("p", { class: "summary", role: "status" });
  const threshold = h("input", { type: "range", min: -1, max: 1, step: 0.025, on: { input: () => set({ threshold: threshold.value }) } });
  const thresholdField = h("label", { class: "slider" }, h("span", {}, ""), threshold);
  const mapped = Boolean(col.mappedClean);
  const marginColumns = () => (state.of === "mapped" ? [col.mappedClean, col.mappedSmallest] : [marginClean[state.of], margin[state.of]]);
  const panel = h("div", {}, h("div", { class: "fields" }, choice("Margins of", "of", [...models.map((model, m) => [String(m), model.symbol]),
      ...(mapped ? [["mapped", `${models[roles.h]?.symbol ?? "robust model"}, after the map`]] : [])]), thresholdField),
    readout, marginChart, chartTools("margins", () => $("svg", marginChart)),
    h("p", { class: "tools" }, tool("CSV", "Download the margins as CSV", () => saveCsv("margins", [["image", "clean", "attacked"],
      ...Array.from({ length: n }, (_, i) => [col.index[i], ...marginColumns().map((values) => marginText(values[i]))])]))),
    h("p", { class: "hint" }, "Filled: clean images. Line: the smallest margin over the clean image and all attacks. The margin is the probability of the true class minus the largest other one."));
  function draw() {
    const [first, second] = marginColumns(), t = Number(state.threshold), width = chartWidth(view.root), height = 260, box = { left: 48, right: 14, top: 12, bottom: 42, x: [-1, 1] };
    const bins = 40, counts = [first, second].map((values) => { const c = new Array(bins).fill(0); for (const v of values) if (v !== NO_MARGIN) c[Math.min(bins - 1, Math.floor((v / MARGIN_STEPS + 1) / 2 * bins))]++; return c; });
    const root = (value) => Math.sqrt(value);
    box.y = [0, Math.max(...counts.flat(), 1)];
    const x = scale(-1, 1, box.left, width - box.right), yy = scale(0, root(box.y[1]), height - box.bottom, box.top), y = (value) => yy(root(value));
    const tint = state.of === "mapped" ? color("robust") : color(models[state.of]?.color ?? "mixed"), w = (x(1) - x(-1)) / bins;
    const path = counts[1].map((value, b) => `${b ? "L" : "M"}${x(-1) + b * w},${y(value)}H${x(-1) + (b + 1) * w}`).join("");
    const marks = [0, ...[1, 5, 10, 50, 100, 500, 1000, 5000].filter((value) => value < box.y[1] * 0.9), box.y[1]].filter((v, k, all) => k === 0 || Math.abs(y(v) - y(all[k - 1])) > 14);
    const muted = color("muted"), rule = color("rule");
    fill(marginChart, s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Histogram of margins, clean and attacked" },
      marks.map((v) => [s("line", { x1: box.left, x2: width - box.right, y1: y(v), y2: y(v), stroke: rule }), s("text", { x: box.left - 8, y: y(v) + 4, "text-anchor": "end", "font-size": 12, fill: muted }, String(v))]),
      [-1, -0.5, 0, 0.5, 1].map((v) => s("text", { x: x(v), y: height - box.bottom + 18, "text-anchor": "middle", "font-size": 12, fill: muted }, tickText(v))),
      s("text", { x: width / 2, y: height - 6, "text-anchor": "middle", "font-size": 12, fill: muted }, "margin"),
      s("text", { transform: `translate(13 ${height / 2 - 12}) rotate(-90)`, "text-anchor": "middle", "font-size": 12, fill: muted }, "images (root scale)"),
      counts[0].map((value, b) => s("rect", { x: x(-1) + b * w + 0.5, y: y(value), width: Math.max(0, w - 1), height: y(0) - y(value), fill: tint, opacity: 0.3 })),
      s("path", { d: path, fill: "none", stroke: tint, "stroke-width": 1.6 }),
      s("line", { x1: x(t), x2: x(t), y1: box.top, y2: height - box.bottom, stroke: color("ink"), "stroke-width": 1.5, "stroke-dasharray": "3 3" })));
    threshold.value = t;
    threshold.setAttribute("aria-valuetext", t.toFixed(3));
    fill(thresholdField.firstChild, "Threshold: ", h("strong", {}, tickText(t.toFixed(3))));
    const limit = Math.round(t * MARGIN_STEPS), above = [first, second].map((values) => values.reduce((total, v) => total + (v !== NO_MARGIN && v > limit), 0));
    let text = `Margin above ${tickText(t.toFixed(3))}: ${above[0].toLocaleString("en")} of ${n.toLocaleString("en")} clean images, ${above[1].toLocaleString("en")} at their smallest margin.`;
    const along = steps.filter((step) => step.lost === null && step.alpha > 0), alone = along.find((step) => step.alpha === 1), q = (step) => (1 - step.alpha) / step.alpha;
    const at = along.reduce((best, step) => (best && Math.abs(q(best) - t) <= Math.abs(q(step) - t) ? best : step), null);
    if (state.of === "mapped" && alone && at && t >= 0) {
      let gained = 0, lost = 0, falls = 0;
      for (let i = 0; i < n; i++) {
        const before = stepPredicted[alone.t][i] === col.label[i], after = stepPredicted[at.t][i] === col.label[i];
        gained += !before && after; lost += before && !after; falls += (stepBits[alone.t][i] & 2) && !(stepBits[at.t][i] & 2);
      }
      text += ` If g may decide up to a margin of ${q(at).toFixed(3)} (α = ${Number(at.alpha.toPrecision(4))}): ${gained} clean images are gained and ${lost} lost against the robust model alone, and ${falls} no longer stand under attack (estimate).`;
    }
    fill(readout, text);
  }
  return { panel, draw };
}
