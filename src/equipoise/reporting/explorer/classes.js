/* Accuracy by class, and which classes are confused. */
function classesPanel(view) {
  const { n, models, inTable, main, sharesOf, classes, col, clean, attacked, broken, state, set, choice, modelChoice, blank } = view;
  const classTable = h("div", { class: "wide" }), confusion = h("div", { class: "wide" });
  const classRows = () => classes.map((name, k) => {
    const row = { name, k, n: 0, clean: models.map(() => 0), stands: models.map(() => 0) };
    for (let i = 0; i < n; i++) if (col.label[i] === k) {
      row.n++;
      models.forEach((_, m) => {
        const shares = ["shareClean", "shareAttacked"].map((name) => sharesOf(name, m));
        row.clean[m] += shares[0] ? shares[0][i] / FULL : clean[m][i] === k;
        row.stands[m] += shares[1] ? shares[1][i] / FULL : broken[m][i] === STANDS;
      });
    }
    return row;
  }).filter((row) => row.n);
  const classHead = ["class", "n", ...models.flatMap((model) => [`${model.symbol} clean`, `${model.symbol} attacked`])];
  const listed = [...inTable].sort((a, b) => (b === main) - (a === main) || a - b);  // the mixture first: narrow screens cut the last columns
  const plain = (right, all) => (100 * right / all).toFixed(1);
  const matrix = () => {
    const cells = classes.map(() => classes.map(() => 0)), answers = (state.on === "clean" ? clean : attacked)[state.model];
    for (let i = 0; i < n; i++) cells[col.label[i]][answers[i]]++;
    return cells;
  };
  const goTo = (label, text, changes) => h("button", { type: "button", class: "link", "aria-label": label, on: { click: () => set({ ...blank(), tab: "images", ...changes }) } }, text);
  const panel = h("div", {}, h("p", { class: "summary" }, "Right in %, clean → under attack. A number leads to the images that are wrong, a class to all of its images."), classTable, h("p", { class: "tools" }, tool("CSV", "Download the classes as CSV", () => saveCsv("classes",
      [classHead, ...classRows().map((row) => [row.name, row.n, ...models.flatMap((_, m) => [row.clean[m] / row.n, row.stands[m] / row.n])])]))),
    h("h3", {}, "Confusion"), h("div", { class: "fields" }, modelChoice("Answers of", "model"), choice("on", "on", [["attacked", "attacked images"], ["clean", "clean images"]])),
    confusion, h("p", { class: "tools" }, tool("CSV", "Download the confusion matrix as CSV", () => saveCsv("confusion",
      [["true class", ...classes], ...matrix().map((row, k) => [classes[k], ...row])]))),
    h("p", { class: "hint" }, "Rows are true classes, columns answers. Every number leads to its images."));
  function draw() {
    const share = (right, all, label, changes) => goTo(`${label}: ${percent(right / all)}; show the images that are wrong`, plain(right, all), changes);
    fill(classTable, h("table", { class: "by-class", "aria-label": "Accuracy by class" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "class"), h("th", { scope: "col" }, "n"), listed.map((m) =>
        h("th", { scope: "col" }, h("span", { class: "dot", style: { background: `var(--${models[m].color})` } }), models[m].symbol)))), h("tbody", {}, classRows().map((row) =>
      h("tr", {}, h("th", { scope: "row" }, goTo(`Images of class ${row.name}`, row.name, { class: String(row.k) })), h("td", {}, String(row.n)), listed.map((m) => h("td", {},
        share(row.clean[m], row.n, `${row.name}, ${models[m].symbol} clean`, { class: String(row.k), on: "clean", [`m${m}`]: "wrong" }), h("span", { class: "arrow" }, "→"),
        share(row.stands[m], row.n, `${row.name}, ${models[m].symbol} attacked`, { class: String(row.k), on: "attacked", [`m${m}`]: "wrong" }))))))));
    const cells = matrix();
    let largest = 1;
    cells.forEach((row, k) => row.forEach((value, j) => { if (j !== k && value > largest) largest = value; }));
    const link = (k, j) => goTo(`${cells[k][j]} images of ${classes[k]} answered ${classes[j]}`, String(cells[k][j]), { class: String(k), answer: String(j), on: state.on, model: state.model });
    if (classes.length <= 20) {
      fill(confusion, h("table", { class: "confusion", "aria-label": "Confusion matrix" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "true class"), classes.map((name) => h("th", { scope: "col" }, h("span", {}, name))))),
        h("tbody", {}, cells.map((row, k) => h("tr", {}, h("th", { scope: "row" }, classes[k]), row.map((value, j) => h("td", { class: j === k ? "diagonal" : "",
          style: j === k || !value ? {} : { background: `color-mix(in srgb, var(--wrong) ${Math.round(6 + 44 * value / largest)}%, transparent)` } }, value ? link(k, j) : "·")))))));
    } else {
      const pairs = cells.flatMap((row, k) => row.flatMap((value, j) => (j !== k && value ? [[value, k, j]] : []))).sort((a, b) => b[0] - a[0]).slice(0, 40);
      fill(confusion, h("table", { "aria-label": "Most frequent confusions" }, h("thead", {}, h("tr", {}, ["true class", "answered", "images"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, pairs.map(([, k, j]) => h("tr", {}, h("th", { scope: "row" }, classes[k]), h("td", {}, classes[j]), h("td", {}, link(k, j)))))));
    }
  }
  return { panel, draw };
}
