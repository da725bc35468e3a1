/* Accuracy by class, and which classes are confused. */
function classesPanel(view) {
  const { n, models, inTable, main, sharesOf, classes, col, clean, attacked, broken } = view;
  const { state, set, choice, modelChoice, blank } = view;
  const classTable = h("div", { class: "wide" });
  const confusion = h("div", { class: "wide" });
  // The mixture first: narrow screens cut the last columns.
  const listed = [...inTable].sort((a, b) => (b === main) - (a === main) || a - b);

  /** Images of every class, and how many of them each model classifies correctly. */
  function classRows() {
    const rows = classes.map((name, k) =>
      ({ name, k, n: 0, clean: models.map(() => 0), stands: models.map(() => 0) }));
    for (let i = 0; i < n; i++) {
      const k = col.label[i];
      rows[k].n++;
      models.forEach((_, m) => {
        const shareClean = sharesOf("shareClean", m);
        const shareAttacked = sharesOf("shareAttacked", m);
        rows[k].clean[m] += shareClean ? shareClean[i] / FULL : clean[m][i] === k;
        rows[k].stands[m] += shareAttacked ? shareAttacked[i] / FULL : broken[m][i] === STANDS;
      });
    }
    return rows.filter((row) => row.n);
  }
  /** Images by true class and answer. */
  function matrix() {
    const cells = classes.map(() => classes.map(() => 0));
    const answers = (state.on === "clean" ? clean : attacked)[state.model];
    for (let i = 0; i < n; i++) cells[col.label[i]][answers[i]]++;
    return cells;
  }
  const saveClasses = () => saveCsv("classes", [
    ["class", "n", ...models.flatMap((model) => [`${model.symbol} clean`, `${model.symbol} attacked`])],
    ...classRows().map((row) =>
      [row.name, row.n, ...models.flatMap((_, m) => [row.clean[m] / row.n, row.stands[m] / row.n])]),
  ]);
  const saveConfusion = () => saveCsv("confusion", [
    ["true class", ...classes],
    ...matrix().map((row, k) => [classes[k], ...row]),
  ]);
  const panel = h("div", {},
    h("p", { class: "summary" },
      "Right in %, clean → under attack. A number leads to the images that are wrong, a class to all of its images."),
    classTable,
    tools(tool("CSV", "Download the classes as CSV", saveClasses)),
    h("h3", {}, "Confusion"),
    h("div", { class: "fields" },
      modelChoice("Answers of", "model"),
      choice("on", "on", [["attacked", "attacked images"], ["clean", "clean images"]])),
    confusion,
    tools(tool("CSV", "Download the confusion matrix as CSV", saveConfusion)),
    hint("Rows are true classes, columns answers. Every number leads to its images."));

  /** A button that shows some of the images. */
  function goTo(label, text, changes) {
    const show = () => set({ ...blank(), tab: "images", ...changes });
    return h("button", { type: "button", class: "link", "aria-label": label, on: { click: show } }, text);
  }
  function drawClasses() {
    const share = (row, m, on, right) =>
      goTo(`${row.name}, ${models[m].symbol} ${on}: ${percent(right / row.n)}; show the images that are wrong`,
        ((100 * right) / row.n).toFixed(1), { class: String(row.k), on, [`m${m}`]: "wrong" });
    const arrow = () => h("span", { class: "arrow" }, "→");
    fill(classTable, table({ class: "by-class", "aria-label": "Accuracy by class" },
      ["class", "n", ...listed.map((m) => [dot(models[m].color), models[m].symbol])],
      classRows().map((row) => tableRow(
        goTo(`Images of class ${row.name}`, row.name, { class: String(row.k) }),
        td(String(row.n)),
        listed.map((m) => td(
          share(row, m, "clean", row.clean[m]), arrow(), share(row, m, "attacked", row.stands[m])))))));
  }
  function drawConfusion() {
    const cells = matrix();
    const errors = cells.flatMap((row, k) => row.flatMap((value, j) => (j !== k && value ? [[value, k, j]] : [])));
    const largest = errors.reduce((most, [value]) => Math.max(most, value), 1);
    const link = (k, j) =>
      goTo(`${cells[k][j]} images of ${classes[k]} answered ${classes[j]}`, String(cells[k][j]),
        { class: String(k), answer: String(j), on: state.on, model: state.model });
    const shade = (value) =>
      ({ background: `color-mix(in srgb, var(--wrong) ${Math.round(6 + (44 * value) / largest)}%, transparent)` });
    if (classes.length <= 20) {
      fill(confusion, table({ class: "confusion", "aria-label": "Confusion matrix" },
        ["true class", ...classes.map((name) => h("span", {}, name))],
        cells.map((row, k) => tableRow(classes[k], row.map((value, j) =>
          h("td", { class: j === k ? "diagonal" : "", style: j === k || !value ? {} : shade(value) },
            value ? link(k, j) : "·"))))));
    } else {
      const most = errors.sort((a, b) => b[0] - a[0]).slice(0, 40);
      fill(confusion, table({ "aria-label": "Most frequent confusions" }, ["true class", "answered", "images"],
        most.map(([, k, j]) => tableRow(classes[k], td(classes[j]), td(link(k, j))))));
    }
  }
  function draw() {
    drawClasses();
    drawConfusion();
  }
  return { panel, draw };
}
