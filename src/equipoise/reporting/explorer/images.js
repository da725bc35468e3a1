/* The images of the run: a table that holds only the rows that are visible. */
const ROW = 44;  // pixels
function imagesPanel(view) {
  const { n, models, roles, inTable, classes, col, attacks, clean, attacked, broken, margin, main } = view;
  const { pictures, pictureOf, marginText, signed, breaker, state, set, select, currentStep, stepName } = view;
  const { choice, modelChoice, synced, blank } = view;
  const summary = h("p", { class: "summary", role: "status" });
  const scroller = h("div", { class: "rows", role: "rowgroup", tabindex: "-1" });
  const spacer = h("div", { class: "spacer", role: "presentation" });
  scroller.append(spacer);
  const heads = [
    ["index", "#"],
    ["label", "true class"],
    ...inTable.map((m) => [`m${m}`, models[m].symbol]),
    ["margin", "margin"],
    ["by", "worst attack"],
  ];
  const headRow = h("div", { class: "row head", role: "row" }, heads.map(([key, text]) => {
    const model = /^m\d+$/.test(key) ? models[key.slice(1)] : null;
    const label = `sort by ${key === "index" ? "number" : text}`;
    const sort = () => set({ sort: state.sort === key ? `${key}.desc` : key });
    const button = h("button", { type: "button", "aria-label": label, on: { click: sort } },
      model ? dot(model.color) : null, text);
    return h("div", { role: "columnheader", class: `c-${key.replace(/\d/, "")}`, "data-key": key }, button);
  }));
  const grid = h("div", {
    class: `grid models-${inTable.length}`, role: "grid", tabindex: "0",
    "aria-label": "Images of the run; arrow keys move, Enter opens one",
  }, headRow, scroller);
  const mark = (right) =>
    h("span", { class: right ? "right" : "wrong", "aria-label": right ? "right" : "wrong" }, right ? "✓" : "✗");
  const answer = (m, i) => {
    const label = col.label[i];
    const a = clean[m][i];
    const b = attacked[m][i];
    const stands = broken[m][i] === STANDS;
    const name = (k) => h("span", { class: "name" }, classes[k]);
    return h("div", { role: "gridcell", class: "c-m" },
      mark(a === label), a === label ? null : name(a),
      h("span", { class: "arrow", "aria-label": "under attack" }, "→"),
      mark(stands), stands ? null : name(b));
  };
  const thumbnail = (i) => {
    if (!pictureOf.has(i) || !pictures) return h("span", { class: "thumb none" });
    const { width, height } = pictures;
    const canvas = h("canvas", { class: "thumb", width, height, role: "img", "aria-label": `image ${col.index[i]}` });
    view.cut("clean", pictureOf.get(i), canvas.getContext("2d"));
    return canvas;
  };
  const gridCell = (name, ...children) => h("div", { role: "gridcell", class: `c-${name}` }, ...children);
  /** The row of the r-th image shown. */
  function imageRow(r) {
    const i = view.shown[r];
    const isActive = r === view.active;
    const open = () => {
      view.active = r;
      set({ image: String(col.index[i]) });
    };
    return h("div", {
      class: `row${isActive ? " active" : ""}`, role: "row", id: `image-${i}`, "aria-rowindex": r + 2,
      "aria-selected": String(isActive), style: { transform: `translateY(${r * ROW}px)` }, on: { click: open },
    },
      gridCell("index", thumbnail(i), h("span", { class: "number" }, String(col.index[i]))),
      gridCell("label", classes[col.label[i]]),
      inTable.map((m) => answer(m, i)),
      gridCell("margin", signed(marginText(margin[state.model][i]))),
      gridCell("by", breaker(state.model, i) || "stands"));
  }
  function drawRows() {
    const { shown, active } = view;
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 4);
    const last = Math.min(shown.length, first + Math.ceil(scroller.clientHeight / ROW) + 8);
    const rows = [];
    for (let r = first; r < last; r++) rows.push(imageRow(r));
    spacer.replaceChildren(...rows);
    if (active >= first && active < last) grid.setAttribute("aria-activedescendant", `image-${shown[active]}`);
    else grid.removeAttribute("aria-activedescendant");
  }
  scroller.addEventListener("scroll", drawRows, { passive: true });
  grid.addEventListener("keydown", (event) => {
    if (event.target !== grid && event.target !== scroller) return;
    const page = Math.max(1, Math.floor(scroller.clientHeight / ROW) - 1);
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -n, End: n }[event.key];
    if (event.key === "Enter" && view.shown.length) set({ image: String(col.index[view.shown[view.active]]) });
    else if (move) {
      view.active = Math.max(0, Math.min(view.shown.length - 1, view.active + move));
      const top = view.active * ROW;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top + ROW > scroller.scrollTop + scroller.clientHeight)
        scroller.scrollTop = top + ROW - scroller.clientHeight;
      drawRows();
    } else return;
    event.preventDefault();
  });
  const { g, h: robust, mixture } = roles;
  const hasPair = [g, robust, mixture].every((m) => m !== undefined);
  const presets = [
    ["All images", {}],
    [`${models[main].symbol} fails under attack`, { on: "attacked", [`m${main}`]: "wrong" }],
  ];
  if (hasPair) {
    presets.push(
      ["g right, h wrong, mixture right",
        { on: "clean", [`m${g}`]: "right", [`m${robust}`]: "wrong", [`m${mixture}`]: "right" }],
      ["h stands, mixture does not", { on: "attacked", [`m${robust}`]: "right", [`m${mixture}`]: "wrong" }],
      ["g right, mixture wrong", { on: "clean", [`m${g}`]: "right", [`m${mixture}`]: "wrong" }]);
  }
  const presetButtons = presets.map(([text, values]) => {
    const filter = { ...blank(), on: "attacked", ...values };
    const button = h("button", { type: "button", class: "chip", on: { click: () => set(filter) } }, text);
    const isMet = ([key, value]) => state[key] === value || (key === "on" && text === "All images");
    button.sync = () => button.setAttribute("aria-pressed", String(Object.entries(filter).every(isMet)));
    synced.push(button);
    return button;
  });
  const search = h("input", {
    type: "search",
    "aria-label": "Search by class or number",
    placeholder: "class or number",
    on: { input: () => set({ q: search.value }) },
  });
  search.sync = () => {
    if (search.value !== state.q) search.value = state.q;
  };
  synced.push(search);
  const onlyPictures = h("input", {
    type: "checkbox",
    on: { change: () => set({ pictures: onlyPictures.checked ? "1" : "" }) },
  });
  onlyPictures.sync = () => {
    onlyPictures.checked = Boolean(state.pictures);
  };
  synced.push(onlyPictures);
  const numbered = (names) => names.map((name, k) => [String(k), name]);
  const filters = h("details", { class: "filters", open: innerWidth > 736 },
    h("summary", {}, "Search and filter"),
    h("div", { class: "fields" },
      h("label", { class: "field" }, h("span", {}, "Search"), search),
      choice("Answers on", "on", [["attacked", "attacked images"], ["clean", "clean images"]]),
      inTable.map((m) => choice(models[m].symbol, `m${m}`, [["", "any"], ["right", "right"], ["wrong", "wrong"]])),
      choice("True class", "class", [["", "any"], ...numbered(classes)]),
      choice("Answered", "answer", [["", "any"], ...numbered(classes)]),
      choice("Broken by", "by", [["", "any"], ...numbered(["stands", "wrong without an attack", ...attacks])]),
      models.length > 1 ? modelChoice("Answered, broken, margin: of", "model") : null,
      pictureOf.size && pictureOf.size < n
        ? h("label", { class: "field check" }, onlyPictures, h("span", {}, "with a picture")) : null));
  const isFiltered = () => Object.keys(blank()).some((key) => state[key] !== "");
  view.showFilters = () => {  // of a link: otherwise nothing says why images are missing
    if (isFiltered()) filters.open = true;
  };
  const saveImages = () => saveCsv("images", [
    ["image", "true class", ...models.flatMap(({ name }) =>
      [`${name} clean`, `${name} attacked`, `${name} smallest margin, rounded up`, `${name} broken by`])],
    ...view.shown.map((i) => [col.index[i], classes[col.label[i]], ...models.flatMap((_, m) =>
      [classes[clean[m][i]], classes[attacked[m][i]], marginText(margin[m][i]), breaker(m, i)])]),
  ]);
  const panel = h("div", {},
    h("div", { class: "chips", role: "group", "aria-label": "Common questions" }, presetButtons),
    filters,
    summary,
    grid,
    tools(tool("CSV", "Download the images shown as CSV", saveImages)),
    hint("✓ right, ✗ wrong; without an attack → at the attack that was worst for the image. The margin is the " +
      "probability of the true class minus the largest other one, at its smallest, rounded up to four digits."));
  function draw() {
    const shown = (view.shown = select());
    view.active = Math.min(view.active, Math.max(0, shown.length - 1));
    const moved = {
      gained: "become right without an attack",
      lost: "become wrong without an attack",
      stands: "stand under attack (estimate) and did not before",
      falls: "no longer stand under attack (estimate)",
    }[state.moved];
    const which = moved ? ` that ${moved} if the mixture moves to ${stepName(currentStep())}` : "";
    const clear = () => h("button", { type: "button", class: "tool", on: { click: () => set(blank()) } }, "clear");
    const counted = `${count(shown.length, "image")} of ${n.toLocaleString("en")}`;
    fill(summary, counted + which, isFiltered() ? clear() : null);
    spacer.style.height = `${Math.max(1, shown.length) * ROW}px`;
    grid.setAttribute("aria-rowcount", shown.length + 1);
    const [key, direction] = state.sort.split(".");
    const order = direction === "desc" ? "descending" : "ascending";
    for (const head of headRow.children) head.setAttribute("aria-sort", head.dataset.key === key ? order : "none");
    drawRows();
  }
  return { panel, draw };
}
