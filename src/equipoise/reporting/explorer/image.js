/* One image: clean, perturbation and attacked, with the probabilities of the models. */
function imageDialog(view) {
  const { models, classes, col, data, clean, attacked, broken, margin, pictures, pictureOf, marginText, signed, breaker, state, set } = view;
  const sprites = {};
  const load = (name) => sprites[name] ??= new Promise((done) => { const image = new Image(); image.onload = () => done(image); image.src = pictures[name]; });
  /** Draw one picture of a sprite. */
  view.cut = async (name, p, context) => {
    const { width, height, perRow } = pictures;
    context.drawImage(await load(name), (p % perRow) * width, Math.floor(p / perRow) * height, width, height, 0, 0, width, height);
  };
  const heading = h("h3", {}), body = h("div", {}), arrow = (text, label, move) => h("button", { type: "button", class: "tool", "aria-label": label, on: { click: () => step(move) } }, text);
  const close = h("button", { type: "button", class: "tool", on: { click: () => dialog.close() } }, "close");
  // The header stays when another image is shown, and with it the focus.
  const dialog = h("dialog", { class: "image", "aria-label": "One image" },
    h("header", {}, heading, h("p", { class: "tools" }, arrow("←", "previous image", -1), arrow("→", "next image", 1), close)), body);
  dialog.addEventListener("close", () => {  // comes late: the focus may have been moved on by then
    if (state.image) set({ image: "" });
    if (document.activeElement === document.body) $(".grid", view.root).focus({ preventScroll: true });
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) step(move);
  });
  const step = (move) => {
    const { shown } = view, next = shown[shown.findIndex((i) => String(col.index[i]) === state.image) + move];
    if (next !== undefined) { view.active = shown.indexOf(next); set({ image: String(col.index[next]) }); }
  };
  async function drawPictures(p, canvases) {
    const { width, height } = pictures;
    const [before, change] = await Promise.all(["clean", "change"].map(async (name) => {
      const context = h("canvas", { width, height }).getContext("2d");
      await view.cut(name, p, context);
      return context.getImageData(0, 0, width, height);
    }));
    const after = (a, d) => (a + d - MIDDLE) & 255;  // changes are stored modulo 256
    const formulas = [(a) => a, (a, d) => MIDDLE + AMPLIFIED * (after(a, d) - a), after];
    canvases.forEach((canvas, k) => {
      const context = canvas.getContext("2d"), image = context.createImageData(width, height);
      for (let j = 0; j < image.data.length; j++) image.data[j] = j % 4 === 3 ? 255 : formulas[k](before.data[j], change.data[j]);
      context.putImageData(image, 0, 0);
      canvas.dataset.drawn = "yes";
    });
  }
  function bars(p, m, side) {
    const kept = data.pictures.count, top = col.topClasses.length / (2 * data.pictures.models.length * kept);
    const start = ((side * data.pictures.models.length + data.pictures.models.indexOf(m)) * kept + p) * top;
    const listed = Array.from({ length: top }, (_, k) => [col.topClasses[start + k], col.topProbabilities[start + k] / FULL]).sort((a, b) => b[1] - a[1]);
    const label = col.label[col.picture[p]], rank = listed.findIndex(([k]) => k === label);
    if (rank > 3) listed[3] = listed[rank];  // the true class is always shown
    return h("ol", { class: "bars", "aria-label": `${models[m].symbol}, ${side ? "attacked" : "clean"} image` }, listed.slice(0, 4).map(([k, share]) =>
      h("li", { class: k === label ? "true" : "" }, h("span", { class: "bar", style: { width: `${100 * share}%`, background: `var(--${models[m].color})` } }),
        h("span", { class: "text" }, `${classes[k]}${k === label ? " ✓" : ""}`), h("span", { class: "value" }, percent(share)))));
  }
  function draw() {
    const i = state.image === "" ? -1 : col.index.indexOf(Number(state.image));
    if (i < 0) { if (dialog.open) dialog.close(); return; }
    const p = pictureOf.get(i), parts = [];
    fill(heading, `Image ${col.index[i]}: ${classes[col.label[i]]}`);
    if (p !== undefined && pictures) {
      const canvases = ["clean", `perturbation ×\u00a0${AMPLIFIED}`, "attacked"].map((text) => [text,
        h("canvas", { width: pictures.width, height: pictures.height, role: "img", "aria-label": `${text}, image ${col.index[i]}` })]);
      parts.push(h("div", { class: "three" }, canvases.map(([text, canvas]) => h("figure", {}, canvas, h("figcaption", {}, text)))));
      if (broken[data.pictures.of]?.[i] === WRONG_CLEAN) parts.push(h("p", { class: "hint" }, "Wrong without an attack, and so not attacked by a suite."));
      drawPictures(p, canvases.map(([, canvas]) => canvas));
      const known = models.map((_, m) => m).filter((m) => data.pictures.models.includes(m));
      parts.push(h("div", { class: "answers" }, h("span", {}), h("h4", {}, "clean"), h("h4", {}, "attacked"), known.map((m) => [
        h("h4", { class: "model" }, h("span", { class: "dot", style: { background: `var(--${models[m].color})` } }), models[m].symbol), bars(p, m, 0), bars(p, m, 1)])));
      parts.push(h("p", { class: "hint" }, `Attacked on ${data.pictures.model}, at the point of its smallest margin${data.threat ? `, within ${data.threat}` : ""}; `
        + "the picture is rounded to bytes, probabilities are those of the point itself. The models' own worst cases in the table may be other points."));
    } else parts.push(h("p", { class: "hint" }, "No picture of this image was kept: a run keeps failures up to a limit and a sample of the others."));
    parts.push(h("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Answers of all models" }, h("table", { "aria-label": "Answers of all models" }, h("thead", {}, h("tr", {}, ["model", "clean", "attacked", "margin", "worst attack"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, models.map((model, m) => h("tr", {}, h("th", { scope: "row" }, model.symbol), h("td", {}, classes[clean[m][i]]), h("td", {}, classes[attacked[m][i]]),
        h("td", {}, signed(marginText(margin[m][i]))), h("td", {}, breaker(m, i) || "stands")))))));
    fill(body, parts);
    if (!dialog.open) { dialog.showModal(); close.focus(); }
  }
  return { panel: dialog, draw };
}
