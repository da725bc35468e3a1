"use strict";

// ---- small things ----

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function csvCell(value) {
  const text = value === null || value === undefined ? "" : String(value);
  // A spreadsheet would take these for formulas.
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
  return /[",\n\r]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
}

function download(name, records) {
  const columns = [...new Set(records.flatMap(Object.keys))];
  const lines = [columns, ...records.map(record => columns.map(column => record[column]))];
  const text = lines.map(line => line.map(csvCell).join(",") + "\n").join("");
  const address = URL.createObjectURL(new Blob([text], {type: "text/csv"}));
  element("a", {href: address, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function content(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

// ---- charts: drawn when they are scrolled to, and all of them before the page is printed ----

function draw(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "started";
  const plot = figure.querySelector(".plot");
  const chart = content(figure.dataset.chart);
  const narrow = plot.clientWidth < 500;
  chart.config.legend.columns = narrow ? 2 : 3;
  chart.config.legend.labelLimit = narrow ? 130 : 200;
  if (narrow) chart.config.axis.labelLimit = 120;
  const options = {
    renderer: "svg",
    ast: true,
    actions: false,
    defaultStyle: false,
    tooltip: {disableDefaultStyle: true},
    bind: figure.querySelector(".controls"),
  };
  vegaEmbed(plot, chart, options).then(() => { figure.dataset.drawn = "done"; });
}

const figures = [...document.querySelectorAll("figure[data-chart]")];
const seen = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (entry.isIntersecting) {
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }
}, {rootMargin: "300px"});
for (const figure of figures) {
  seen.observe(figure);
  const button = figure.querySelector(".csv");
  button.addEventListener("click", () => {
    download(button.dataset.file, content(figure.dataset.chart).datasets.records);
  });
}
addEventListener("beforeprint", () => figures.forEach(draw));

// ---- contents, open where there is room ----

const contents = document.querySelector("nav details");
if (contents && innerWidth >= 900 && innerHeight >= 1200) contents.open = true;

// ---- tables that can be searched and sorted ----

function makeSortable(box) {
  const body = box.querySelector("tbody");
  const rows = [...body.rows];
  const search = element("input", {type: "search", placeholder: "Search"});
  search.setAttribute("aria-label", "Search the table");
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
  box.prepend(search);
  box.querySelectorAll("thead th").forEach((head, column) => {
    const button = element("button", {type: "button", textContent: head.textContent});
    button.addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const key = row => {
        const cell = row.cells[column];
        return cell.dataset.order === undefined ? cell.textContent.trim() : Number(cell.dataset.order);
      };
      const before = (a, b) => {
        if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
        return a < b ? -1 : a > b ? 1 : 0;
      };
      rows.sort((a, b) => (ascending ? 1 : -1) * before(key(a), key(b)));
      body.append(...rows);
    });
    head.replaceChildren(button);
  });
}

document.querySelectorAll(".sortable").forEach(makeSortable);

// ---- the gallery: images with what every model says of them ----

const SHOWN = 12;

function makeGallery(box) {
  const images = content(box.dataset.content);
  const {models, label, classes, broken, pictures} = images;
  const pictureOf = new Map(pictures ? pictures.places.map((place, number) => [place, number]) : []);
  const right = (model, at) => model.attacked[at] === label[at];
  const spread = at => models.some(model => right(model, at)) && !models.every(model => right(model, at));

  const outcomes = [["all images", () => true]];
  if (models.length > 1) outcomes.push(["models disagree under attack", spread]);
  for (const model of models) {
    const name = model.name;
    outcomes.push([`${name}: right under attack`, at => right(model, at)]);
    outcomes.push([`${name}: broken by the attack`, at => model.clean[at] === label[at] && !right(model, at)]);
    outcomes.push([`${name}: wrong without an attack`, at => model.clean[at] !== label[at]]);
  }
  const labels = [["all classes", () => true]];
  for (const number of [...new Set(label)].sort((a, b) => a - b)) {
    labels.push([classes[number], at => label[at] === number]);
  }
  const stages = [["anything or nothing", () => true]];
  broken.slice(2).forEach((stage, number) => {
    stages.push([stage, at => models.some(model => model.brokenBy[at] === number + 2)]);
  });
  const orders = [["pictures first", at => (pictureOf.has(at) ? 0 : 1)], ["image number", () => 0]];
  for (const model of models) {
    orders.push([`smallest margin of ${model.name}`, at => model.margin[at] ?? 2]);
    orders.push([`margin of ${model.name} nearest to 0`, at => Math.abs(model.margin[at] ?? 2)]);
  }

  const filters = element("div", {className: "filters"});
  function choice(title, options) {
    const select = element("select");
    options.forEach(([name], number) => select.append(element("option", {value: number, textContent: name})));
    filters.append(element("label", {}, title, select));
    select.addEventListener("change", () => { shown = SHOWN; update(); });
    return () => options[Number(select.value)][1];
  }
  const outcome = choice("Show", outcomes);
  const ofClass = choice("True class", labels);
  const brokenBy = choice("Broken by", stages);
  const order = choice("Order", orders);
  const save = element("button", {type: "button", textContent: "These images (CSV)"});
  filters.append(save);

  const count = element("p");
  count.setAttribute("role", "status");
  const cards = element("div", {className: "cards"});
  const more = element("button", {type: "button", className: "more", textContent: "Show more"});
  let shown = SHOWN;
  let chosen = [];

  function answer(number) {
    return number < 0 ? "not recorded" : classes[number];
  }

  function picture(sheet, number) {
    const {height, width, perRow, places} = pictures;
    const rows = Math.ceil(places.length / perRow);
    const made = element("div");
    made.setAttribute("role", "img");
    made.setAttribute("aria-label", sheet);
    made.style.aspectRatio = `${width} / ${height}`;
    made.style.backgroundImage = `url(${pictures[sheet]})`;
    made.style.backgroundSize = `${100 * perRow}% ${100 * rows}%`;
    const x = perRow > 1 ? (number % perRow) / (perRow - 1) : 0;
    const y = rows > 1 ? Math.floor(number / perRow) / (rows - 1) : 0;
    made.style.backgroundPosition = `${100 * x}% ${100 * y}%`;
    return made;
  }

  function said(at, model) {
    const dd = element("dd");
    for (const [number, before] of [[model.clean[at], ""], [model.attacked[at], " → "]]) {
      const text = element("span", {textContent: answer(number)});
      if (number !== label[at]) text.className = "wrong";
      dd.append(before, text);
    }
    if (model.margin[at] !== null) {
      const margin = model.margin[at].toFixed(2).replace("-", "−");
      dd.append(" ", element("small", {textContent: margin, title: "margin"}));
    }
    if (model.brokenBy[at] > 1) dd.title = `broken by ${broken[model.brokenBy[at]]}`;
    return dd;
  }

  function card(at) {
    const made = element("article", {className: "card"});
    if (pictureOf.has(at)) {
      const number = pictureOf.get(at);
      made.append(element("div", {className: "pair"}, picture("clean", number), picture("attacked", number)));
    }
    made.append(element("h3", {textContent: `${classes[label[at]]} (image ${images.index[at]})`}));
    const list = element("dl");
    for (const model of models) {
      const dot = element("i", {className: `dot ${model.colour}`});
      list.append(element("dt", {}, dot, model.name), said(at, model));
    }
    made.append(list);
    return made;
  }

  function update() {
    const tests = [outcome(), ofClass(), brokenBy()];
    chosen = label.map((_, at) => at).filter(at => tests.every(test => test(at)));
    const key = order();
    chosen = chosen.map(at => [key(at), at]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(pair => pair[1]);
    count.textContent = `${chosen.length} of ${label.length} images`;
    cards.replaceChildren(...chosen.slice(0, shown).map(card));
    more.hidden = chosen.length <= shown;
  }
  more.addEventListener("click", () => { shown += SHOWN; update(); });
  save.addEventListener("click", () => {
    download("images.csv", chosen.map(at => {
      const record = {image: images.index[at], class: classes[label[at]]};
      for (const model of models) {
        record[`${model.name}, clean`] = answer(model.clean[at]);
        record[`${model.name}, attacked`] = answer(model.attacked[at]);
        record[`${model.name}, margin`] = model.margin[at];
        record[`${model.name}, broken by`] = broken[model.brokenBy[at]];
      }
      return record;
    }));
  });
  box.append(filters, count, cards, more);
  update();
}

document.querySelectorAll(".gallery").forEach(makeGallery);
document.documentElement.dataset.ready = Math.round(performance.now());
