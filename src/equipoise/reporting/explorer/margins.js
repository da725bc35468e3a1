/* Distributions of margins with a movable threshold. */
function marginsPanel(view) {
  const { n, models, roles, col, margin, marginClean, steps, stepPredicted, stepBits } = view;
  const { marginText, state, set, choice } = view;
  const marginChart = h("div", { class: "chart" });
  const readout = h("p", { class: "summary", role: "status" });
  const move = () => set({ threshold: threshold.value });
  const threshold = h("input", { type: "range", min: -1, max: 1, step: 0.025, on: { input: move } });
  const thresholdField = h("label", { class: "slider" }, h("span", {}, ""), threshold);
  const marginColumns = () =>
    state.of === "mapped" ? [col.mappedClean, col.mappedSmallest] : [marginClean[state.of], margin[state.of]];
  const saveMargins = () => saveCsv("margins", [
    ["image", "clean", "attacked"],
    ...Array.from({ length: n }, (_, i) => [col.index[i], ...marginColumns().map((values) => marginText(values[i]))]),
  ]);
  const panel = h("div", {},
    h("div", { class: "fields" },
      choice("Margins of", "of", [
        ...models.map((model, m) => [String(m), model.symbol]),
        ...(col.mappedClean ? [["mapped", `${models[roles.h]?.symbol ?? "robust model"}, after the map`]] : []),
      ]),
      thresholdField),
    readout,
    marginChart,
    chartTools("margins", () => $("svg", marginChart)),
    tools(tool("CSV", "Download the margins as CSV", saveMargins)),
    hint("Filled: clean images. Line: the smallest margin over the clean image and all attacks. " +
      "The margin is the probability of the true class minus the largest other one."));

  const BINS = 40;
  function histogram(values) {
    const counts = new Array(BINS).fill(0);
    for (const value of values) {
      if (value === NO_MARGIN) continue;
      counts[Math.min(BINS - 1, Math.floor(((value / MARGIN_STEPS + 1) / 2) * BINS))]++;
    }
    return counts;
  }
  function drawChart(t) {
    const width = chartWidth(view.root);
    const height = 260;
    const box = { left: 48, right: 14, top: 12, bottom: 42 };
    const [clean, smallest] = marginColumns().map(histogram);
    const most = Math.max(...clean, ...smallest, 1);
    const x = scale(-1, 1, box.left, width - box.right);
    const rootScale = scale(0, Math.sqrt(most), height - box.bottom, box.top);
    const y = (value) => rootScale(Math.sqrt(value));
    const barWidth = (x(1) - x(-1)) / BINS;
    const start = (b) => x(-1) + b * barWidth;
    const tint = state.of === "mapped" ? color("robust") : color(models[state.of]?.color ?? "mixed");
    const outline = smallest.map((value, b) => `${b ? "L" : "M"}${start(b)},${y(value)}H${start(b + 1)}`).join("");
    const marks = [0, ...[1, 5, 10, 50, 100, 500, 1000, 5000].filter((value) => value < most * 0.9), most]
      .filter((value, k, all) => k === 0 || Math.abs(y(value) - y(all[k - 1])) > 14);
    const label = "Histogram of margins, clean and attacked";
    fill(marginChart, s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
      marks.map((value) => gridLine(box.left, width - box.right, y(value), String(value))),
      [-1, -0.5, 0, 0.5, 1].map((value) => textAt(x(value), height - box.bottom + 18, tickText(value))),
      textAt(width / 2, height - 6, "margin"),
      sideLabel(height / 2 - 12, "images (root scale)"),
      clean.map((value, b) => s("rect", {
        x: start(b) + 0.5, y: y(value), width: Math.max(0, barWidth - 1), height: y(0) - y(value),
        fill: tint, opacity: 0.3,
      })),
      s("path", { d: outline, fill: "none", stroke: tint, "stroke-width": 1.6 }),
      segment(x(t), box.top, x(t), height - box.bottom,
        { stroke: color("ink"), "stroke-width": 1.5, "stroke-dasharray": "3 3" })));
  }
  function aboveText(t) {
    const limit = Math.round(t * MARGIN_STEPS);
    const [clean, smallest] = marginColumns().map((values) =>
      values.reduce((total, value) => total + (value !== NO_MARGIN && value > limit), 0).toLocaleString("en"));
    return `Margin above ${tickText(t.toFixed(3))}: ${clean} of ${n.toLocaleString("en")} clean images, ` +
      `${smallest} at their smallest margin.`;
  }
  /** What changes against the robust model alone if g decides below the threshold: the nearest alpha that is stored. */
  function mixtureText(t) {
    const along = steps.filter((step) => step.lost === null && step.alpha > 0);
    const alone = along.find((step) => step.alpha === 1);
    if (state.of !== "mapped" || !alone || t < 0) return "";
    const marginOf = (step) => (1 - step.alpha) / step.alpha;
    const distance = (step) => Math.abs(marginOf(step) - t);
    const at = along.reduce((best, step) => (distance(best) <= distance(step) ? best : step));
    let gained = 0;
    let lost = 0;
    let falls = 0;
    for (let i = 0; i < n; i++) {
      const before = stepPredicted[alone.t][i] === col.label[i];
      const after = stepPredicted[at.t][i] === col.label[i];
      gained += !before && after;
      lost += before && !after;
      falls += stepBits[alone.t][i] & 2 && !(stepBits[at.t][i] & 2);
    }
    const limit = `${marginOf(at).toFixed(3)} (α = ${Number(at.alpha.toPrecision(4))})`;
    return ` If g may decide up to a margin of ${limit}: ${gained} clean images are gained and ${lost} lost against ` +
      `the robust model alone, and ${falls} no longer stand under attack (estimate).`;
  }
  function draw() {
    const t = Number(state.threshold);
    drawChart(t);
    threshold.value = t;
    threshold.setAttribute("aria-valuetext", t.toFixed(3));
    fill(thresholdField.firstChild, "Threshold: ", h("strong", {}, tickText(t.toFixed(3))));
    fill(readout, aboveText(t) + mixtureText(t));
  }
  return { panel, draw };
}
