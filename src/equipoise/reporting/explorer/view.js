/* The data of the explorer, what is selected of them, and the controls that select. The numbers are
   those of columns.py and data.py. */
const STANDS = 0;
const WRONG_CLEAN = 1;  // further numbers are attacks
const NO_MARGIN = -32768;
const MARGIN_STEPS = 10000;
const FULL = 65535;  // a share or probability of 1

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
    const row = changes.slice(start, start + n);
    const before = rows.at(-1);
    if (before) for (let i = 0; i < n; i++) row[i] ^= before[i];
    rows.push(row);
  }
  return rows;
}

/** What all panels share: the columns and what they mean, and the state that the address keeps. */
function makeView(root, data, pictures, draw) {
  const n = data.count;
  const { models, classes, columns: col, attacks } = data;
  const of = (name) => models.map((_, m) => col[`${name}${m}`]);
  const clean = of("clean");
  const attacked = of("attacked");
  const broken = of("broken");
  const margin = of("margin");
  const marginClean = of("marginClean");
  const { roles, inTable } = data;
  const main = roles.mixture ?? 0;
  const sharesOf = (name, m) => col[`${name}${m}`];  // of a randomised model: in how many of its passes it is right
  const steps = data.steps ? data.steps.map((step, t) => ({ ...step, t })) : [];
  const stepPredicted = steps.length ? rebuild(col.stepPredicted, n) : [];
  const stepBits = steps.length ? rebuild(col.stepBits, n) : [];
  const own = steps.find((step) => step.evaluated && step.lost === null);
  const pictureOf = new Map();
  if (col.picture) col.picture.forEach((position, p) => pictureOf.set(position, p));
  const marginText = (value) => (value === NO_MARGIN ? "–" : (value / MARGIN_STEPS).toFixed(4));
  const signed = (text) => text.replace("-", "−");
  /** Whether an attack, by its number, broke an image: it may be one of several. */
  const brokenBy = (m, i, a) => Boolean((col[`brokenBy${m}`][(a >> 3) * n + i] >> (a & 7)) & 1);
  const breaker = (m, i) =>
    broken[m][i] === STANDS ? "" : broken[m][i] === WRONG_CLEAN ? "wrong without an attack" : attacks[broken[m][i] - 2];

  // -------------------------------------------------------------- state, kept in the address
  const defaults = {
    tab: "images", on: "attacked", class: "", answer: "", by: "", q: "", moved: "", pictures: "", sort: "index",
    image: "", model: String(main), curve: "", step: "", of: String(main), threshold: "0",
  };
  models.forEach((_, m) => { defaults[`m${m}`] = ""; });
  const state = { ...defaults };
  const readState = () => {
    const given = location.hash.includes("=") ? new URLSearchParams(location.hash.slice(1)) : new URLSearchParams();
    Object.assign(state, defaults);
    for (const key of Object.keys(defaults)) if (given.has(key)) state[key] = given.get(key);
    for (const key of Object.keys(defaults)) if (!isValid(key, state[key])) state[key] = defaults[key];
  };
  const below = (text, limit) => /^\d+$/.test(text) && Number(text) < limit;
  const valid = {
    tab: (value) => Object.hasOwn(TABS, value) && (value !== "tradeoff" || hasTradeOff),
    on: (value) => ["attacked", "clean"].includes(value),
    class: (value) => below(value, classes.length),
    answer: (value) => below(value, classes.length),
    by: (value) => below(value, attacks.length + 2),
    q: () => true,
    moved: (value) => own && ["gained", "lost", "stands", "falls"].includes(value),
    pictures: (value) => value === "1",
    sort: (value) => /^(index|label|margin|by|m\d+)(\.desc)?$/.test(value),
    image: (value) => col.index.includes(Number(value)),
    model: (value) => below(value, models.length),
    curve: (value) => (value === "loss" && hasFrontier) || (value === "alpha" && hasAlphas),
    step: (value) => below(value, steps.length),
    of: (value) => below(value, models.length) || (value === "mapped" && col.mappedClean),
    threshold: (value) => value !== "" && Math.abs(Number(value)) <= 1,
  };
  const isRightOrWrong = (value) => ["right", "wrong"].includes(value);  // of m0, m1, …
  const isValid = (key, value) => value === defaults[key] || Boolean((valid[key] ?? isRightOrWrong)(value));
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
  const hasAlphas = steps.some((step) => step.lost === null);
  const hasFrontier = steps.some((step) => step.lost !== null);
  const curve = () => state.curve || (hasFrontier ? "loss" : "alpha");
  const curveSteps = () => steps.filter((step) => (step.lost !== null) === (curve() === "loss"));
  /** Whether an image changes sides between the evaluated mixture and the one of the slider. */
  const moves = (kind, i) => {
    const to = currentStep();
    if (!to || !own) return false;
    const label = col.label[i];
    const before = stepPredicted[own.t][i] === label;
    const after = stepPredicted[to.t][i] === label;
    const stood = stepBits[own.t][i] & 2;
    const stands = stepBits[to.t][i] & 2;
    return {
      gained: !before && after, lost: before && !after, stands: !stood && stands, falls: stood && !stands,
    }[kind];
  };
  function select() {
    const words = state.q.trim().toLowerCase();
    const rows = [];
    const named = new Set(classes.flatMap((name, k) => (words && name.toLowerCase().includes(words) ? [k] : [])));
    const isFound = (i) => String(col.index[i]) === words || named.has(col.label[i])
      || models.some((_, m) => named.has(clean[m][i]) || named.has(attacked[m][i]));
    const answers = (state.on === "clean" ? clean : attacked)[state.model];
    const isBroken = (i) =>
      state.by > 1 ? brokenBy(state.model, i, state.by - 2) : broken[state.model][i] === Number(state.by);
    for (let i = 0; i < n; i++) {
      if (state.class !== "" && col.label[i] !== Number(state.class)) continue;
      if (state.answer !== "" && answers[i] !== Number(state.answer)) continue;
      if (state.by !== "" && !isBroken(i)) continue;
      if (state.pictures && !pictureOf.has(i)) continue;
      if (state.moved && !moves(state.moved, i)) continue;
      if (!models.every((_, m) => state[`m${m}`] === "" || (state[`m${m}`] === "right") === correct(m, i))) continue;
      if (words && !isFound(i)) continue;
      rows.push(i);
    }
    const [key, direction] = state.sort.split(".");
    const sign = direction === "desc" ? -1 : 1;
    const columns = { label: col.label, margin: margin[state.model], by: broken[state.model] };
    const values = columns[key] ?? (/^m\d+$/.test(key) ? broken[key.slice(1)] : null) ?? col.index;
    return rows.sort((a, b) => sign * (values[a] - values[b]) || a - b);
  }

  // -------------------------------------------------------------- controls
  const choice = (label, key, options) => {
    const change = () => set({ [key]: input.value, ...(key === "curve" ? { step: "" } : {}) });
    const input = h("select", { "aria-label": label, on: { change } },
      options.map(([value, text]) => h("option", { value }, text)));
    input.sync = () => {
      input.value = state[key] === "" && key === "curve" ? curve() : state[key];
    };
    synced.push(input);
    return h("label", { class: "field" }, h("span", {}, label), input);
  };
  const synced = [];
  const modelChoice = (label, key) =>
    choice(label, key, models.map((model, m) => [String(m), model.symbol]));
  const stepName = (step) =>
    step.lost !== null
      ? `a loss of at most ${Number((100 * step.lost).toPrecision(3))} points`
      : `α = ${Number(step.alpha.toPrecision(4))}`;
  const blank = () => ({
    ...Object.fromEntries(models.map((_, m) => [`m${m}`, ""])),
    class: "", answer: "", by: "", q: "", moved: "", pictures: "",
  });
  return {
    root, data, pictures, n, models, roles, inTable, sharesOf, classes, col, attacks, clean, attacked, broken, margin,
    marginClean, main, steps, stepPredicted, stepBits, own, pictureOf, marginText, signed, breaker, state, readState,
    set, hasTradeOff, currentStep, hasFrontier, curve, curveSteps, moves, select, choice, synced, modelChoice, stepName,
    blank, shown: [], active: 0,
  };
}
