// Used by both pages: requests to the gateway, and elements. Text is never parsed as HTML, as clients may choose names.
const $ = id => document.getElementById(id);

// The operator's key is kept until the tab is closed. (An EventSource could not send it.)
const ask = (path, more) => {
  const key = sessionStorage.getItem("headway-key");
  return fetch(path, {cache: "no-store", ...more, headers: {...more?.headers, ...key && {authorization: `Bearer ${key}`}}});
};

// A time in the viewer's time zone, with the date if it is not today.
function clock(at, precise = false) {
  const date = new Date(1000 * at), far = date.toDateString() !== new Date().toDateString();
  return date.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...precise && {second: "2-digit"}, ...precise && far && {month: "short", day: "numeric"}});
}

const number = x => !x ? "0" : x >= 100 ? Math.round(x).toLocaleString("en") : x >= 10 ? x.toFixed(1) : x.toFixed(2);
const whole = x => x.toLocaleString("en");
const seconds = s => s >= 90 ? `${number(s / 60)} min` : s >= 1 ? `${number(s)} s` : !s ? "0" : s >= .01 ? `${Math.round(s * 1000)} ms` : `${number(s * 1000)} ms`;
const element = (tag, kind, ...content) => {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...content);
  return node;
};
const named = name => Object.assign(element("span", "name", name), {title: name});  // long ones are cut
const labelOf = node => node.ariaLabel ?? node.textContent;
const cell = (content, kind) => element("td", kind, content ?? "-");

// rows: lists of cells, one per column; cards show the column's name beside the cell. Unchanged rows are kept, so that
// focus and selection survive updates.
function fill(id, rows) {
  const body = document.getElementById(id), names = [...body.parentNode.tHead.rows[0].cells].map(th => th.textContent);
  const focused = body.contains(document.activeElement) ? labelOf(document.activeElement) : null;
  rows.forEach((cells, i) => {
    cells.forEach((td, column) => {
      td.dataset.label = names[column];
      if (td.textContent === "-") td.classList.add("none");
    });
    const tr = element("tr", "", ...cells), old = body.rows[i];
    if (!old) body.append(tr);
    else if (old.outerHTML !== tr.outerHTML) old.replaceWith(tr);
  });
  while (body.rows.length > rows.length) body.lastChild.remove();
  if (focused && !body.contains(document.activeElement)) {
    [...body.querySelectorAll("button")].find(button => labelOf(button) === focused)?.focus({preventScroll: true});
  }
}

// A bar of parts [share, colour], with text beneath.
function bar(parts, caption) {
  const box = element("div", "bar");
  for (const [share, shade] of parts) {
    const part = element("i");
    part.style.width = `${100 * Math.min(share, 1)}%`;
    part.style.background = shade;
    box.append(part);
  }
  return element("div", "bars", box, element("small", "", caption));
}
