/* Clean against attacked accuracy, with a slider that moves the mixture. */
function tradeOffPanel(view) {
  const { n, models, main, own, steps, stepName, state, set, choice, currentStep, curve, curveSteps, hasFrontier, moves, blank } = view;
  const readout = h("p", { class: "summary", role: "status" });
  const slider = h("input", { type: "range", min: 0, step: 1, on: { input: () => set({ step: String(curveSteps()[slider.value].t) }) } });
  const sliderField = h("label", { class: "slider" }, h("span", {}, ""), slider);
  const tradeChart = h("div", { class: "chart" }), tradeTable = h("div", { class: "wide" }), movedLine = h("p", { class: "moved" });
  const measured = models.filter((model) => model.results.clean && model.results.attacked);
  const tradeRows = () => {
    const at = steps.length ? currentStep() : null;
    return [...measured.map((model) => ({ name: model.symbol, color: model.color, kind: "measured", clean: model.results.clean, attacked: model.results.attacked,
        share: model === models[main] && own ? own.byAccurate : null })),
      ...(at ? [{ name: at.evaluated ? "estimate for it" : at.lost !== null ? `at ${Number((100 * at.lost).toPrecision(3))} points` : `at ${stepName(at)}`, color: "mixed", kind: "estimate", clean: at.clean, attacked: at.attacked, share: at.byAccurate }] : [])];
  };
  const tradeCsv = () => saveCsv("trade-off", [["model", "clean", "clean low", "clean high", "attacked", "attacked low", "attacked high", "attacked is", "decided by g"],
    ...tradeRows().map((row) => [row.name, row.clean.value, row.clean.low, row.clean.high, row.attacked.value, row.attacked.low, row.attacked.high, row.kind, row.share ?? ""])]);
  const panel = h("div", {},
    steps.length ? h("div", { class: "fields" }, hasFrontier ? choice("Move along", "curve", [["loss", "the fitted frontier"], ["alpha", "α, with the same map"]]) : null, sliderField) : null,
    readout, tradeChart, chartTools("trade-off", () => $("svg", tradeChart)), tradeTable,
    h("p", { class: "tools" }, tool("CSV", "Download the trade-off as CSV", tradeCsv)), movedLine,
    h("p", { class: "hint" }, "Filled: measured in this run, with 95 % intervals. ", steps.length ? "Hollow: computed from stored logits, without a model. Their clean accuracy is exact. Their attacked "
      + "accuracy is an estimate, with intervals for the number of images alone: an image counts if it is right without an attack and, whatever g says there, at every attacked point that this run stored; a new attack on that mixture may find other points."
      : "This run has no mixture with stored points, so there is nothing to move."));
  function drawTradeChart() {
    const width = chartWidth(view.root), height = Math.min(380, width * 0.72), box = { left: 48, right: 14, top: 14, bottom: 42 };
    const at = steps.length ? currentStep() : null, curves = ["loss", "alpha"].map((kind) => steps.filter((step) => (step.lost !== null) === (kind === "loss")));
    const all = [...measured.map((model) => model.results), ...curves[0], ...(at ? [at] : [])];
    box.x = extent(all.flatMap((item) => [100 * item.clean.low, 100 * item.clean.high]), 4);
    box.y = extent(all.flatMap((item) => [100 * item.attacked.low, 100 * item.attacked.high]), 4);
    const x = scale(...box.x, box.left, width - box.right), y = scale(...box.y, height - box.bottom, box.top);
    const px = (item) => x(100 * item.clean.value), py = (item) => y(100 * item.attacked.value), muted = color("muted"), paper = color("paper"), ink = color("ink");
    const inside = (item) => 100 * item.attacked.value >= box.y[0] - 1e-6 && 100 * item.clean.value >= box.x[0] - 1e-6;
    const halo = { stroke: paper, "stroke-width": 4, "paint-order": "stroke", "stroke-linejoin": "round", "text-anchor": "middle" };
    const line = (items, style) => s("polyline", { points: items.filter(inside).map((item) => `${px(item)},${py(item)}`).join(" "), fill: "none", ...style });
    const say = (text) => { fill(readout, text); };
    const describe = (name, item, kind) => `${name}: clean ${percent(item.clean.value)} ${interval(item.clean)}, attacked ${percent(item.attacked.value)} ${interval(item.attacked)}, ${kind}`;
    const interactive = (text) => ({ tabindex: 0, role: "img", "aria-label": text, on: { pointerenter: () => say(text), focus: () => say(text) } });
    const drawn = curves[0].filter(inside), roomy = (k) => drawn.slice(0, k).every((other) => Math.hypot(px(drawn[k]) - px(other), py(drawn[k]) - py(other)) > 20);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Attacked accuracy against clean accuracy" },
      axes(width, height, box, x, y, ["clean accuracy, %", "attacked accuracy, %"]),
      line(curves[1], { stroke: muted, "stroke-width": 1, "stroke-dasharray": "2 4" }), line(curves[0], { stroke: color("mixed"), "stroke-width": 1.5, "stroke-dasharray": "5 4" }),
      drawn.map((step, k) => s("g", interactive(describe(stepName(step), step, "attacked is an estimate")),
        s("line", { x1: px(step), x2: px(step), y1: y(100 * step.attacked.low), y2: y(100 * step.attacked.high), stroke: muted, "stroke-width": 0.75, opacity: 0.6 }),
        s("line", { x1: x(100 * step.clean.low), x2: x(100 * step.clean.high), y1: py(step), y2: py(step), stroke: muted, "stroke-width": 0.75, opacity: 0.6 }),
        s("rect", { x: px(step) - 5, y: py(step) - 5, width: 10, height: 10, transform: `rotate(45 ${px(step)} ${py(step)})`, fill: paper, stroke: color("mixed"), "stroke-width": 1.5 }),
        roomy(k) ? s("text", { x: px(step), y: py(step) + 20, "font-size": 11, fill: muted, ...halo }, `${Number((100 * step.lost).toPrecision(3))}${k ? "" : " points"}`) : null)),
      measured.map((model) => {
        const item = model.results, own = color(model.color);
        return s("g", interactive(describe(model.symbol, item, "measured")),
          s("line", { x1: x(100 * item.clean.low), x2: x(100 * item.clean.high), y1: py(item), y2: py(item), stroke: own, "stroke-width": 1 }),
          s("line", { x1: px(item), x2: px(item), y1: y(100 * item.attacked.low), y2: y(100 * item.attacked.high), stroke: own, "stroke-width": 1 }),
          s("circle", { cx: px(item), cy: py(item), r: 6, fill: own }),
          s("text", { x: px(item), y: py(item) - 14, "font-size": 12, "font-weight": 600, fill: ink, ...halo }, model.symbol));
      }),
      at ? s("circle", { cx: px(at), cy: py(at), r: 10, fill: "none", stroke: ink, "stroke-width": 2 }) : null);
    fill(tradeChart, svg);
  }
  function draw() {
    const at = steps.length ? currentStep() : null;
    if (at) {
      const listed = curveSteps();
      slider.max = listed.length - 1;
      slider.value = listed.indexOf(at);
      slider.setAttribute("aria-valuetext", stepName(at));
      fill(sliderField.firstChild, `${curve() === "loss" ? "Loss allowed" : "Weight of the robust side"}: `, h("strong", {}, curve() === "loss" ? `${Number((100 * at.lost).toPrecision(3))} points` : `α = ${Number(at.alpha.toPrecision(4))}`));
      const attackedNow = models[main].results.attacked;
      fill(readout, at.evaluated ? `This is the mixture that was attacked${attackedNow ? `: ${percent(attackedNow.value)} measured. Its estimate, ${percent(at.attacked.value)}, is no higher: it counts g as wrong at every stored point, of the attacks on the robust model too` : ""}.`
        : `Not attacked itself: ${stepName(at)}${at.lost !== null ? `, α = ${Number(at.alpha.toPrecision(4))}` : ""}.`);
    } else fill(readout, "");
    drawTradeChart();
    const figure = (result, note) => h("td", {}, percent(result.value), h("small", {}, interval(result), note ? h("em", {}, ` ${note}`) : null));
    fill(tradeTable, h("table", { "aria-label": "Trade-off" }, h("thead", {}, h("tr", {}, ["model", "clean", "attacked", "decided by g"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, tradeRows().map((row) => h("tr", { class: row.kind === "estimate" ? "moving" : "" },
        h("th", { scope: "row" }, h("span", { class: `dot${row.kind === "estimate" ? " hollow" : ""}`, style: { background: row.kind === "estimate" ? "" : `var(--${row.color})`, borderColor: `var(--${row.color})` } }), row.name),
        figure(row.clean, row.kind === "estimate" ? "exact" : ""), figure(row.attacked, row.kind === "estimate" ? "estimate" : ""), h("td", {}, row.share === null ? "–" : percent(row.share)))))));
    fill(movedLine);
    if (at && own && !at.evaluated) {
      const kinds = { gained: "become right", lost: "become wrong", stands: "more stand under attack (estimate)", falls: "no longer stand (estimate)" };
      const counts = Object.fromEntries(Object.keys(kinds).map((kind) => [kind, 0]));
      for (let i = 0; i < n; i++) for (const kind in kinds) counts[kind] += Boolean(moves(kind, i));
      fill(movedLine, `Compared with the mixture that was attacked, and with the same estimate for it (${percent(own.attacked.value)}): `, Object.entries(kinds).map(([kind, text]) =>
        h("button", { type: "button", class: "chip", disabled: counts[kind] === 0, on: { click: () => set({ ...blank(), tab: "images", moved: kind }) } }, `${counts[kind]} ${text}`)));
    }
  }
  return { panel, draw };
}
