/* One image: clean, perturbation and attacked, with the probabilities of the models. */
const MIDDLE = 128;  // no change of a pixel
const AMPLIFIED = 10;
function imageDialog(view) {
  const { models, classes, col, data, clean, attacked, broken, margin, pictures, pictureOf } = view;
  const { marginText, signed, breaker, state, set } = view;
  const sprites = {};
  const load = (name) =>
    (sprites[name] ??= new Promise((done) => {
      const image = new Image();
      image.onload = () => done(image);
      image.src = pictures[name];
    }));
  /** Draw one picture of a sprite. */
  view.cut = async (name, p, context) => {
    const { width, height, perRow } = pictures;
    const left = (p % perRow) * width;
    const top = Math.floor(p / perRow) * height;
    context.drawImage(await load(name), left, top, width, height, 0, 0, width, height);
  };
  const heading = h("h3", {});
  const body = h("div", {});
  const arrow = (text, label, move) => tool(text, label, () => step(move));
  const close = h("button", { type: "button", class: "tool", on: { click: () => dialog.close() } }, "close");
  // The header stays when another image is shown, and with it the focus.
  const dialog = h("dialog", { class: "image", "aria-label": "One image" },
    h("header", {}, heading,
      h("p", { class: "tools" }, arrow("←", "previous image", -1), arrow("→", "next image", 1), close)),
    body);
  dialog.addEventListener("close", () => {  // comes late: the focus may have been moved on by then
    if (state.image) set({ image: "" });
    if (document.activeElement === document.body) $(".grid", view.root).focus({ preventScroll: true });
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  dialog.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) step(move);
  });
  const step = (move) => {
    const { shown } = view;
    const next = shown[shown.findIndex((i) => String(col.index[i]) === state.image) + move];
    if (next !== undefined) {
      view.active = shown.indexOf(next);
      set({ image: String(col.index[next]) });
    }
  };
  async function drawPictures(p, canvases) {
    const { width, height } = pictures;
    const [before, change] = await Promise.all(
      ["clean", "change"].map(async (name) => {
        const context = h("canvas", { width, height }).getContext("2d");
        await view.cut(name, p, context);
        return context.getImageData(0, 0, width, height);
      }),
    );
    const after = (a, d) => (a + d - MIDDLE) & 255;  // changes are stored modulo 256
    const formulas = [(a) => a, (a, d) => MIDDLE + AMPLIFIED * (after(a, d) - a), after];
    canvases.forEach((canvas, k) => {
      const context = canvas.getContext("2d");
      const image = context.createImageData(width, height);
      for (let j = 0; j < image.data.length; j++)
        image.data[j] = j % 4 === 3 ? 255 : formulas[k](before.data[j], change.data[j]);
      context.putImageData(image, 0, 0);
      canvas.dataset.drawn = "yes";
    });
  }
  function bars(p, m, side) {
    const { count: kept, models: known } = data.pictures;
    const top = col.topClasses.length / (2 * known.length * kept);
    const start = ((side * known.length + known.indexOf(m)) * kept + p) * top;
    const listed = Array.from({ length: top }, (_, k) =>
      [col.topClasses[start + k], col.topProbabilities[start + k] / FULL]).sort((a, b) => b[1] - a[1]);
    const label = col.label[col.picture[p]];
    const rank = listed.findIndex(([k]) => k === label);
    if (rank > 3) listed[3] = listed[rank];  // the true class is always shown
    const bar = ([k, share]) => h("li", { class: k === label ? "true" : "" },
      h("span", { class: "bar", style: { width: `${100 * share}%`, background: `var(--${models[m].color})` } }),
      h("span", { class: "text" }, `${classes[k]}${k === label ? " ✓" : ""}`),
      h("span", { class: "value" }, percent(share)));
    return h("ol", { class: "bars", "aria-label": `${models[m].symbol}, ${side ? "attacked" : "clean"} image` },
      listed.slice(0, 4).map(bar));
  }
  /** The pictures of image i, the p-th of those kept, and what the models make of them. */
  function pictureParts(i, p) {
    const { width, height } = pictures;
    const names = ["clean", `perturbation ×\u00a0${AMPLIFIED}`, "attacked"];
    const canvases = names.map((text) =>
      h("canvas", { width, height, role: "img", "aria-label": `${text}, image ${col.index[i]}` }));
    drawPictures(p, canvases);
    const known = models.map((_, m) => m).filter((m) => data.pictures.models.includes(m));
    const within = data.threat ? `, within ${data.threat}` : "";
    return [
      h("div", { class: "three" },
        canvases.map((canvas, k) => h("figure", {}, canvas, h("figcaption", {}, names[k])))),
      broken[data.pictures.of]?.[i] === WRONG_CLEAN
        ? hint("Wrong without an attack, and so not attacked by a suite.") : null,
      h("div", { class: "answers" }, h("span", {}), h("h4", {}, "clean"), h("h4", {}, "attacked"),
        known.map((m) => [
          h("h4", { class: "model" }, dot(models[m].color), models[m].symbol), bars(p, m, 0), bars(p, m, 1)])),
      hint(`Attacked on ${data.pictures.model}, at the point of its smallest margin${within}; the picture is rounded ` +
        "to bytes, probabilities are those of the point itself. The models' own worst cases in the table may be " +
        "other points."),
    ];
  }
  function draw() {
    const i = state.image === "" ? -1 : col.index.indexOf(Number(state.image));
    if (i < 0) {
      if (dialog.open) dialog.close();
      return;
    }
    const p = pictureOf.get(i);
    const label = "Answers of all models";
    fill(heading, `Image ${col.index[i]}: ${classes[col.label[i]]}`);
    fill(body,
      p !== undefined && pictures ? pictureParts(i, p)
        : hint("No picture of this image was kept: a run keeps failures up to a limit and a sample of the others."),
      h("div", { class: "wide", tabindex: 0, role: "group", "aria-label": label },
        table({ "aria-label": label }, ["model", "clean", "attacked", "margin", "worst attack"],
          models.map((model, m) => tableRow(model.symbol, td(classes[clean[m][i]]), td(classes[attacked[m][i]]),
            td(signed(marginText(margin[m][i]))), td(breaker(m, i) || "stands"))))));
    if (!dialog.open) {
      dialog.showModal();
      close.focus();
    }
  }
  return { panel: dialog, draw };
}
