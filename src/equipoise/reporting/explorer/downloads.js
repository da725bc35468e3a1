/* Tables as CSV, figures as SVG and PNG, commands to copy. */
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
    const wide = table.parentElement, caption = wide.nextElementSibling;
    if (wide.scrollWidth > wide.clientWidth) for (const [key, value] of Object.entries({ tabindex: 0, role: "group", "aria-label": `${table.getAttribute("aria-label")} Scrolls sideways.` })) wide.setAttribute(key, value);
    (caption?.matches(".caption") ? caption : wide).after(h("p", { class: "tools" }, tool("CSV", `Download the table ${name} as CSV`, () => saveCsv(name, read()))));
  }
  for (const figure of document.querySelectorAll("main figure")) {
    if (figure.dataset.chart) continue;  // has its own, for what is shown
    const image = $("img", figure), name = slug(image.alt);
    figure.append(h("p", { class: "tools" },
      tool("SVG", `Download the figure as SVG: ${image.alt}`, () => save(`${name}.svg`,
        new Blob([Uint8Array.from(atob(image.src.split(",")[1]), (letter) => letter.charCodeAt(0))], { type: "image/svg+xml" }))),
      tool("PNG", `Download the figure as PNG: ${image.alt}`, () => savePng(name, image.src, image.naturalWidth, image.naturalHeight))));
  }
  for (const title of document.querySelectorAll("main section[id] > h2")) title.append(" ", h("a", { class: "anchor", href: `#${title.parentElement.id}`, "aria-label": `Link to ${title.textContent}` }, "#"));
  for (const code of document.querySelectorAll("main pre")) {
    const button = tool("copy", "Copy the command", () => copyText(code.textContent, button));
    code.after(h("p", { class: "tools" }, button));
  }
}
