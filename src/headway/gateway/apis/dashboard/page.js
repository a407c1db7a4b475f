// The page: the view in its address, the stream of snapshots, and what is made of each.
const view = new URLSearchParams(location.search);
const NAMES = ["window", "class", "tenant"];
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
let last = null, stream = new AbortController();

const colourOf = {};
const look = name => {
  const place = colourOf[name] ??= Object.keys(colourOf).length;
  return {colour: COLOURS[place % COLOURS.length], dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length]};
};

function charts(data) {
  const time = {ends: data.ends, from: data.at - data.window_s, to: data.at};
  const draw = (name, series, about, more) => {
    const summary = series.map(one => `${one.name}: ${one.summary}`).join(", ") || "nothing in this time";
    chart(`chart-${name}`, {...time, ...more, series, about: `${about}. ${summary}`});
    keys(`keys-${name}`, series);
  };
  const order = Object.keys(data.classes), shares = Object.values(data.attained).flatMap(one => one.series).filter(share => share !== null);
  const least = [90, 80, 60, 0].find(bound => Math.min(...shares, 100) >= bound);
  order.forEach(look);
  draw("kept", Object.entries(data.attained).sort(([a], [b]) => order.indexOf(a) - order.indexOf(b)).map(([name, one]) => (
    {name, ...look(name), values: one.series, summary: `${number(100 * one.kept / one.owed)} % of ${whole(one.owed)}`}
  )), "Promises kept by class", {format: value => `${number(value)} %`, least: shares.length ? least : 0, most: 100});
  const mean = values => values.length ? `${number(values.reduce((sum, value) => sum + value, 0) / values.length)}/s on average` : "-";
  draw("tokens", ["in", "out"].map((name, i) => ({name, colour: COLOURS[i], dash: "none", values: data.tokens[name], summary: mean(data.tokens[name])})),
    "Tokens per second", {format: value => `${number(value)}/s`});
  for (const [name, about] of [["ttft", "Time to first token"], ["tpot", "Time per output token"]]) {
    draw(name, ["p50", "p99"].map((part, i) => (
      {name: part, colour: COLOURS[[0, 4][i]], dash: "none", values: data[name][part], summary: data[name].all[part] === null ? "-" : seconds(data[name].all[part])}
    )), about, {format: seconds});
  }
}

function options(id, names) {
  const select = $(id), wanted = view.get(id) ?? "", all = [...new Set([...names, ...wanted ? [wanted] : []])];
  if (all.join("\n") !== [...select.options].slice(1).map(option => option.value).join("\n")) {
    select.replaceChildren(select.options[0], ...all.map(name => new Option(name, name)));
  }
  select.value = wanted;
}

function show(data) {
  const classes = Object.values(data.attained), all = Object.values(data.lines);
  const sum = (list, name) => list.reduce((total, one) => total + one[name], 0);
  const owed = sum(classes, "owed"), kept = sum(classes, "kept"), waiting = sum(all, "waiting");
  options("class", Object.keys(data.classes));
  options("tenant", data.tenants);
  document.querySelectorAll(".window").forEach(node => { node.textContent = `, last ${$("window").selectedOptions[0].textContent.replace("1 hour", "hour")}`; });
  document.querySelectorAll(".unfiltered").forEach(node => { node.hidden = !view.get("class") && !view.get("tenant"); });
  $("recipe").textContent = `recipe ${data.recipe}, version ${data.version}`;
  $("kept").textContent = owed ? `${number(100 * kept / owed)} %` : "-";
  $("owed").textContent = owed ? `${whole(kept)} of ${whole(owed)} promises` : "nothing was promised";
  $("requests").textContent = number(data.requests_per_s);
  $("answered").textContent = `${whole(data.answered)} in the window, ${whole(data.failed)} failed or refused`;
  $("tokens").textContent = number(data.tokens_per_s);
  $("cached").textContent = data.cached ? `${number(100 * data.cached)} % of prompt tokens in the window were cached` : "";
  $("waiting").textContent = `${whole(waiting)} / ${whole(sum(all, "inside"))}`;
  const reporting = Object.values(data.engines).filter(one => one.computing !== null);
  $("inside").textContent = reporting.length ? ["computing", "paused", "waiting"].map(state => `${whole(sum(reporting, state))} ${state}`).join(", ") + " in engines" : "";
  $("oldest").textContent = waiting ? `the first is queued for ${seconds(Math.max(...all.map(line => line.oldest)))}` : "nothing is queued";
  lines(data.lines, data.classes);
  engines(data.engines);
  charts(data);
  late(data.late);
  $("state").textContent = `live, ${clock(data.at, true)}`;
  $("state").className = document.querySelector("main").className = "";
  last = data;
}

async function follow() {
  const answer = await ask(`headway/live?${view}`, {signal: stream.signal});
  if (!answer.ok) {
    const {error} = await answer.json();
    $("asks").hidden = answer.status !== 401 && answer.status !== 403;
    $("why").textContent = error.message;
    throw new Error(error.message);
  }
  $("asks").hidden = true;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the gateway ended the stream");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (events.length) show(JSON.parse(events.at(-1).slice(6)));
  }
}
async function run() {
  for (;;) {
    try { await follow(); } catch (error) {
      if (stream.signal.aborted) { stream = new AbortController(); continue; }  // another view is wanted
      $("state").textContent = `not live${last ? ` since ${clock(last.at, true)}` : ""}: ${error.message}`;
      $("state").className = "off";
      document.querySelector("main").className = "stale";
    }
    await new Promise(done => setTimeout(done, 2000));
  }
}

for (const name of [...view.keys()]) if (!NAMES.includes(name)) view.delete(name);
if (![...$("window").options].some(option => option.value === view.get("window"))) view.delete("window");
$("window").value = view.get("window") ?? "10m";
options("class", []);
options("tenant", []);
$("zone").textContent = `Times are in your time zone: ${zone}, ${new Date().toLocaleTimeString("en", {timeZoneName: "shortOffset"}).split(" ").at(-1)}.`;
$("view").addEventListener("change", () => {
  for (const name of NAMES) $(name).value ? view.set(name, $(name).value) : view.delete(name);
  history.replaceState(null, "", `?${view}`);
  stream.abort();
});
$("view").addEventListener("submit", event => event.preventDefault());
$("form").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("headway-key", $("key").value);
  location.reload();
});
$("which").addEventListener("submit", event => {
  event.preventDefault();
  if ($("id").value.trim()) explain($("id").value.trim());
});
$("close").addEventListener("click", () => $("story").close());
new ResizeObserver(() => { if (last) charts(last); }).observe(document.querySelector("main"));
run();
