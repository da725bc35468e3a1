/* Clean against attacked accuracy, with a slider that moves the mixture. */
function tradeOffPanel(view) {
  const { n, models, main, own, steps, stepName, set, choice } = view;
  const { currentStep, curve, curveSteps, hasFrontier, moves, blank } = view;
  const readout = h("p", { class: "summary", role: "status" });
  const moveTo = () => set({ step: String(curveSteps()[slider.value].t) });
  const slider = h("input", { type: "range", min: 0, step: 1, on: { input: moveTo } });
  const sliderField = h("label", { class: "slider" }, h("span", {}, ""), slider);
  const tradeChart = h("div", { class: "chart" });
  const tradeTable = h("div", { class: "wide" });
  const movedLine = h("p", { class: "moved" });
  const measured = models.filter((model) => model.results.clean && model.results.attacked);
  const pointsText = (step) => `${Number((100 * step.lost).toPrecision(3))}`;
  const alphaText = (step) => `α = ${Number(step.alpha.toPrecision(4))}`;

  /** The models that were measured, and the mixture of the slider. */
  function tradeRows() {
    const at = steps.length ? currentStep() : null;
    const rows = measured.map((model) => ({
      name: model.symbol, color: model.color, kind: "measured", ...model.results,
      share: model === models[main] && own ? own.byAccurate : null,
    }));
    if (!at) return rows;
    const where = at.lost !== null ? `${pointsText(at)} points` : stepName(at);
    const name = at.evaluated ? "estimate for it" : `at ${where}`;
    const { clean, attacked, byAccurate } = at;
    return [...rows, { name, color: "mixed", kind: "estimate", clean, attacked, share: byAccurate }];
  }
  const numbers = ({ value, low, high }) => [value, low, high];
  const saveTradeOff = () => saveCsv("trade-off", [
    ["model", "clean", "clean low", "clean high", "attacked", "attacked low", "attacked high", "attacked is",
     "decided by g"],
    ...tradeRows().map((row) => [row.name, ...numbers(row.clean), ...numbers(row.attacked), row.kind, row.share ?? ""]),
  ]);
  const curveChoice = () =>
    choice("Move along", "curve", [["loss", "the fitted frontier"], ["alpha", "α, with the same map"]]);
  const panel = h("div", {},
    steps.length ? h("div", { class: "fields" }, hasFrontier ? curveChoice() : null, sliderField) : null,
    readout,
    tradeChart,
    chartTools("trade-off", () => $("svg", tradeChart)),
    tradeTable,
    tools(tool("CSV", "Download the trade-off as CSV", saveTradeOff)),
    movedLine,
    hint("Filled: measured in this run, with 95 % intervals. ", steps.length
      ? "Hollow: computed from stored logits, without a model. Their clean accuracy is exact. Their attacked " +
        "accuracy is an estimate, with intervals for the number of images alone: an image counts if it is right " +
        "without an attack and, whatever g says there, at every attacked point that this run stored; a new attack " +
        "on that mixture may find other points."
      : "This run has no mixture with stored points, so there is nothing to move."));

  function drawChart(at) {
    const width = chartWidth(view.root);
    const height = Math.min(380, width * 0.72);
    const box = { left: 48, right: 14, top: 14, bottom: 42 };
    const frontier = steps.filter((step) => step.lost !== null);
    const alphas = steps.filter((step) => step.lost === null);
    const all = [...measured.map((model) => model.results), ...frontier, ...(at ? [at] : [])];
    box.x = extent(all.flatMap((item) => [100 * item.clean.low, 100 * item.clean.high]), 4);
    box.y = extent(all.flatMap((item) => [100 * item.attacked.low, 100 * item.attacked.high]), 4);
    const x = scale(...box.x, box.left, width - box.right);
    const y = scale(...box.y, height - box.bottom, box.top);
    const px = (item) => x(100 * item.clean.value);
    const py = (item) => y(100 * item.attacked.value);
    const [muted, paper, ink, mixed] = ["muted", "paper", "ink", "mixed"].map(color);
    const halo = { stroke: paper, "stroke-width": 4, "paint-order": "stroke", "stroke-linejoin": "round" };
    const inside = (item) => 100 * item.attacked.value >= box.y[0] - 1e-6 && 100 * item.clean.value >= box.x[0] - 1e-6;
    const drawn = frontier.filter(inside);
    const path = (items, style) =>
      s("polyline", { points: items.map((item) => `${px(item)},${py(item)}`).join(" "), fill: "none", ...style });
    const intervals = (item, style) => [
      segment(px(item), y(100 * item.attacked.low), px(item), y(100 * item.attacked.high), style),
      segment(x(100 * item.clean.low), py(item), x(100 * item.clean.high), py(item), style),
    ];
    const resultText = (result) => `${percent(result.value)} ${interval(result)}`;
    /** A point whose numbers are shown when it is pointed at. */
    const point = (name, item, kind, ...parts) => {
      const text = `${name}: clean ${resultText(item.clean)}, attacked ${resultText(item.attacked)}, ${kind}`;
      const show = () => fill(readout, text);
      return s("g", { tabindex: 0, role: "img", "aria-label": text, on: { pointerenter: show, focus: show } }, parts);
    };
    const diamond = (step) => s("rect", {
      x: px(step) - 5, y: py(step) - 5, width: 10, height: 10, transform: `rotate(45 ${px(step)} ${py(step)})`,
      fill: paper, stroke: mixed, "stroke-width": 1.5,
    });
    const isFree = (k) =>  // no earlier point is so near that their labels would overlap
      drawn.slice(0, k).every((other) => Math.hypot(px(drawn[k]) - px(other), py(drawn[k]) - py(other)) > 20);
    const label = "Attacked accuracy against clean accuracy";
    fill(tradeChart, s("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label },
      axes(width, height, box, x, y, ["clean accuracy, %", "attacked accuracy, %"]),
      path(alphas.filter(inside), { stroke: muted, "stroke-width": 1, "stroke-dasharray": "2 4" }),
      path(drawn, { stroke: mixed, "stroke-width": 1.5, "stroke-dasharray": "5 4" }),
      drawn.map((step, k) => point(stepName(step), step, "attacked is an estimate",
        intervals(step, { stroke: muted, "stroke-width": 0.75, opacity: 0.6 }),
        diamond(step),
        isFree(k)
          ? textAt(px(step), py(step) + 20, `${pointsText(step)}${k ? "" : " points"}`, { "font-size": 11, ...halo })
          : null)),
      measured.map((model) => point(model.symbol, model.results, "measured",
        intervals(model.results, { stroke: color(model.color), "stroke-width": 1 }),
        s("circle", { cx: px(model.results), cy: py(model.results), r: 6, fill: color(model.color) }),
        textAt(px(model.results), py(model.results) - 14, model.symbol, { "font-weight": 600, fill: ink, ...halo }))),
      at ? s("circle", { cx: px(at), cy: py(at), r: 10, fill: "none", stroke: ink, "stroke-width": 2 }) : null));
  }
  function stepText(at) {
    if (!at.evaluated) return `Not attacked itself: ${stepName(at)}${at.lost !== null ? `, ${alphaText(at)}` : ""}.`;
    const result = models[main].results.attacked;
    if (!result) return "This is the mixture that was attacked.";
    return `This is the mixture that was attacked: ${percent(result.value)} measured. Its estimate, ` +
      `${percent(at.attacked.value)}, is no higher: it counts g as wrong at every stored point, of the attacks on ` +
      "the robust model too.";
  }
  function drawSlider(at) {
    const listed = curveSteps();
    const alongLoss = curve() === "loss";
    slider.max = listed.length - 1;
    slider.value = listed.indexOf(at);
    slider.setAttribute("aria-valuetext", stepName(at));
    fill(sliderField.firstChild, `${alongLoss ? "Loss allowed" : "Weight of the robust side"}: `,
      h("strong", {}, alongLoss ? `${pointsText(at)} points` : alphaText(at)));
  }
  function drawTable() {
    const figure = (result, note) =>
      td(percent(result.value), h("small", {}, interval(result), note ? h("em", {}, ` ${note}`) : null));
    const hollow = (name) => h("span", { class: "dot hollow", style: { borderColor: `var(--${name})` } });
    fill(tradeTable, table({ "aria-label": "Trade-off" }, ["model", "clean", "attacked", "decided by g"],
      tradeRows().map((row) => {
        const estimated = row.kind === "estimate";
        const node = tableRow([estimated ? hollow(row.color) : dot(row.color), row.name],
          figure(row.clean, estimated ? "exact" : ""),
          figure(row.attacked, estimated ? "estimate" : ""),
          td(row.share === null ? "–" : percent(row.share)));
        node.classList.toggle("moving", estimated);
        return node;
      })));
  }
  /** How many images change sides between the mixture that was attacked and the one of the slider. */
  function drawMoved() {
    const kinds = {
      gained: "become right", lost: "become wrong", stands: "more stand under attack (estimate)",
      falls: "no longer stand (estimate)",
    };
    const estimate = percent(own.attacked.value);
    fill(movedLine, `Compared with the mixture that was attacked, and with the same estimate for it (${estimate}): `,
      Object.entries(kinds).map(([kind, text]) => {
        let images = 0;
        for (let i = 0; i < n; i++) images += Boolean(moves(kind, i));
        const show = () => set({ ...blank(), tab: "images", moved: kind });
        return h("button", { type: "button", class: "chip", disabled: images === 0, on: { click: show } },
          `${images} ${text}`);
      }));
  }
  function draw() {
    const at = steps.length ? currentStep() : null;
    if (at) drawSlider(at);
    fill(readout, at ? stepText(at) : "");
    drawChart(at);
    drawTable();
    if (at && own && !at.evaluated) drawMoved();
    else fill(movedLine);
  }
  return { panel, draw };
}
