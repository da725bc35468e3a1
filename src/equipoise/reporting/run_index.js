/* Sort, search and filter a table of runs, with the state in the address. Text only ever becomes text. */
(() => {
  const make = (tag, properties, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(properties)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const text = (cell) => cell.textContent.trim();
  const main = (cell) =>
    [...cell.childNodes]
      .filter((node) => node.nodeName !== "SMALL")
      .map((node) => node.textContent)
      .join("")
      .trim();

  for (const box of document.querySelectorAll(".runs")) {
    const table = box.querySelector("table");
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const names = heads.map(text);
    const fields = {};
    const search = make("input", { type: "search", "aria-label": "Search", placeholder: "Search" });
    const status = make("p", { class: "summary", role: "status" });
    const controls = make(
      "div",
      { class: "fields" },
      make("label", { class: "field" }, make("span", {}, "search"), search),
    );
    heads.forEach((head, column) => {
      if (head.dataset.filter === undefined) return;
      const values = [...new Set(rows.map((row) => main(row.cells[column])))].sort();
      const select = make(
        "select",
        { "aria-label": `Filter by ${names[column]}` },
        make("option", { value: "" }, "all"),
        ...values.map((value) => make("option", { value }, value)),
      );
      fields[names[column]] = { select, column };
      controls.append(make("label", { class: "field" }, make("span", {}, names[column]), select));
    });
    const state = () => new URLSearchParams(location.hash.slice(1));
    const change = (key, value) => {
      const next = state();
      if (value) next.set(key, value);
      else next.delete(key);
      history.replaceState(null, "", `#${next}`);
      draw();
    };
    heads.forEach((head, column) => {
      const button = make("button", { type: "button", title: `Sort by ${names[column]}` }, names[column]);
      head.replaceChildren(button);
      button.addEventListener("click", () =>
        change("sort", state().get("sort") === names[column] ? `-${names[column]}` : names[column]),
      );
    });
    const key = (row, column) => {
      const cell = row.cells[column];
      const value = main(cell);
      return cell.dataset.order !== undefined ? Number(cell.dataset.order) : value === "–" ? null : value;
    };
    const compare = (a, b) =>
      typeof a === "number" && typeof b === "number"
        ? a - b
        : String(a).localeCompare(String(b), "en", { numeric: true });

    function draw() {
      const now = state();
      const sort = now.get("sort") ?? "";
      const down = sort.startsWith("-");
      const column = names.indexOf(sort.replace(/^-/, ""));
      heads.forEach((head, number) =>
        head.setAttribute("aria-sort", number !== column ? "none" : down ? "descending" : "ascending"),
      );
      const sorted =
        column < 0
          ? rows
          : [...rows].sort((a, b) => {
              const [x, y] = [key(a, column), key(b, column)];
              if (x === null || y === null) return (x === null) - (y === null);  // last, in either direction
              return (down ? -1 : 1) * compare(x, y);
            });
      const words = (now.get("search") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of sorted) {
        const content = text(row).toLowerCase();
        row.hidden = !(
          words.every((word) => content.includes(word)) &&
          Object.entries(fields).every(
            ([name, field]) => !now.get(name) || main(row.cells[field.column]) === now.get(name),
          )
        );
        shown += !row.hidden;
      }
      body.append(...sorted);
      if (search.value !== (now.get("search") ?? "")) search.value = now.get("search") ?? "";
      for (const [name, field] of Object.entries(fields)) field.select.value = now.get(name) ?? "";
      status.textContent = `${shown} of ${rows.length} shown`;
    }
    search.addEventListener("input", () => change("search", search.value));
    for (const [name, field] of Object.entries(fields))
      field.select.addEventListener("change", () => change(name, field.select.value));
    window.addEventListener("hashchange", draw);
    box.prepend(controls, status);
    draw();
  }
})();
