/* Figures of the report that can be read and zoomed. They are drawn from the numbers beside each printed figure, which
   remains where there is no script and on paper. */
function liveFigure(figure) {
  const chart = JSON.parse(figure.dataset.chart);
  const { panels, name } = chart;
  const xName = chart.xLabel ?? "x";
  const marks = (panel) => [...(panel.lines ?? []), ...(panel.histograms ?? [])];
  const labelled = panels.flatMap(marks).filter((mark) => mark.label);
  const keys = [...new Map(labelled.map((mark) => [mark.label, mark])).values()];
  const lines = panels.flatMap((panel) => panel.lines ?? []);
  // One reading for all curves at an x, or of the nearest point where points do not share their x.
  const together = lines.every((line) => !line.marker || line.x.join() === lines[0].x.join());
  const shared = !chart.beside;  // panels below each other have one x axis
  const full = panels.map((panel) => xRangeOf(panel, lines.some((line) => line.texts)));
  const whole = [Math.min(...full.map((own) => own[0])), Math.max(...full.map((own) => own[1]))];
  const places = [...new Set(panels.flatMap(placesOf))].sort((a, b) => a - b);
  const box = h("div", { class: "live chart" });
  const reading = h("p", { class: "reading", role: "status" });

  // ---------------------------------------------------------------- state, kept in the address
  let range = whole;
  let hidden = new Set();
  let at = null;  // where the figure is read
  let picked = null;  // the point that is read, where not all curves are read together
  let drag = null;
  let areas = [];  // the panels as drawn
  const writeAddress = () => {
    const state = new URLSearchParams({ figure: name });
    const number = (label) => keys.findIndex((key) => key.label === label);
    if (range !== whole) state.set("x", range.map((value) => Number(value.toPrecision(5))).join(":"));
    if (hidden.size) state.set("hide", [...hidden].map(number).join("."));
    if (at !== null) state.set("at", Number(at.toPrecision(5)));
    history.replaceState(null, "", `#${state}`);
  };
  const readAddress = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    if (given.get("figure") !== name) return false;
    const [low, high] = (given.get("x") ?? "").split(":").map(Number);
    range = low < high ? [low, high] : whole;
    const numbers = (given.get("hide") ?? "").split(".").filter(Boolean);
    hidden = new Set(numbers.map((k) => keys[k]?.label).filter(Boolean));
    const place = given.has("at") ? Number(given.get("at")) : NaN;
    at = Number.isFinite(place) && places.length ? places[nearest(places, place)] : null;
    return true;
  };
  const zoom = (low, high) => {
    range = high - low >= 0.999 * (whole[1] - whole[0]) ? whole : [Math.max(whole[0], low), Math.min(whole[1], high)];
    writeAddress();
    draw();
  };
  const zoomBy = (factor) => {
    const middle = at !== null && at >= range[0] && at <= range[1] ? at : (range[0] + range[1]) / 2;
    zoom(middle - (middle - range[0]) * factor, middle + (range[1] - middle) * factor);
  };
  const visible = (mark) => !mark.label || !hidden.has(mark.label);
  const toggle = (label) => {
    if (!hidden.delete(label)) hidden.add(label);
    writeAddress();
    draw();
  };

  // ---------------------------------------------------------------- reading
  /** Where the figure is read, or which part is selected. */
  function drawReading() {
    const ink = color("ink");
    const ring = (cx, cy) => s("circle", { cx, cy, r: 7, fill: "none", stroke: ink, "stroke-width": 1.5 });
    const isIn = ({ x, left, width }) => together && at !== null && x(at) >= left && x(at) <= left + width;
    fill($(".mark", box), areas.map((area, p) => {
      const { x, y, top, height } = area;
      return [
        isIn(area) ? segment(x(at), top, x(at), top + height, { stroke: ink, opacity: 0.6 }) : null,
        picked && picked.p === p ? ring(x(picked.x), y(picked.y)) : null,
        drag ? s("rect", {
          x: Math.min(drag.from, drag.to), y: top, width: Math.abs(drag.to - drag.from), height,
          fill: color("accurate"), opacity: 0.15,
        }) : null,
      ];
    }));
    fill(reading, readingParts());
    const plot = $(".plot", box);
    if (plot && at !== null) {
      plot.setAttribute("aria-valuenow", at);
      plot.setAttribute("aria-valuetext", reading.textContent);
    }
  }
  const quiet = (text) => h("span", { class: "quiet" }, text);
  const entry = ({ color, label }, text) => h("span", {}, dot(color), label ? `${label} ` : "", h("strong", {}, text));
  const spread = (low, high) => ` [${short(low)}, ${short(high)}]`;
  const valueText = (panel, line, k) =>
    short(line.y[k]) + (line.low ? spread(line.low[k], line.high[k]) : "") +
    (panel.yLabel && !line.label ? ` ${panel.yLabel}` : "");
  function readingParts() {
    if (at === null) {
      const zooming = shared ? "; drag to zoom" : "";
      return places.length ? quiet(`Move over the figure, or use the arrow keys, to read it${zooming}.`) : "";
    }
    if (!together) return picked ? pointReading(picked) : "";
    return [quiet(`${xName} ${placeText(panels[0], at)}`), panels.map(panelReading)];
  }
  function pointReading({ mark, panel, k }) {
    const xText = placeText(panel, mark.x[k]) + (mark.xLow ? spread(mark.xLow[k], mark.xHigh[k]) : "");
    const more = mark.texts?.[k] ? ` (${mark.texts[k]})` : "";
    const yName = chart.yLabel ?? panel.yLabel ?? "y";
    return entry(mark, `${yName} ${valueText(panel, mark, k)} at ${xName} ${xText}${more}`);
  }
  function panelReading(panel) {
    const curves = (panel.lines ?? []).filter((line) => visible(line) && (line.label || panel.lines.length === 1));
    const histograms = (panel.histograms ?? []).filter(visible);
    if (!curves.length && !histograms.length) return [];
    return [
      panels.length > 1 && panel.title ? quiet(`${panel.title}:`) : null,
      curves.map((line) => {
        const k = nearest(line.x, at);  // a curve without a point here is read at its nearest one
        const elsewhere = line.x[k] === at ? "" : ` at ${placeText(panel, line.x[k])}`;
        return entry(line, `${valueText(panel, line, k)}${elsewhere}`);
      }),
      histograms.map((histogram) => {
        const k = histogram.edges.findIndex((edge, e) => at >= edge && at <= histogram.edges[e + 1]);
        return k < 0 ? null : entry(histogram, short(histogram.counts[k]));
      }),
    ];
  }
  const pointsOf = (panel, p) => (panel.lines ?? []).filter(visible)
    .flatMap((line) => line.x.map((x, k) => ({ mark: line, panel, p, k, x, y: line.y[k] })));
  function pick(point) {
    picked = point;
    at = point.x;
  }
  function pickNearest(p, px, py) {
    const distance = (point) => Math.hypot(areas[p].x(point.x) - px, areas[p].y(point.y) - py);
    const points = pointsOf(panels[p], p);
    if (points.length) pick(points.reduce((best, point) => (distance(point) < distance(best) ? point : best)));
  }
  /** Read the figure one place further, or at either end. */
  function step(key) {
    const listed = together ? places.filter((x) => isBetween(x, range)) : panels.flatMap(pointsOf);
    if (!listed.length) return;
    const last = listed.length - 1;
    const isPicked = (point) => picked && point.mark === picked.mark && point.k === picked.k;
    const now = !together ? listed.findIndex(isPicked) : at === null ? -1 : nearest(listed, at);
    const to = { Home: 0, End: last, ArrowLeft: now - 1, ArrowRight: now + 1 }[key];
    const next = listed[Math.max(0, Math.min(last, to))];
    if (together) at = next;
    else pick(next);
    writeAddress();
    drawReading();
  }
  function onKey(event) {
    if (event.key === "+" || event.key === "-") zoomBy(event.key === "+" ? 0.5 : 2);
    else if (event.key === "Escape" && range !== whole) zoom(...whole);
    else if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) step(event.key);
    else return;
    event.preventDefault();
  }

  // ---------------------------------------------------------------- the whole figure
  /** The key of a curve, which shows and hides it; `left` and `bottom` are those of its text. */
  function drawKey(mark, k, left, bottom, width) {
    const on = visible(mark);
    const hasOneColor = labelled.every((own) => own.label !== mark.label || own.color === mark.color);
    const tint = color(hasOneColor ? mark.color : "muted");
    const keydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      toggle(mark.label);
      event.preventDefault();
    };
    const text = { "text-anchor": "start", fill: color("ink"), "text-decoration": on ? null : "line-through" };
    return s("g", {
      class: "key", role: "button", tabindex: 0, "data-focus": `key${k}`, "aria-pressed": String(on),
      "aria-label": `Curve ${mark.label}`, opacity: on ? 1 : 0.4, on: { click: () => toggle(mark.label), keydown },
    },
      s("rect", { x: left, y: bottom - 12, width, height: 18, fill: "transparent" }),
      mark.filled ? s("rect", { x: left, y: bottom - 8, width: 20, height: 9, fill: tint, opacity: 0.35 })
        : segment(left, bottom - 4, left + 22, bottom - 4, {
          stroke: tint, "stroke-width": Math.min(3, mark.width ?? 1.8), "stroke-dasharray": mark.dash,
          opacity: mark.opacity,
        }),
      mark.marker ? symbol(mark.marker, left + 11, bottom - 4, tint) : null,
      textAt(left + 28, bottom, mark.label, text));
  }
  /** All keys in as many rows as they need, and the bottom of the last row. */
  function drawKeys(width, bottom) {
    let left = GAP.left;
    const nodes = keys.map((mark, k) => {
      const keyWidth = 34 + textWidth(mark.label);
      if (left > GAP.left && left + keyWidth > width) {
        left = GAP.left;
        bottom += GAP.key;
      }
      const node = drawKey(mark, k, left, bottom, keyWidth);
      left += keyWidth + 14;
      return node;
    });
    return [nodes, bottom];
  }
  /** A slider for the keyboard and for readers of the screen, over all panels. */
  function drawSlider(width, height) {
    return s("g", {
      class: "plot", role: "slider", tabindex: 0, "data-focus": "plot", "aria-orientation": "horizontal",
      "aria-label": `Read the figure ${name} along ${xName}`, "aria-valuemin": range[0], "aria-valuemax": range[1],
      "aria-valuenow": at ?? range[0], "aria-valuetext": `${xName} ${short(at ?? range[0])}`, on: { keydown: onKey },
    }, s("rect", { x: GAP.left, y: areas[0].top, width, height, fill: "transparent" }));
  }
  function draw() {
    const width = Math.max(300, Math.min(760, box.clientWidth || figure.clientWidth || 640));
    const focused = box.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    const columns = chart.beside && width > 560 ? panels.length : 1;
    const rows = Math.ceil(panels.length / columns);
    const panelHeight = Math.max(120, Math.min(280, (90 * chart.height) / rows));
    const title = panels.some((panel) => panel.title) ? GAP.title : 0;
    const below = !shared ? GAP.bottom : title ? 8 : 20;
    const inner = width - GAP.left - GAP.right;
    const panelWidth = (inner - (columns - 1) * 40) / columns;
    areas = panels.map((panel, p) => {
      const left = GAP.left + (p % columns) * (panelWidth + 40);
      const top = GAP.top + title + Math.floor(p / columns) * (panelHeight + title + below);
      const xRange = shared ? range : full[p];
      const asPrinted = panel.yRange && range === whole && !hidden.size;
      const yRange = asPrinted ? panel.yRange : yRangeOf(panel, xRange, visible);
      const frame = { left, top, width: panelWidth, height: panelHeight };
      return drawPanel(panel, frame, xRange, yRange, visible, !shared || p >= panels.length - columns);
    });
    const end = GAP.top + rows * (panelHeight + title + below) - below;
    const [keyNodes, bottom] = drawKeys(width, end + GAP.bottom + GAP.label);
    const height = bottom + (keys.length ? 10 : -8);
    fill(box, s("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": chart.alt || name },
      areas.map((area) => area.nodes),
      chart.xLabel ? textAt(GAP.left + inner / 2, end + GAP.bottom + 4, chart.xLabel) : null,
      chart.yLabel ? sideLabel(GAP.top + (end + 4) / 2, chart.yLabel) : null,
      places.length ? drawSlider(inner, areas.at(-1).top + panelHeight - areas[0].top) : null,
      s("g", { class: "mark" }),
      keyNodes));
    drawReading();
    if (focused) $(`[data-focus="${focused}"]`, box)?.focus();
    for (const button of zoomed) button.disabled = range === whole;
  }

  // ---------------------------------------------------------------- pointer and tools
  const position = (event) => {
    const svg = $("svg", box);
    const shown = svg.getBoundingClientRect();
    const { width, height } = svg.viewBox.baseVal;
    return [(event.clientX - shown.left) * width / shown.width, (event.clientY - shown.top) * height / shown.height];
  };
  const areaAt = ([px, py]) => areas.find(({ left, top, width, height }) =>
    px >= left && px <= left + width && py >= top - 4 && py <= top + height + 4);
  box.addEventListener("pointermove", (event) => {
    const spot = position(event);
    const area = areaAt(spot);
    if (drag) drag.to = Math.max(areas[0].left, Math.min(areas[0].left + areas[0].width, spot[0]));
    else if (area && !together) pickNearest(areas.indexOf(area), ...spot);
    else if (area) {
      const listed = places.filter((place) => place >= area.range[0] && place <= area.range[1]);
      const place = scale(area.left, area.left + area.width, ...area.range)(spot[0]);
      if (listed.length) at = listed[nearest(listed, place)];
    }
    drawReading();
  });
  box.addEventListener("pointerdown", (event) => {
    const spot = position(event);
    if (event.pointerType !== "mouse" || event.button !== 0 || !shared || !areaAt(spot)) return;
    drag = { from: spot[0], to: spot[0] };
    event.preventDefault();
  });
  box.addEventListener("pointerleave", () => {
    if (drag) return;
    at = picked = null;
    readAddress();
    drawReading();
  });
  document.addEventListener("pointerup", () => {
    if (!drag) return;
    const { from, to } = drag;
    const back = scale(areas[0].left, areas[0].left + areas[0].width, ...range);
    drag = null;
    if (Math.abs(to - from) > 6) zoom(back(Math.min(from, to)), back(Math.max(from, to)));
    else drawReading();
  });
  const zoomOut = tool("−", `Zoom out of the figure ${name}`, () => zoomBy(2));
  const all = tool("all", `Show all of the figure ${name}`, () => zoom(...whole));
  const zoomed = [zoomOut, all];
  const toolbar = chartTools(name, () => $("svg", box));
  if (shared && places.length > 2) {
    const zoomIn = tool("+", `Zoom into the figure ${name}`, () => zoomBy(0.5));
    toolbar.prepend(zoomIn, zoomOut, all, h("span", { class: "gap" }));
  }
  const saveNumbers = () => saveCsv(name, figureTable(chart));
  toolbar.append(tool("CSV", `Download the numbers of the figure ${name} as CSV`, saveNumbers));
  figure.classList.add("has-live");
  figure.append(box, reading, toolbar);
  const showAddress = () => {
    if (!readAddress()) return;
    draw();
    figure.scrollIntoView();
  };
  draw();
  showAddress();
  window.addEventListener("hashchange", showAddress);
  keepDrawn(box, draw);
}
