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
  const text =
    typeof value === "string" && /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : `${value}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const saveCsv = (name, rows) =>
  save(
    `${name}.csv`,
    new Blob(["\ufeff", rows.map((row) => row.map(cell).join(",")).join("\r\n"), "\r\n"], {
      type: "text/csv;charset=utf-8",
    }),
  );
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
  const copy = svg.cloneNode(true);
  const box = svg.viewBox.baseVal;
  copy.setAttribute("width", box.width);
  copy.setAttribute("height", box.height);
  copy.setAttribute("font-family", "system-ui, sans-serif");
  copy.prepend(make(svg.namespaceURI, "rect", { width: box.width, height: box.height, fill: color("paper") }));
  return new XMLSerializer().serializeToString(copy);
};
const dataUri = (source) => `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
const tool = (text, label, action) =>
  h("button", { type: "button", class: "tool", "aria-label": label, on: { click: action } }, text);
const tools = (...buttons) => h("p", { class: "tools" }, ...buttons);
const chartTools = (name, svg) => {
  const saveSvg = () => save(`${name}.svg`, new Blob([svgSource(svg())], { type: "image/svg+xml" }));
  const saveAsPng = () => {
    const { width, height } = svg().viewBox.baseVal;
    savePng(name, dataUri(svgSource(svg())), width, height);
  };
  return tools(
    tool("SVG", `Download the figure ${name} as SVG`, saveSvg),
    tool("PNG", `Download the figure ${name} as PNG`, saveAsPng));
};
async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", {}, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}
const slug = (text) => {
  const words = text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return words.slice(0, 60) || "table";
};

/** The cells of a table as text, their parts separated by spaces. */
function tableTexts(own) {
  const parts = (cell) => [...cell.childNodes].map((node) => node.textContent.trim()).filter(Boolean);
  return [...own.rows].map((row) => [...row.cells].map((cell) => parts(cell).join(" ").replaceAll("\u00a0", " ")));
}
function addTableDownload(own) {
  const section = own.closest("section");
  const number = [...section.querySelectorAll("table")].indexOf(own) + 1;
  const name = slug(`${$("h2", section).textContent} ${number}`);
  const wide = own.parentElement;
  const caption = wide.nextElementSibling;
  if (wide.scrollWidth > wide.clientWidth) {  // the keyboard scrolls what has the focus
    wide.tabIndex = 0;
    wide.setAttribute("role", "group");
    wide.setAttribute("aria-label", `${own.getAttribute("aria-label")} Scrolls sideways.`);
  }
  const button = tool("CSV", `Download the table ${name} as CSV`, () => saveCsv(name, tableTexts(own)));
  (caption?.matches(".caption") ? caption : wide).after(tools(button));
}
function addFigureDownloads(figure) {
  const image = $("img", figure);
  const name = slug(image.alt);
  const saveSvg = () => {
    const bytes = Uint8Array.from(atob(image.src.split(",")[1]), (letter) => letter.charCodeAt(0));
    save(`${name}.svg`, new Blob([bytes], { type: "image/svg+xml" }));
  };
  figure.append(tools(
    tool("SVG", `Download the figure as SVG: ${image.alt}`, saveSvg),
    tool("PNG", `Download the figure as PNG: ${image.alt}`, () =>
      savePng(name, image.src, image.naturalWidth, image.naturalHeight))));
}
/** Downloads beside the tables and figures that the report has without a script. */
function addDownloads() {
  document.querySelectorAll("main table").forEach(addTableDownload);
  // Figures with numbers have their own downloads, for what is shown.
  document.querySelectorAll("main figure:not([data-chart])").forEach(addFigureDownloads);
  for (const title of document.querySelectorAll("main section[id] > h2")) {
    const label = `Link to ${title.textContent}`;
    title.append(" ", h("a", { class: "anchor", href: `#${title.parentElement.id}`, "aria-label": label }, "#"));
  }
  for (const code of document.querySelectorAll("main pre")) {
    const button = tool("copy", "Copy the command", () => copyText(code.textContent, button));
    code.after(tools(button));
  }
}
