/* The explorer of an evaluation: its data, the state in the address, the controls, and the tabs. */
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

const STANDS = 0, WRONG_CLEAN = 1, NO_MARGIN = -32768, MARGIN_STEPS = 10000, ROW = 44, MIDDLE = 128, AMPLIFIED = 10, FULL = 65535;
const TABS = { images: ["Images", imagesPanel], tradeoff: ["Trade-off", tradeOffPanel], classes: ["Classes", classesPanel],
               margins: ["Margins", marginsPanel] };

/** What all panels share: the columns and what they mean, and the state that the address keeps. */
function makeView(root, data, pictures, draw) {
  const n = data.count, { models, classes, columns: col, attacks } = data;
  const of = (name) => models.map((_, m) => col[`${name}${m}`]);
  const clean = of("clean"), attacked = of("attacked"), broken = of("broken"), margin = of("margin"), marginClean = of("marginClean");
  const { roles, inTable } = data, main = roles.mixture ?? 0;
  const sharesOf = (name, m) => col[`${name}${m}`];  // of a randomised model: in how many of its passes it is right
  const steps = data.steps ? data.steps.map((step, t) => ({ ...step, t })) : [];
  const stepPredicted = steps.length ? rebuild(col.stepPredicted, n) : [], stepBits = steps.length ? rebuild(col.stepBits, n) : [];
  const own = steps.find((step) => step.evaluated && step.lost === null);
  const pictureOf = new Map();
  if (col.picture) col.picture.forEach((position, p) => pictureOf.set(position, p));
  const marginText = (value) => value === NO_MARGIN ? "–" : (value / MARGIN_STEPS).toFixed(4);
  const signed = (text) => text.replace("-", "−");
  /** Whether an attack, by its number, broke an image: it may be one of several. */
  const brokenBy = (m, i, a) => Boolean(col[`brokenBy${m}`][(a >> 3) * n + i] >> (a & 7) & 1);
  const breaker = (m, i) => broken[m][i] === STANDS ? "" : broken[m][i] === WRONG_CLEAN ? "wrong without an attack" : attacks[broken[m][i] - 2];

  // -------------------------------------------------------------- state, kept in the address
  const defaults = { tab: "images", on: "attacked", class: "", answer: "", by: "", q: "", moved: "", pictures: "", sort: "index", image: "",
                     model: String(main), curve: "", step: "", of: String(main), threshold: "0" };
  models.forEach((_, m) => { defaults[`m${m}`] = ""; });
  const state = { ...defaults };
  const readState = () => {
    const given = location.hash.includes("=") ? new URLSearchParams(location.hash.slice(1)) : new URLSearchParams();
    Object.assign(state, defaults);
    for (const key of Object.keys(defaults)) if (given.has(key)) state[key] = given.get(key);
    for (const key of Object.keys(defaults)) if (!isValid(key, state[key])) state[key] = defaults[key];
  };
  const below = (text, limit) => /^\d+$/.test(text) && Number(text) < limit;
  const isValid = (key, value) => value === defaults[key] || Boolean({
    tab: () => Object.hasOwn(TABS, value) && (value !== "tradeoff" || hasTradeOff), on: () => ["attacked", "clean"].includes(value),
    class: () => below(value, classes.length), answer: () => below(value, classes.length), by: () => below(value, attacks.length + 2), q: () => true,
    moved: () => own && ["gained", "lost", "stands", "falls"].includes(value), pictures: () => value === "1", sort: () => /^(index|label|margin|by|m\d+)(\.desc)?$/.test(value),
    image: () => col.index.includes(Number(value)), model: () => below(value, models.length), of: () => below(value, models.length) || (value === "mapped" && col.mappedClean),
    curve: () => ["loss", "alpha"].includes(value) && steps.some((step) => (step.lost !== null) === (value === "loss")), step: () => below(value, steps.length),
    threshold: () => value !== "" && Math.abs(Number(value)) <= 1 }[key]?.() ?? (/^m\d+$/.test(key) && ["right", "wrong"].includes(value)));
  let writing = 0;
  /** Browsers slow down pages that change their address with every movement of a slider. */
  const writeAddress = () => {
    clearTimeout(writing);
    writing = setTimeout(showAddress, 150);
  };
  const set = (changes) => {
    Object.assign(state, changes);
    draw();
    writeAddress();
  };
  const showAddress = () => {
    const shown = new URLSearchParams();
    for (const [key, value] of Object.entries(state)) if (`${value}` !== defaults[key]) shown.set(key, value);
    if (state.tab !== "images" && !shown.has("tab")) shown.set("tab", state.tab);
    history.replaceState(null, "", `#${shown.size ? shown : "tab=images"}`);
  };
  const hasTradeOff = models.some((model) => model.results.clean && model.results.attacked);

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
      if (state.by !== "" && !(state.by > 1 ? brokenBy(state.model, i, state.by - 2) : broken[state.model][i] === Number(state.by))) continue;
      if (state.pictures && !pictureOf.has(i)) continue;
      if (state.moved && !moves(state.moved, i)) continue;
      if (!models.every((_, m) => state[`m${m}`] === "" || (state[`m${m}`] === "right") === correct(m, i))) continue;
      if (words && String(col.index[i]) !== words && !named.has(col.label[i])
          && !models.some((_, m) => named.has(clean[m][i]) || named.has(attacked[m][i]))) continue;
      rows.push(i);
    }
    const [key, direction] = state.sort.split("."), sign = direction === "desc" ? -1 : 1;
    const values = key === "label" ? col.label : key === "margin" ? margin[state.model] : key === "by" ? broken[state.model]
      : /^m\d+$/.test(key) ? broken[key.slice(1)] ?? col.index : col.index;
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
  const modelChoice = (label, key) => choice(label, key, models.map((model, m) => [String(m), model.symbol]));
  const stepName = (step) => (step.lost !== null ? `a loss of at most ${Number((100 * step.lost).toPrecision(3))} points` : `α = ${Number(step.alpha.toPrecision(4))}`);
  const blank = () => ({ ...Object.fromEntries(models.map((_, m) => [`m${m}`, ""])), class: "", answer: "", by: "", q: "", moved: "", pictures: "" });
  return { root, data, pictures, n, models, roles, inTable, sharesOf, classes, col, attacks, clean, attacked, broken, margin, marginClean, main, steps, stepPredicted, stepBits, own, pictureOf,
           marginText, signed, breaker, state, readState, set, hasTradeOff, currentStep, hasFrontier, curve, curveSteps, moves, select, choice, synced, modelChoice,
           stepName, blank, shown: [], active: 0 };
}

function explore(root, data, pictures) {
  const view = makeView(root, data, pictures, () => draw()), { state, set } = view;
  const dialog = imageDialog(view);
  const panels = Object.fromEntries(Object.entries(TABS).filter(([key]) => key !== "tradeoff" || view.hasTradeOff).map(([key, [, build]]) => [key, build(view)]));
  const tabs = Object.keys(panels).map((key) => h("button", { type: "button", role: "tab", id: `tab-${key}`, "aria-controls": `panel-${key}`, on: { click: () => set({ tab: key }) } }, TABS[key][0]));
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": "Explorer" }, tabs);
  list.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], keys = Object.keys(panels);
    if (!move) return;
    const next = keys[(keys.indexOf(state.tab) + move + keys.length) % keys.length];
    set({ tab: next });
    $(`#tab-${next}`).focus();
  });
  Object.entries(panels).forEach(([key, { panel }]) => { panel.id = `panel-${key}`; panel.setAttribute("role", "tabpanel"); panel.setAttribute("aria-labelledby", `tab-${key}`); });
  function draw() {
    tabs.forEach((tab) => { const on = tab.id === `tab-${state.tab}`; tab.setAttribute("aria-selected", on); tab.tabIndex = on ? 0 : -1; });
    for (const [key, { panel }] of Object.entries(panels)) panel.hidden = key !== state.tab;
    for (const input of view.synced) input.sync();
    panels[state.tab].draw();
    dialog.draw();
  }
  root.append(list, ...Object.values(panels).map(({ panel }) => panel), dialog.panel);
  view.readState();
  view.showFilters();
  draw();
  window.addEventListener("hashchange", () => { view.readState(); view.showFilters(); draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = root.clientWidth;
  new ResizeObserver(() => { if (root.clientWidth !== width) { width = root.clientWidth; draw(); } }).observe(root);
  root.dataset.ready = performance.now().toFixed(1);  // milliseconds since the page was opened
  if (location.hash.includes("=") && !location.hash.startsWith("#figure=")) root.scrollIntoView();
}
