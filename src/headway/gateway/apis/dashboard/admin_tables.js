// The tables of tenants, keys and engines.
const SHOWN = 100;  // keys; search finds the others
const FULL = .999;  // share of a limit above which few requests fit
const KINDS = {ttft_ms: "TTFT", tpot_ms: "TPOT", itl_ms: "ITL", e2e_ms: "end to end"};
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 3}).format;
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
const day = at => new Date(1000 * at).toLocaleDateString("en-GB", {day: "numeric", month: "short", year: "numeric"});
const span = s => s >= 172800 ? `${Math.round(s / 86400)} days` : s >= 5400 ? `${Math.round(s / 3600)} h` : `${Math.max(Math.round(s / 60), 1)} min`;

// The first cell of a row, which names it.
function head(name, ...under) {
  const th = element("th", "", named(name), ...under.map(text => element("small", "dim", text)));
  th.scope = "row";
  return th;
}

// Usage of a limit: a bar and text. mark: position of the soft limit, as a share of the limit.
function meter(used, most, text, notes = [], mark = null) {
  const share = used / most, node = bar([[share, share >= FULL ? "var(--orange)" : share >= .8 ? "var(--amber)" : "var(--blue)"]], text);
  if (mark !== null && mark < 1) {
    const line = element("b");
    line.style.left = `${100 * mark}%`;
    node.firstChild.append(line);
  }
  node.append(...notes.map(([note, kind]) => element("small", kind, note)));
  return node;
}

// The effect of a budget's limit on requests; null while usage is low.
function pressed(used, limit) {
  if (used >= limit) return "spent: requests are refused";
  if (used >= FULL * limit) return "nearly spent: most requests are refused";
  return used >= .8 * limit ? "near its limit" : null;
}

function budget(one) {
  const range = limits => [...new Set(limits.map(compact))].join(" to "), [hard, soft] = [one.hard.at(-1), one.soft.at(-1)];
  const most = hard ?? soft, used = `${one.unit} ${compact(one.used)} of ${range(one.hard.length ? one.hard : one.soft)}`;
  const notes = [], when = one.per === "day" ? "today" : "this month";
  if (hard && pressed(one.used, hard)) notes.push([pressed(one.used, hard), "bad"]);
  if (hard > one.hard[0] && one.used >= FULL * one.hard[0] && one.used < FULL * hard) notes.push([`of keys with the limit ${compact(one.hard[0])}: ${pressed(one.used, one.hard[0])}`, "bad"]);
  if (soft && one.used >= soft) notes.push(["beyond the soft limit: served without promises", "bad"]);
  else if (soft && hard) notes.push([`soft limit at ${range(one.soft)}`, "dim"]);
  notes.push([`resets in ${span(one.resets_at - Date.now() / 1000)}`, "dim"]);
  return meter(one.used, most, `${used} ${when}${hard ? "" : " (soft)"}`, notes, hard && soft ? soft / hard : null);
}

const list = nodes => nodes.length ? element("div", "list", ...nodes) : "-";

function minute({last_minute: used, limits}) {
  const kinds = ["requests", "tokens"].filter(kind => kind in used && limits[`${kind}_per_min`]);
  return list(kinds.map(kind => meter(used[kind], limits[`${kind}_per_min`], `${compact(used[kind])} of ${plural(limits[`${kind}_per_min`], kind.slice(0, -1))}`)));
}

function requests({inside, waiting, limits: {max_queued: most}}) {
  const text = `${whole(inside)} in engines, ${whole(waiting)} queued`;
  return most === null ? element("div", "", text) : meter(waiting, most, `${text} of ${whole(most)}`);
}

function showTenants({data, others}) {
  const unknown = window => window === null ? "with the others" : null;
  fill("tenants", data.map(one => [
    head(one.id, plural(one.keys, "key")), cell(requests(one)), cell(minute(one)), cell(one.budgets === null ? "not known" : list(one.budgets.map(budget))),
    cell(unknown(one.window) ?? (one.window.owed ? `${number(100 * one.window.kept / one.window.owed)} % of ${whole(one.window.owed)}` : "-"), "n"),
    cell(unknown(one.window) ?? `${compact(one.window.tokens_in)} / ${compact(one.window.tokens_out)}`, "n"),
  ]));
  const {tenants, waiting, inside, window: rest} = others, names = data.map(one => one.id);
  $("tenants-more").textContent = !names.length ? "No tenant matches." : tenants || rest.answered
    ? `${plural(tenants, "more tenant")}: ${whole(inside)} in engines, ${whole(waiting)} queued, ${compact(rest.tokens_in)} / ${compact(rest.tokens_out)} tokens, `
      + `${whole(rest.kept)} of ${whole(rest.owed)} promises kept. ${tenants ? "Search to see them. " : ""}Tenants without a key, beyond the first 64 seen, are listed only while they have requests.` : "";
  $("tenant-names").replaceChildren(...names.map(name => new Option(name)));
}

function limitsOf(key) {
  const texts = [];
  if (key.max_queued) texts.push(`${whole(key.max_queued)} queued`);
  for (const kind of ["requests", "tokens"]) if (key[`${kind}_per_min`]) texts.push(`${compact(key[`${kind}_per_min`])} ${kind}/min`);
  for (const one of key.budgets ?? []) texts.push(`${one.tokens ? `${compact(one.tokens)} tokens` : `cost ${compact(one.cost)}`}/${one.per}${one.soft ? " (soft)" : ""}`);
  for (const [name, noun] of Object.entries(KINDS)) if (key[name]) texts.push(`${noun} from ${whole(key[name])} ms`);
  if (key.priority !== undefined && key.priority !== null) texts.push(`priority from ${key.priority}`);
  return list(texts.map(text => element("div", "", text)));
}

function showKeys({data, others, stored_keys: stored}) {
  fill("keys", data.map(key => {
    const ends = key.revoked_at ?? key.expires_at, active = key.state === "active";
    return [
      key.prefix ? head(`${key.prefix}…`, ...key.name ? [key.name] : []) : head(key.name),
      cell(named(key.tenant)), cell(key.classes ? key.classes.join(", ") : "all"), cell(limitsOf(key)),
      cell(key.state, active ? "good" : "dim"), cell(key.created_at === null ? "-" : day(key.created_at)),
      cell(ends === null ? "-" : ends - Date.now() / 1000 > 0 && ends - Date.now() / 1000 < 172800 ? `in ${span(ends - Date.now() / 1000)}` : day(ends)),
      cell(active ? element("div", "acts", action("Rotate", key.prefix, () => rotate(key)), action("Revoke", key.prefix, () => revoke(key))) : "-"),
    ];
  }));
  $("create").hidden = !stored;
  $("keys-more").textContent = [
    others.found ? `${whole(others.found)} more: search for them.` : "", data.length ? "" : "No key is shown.", others.hidden ? `Not shown: ${plural(others.hidden, "key")}.` : "",
    stored ? "" : "Keys can be created here with server.stored_keys = true.",
  ].filter(text => text).join(" ");
}

let failures = {};  // by engine; buttons of kept rows find the latest one here
function showEngines({data}) {
  failures = Object.fromEntries(data.map(one => [one.id, one.error ?? ""]));
  fill("engines", data.map(one => {
    const state = one.loading ? `loads ${one.loading}` : one.state, notes = [one.waits_for && `waits for ${one.waits_for}`, one.to_roll && "to be replaced"];
    const told = element("div", "", element("span", one.state === "up" ? "good" : "bad", state), ...notes.filter(note => note).map(note => element("small", "dim", note)));
    const acts = element("div", "acts");
    if (one.error) acts.append(action("Why failed", one.id, () => openForm({title: `Why ${one.id} has failed`, text: failures[one.id], home: "engines-title"})));
    if (one.leaving === "drain") acts.append(action("Use again", one.id, () => useAgain(one)));
    if (one.leaving === null) acts.append(action("Drain", one.id, () => drain(one)));
    if (one.leaving !== "remove") acts.append(action("Remove", one.id, () => remove(one)));
    const restarts = one.restarts ? [plural(one.restarts, "restart")] : [];
    return [head(one.id, ...restarts), cell(named(one.model)), cell(named(one.url ?? "started by Headway")), cell(whole(one.inside), "n"), cell(told), cell(acts.childElementCount ? acts : "-")];
  }));
}
