/* The explorer of an evaluation: its tabs. */
const TABS = {
  images: ["Images", imagesPanel],
  tradeoff: ["Trade-off", tradeOffPanel],
  classes: ["Classes", classesPanel],
  margins: ["Margins", marginsPanel],
};

function explore(root, data, pictures) {
  const view = makeView(root, data, pictures, () => draw());
  const { state, set } = view;
  const dialog = imageDialog(view);
  const panels = Object.fromEntries(
    Object.entries(TABS)
      .filter(([key]) => key !== "tradeoff" || view.hasTradeOff)
      .map(([key, [, build]]) => [key, build(view)]),
  );
  const tabs = Object.keys(panels).map((key) => h("button", {
    type: "button", role: "tab", id: `tab-${key}`, "aria-controls": `panel-${key}`,
    on: { click: () => set({ tab: key }) },
  }, TABS[key][0]));
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": "Explorer" }, tabs);
  list.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const keys = Object.keys(panels);
    if (!move) return;
    const next = keys[(keys.indexOf(state.tab) + move + keys.length) % keys.length];
    set({ tab: next });
    $(`#tab-${next}`).focus();
  });
  Object.entries(panels).forEach(([key, { panel }]) => {
    panel.id = `panel-${key}`;
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", `tab-${key}`);
  });
  function draw() {
    tabs.forEach((tab) => {
      const on = tab.id === `tab-${state.tab}`;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
    });
    for (const [key, { panel }] of Object.entries(panels)) panel.hidden = key !== state.tab;
    for (const input of view.synced) input.sync();
    panels[state.tab].draw();
    dialog.draw();
  }
  root.append(list, ...Object.values(panels).map(({ panel }) => panel), dialog.panel);
  view.readState();
  view.showFilters();
  draw();
  window.addEventListener("hashchange", () => {
    view.readState();
    view.showFilters();
    draw();
  });
  keepDrawn(root, draw);
  root.dataset.ready = performance.now().toFixed(1);  // milliseconds since the page was opened
  if (location.hash.includes("=") && !location.hash.startsWith("#figure=")) root.scrollIntoView();
}
