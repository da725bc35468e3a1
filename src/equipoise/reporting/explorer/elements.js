"use strict";
/* The script of a report is these files one after the other. First: elements, and numbers as text.
   Text from the run only ever becomes text nodes and attribute values, never markup. */
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
const fill = (node, ...children) => {
  node.replaceChildren(...children.flat(Infinity).filter(Boolean));
  return node;
};
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const interval = (result) => `[${(100 * result.low).toFixed(1)}, ${(100 * result.high).toFixed(1)}]`;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").body.firstChild.namespaceURI;
const s = (tag, properties, ...children) => make(SVG, tag, properties, ...children);
const dot = (name) => h("span", { class: "dot", style: { background: `var(--${name})` } });
const hint = (...children) => h("p", { class: "hint" }, ...children);
const td = (...children) => h("td", {}, ...children);
/** A row of a table: its head and its cells. */
const tableRow = (head, ...cells) => h("tr", {}, h("th", { scope: "row" }, head), ...cells);
const table = (properties, heads, rows) =>
  h("table", properties,
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows));
