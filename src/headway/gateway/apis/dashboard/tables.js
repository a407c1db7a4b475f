// The overview's tables, whose rows are cards on a narrow screen.
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
