/* What a page lacks, in words; evaluated in the page. */
(() => {
  const found = [], visible = (node) => node.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const name = (node) => `${node.tagName.toLowerCase()}${node.className?.baseVal ?? node.className ? '.' + (node.className.baseVal ?? node.className) : ''}: `
    + (node.getAttribute('aria-label') ?? node.textContent).trim().slice(0, 40);
  const ids = [...document.querySelectorAll('[id]')].map((node) => node.id);
  ids.filter((id, k) => ids.indexOf(id) !== k).forEach((id) => found.push(`the id ${id} occurs twice`));
  let level = 0;
  for (const title of document.querySelectorAll('h1, h2, h3, h4, h5, h6')) if (visible(title)) {
    const own = Number(title.tagName[1]);
    if (own > level + 1) found.push(`a level is left out before the heading ${title.textContent}`);
    level = own;
  }
  for (const image of document.querySelectorAll('img')) if (!image.alt.trim()) found.push('an image without a text');
  for (const node of document.querySelectorAll('canvas')) if (visible(node) && !node.getAttribute('aria-label')) found.push('a canvas without a name');
  for (const table of document.querySelectorAll('table')) if (![...table.rows[0].cells].every((cell) => cell.tagName === 'TH' && cell.scope)) found.push('a table without heads');
  for (const node of document.querySelectorAll('[tabindex]')) if (node.tabIndex > 0) found.push(`${name(node)} changes the order of focus`);
  if (!document.documentElement.lang || !document.title || !document.querySelector('main')) found.push('no language, title or main part');

  const number = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
  const srgb = (text) => {  // color-mix gives color(srgb …)
    const values = number(text);
    return text.startsWith('color(') ? [...values.slice(0, 3).map((v) => 255 * v), values[3]] : values;
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((v, k) => a * v + (1 - a) * under[k]);
  const paper = (node) => {
    if (!node) return [255, 255, 255];
    const own = srgb(getComputedStyle(node).backgroundColor);
    return own[3] >= 1 ? own.slice(0, 3) : over(own, paper(node.parentElement));
  };
  const light = (rgb) => { const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.textContent.trim() || !visible(node) || node.closest('script, style, noscript, :disabled, [aria-pressed="false"].key')) continue;
    const style = getComputedStyle(node), ink = srgb(node.namespaceURI.endsWith('svg') ? style.fill : style.color);
    let opacity = ink[3];
    for (let up = node; up; up = up.parentElement) opacity *= Number(getComputedStyle(up).opacity);
    const back = paper(node), front = over([...ink.slice(0, 3), opacity], back), [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.push(`contrast ${ratio.toFixed(2)} of ${name(node)}`);
  }
  const before = document.activeElement;
  for (const node of document.querySelectorAll('a[href], button, select, input, summary, [tabindex="0"]')) if (visible(node) && !node.disabled) {
    node.focus({ preventScroll: true, focusVisible: true });
    if (document.activeElement !== node) continue;
    const style = getComputedStyle(node), shown = node.querySelector('.active') ? getComputedStyle(node.querySelector('.active')).boxShadow : 'none';
    if (style.outlineStyle === 'none' && style.boxShadow === 'none' && shown === 'none') found.push(`the focus of ${name(node)} is not visible`);
  }
  before?.focus?.({ preventScroll: true });
  return [...new Set(found)];
})()
