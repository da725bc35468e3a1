"use strict";
/* The script of a report: downloads for every table and figure, and the explorer of an evaluation.
   Text from the run only ever becomes text nodes and attribute values, never markup. */
(() => {
  // ---------------------------------------------------------------- elements, formats, downloads
  const $ = (selector, parent = document) => parent.querySelector(selector);
  const make = (space, tag, properties = {}, ...children) => {
    const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(properties)) {
      if (value === undefined || value === null || value === false) continue;
      if (key === "on") for (const [event, action] of Object.entries(value)) node.addEventListener(event, action);
      else if (key === "style") Object.assign(node.style, value);
      else node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  };
  const h = (tag, properties, ...children) => make(null, tag, properties, ...children);
  const fill = (node, ...children) => { node.replaceChildren(...children.flat(Infinity).filter(Boolean)); return node; };
  const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
  const interval = (result) => `[${(100 * result.low).toFixed(1)}, ${(100 * result.high).toFixed(1)}]`;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

  function save(name, blob) {
    const link = h("a", { href: URL.createObjectURL(blob), download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  // A cell that a spreadsheet would compute is marked as text.
  const cell = (value) => {
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : `${value}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const saveCsv = (name, rows) =>
    save(`${name}.csv`, new Blob(["\ufeff", rows.map((row) => row.map(cell).join(",")).join("\r\n"), "\r\n"],
                                 { type: "text/csv;charset=utf-8" }));
  function savePng(name, source, width, height) {
    const image = new Image();
    image.onload = () => {
      const canvas = h("canvas", { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
      canvas.toBlob((blob) => save(`${name}.png`, blob));
    };
    image.src = source;
  }
  const svgSource = (svg) => {
    const copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    copy.setAttribute("font-family", "system-ui, sans-serif");
    copy.prepend(make(svg.namespaceURI, "rect", { width: box.width, height: box.height, fill: color("paper") }));
    return new XMLSerializer().serializeToString(copy);
  };
  const dataUri = (source) => `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
  const tool = (text, label, action) => h("button", { type: "button", class: "tool", "aria-label": label, on: { click: action } }, text);
  const chartTools = (name, svg) => h("p", { class: "tools" },
    tool("SVG", `Download the figure ${name} as SVG`, () => save(`${name}.svg`, new Blob([svgSource(svg())], { type: "image/svg+xml" }))),
    tool("PNG", `Download the figure ${name} as PNG`, () => {
      const box = svg().viewBox.baseVal;
      savePng(name, dataUri(svgSource(svg())), box.width, box.height);
    }));
  async function copyText(text, button) {
    try { await navigator.clipboard.writeText(text); } catch {
      const area = h("textarea", {}, text);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }
  const slug = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "table";

  /** Downloads beside the tables and figures that the report has without a script. */
  function addDownloads() {
    for (const table of document.querySelectorAll("main table")) {
      const section = table.closest("section");
      const name = slug(`${$("h2", section).textContent} ${[...section.querySelectorAll("table")].indexOf(table) + 1}`);
      const read = () => [...table.rows].map((row) => [...row.cells].map((own) => [...own.childNodes]
        .map((node) => node.textContent.trim()).filter(Boolean).join(" ").replaceAll("\u00a0", " ")));
      table.parentElement.after(h("p", { class: "tools" }, tool("CSV", `Download the table ${name} as CSV`, () => saveCsv(name, read()))));
    }
    for (const figure of document.querySelectorAll("main figure")) {
      const image = $("img", figure), name = slug(image.alt);
      figure.append(h("p", { class: "tools" },
        tool("SVG", `Download the figure as SVG: ${image.alt}`, () => save(`${name}.svg`,
          new Blob([Uint8Array.from(atob(image.src.split(",")[1]), (letter) => letter.charCodeAt(0))], { type: "image/svg+xml" }))),
        tool("PNG", `Download the figure as PNG: ${image.alt}`, () => savePng(name, image.src, image.naturalWidth, image.naturalHeight))));
    }
    for (const code of document.querySelectorAll("main pre")) {
      const button = tool("copy", "Copy the command", () => copyText(code.textContent, button));
      code.after(h("p", { class: "tools" }, button));
    }
  }

  // ---------------------------------------------------------------- the data of the explorer
  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const size = new DataView(buffer).getUint32(0, true);
    const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    const types = { Uint8Array, Uint16Array, Uint32Array, Int16Array };
    const column = ({ type, offset, length }) => new types[type](buffer, 4 + size + offset, length);
    data.columns = Object.fromEntries(Object.entries(data.columns).map(([name, place]) => [name, column(place)]));
    return data;
  }
  /** Rows of (T, N) numbers from what changes between them. */
  function rebuild(changes, n) {
    const rows = [];
    for (let start = 0; start < changes.length; start += n) {
      const row = changes.slice(start, start + n), before = rows.at(-1);
      if (before) for (let i = 0; i < n; i++) row[i] ^= before[i];
      rows.push(row);
    }
    return rows;
  }

  const STANDS = 0, WRONG_CLEAN = 1, NO_MARGIN = -32768, MARGIN_STEPS = 10000, ROW = 44, MIDDLE = 128, AMPLIFIED = 10;
  const TABS = { images: "Images", tradeoff: "Trade-off", classes: "Classes", margins: "Margins" };

  function explore(root, data, pictures) {
    const SVG = $("svg", root).namespaceURI, s = (tag, properties, ...children) => make(SVG, tag, properties, ...children);
    const n = data.count, { models, classes, columns: col, attacks } = data;
    const of = (name) => models.map((_, m) => col[`${name}${m}`]);
    const clean = of("clean"), attacked = of("attacked"), broken = of("broken"), margin = of("margin"), marginClean = of("marginClean");
    const main = models.length - 1 && models.some((model) => model.symbol === "mixture")
      ? models.findIndex((model) => model.symbol === "mixture") : 0;
    const steps = data.steps ? data.steps.map((step, t) => ({ ...step, t })) : [];
    const stepPredicted = steps.length ? rebuild(col.stepPredicted, n) : [], stepBits = steps.length ? rebuild(col.stepBits, n) : [];
    const own = steps.find((step) => step.evaluated && step.lost === null);
    const pictureOf = new Map();
    if (col.picture) col.picture.forEach((position, p) => pictureOf.set(position, p));
    const marginText = (value) => value === NO_MARGIN ? "–" : (value / MARGIN_STEPS).toFixed(4);
    const signed = (text) => text.replace("-", "−");
    const breaker = (m, i) => broken[m][i] === STANDS ? "" : broken[m][i] === WRONG_CLEAN ? "wrong without an attack" : attacks[broken[m][i] - 2];

    // -------------------------------------------------------------- state, kept in the address
    const defaults = { tab: "images", on: "attacked", class: "", answer: "", by: "", q: "", moved: "", pictures: "", sort: "index", image: "",
                       model: String(main), curve: "", step: "", of: String(main), threshold: "0" };
    models.forEach((_, m) => { defaults[`m${m}`] = ""; });
    let state = { ...defaults };
    const readState = () => {
      const given = location.hash.includes("=") ? new URLSearchParams(location.hash.slice(1)) : new URLSearchParams();
      state = { ...defaults };
      for (const key of Object.keys(defaults)) if (given.has(key)) state[key] = given.get(key);
      if (!(state.tab in TABS)) state.tab = "images";
      if (state.tab === "tradeoff" && !hasTradeOff) state.tab = "images";
      for (const key of ["model", "of"]) if (!models[state[key]] && !(key === "of" && ["Before", "After"].includes(state.of))) state[key] = String(main);
    };
    const set = (changes) => {
      Object.assign(state, changes);
      const shown = new URLSearchParams();
      for (const [key, value] of Object.entries(state)) if (`${value}` !== defaults[key]) shown.set(key, value);
      if (state.tab !== "images" && !shown.has("tab")) shown.set("tab", state.tab);
      history.replaceState(null, "", `#${shown.size ? shown : "tab=images"}`);
      draw();
    };
    const hasTradeOff = models.every((model) => model.results.clean && model.results.attacked);

    // -------------------------------------------------------------- which images are shown
    const correct = (m, i) => (state.on === "clean" ? clean[m][i] === col.label[i] : broken[m][i] === STANDS);
    const currentStep = () => {
      const listed = curveSteps();
      const found = listed.find((step) => String(step.t) === state.step);
      return found ?? listed.find((step) => step.evaluated) ?? listed[0];
    };
    const hasFrontier = steps.some((step) => step.lost !== null);
    const curve = () => state.curve || (hasFrontier ? "loss" : "alpha");
    const curveSteps = () => steps.filter((step) => (step.lost !== null) === (curve() === "loss"));
    /** Whether an image changes sides between the evaluated mixture and the one of the slider. */
    const moves = (kind, i) => {
      const to = currentStep();
      if (!to || !own) return false;
      const label = col.label[i], before = stepPredicted[own.t][i] === label, after = stepPredicted[to.t][i] === label;
      const stood = stepBits[own.t][i] & 2, stands = stepBits[to.t][i] & 2;
      return { gained: !before && after, lost: before && !after, stands: !stood && stands, falls: stood && !stands }[kind];
    };
    function select() {
      const words = state.q.trim().toLowerCase(), rows = [];
      const named = new Set(classes.flatMap((name, k) => (words && name.toLowerCase().includes(words) ? [k] : [])));
      for (let i = 0; i < n; i++) {
        if (state.class !== "" && col.label[i] !== Number(state.class)) continue;
        if (state.answer !== "" && (state.on === "clean" ? clean : attacked)[state.model][i] !== Number(state.answer)) continue;
        if (state.by !== "" && broken[state.model][i] !== Number(state.by)) continue;
        if (state.pictures && !pictureOf.has(i)) continue;
        if (state.moved && !moves(state.moved, i)) continue;
        if (!models.every((_, m) => state[`m${m}`] === "" || (state[`m${m}`] === "right") === correct(m, i))) continue;
        if (words && String(col.index[i]) !== words && !named.has(col.label[i])
            && !models.some((_, m) => named.has(clean[m][i]) || named.has(attacked[m][i]))) continue;
        rows.push(i);
      }
      const [key, direction] = state.sort.split("."), sign = direction === "desc" ? -1 : 1;
      const values = key === "label" ? col.label : key === "margin" ? margin[state.model] : key === "by" ? broken[state.model]
        : /^m\d$/.test(key) ? broken[key.slice(1)] ?? col.index : col.index;
      return rows.sort((a, b) => sign * (values[a] - values[b]) || a - b);
    }

    // -------------------------------------------------------------- controls
    const choice = (label, key, options) => {
      const input = h("select", { "aria-label": label, on: { change: () => set({ [key]: input.value, ...(key === "curve" ? { step: "" } : {}) }) } },
        options.map(([value, text]) => h("option", { value }, text)));
      input.sync = () => { input.value = state[key] === "" && key === "curve" ? curve() : state[key]; };
      synced.push(input);
      return h("label", { class: "field" }, h("span", {}, label), input);
    };
    const synced = [];
    const modelChoice = (label, key) => choice(label, key, models.map((model, m) => [String(m), model.name]));

    // -------------------------------------------------------------- images: a table that holds only what is visible
    let shown = [], active = 0;
    const summary = h("p", { class: "summary", role: "status" });
    const scroller = h("div", { class: "rows", role: "rowgroup", tabindex: "0", "aria-label": "Images; arrow keys move, Enter opens one" });
    const spacer = h("div", { class: "spacer", role: "presentation" });
    scroller.append(spacer);
    const heads = [["index", "#"], ["label", "true class"], ...models.map((model, m) => [`m${m}`, model.symbol]), ["margin", "margin"], ["by", "broken by"]];
    const headRow = h("div", { class: "row head", role: "row" }, heads.map(([key, text], c) => {
      const button = h("button", { type: "button", "aria-label": `sort by ${key === "index" ? "number" : text}`, on: { click: () => set({ sort: state.sort === key ? `${key}.desc` : key }) } },
        c >= 2 && c < 2 + models.length ? h("span", { class: "dot", style: { background: `var(--${models[c - 2].color})` } }) : null, text);
      return h("div", { role: "columnheader", class: `c-${key.replace(/\d/, "")}`, "data-key": key }, button);
    }));
    const grid = h("div", { class: `grid models-${models.length}`, role: "grid", "aria-label": "Images of the run" }, headRow, scroller);
    const sprites = {};
    const load = (name) => sprites[name] ??= new Promise((done) => { const image = new Image(); image.onload = () => done(image); image.src = pictures[name]; });
    /** Draw one picture of a sprite. */
    async function cut(name, p, context) {
      const { width, height, perRow } = pictures;
      context.drawImage(await load(name), (p % perRow) * width, Math.floor(p / perRow) * height, width, height, 0, 0, width, height);
    }
    const mark = (right) => h("span", { class: right ? "right" : "wrong", "aria-label": right ? "right" : "wrong" }, right ? "✓" : "✗");
    const answer = (m, i) => {
      const label = col.label[i], a = clean[m][i], b = attacked[m][i], stands = broken[m][i] === STANDS;
      return h("div", { role: "gridcell", class: "c-m" }, mark(a === label), a === label ? null : h("span", { class: "name" }, classes[a]),
        h("span", { class: "arrow", "aria-label": "under attack" }, "→"), mark(stands), stands ? null : h("span", { class: "name" }, classes[b]));
    };
    const thumbnail = (i) => {
      if (!pictureOf.has(i) || !pictures) return h("span", { class: "thumb none" });
      const { width, height } = pictures, canvas = h("canvas", { class: "thumb", width, height, role: "img", "aria-label": `image ${col.index[i]}` });
      cut("clean", pictureOf.get(i), canvas.getContext("2d"));
      return canvas;
    };
    function drawRows() {
      const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 4), last = Math.min(shown.length, first + Math.ceil(scroller.clientHeight / ROW) + 8);
      const rows = [];
      for (let r = first; r < last; r++) {
        const i = shown[r];
        rows.push(h("div", { class: `row${r === active ? " active" : ""}`, role: "row", id: `image-${i}`, "aria-rowindex": r + 2,
                             "aria-selected": r === active ? "true" : "false", style: { transform: `translateY(${r * ROW}px)` },
                             on: { click: () => { active = r; set({ image: String(col.index[i]) }); } } },
          h("div", { role: "gridcell", class: "c-index" }, thumbnail(i), h("span", { class: "number" }, String(col.index[i]))),
          h("div", { role: "gridcell", class: "c-label" }, classes[col.label[i]]), models.map((_, m) => answer(m, i)),
          h("div", { role: "gridcell", class: "c-margin" }, signed(marginText(margin[state.model][i]))),
          h("div", { role: "gridcell", class: "c-by" }, breaker(state.model, i) || "stands")));
      }
      spacer.replaceChildren(...rows);
      if (shown.length) scroller.setAttribute("aria-activedescendant", `image-${shown[active]}`);
    }
    scroller.addEventListener("scroll", drawRows, { passive: true });
    scroller.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.floor(scroller.clientHeight / ROW) - 1);
      const move = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -n, End: n }[event.key];
      if (event.key === "Enter" && shown.length) set({ image: String(col.index[shown[active]]) });
      else if (move) {
        active = Math.max(0, Math.min(shown.length - 1, active + move));
        const top = active * ROW;
        if (top < scroller.scrollTop) scroller.scrollTop = top;
        else if (top + ROW > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + ROW - scroller.clientHeight;
        drawRows();
      } else return;
      event.preventDefault();
    });
    const blank = () => ({ ...Object.fromEntries(models.map((_, m) => [`m${m}`, ""])), class: "", answer: "", by: "", q: "", moved: "", pictures: "" });
    const isMixture = models[main].symbol === "mixture" && models.length === 3;
    const presets = [["All images", {}], [`${models[main].symbol} fails under attack`, { on: "attacked", [`m${main}`]: "wrong" }],
      ...(isMixture ? [["g right, h wrong, mixture right", { on: "clean", m0: "right", m1: "wrong", m2: "right" }],
                       ["h stands, mixture does not", { on: "attacked", m1: "right", m2: "wrong" }],
                       ["g right, mixture wrong", { on: "clean", m0: "right", m2: "wrong" }]] : [])];
    const presetButtons = presets.map(([text, values]) => {
      const button = h("button", { type: "button", class: "chip", on: { click: () => set({ ...blank(), on: "attacked", ...values }) } }, text);
      button.sync = () => {
        const wanted = { ...blank(), on: "attacked", ...values };
        button.setAttribute("aria-pressed", String(Object.entries(wanted).every(([key, value]) => state[key] === value || (key === "on" && text === "All images"))));
      };
      synced.push(button);
      return button;
    });
    const search = h("input", { type: "search", "aria-label": "Search by class or number", placeholder: "class or number", on: { input: () => set({ q: search.value }) } });
    search.sync = () => { if (search.value !== state.q) search.value = state.q; };
    synced.push(search);
    const onlyPictures = h("input", { type: "checkbox", on: { change: () => set({ pictures: onlyPictures.checked ? "1" : "" }) } });
    onlyPictures.sync = () => { onlyPictures.checked = Boolean(state.pictures); };
    synced.push(onlyPictures);
    const numbered = (names) => names.map((name, k) => [String(k), name]);
    const rightOrWrong = [["", "any"], ["right", "right"], ["wrong", "wrong"]];
    const imagesPanel = h("div", {}, h("div", { class: "chips", role: "group", "aria-label": "Common questions" }, presetButtons),
      h("details", { class: "filters", open: innerWidth > 736 }, h("summary", {}, "Search and filter"), h("div", { class: "fields" },
        h("label", { class: "field" }, h("span", {}, "Search"), search),
        choice("Answers on", "on", [["attacked", "attacked images"], ["clean", "clean images"]]),
        models.map((model, m) => choice(model.symbol, `m${m}`, rightOrWrong)),
        choice("True class", "class", [["", "any"], ...numbered(classes)]), choice("Answered", "answer", [["", "any"], ...numbered(classes)]),
        choice("Broken by", "by", [["", "any"], ["0", "stands"], ["1", "wrong without an attack"], ...attacks.map((name, k) => [String(k + 2), name])]),
        models.length > 1 ? modelChoice("Answered, broken, margin: of", "model") : null,
        pictureOf.size && pictureOf.size < n ? h("label", { class: "field check" }, onlyPictures, h("span", {}, "with a picture")) : null)),
      summary, grid, h("p", { class: "tools" }, tool("CSV", "Download the images shown as CSV", () => saveCsv("images", [
        ["image", "true class", ...models.flatMap((model) => [`${model.name} clean`, `${model.name} attacked`, `${model.name} smallest margin, rounded up`, `${model.name} broken by`])],
        ...shown.map((i) => [col.index[i], classes[col.label[i]], ...models.flatMap((_, m) => [classes[clean[m][i]], classes[attacked[m][i]], marginText(margin[m][i]), breaker(m, i)])])]))),
      h("p", { class: "hint" }, "✓ right, ✗ wrong; without an attack → at the attack that was worst for the image. The margin is the probability of the true class "
        + "minus the largest other one, at its smallest, rounded up to four digits."));
    function drawImages() {
      shown = select();
      active = Math.min(active, Math.max(0, shown.length - 1));
      const moved = { gained: "become right without an attack", lost: "become wrong without an attack", stands: "stand under attack (estimate) and did not before",
                      falls: "no longer stand under attack (estimate)" }[state.moved];
      fill(summary, `${count(shown.length, "image")} of ${n.toLocaleString("en")}${moved ? ` that ${moved} if the mixture moves to ${stepName(currentStep())}` : ""}`,
        moved ? h("button", { type: "button", class: "tool", on: { click: () => set({ moved: "" }) } }, "clear") : null);
      spacer.style.height = `${Math.max(1, shown.length) * ROW}px`;
      grid.setAttribute("aria-rowcount", shown.length + 1);
      const [key, direction] = state.sort.split(".");
      for (const head of headRow.children) head.setAttribute("aria-sort", head.dataset.key !== key ? "none" : direction === "desc" ? "descending" : "ascending");
      drawRows();
    }

    // -------------------------------------------------------------- one image
    const dialog = h("dialog", { class: "image", "aria-label": "One image" });
    dialog.addEventListener("close", () => {  // comes late: the focus may have been moved on by then
      if (state.image) set({ image: "" });
      if (document.activeElement === document.body) scroller.focus({ preventScroll: true });
    });
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move) step(move);
    });
    const step = (move) => {
      const next = shown[shown.findIndex((i) => String(col.index[i]) === state.image) + move];
      if (next !== undefined) { active = shown.indexOf(next); set({ image: String(col.index[next]) }); }
    };
    async function drawPictures(p, canvases) {
      const { width, height } = pictures;
      const [before, change] = await Promise.all(["clean", "change"].map(async (name) => {
        const context = h("canvas", { width, height }).getContext("2d");
        await cut(name, p, context);
        return context.getImageData(0, 0, width, height);
      }));
      const formulas = [(a) => a, (a, d) => MIDDLE + AMPLIFIED * (d - MIDDLE), (a, d) => a + d - MIDDLE];
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
      const listed = Array.from({ length: top }, (_, k) => [col.topClasses[start + k], col.topProbabilities[start + k] / 65535]).sort((a, b) => b[1] - a[1]);
      const label = col.label[col.picture[p]], rank = listed.findIndex(([k]) => k === label);
      if (rank > 3) listed[3] = listed[rank];  // the true class is always shown
      return h("ol", { class: "bars", "aria-label": `${models[m].name}, ${side ? "attacked" : "clean"} image` }, listed.slice(0, 4).map(([k, share]) =>
        h("li", { class: k === label ? "true" : "" }, h("span", { class: "bar", style: { width: `${100 * share}%`, background: `var(--${models[m].color})` } }),
          h("span", { class: "text" }, `${classes[k]}${k === label ? " ✓" : ""}`), h("span", { class: "value" }, percent(share)))));
    }
    function drawImage() {
      const i = state.image === "" ? -1 : col.index.indexOf(Number(state.image));
      if (i < 0) { if (dialog.open) dialog.close(); return; }
      const p = pictureOf.get(i), close = h("button", { type: "button", class: "tool", on: { click: () => dialog.close() } }, "close");
      const parts = [h("header", {}, h("h3", {}, `Image ${col.index[i]}: ${classes[col.label[i]]}`),
        h("p", { class: "tools" }, h("button", { type: "button", class: "tool", "aria-label": "previous image", on: { click: () => step(-1) } }, "←"),
          h("button", { type: "button", class: "tool", "aria-label": "next image", on: { click: () => step(1) } }, "→"), close))];
      if (p !== undefined && pictures) {
        const canvases = ["clean", `perturbation ×\u00a0${AMPLIFIED}`, "attacked"].map((text) => [text,
          h("canvas", { width: pictures.width, height: pictures.height, role: "img", "aria-label": `${text}, image ${col.index[i]}` })]);
        parts.push(h("div", { class: "three" }, canvases.map(([text, canvas]) => h("figure", {}, canvas, h("figcaption", {}, text)))));
        if (broken[main][i] === WRONG_CLEAN) parts.push(h("p", { class: "hint" }, "Wrong without an attack, and so not attacked by a suite."));
        drawPictures(p, canvases.map(([, canvas]) => canvas));
        const known = models.map((_, m) => m).filter((m) => data.pictures.models.includes(m));
        parts.push(h("div", { class: "answers" }, h("span", {}), h("h4", {}, "clean"), h("h4", {}, "attacked"), known.map((m) => [
          h("h4", { class: "model" }, h("span", { class: "dot", style: { background: `var(--${models[m].color})` } }), models[m].symbol), bars(p, m, 0), bars(p, m, 1)])));
        parts.push(h("p", { class: "hint" }, `Attacked on ${data.pictures.model}, at the point of its smallest margin${data.threat ? `, within ${data.threat}` : ""}; `
          + "the picture is rounded to bytes, probabilities are those of the point itself. The models' own worst cases in the table may be other points."));
      } else parts.push(h("p", { class: "hint" }, "No picture of this image was kept: a run keeps failures up to a limit and a sample of the others."));
      parts.push(h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["model", "clean", "attacked", "margin", "broken by"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, models.map((model, m) => h("tr", {}, h("th", { scope: "row" }, model.symbol), h("td", {}, classes[clean[m][i]]), h("td", {}, classes[attacked[m][i]]),
          h("td", {}, signed(marginText(margin[m][i]))), h("td", {}, breaker(m, i) || "stands")))))));
      fill(dialog, parts);
      if (!dialog.open) { dialog.showModal(); close.focus(); }
    }

    // -------------------------------------------------------------- charts
    const scale = (from, to, low, high) => (value) => low + (value - from) / (to - from || 1) * (high - low);
    const ticks = (low, high, most = 6) => {
      const raw = (high - low) / most, unit = 10 ** Math.floor(Math.log10(raw)), size = [1, 2, 5, 10].map((k) => k * unit).find((k) => k >= raw);
      const found = [];
      for (let k = Math.ceil(low / size - 1e-9); k * size <= high + 1e-9; k++) found.push(Number((k * size).toPrecision(12)));
      return found;
    };
    function axes(width, height, box, x, y, labels) {
      const muted = color("muted"), rule = color("rule"), parts = [];
      for (const value of ticks(...box.y)) parts.push(s("line", { x1: box.left, x2: width - box.right, y1: y(value), y2: y(value), stroke: rule, "stroke-width": 1 }),
        s("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end", "font-size": 12, fill: muted }, String(value)));
      for (const value of ticks(...box.x)) parts.push(s("text", { x: x(value), y: height - box.bottom + 18, "text-anchor": "middle", "font-size": 12, fill: muted }, String(value)));
      parts.push(s("text", { x: (box.left + width - box.right) / 2, y: height - 6, "text-anchor": "middle", "font-size": 12, fill: muted }, labels[0]),
        s("text", { x: 0, y: 0, transform: `translate(13 ${(height - box.bottom + box.top) / 2}) rotate(-90)`, "text-anchor": "middle", "font-size": 12, fill: muted }, labels[1]));
      return parts;
    }
    const chartWidth = () => Math.max(320, Math.min(760, root.clientWidth || 760));
    const extent = (values, least) => {
      let low = Math.min(...values), high = Math.max(...values);
      const more = Math.max(0.06 * (high - low), (least - (high - low)) / 2);
      low = Math.max(0, low - more); high = Math.min(100, high + more);
      return [low, high];
    };

    // -------------------------------------------------------------- trade-off
    const stepName = (step) => (step.lost !== null ? `a loss of at most ${Number((100 * step.lost).toPrecision(3))} points` : `α = ${Number(step.alpha.toPrecision(4))}`);
    const readout = h("p", { class: "summary", role: "status" });
    const slider = h("input", { type: "range", min: 0, step: 1, on: { input: () => set({ step: String(curveSteps()[slider.value].t) }) } });
    const sliderField = h("label", { class: "slider" }, h("span", {}, ""), slider);
    const tradeChart = h("div", { class: "chart" }), tradeTable = h("div", { class: "wide" }), movedLine = h("p", { class: "moved" });
    const tradeRows = () => {
      const at = steps.length ? currentStep() : null;
      return [...models.map((model, m) => ({ name: model.name, color: model.color, kind: "measured", clean: model.results.clean, attacked: model.results.attacked,
          share: m === main && own ? own.byAccurate : null })),
        ...(at ? [{ name: at.lost !== null ? `at ${Number((100 * at.lost).toPrecision(3))} points` : `at ${stepName(at)}`, color: "mixed", kind: "estimate", clean: at.clean, attacked: at.attacked, share: at.byAccurate }] : [])];
    };
    const tradeCsv = () => saveCsv("trade-off", [["model", "clean", "low", "high", "attacked", "low", "high", "attacked is", "decided by g"],
      ...tradeRows().map((row) => [row.name, row.clean.value, row.clean.low, row.clean.high, row.attacked.value, row.attacked.low, row.attacked.high, row.kind, row.share ?? ""])]);
    const tradePanel = h("div", {},
      steps.length ? h("div", { class: "fields" }, hasFrontier ? choice("Move along", "curve", [["loss", "the fitted frontier"], ["alpha", "α, with the same map"]]) : null, sliderField) : null,
      readout, tradeChart, chartTools("trade-off", () => $("svg", tradeChart)), tradeTable,
      h("p", { class: "tools" }, tool("CSV", "Download the trade-off as CSV", tradeCsv)), movedLine,
      h("p", { class: "hint" }, "Filled: measured in this run, with 95 % intervals. ", steps.length ? "Hollow: computed from stored logits, without a model. Their clean accuracy is exact. Their attacked "
        + "accuracy is an estimate: an image counts if it is right without an attack and, whatever g says there, at every attacked point that this run stored; a new attack on that mixture may find other points."
        : "This run has no fitted mixture with stored points, so there is nothing to move."));
    function drawTradeChart() {
      const width = chartWidth(), height = Math.min(380, width * 0.72), box = { left: 48, right: 14, top: 14, bottom: 42 };
      const at = steps.length ? currentStep() : null, curves = ["loss", "alpha"].map((kind) => steps.filter((step) => (step.lost !== null) === (kind === "loss")));
      const all = [...models.map((model) => model.results), ...curves[0], ...(at ? [at] : [])];
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
          s("rect", { x: px(step) - 5, y: py(step) - 5, width: 10, height: 10, transform: `rotate(45 ${px(step)} ${py(step)})`, fill: paper, stroke: color("mixed"), "stroke-width": 1.5 }),
          roomy(k) ? s("text", { x: px(step), y: py(step) + 20, "font-size": 11, fill: muted, ...halo }, `${Number((100 * step.lost).toPrecision(3))}`) : null)),
        models.map((model) => {
          const item = model.results, own = color(model.color);
          return s("g", interactive(describe(model.name, item, "measured")),
            s("line", { x1: x(100 * item.clean.low), x2: x(100 * item.clean.high), y1: py(item), y2: py(item), stroke: own, "stroke-width": 1 }),
            s("line", { x1: px(item), x2: px(item), y1: y(100 * item.attacked.low), y2: y(100 * item.attacked.high), stroke: own, "stroke-width": 1 }),
            s("circle", { cx: px(item), cy: py(item), r: 6, fill: own }),
            s("text", { x: px(item), y: py(item) - 14, "font-size": 12, "font-weight": 600, fill: own, ...halo }, model.symbol));
        }),
        at ? s("circle", { cx: px(at), cy: py(at), r: 10, fill: "none", stroke: ink, "stroke-width": 2 }) : null);
      fill(tradeChart, svg);
    }
    function drawTradeOff() {
      if (!hasTradeOff) return;
      const at = steps.length ? currentStep() : null;
      if (at) {
        const listed = curveSteps();
        slider.max = listed.length - 1;
        slider.value = listed.indexOf(at);
        slider.setAttribute("aria-valuetext", stepName(at));
        fill(sliderField.firstChild, `${curve() === "loss" ? "Loss allowed" : "Weight of the robust side"}: `, h("strong", {}, curve() === "loss" ? `${Number((100 * at.lost).toPrecision(3))} points` : `α = ${Number(at.alpha.toPrecision(4))}`));
        fill(readout, at.evaluated ? "This is the mixture that was attacked." : `Not attacked itself: ${stepName(at)}, α = ${Number(at.alpha.toPrecision(4))}.`);
      } else fill(readout, "");
      drawTradeChart();
      const figure = (result, note) => h("td", {}, percent(result.value), h("small", {}, interval(result), note ? h("em", {}, ` ${note}`) : null));
      fill(tradeTable, h("table", {}, h("thead", {}, h("tr", {}, ["model", "clean", "attacked", "decided by g"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, tradeRows().map((row) => h("tr", { class: row.kind === "estimate" ? "moving" : "" },
          h("th", { scope: "row" }, h("span", { class: `dot${row.kind === "estimate" ? " hollow" : ""}`, style: { "--own": `var(--${row.color})`, background: row.kind === "estimate" ? "" : `var(--${row.color})`, borderColor: `var(--${row.color})` } }), row.name),
          figure(row.clean, row.kind === "estimate" ? "exact" : ""), figure(row.attacked, row.kind === "estimate" ? "estimate" : ""), h("td", {}, row.share === null ? "–" : percent(row.share)))))));
      fill(movedLine);
      if (at && own && !at.evaluated) {
        const kinds = { gained: "become right", lost: "become wrong", stands: "more stand under attack (estimate)", falls: "no longer stand (estimate)" };
        const counts = Object.fromEntries(Object.keys(kinds).map((kind) => [kind, 0]));
        for (let i = 0; i < n; i++) for (const kind in kinds) counts[kind] += Boolean(moves(kind, i));
        fill(movedLine, "Compared with the mixture that was attacked: ", Object.entries(kinds).map(([kind, text]) =>
          h("button", { type: "button", class: "chip", disabled: counts[kind] === 0, on: { click: () => set({ ...blank(), tab: "images", moved: kind }) } }, `${counts[kind]} ${text}`)));
      }
    }

    // -------------------------------------------------------------- classes
    const classTable = h("div", { class: "wide" }), confusion = h("div", { class: "wide" });
    const classRows = () => classes.map((name, k) => {
      const row = { name, k, n: 0, clean: models.map(() => 0), stands: models.map(() => 0) };
      for (let i = 0; i < n; i++) if (col.label[i] === k) {
        row.n++;
        models.forEach((_, m) => { row.clean[m] += clean[m][i] === k; row.stands[m] += broken[m][i] === STANDS; });
      }
      return row;
    }).filter((row) => row.n);
    const classHead = ["class", "n", ...models.flatMap((model) => [`${model.symbol} clean`, `${model.symbol} attacked`])];
    const plain = (right, all) => (100 * right / all).toFixed(1);
    const matrix = () => {
      const cells = classes.map(() => classes.map(() => 0)), answers = (state.on === "clean" ? clean : attacked)[state.model];
      for (let i = 0; i < n; i++) cells[col.label[i]][answers[i]]++;
      return cells;
    };
    const goTo = (label, text, changes) => h("button", { type: "button", class: "link", "aria-label": label, on: { click: () => set({ ...blank(), tab: "images", ...changes }) } }, text);
    const classesPanel = h("div", {}, h("p", { class: "summary" }, "Right in %, clean → under attack. A number leads to the images that are wrong, a class to all of its images."), classTable, h("p", { class: "tools" }, tool("CSV", "Download the classes as CSV", () => saveCsv("classes",
        [classHead, ...classRows().map((row) => [row.name, row.n, ...models.flatMap((_, m) => [row.clean[m] / row.n, row.stands[m] / row.n])])]))),
      h("h3", {}, "Confusion"), h("div", { class: "fields" }, modelChoice("Answers of", "model"), choice("on", "on", [["attacked", "attacked images"], ["clean", "clean images"]])),
      confusion, h("p", { class: "tools" }, tool("CSV", "Download the confusion matrix as CSV", () => saveCsv("confusion",
        [["true class", ...classes], ...matrix().map((row, k) => [classes[k], ...row])]))),
      h("p", { class: "hint" }, "Rows are true classes, columns answers. Every number leads to its images."));
    function drawClasses() {
      const share = (right, all, label, changes) => goTo(`${label}: ${percent(right / all)}; show the images that are wrong`, plain(right, all), changes);
      fill(classTable, h("table", { class: "by-class" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "class"), h("th", { scope: "col" }, "n"), models.map((model) =>
          h("th", { scope: "col" }, h("span", { class: "dot", style: { background: `var(--${model.color})` } }), model.symbol)))), h("tbody", {}, classRows().map((row) =>
        h("tr", {}, h("th", { scope: "row" }, goTo(`Images of class ${row.name}`, row.name, { class: String(row.k) })), h("td", {}, String(row.n)), models.map((model, m) => h("td", {},
          share(row.clean[m], row.n, `${row.name}, ${model.symbol} clean`, { class: String(row.k), on: "clean", [`m${m}`]: "wrong" }), h("span", { class: "arrow" }, "→"),
          share(row.stands[m], row.n, `${row.name}, ${model.symbol} attacked`, { class: String(row.k), on: "attacked", [`m${m}`]: "wrong" }))))))));
      const cells = matrix(), largest = Math.max(1, ...cells.flatMap((row, k) => row.filter((_, j) => j !== k)));
      const link = (k, j) => goTo(`${cells[k][j]} images of ${classes[k]} answered ${classes[j]}`, String(cells[k][j]), { class: String(k), answer: String(j), on: state.on, model: state.model });
      if (classes.length <= 20) {
        fill(confusion, h("table", { class: "confusion" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "true class"), classes.map((name) => h("th", { scope: "col" }, h("span", {}, name))))),
          h("tbody", {}, cells.map((row, k) => h("tr", {}, h("th", { scope: "row" }, classes[k]), row.map((value, j) => h("td", { class: j === k ? "diagonal" : "",
            style: j === k || !value ? {} : { background: `color-mix(in srgb, var(--wrong) ${Math.round(6 + 44 * value / largest)}%, transparent)` } }, value ? link(k, j) : "·")))))));
      } else {
        const pairs = cells.flatMap((row, k) => row.flatMap((value, j) => (j !== k && value ? [[value, k, j]] : []))).sort((a, b) => b[0] - a[0]).slice(0, 40);
        fill(confusion, h("table", {}, h("thead", {}, h("tr", {}, ["true class", "answered", "images"].map((text) => h("th", { scope: "col" }, text)))),
          h("tbody", {}, pairs.map(([, k, j]) => h("tr", {}, h("th", { scope: "row" }, classes[k]), h("td", {}, classes[j]), h("td", {}, link(k, j)))))));
      }
    }

    // -------------------------------------------------------------- margins
    const marginChart = h("div", { class: "chart" }), marginText2 = h("p", { class: "summary", role: "status" });
    const threshold = h("input", { type: "range", min: -1, max: 1, step: 0.025, on: { input: () => set({ threshold: threshold.value }) } });
    const thresholdField = h("label", { class: "slider" }, h("span", {}, ""), threshold);
    const mapped = Boolean(col.gapAfter);
    const marginColumns = () => (["Before", "After"].includes(state.of) && mapped ? [col[`gap${state.of}`], col[`smallest${state.of}`]] : [marginClean[state.of] ?? marginClean[main], margin[state.of] ?? margin[main]]);
    const marginsPanel = h("div", {}, h("div", { class: "fields" }, choice("Margins of", "of", [...models.map((model, m) => [String(m), model.name]),
        ...(mapped ? [["Before", "robust model, before the map"], ["After", "robust model, after the map"]] : [])]), thresholdField),
      marginText2, marginChart, chartTools("margins", () => $("svg", marginChart)),
      h("p", { class: "tools" }, tool("CSV", "Download the margins as CSV", () => saveCsv("margins", [["image", "clean", "attacked"],
        ...Array.from({ length: n }, (_, i) => [col.index[i], ...marginColumns().map((values) => marginText(values[i]))])]))),
      h("p", { class: "hint" }, "Filled: clean images. Line: the smallest margin over the clean image and all attacks. For a model the margin is that of the true class. ",
        mapped ? "Before and after the map, a clean image has the gap between the two most probable classes, which decides whether g is asked." : ""));
    function drawMargins() {
      const [first, second] = marginColumns(), t = Number(state.threshold), width = chartWidth(), height = 260, box = { left: 48, right: 14, top: 12, bottom: 42, x: [-1, 1] };
      const bins = 40, counts = [first, second].map((values) => { const c = new Array(bins).fill(0); for (const v of values) if (v !== NO_MARGIN) c[Math.min(bins - 1, Math.floor((v / MARGIN_STEPS + 1) / 2 * bins))]++; return c; });
      const root3 = (value) => Math.sqrt(value);
      box.y = [0, Math.max(...counts.flat(), 1)];
      const x = scale(-1, 1, box.left, width - box.right), yy = scale(0, root3(box.y[1]), height - box.bottom, box.top), y = (value) => yy(root3(value));
      const tint = ["Before", "After"].includes(state.of) ? color("robust") : color(models[state.of]?.color ?? "mixed"), w = (x(1) - x(-1)) / bins;
      const path = counts[1].map((value, b) => `${b ? "L" : "M"}${x(-1) + b * w},${y(value)}H${x(-1) + (b + 1) * w}`).join("");
      const marks = [0, ...[1, 5, 10, 50, 100, 500, 1000, 5000].filter((value) => value < box.y[1] * 0.9), box.y[1]].filter((v, k, all) => k === 0 || Math.abs(y(v) - y(all[k - 1])) > 14);
      const muted = color("muted"), rule = color("rule");
      fill(marginChart, s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Histogram of margins, clean and attacked" },
        marks.map((v) => [s("line", { x1: box.left, x2: width - box.right, y1: y(v), y2: y(v), stroke: rule }), s("text", { x: box.left - 8, y: y(v) + 4, "text-anchor": "end", "font-size": 12, fill: muted }, String(v))]),
        [-1, -0.5, 0, 0.5, 1].map((v) => s("text", { x: x(v), y: height - box.bottom + 18, "text-anchor": "middle", "font-size": 12, fill: muted }, String(v))),
        s("text", { x: width / 2, y: height - 6, "text-anchor": "middle", "font-size": 12, fill: muted }, "margin"),
        s("text", { transform: `translate(13 ${height / 2 - 12}) rotate(-90)`, "text-anchor": "middle", "font-size": 12, fill: muted }, "images (root scale)"),
        counts[0].map((value, b) => s("rect", { x: x(-1) + b * w + 0.5, y: y(value), width: Math.max(0, w - 1), height: y(0) - y(value), fill: tint, opacity: 0.3 })),
        s("path", { d: path, fill: "none", stroke: tint, "stroke-width": 1.6 }),
        s("line", { x1: x(t), x2: x(t), y1: box.top, y2: height - box.bottom, stroke: color("ink"), "stroke-width": 1.5, "stroke-dasharray": "3 3" })));
      threshold.value = t;
      threshold.setAttribute("aria-valuetext", t.toFixed(3));
      fill(thresholdField.firstChild, "Threshold: ", h("strong", {}, t.toFixed(3)));
      const limit = Math.round(t * MARGIN_STEPS), above = [first, second].map((values) => values.reduce((total, v) => total + (v !== NO_MARGIN && v > limit), 0));
      let text = `Margin above ${t.toFixed(3)}: ${above[0].toLocaleString("en")} of ${n.toLocaleString("en")} clean images, ${above[1].toLocaleString("en")} at their smallest margin.`;
      const alone = steps.find((step) => step.lost === null && step.alpha === 1), at = steps.find((step) => step.lost === null && Math.abs((1 - step.alpha) / step.alpha - t) < 1e-9);
      if (state.of === "After" && alone && at && t >= 0) {
        let gained = 0, lost = 0, falls = 0;
        for (let i = 0; i < n; i++) {
          const before = stepPredicted[alone.t][i] === col.label[i], after = stepPredicted[at.t][i] === col.label[i];
          gained += !before && after; lost += before && !after; falls += (stepBits[alone.t][i] & 2) && !(stepBits[at.t][i] & 2);
        }
        text += ` If g decides up to this margin (α = ${Number(at.alpha.toPrecision(4))}): ${gained} clean images are gained and ${lost} lost against the robust model alone, and ${falls} no longer stand under attack (estimate).`;
      }
      fill(marginText2, text);
    }

    // -------------------------------------------------------------- tabs
    const panels = { images: imagesPanel, ...(hasTradeOff ? { tradeoff: tradePanel } : {}), classes: classesPanel, margins: marginsPanel };
    const tabs = Object.keys(panels).map((key) => h("button", { type: "button", role: "tab", id: `tab-${key}`, "aria-controls": `panel-${key}`, on: { click: () => set({ tab: key }) } }, TABS[key]));
    const list = h("div", { class: "tabs", role: "tablist", "aria-label": "Explorer" }, tabs);
    list.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], keys = Object.keys(panels);
      if (!move) return;
      const next = keys[(keys.indexOf(state.tab) + move + keys.length) % keys.length];
      set({ tab: next });
      $(`#tab-${next}`).focus();
    });
    Object.entries(panels).forEach(([key, panel]) => { panel.id = `panel-${key}`; panel.setAttribute("role", "tabpanel"); panel.setAttribute("aria-labelledby", `tab-${key}`); });
    const draws = { images: drawImages, tradeoff: drawTradeOff, classes: drawClasses, margins: drawMargins };
    function draw() {
      tabs.forEach((tab) => { const on = tab.id === `tab-${state.tab}`; tab.setAttribute("aria-selected", on); tab.tabIndex = on ? 0 : -1; });
      for (const [key, panel] of Object.entries(panels)) panel.hidden = key !== state.tab;
      for (const input of synced) input.sync();
      draws[state.tab]();
      drawImage();
    }
    root.append(list, ...Object.values(panels), dialog);
    readState();
    draw();
    window.addEventListener("hashchange", () => { readState(); draw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    let width = root.clientWidth;
    new ResizeObserver(() => { if (root.clientWidth !== width) { width = root.clientWidth; draw(); } }).observe(root);
    root.dataset.ready = performance.now().toFixed(1);  // milliseconds since the page was opened
    if (location.hash.includes("=")) root.scrollIntoView();
  }

  addDownloads();
  const root = $("#explorer");
  if (root) {
    const pictures = $("#explorer-pictures");
    unpack($("#explorer-columns").textContent).then((data) => explore(root, data, pictures && JSON.parse(pictures.textContent)))
      .catch((error) => { root.append(h("p", {}, "The explorer could not be shown: this browser may be too old.")); throw error; });
  }
})();
