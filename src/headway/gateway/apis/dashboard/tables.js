// Tables, whose rows are cards on a narrow screen. Text never becomes markup: names may be anybody's.
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
const cell = (content, kind) => element("td", kind, content ?? "-");

// rows: of cells, one for each column of the table's head, whose name a card shows beside the cell. A row that is as
// it was stays, so that neither the focus nor a selection is lost every second.
function fill(id, rows) {
  const body = document.getElementById(id), names = [...body.parentNode.querySelectorAll("th")].map(th => th.textContent);
  const focused = body.contains(document.activeElement) ? document.activeElement.textContent : null;
  rows.forEach((cells, i) => {
    cells.forEach((td, column) => { td.dataset.label = names[column]; });
    const tr = element("tr", "", ...cells), old = body.rows[i];
    if (!old) body.append(tr);
    else if (old.outerHTML !== tr.outerHTML) old.replaceWith(tr);
  });
  while (body.rows.length > rows.length) body.lastChild.remove();
  if (focused && !body.contains(document.activeElement)) {
    [...body.querySelectorAll("button")].find(button => button.textContent === focused)?.focus({preventScroll: true});
  }
}

// A bar of [share, colour], with what it says beneath.
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

function lines(all, classes) {
  const most = Math.max(1, ...Object.values(all).map(line => line.waiting + line.inside));
  fill("lines", Object.entries(all).map(([name, line]) => [
    cell(element("div", "", named(name), element("small", "dim", classes[name] ?? "")), "long"),
    cell(whole(line.waiting), "n"), cell(whole(line.inside), "n"),
    cell(line.waiting ? seconds(line.oldest) : "-", "n"),
    cell(bar([[line.inside / most, "var(--blue)"], [line.waiting / most, "var(--amber)"]], `${whole(line.inside + line.waiting)} request${line.inside + line.waiting === 1 ? "" : "s"}`), "load"),
  ]));
}

function engines(all) {
  fill("engines", Object.entries(all).map(([id, one]) => {
    const state = one.loading ? `loads ${one.loading}` : one.state;
    const countCell = count => cell(count === null ? "-" : whole(count), "n");
    const batch = `${one.computing ?? "?"} of ${one.batch}${one.assumed.includes("max_running") ? " (assumed)" : ""}`;
    return [
      cell(id), cell(named(one.model), "long"),
      cell(one.up ? bar([[(one.computing ?? 0) / one.batch, "var(--blue)"]], batch) : "-"),
      countCell(one.paused), countCell(one.waiting),
      cell(one.kv === null ? "-" : bar([[one.kv, one.kv > .95 ? "var(--orange)" : "var(--green)"]], `${Math.round(100 * one.kv)} %`)),
      countCell(one.evictions),
      cell(one.restarts ? `${state}, ${one.restarts} restart${one.restarts === 1 ? "" : "s"}` : state, state === "up" ? "good" : "bad"),
    ];
  }));
}

function late(all) {
  const shades = {queued: "var(--amber)", answering: "var(--green)"};
  $("none").hidden = all.length > 0;
  $("late").parentNode.hidden = !all.length;
  fill("late", all.map(one => {
    const sum = one.spans.reduce((total, [, s]) => total + s, 0) || 1;
    const story = one.spans.map(([state, s]) => `${state} ${seconds(s)}`).join(", ");
    return [
      cell(explainable(one.id, one.ended - sum), "long"), cell(named(one.tier), "long"), cell(named(one.tenant), "long"),
      cell(one.outcome === "finished" ? one.target : `${one.target}, ${one.outcome}`),
      cell(seconds(one.promised), "n"), cell(seconds(one.by), "n bad"),
      cell(bar(one.spans.map(([state, s]) => [s / sum, shades[state] ?? "var(--blue)"]), story), "long story"),
      cell(clock(one.ended, true), "n dim"),
    ];
  }));
}
