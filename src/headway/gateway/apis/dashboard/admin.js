// Administration: signs in, refreshes the tables, and calls the endpoints that `headway key` and `headway engine` use.
const EVERY_MS = 5000, ANSWER_MS = 10000, TYPING_MS = 250, SAID_MS = 20000;
const KEYS = "v1/headway/keys", ENGINES = "v1/headway/engines";
const PARTS = {
  tenants: {path: () => `v1/headway/tenants?${new URLSearchParams({window: $("window").value, name: $("find-tenant").value.trim()})}`, show: showTenants},
  keys: {path: () => `${KEYS}?${new URLSearchParams({name: $("find-key").value.trim(), ended: $("ended").checked, limit: SHOWN})}`, show: showKeys, every: 60000},
  engines: {path: () => ENGINES, show: showEngines},
};
const asked = {}, updated = {};  // by part: the AbortController of its latest request, and the time of the data shown
let inside = false;  // the key is an operator's

// Resolves to the body of the answer; rejects with message, param and status of the gateway's error.
async function call(method, path, body, signal) {
  const answer = await ask(path, {method, signal, ...body && {body: JSON.stringify(body), headers: {"content-type": "application/json"}}});
  const found = await answer.json().catch(() => null);
  if (answer.ok && found) return found;
  throw {status: answer.status, message: `The gateway answers ${answer.status}.`, ...found?.error};
}

let silence;
function say(text) {
  $("said").textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => { $("said").textContent = ""; }, SAID_MS);
}

// An alert is announced whenever its text is set.
function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// Loads a part; aborts an earlier request for it.
async function load(name) {
  asked[name]?.abort();
  const {signal} = asked[name] = new AbortController(), {path, show} = PARTS[name];
  try {
    const answer = await call("GET", path(), null, AbortSignal.any([signal, AbortSignal.timeout(ANSWER_MS)]));
    if (signal.aborted) return;
    enter();
    show(answer);
    updated[name] = clock(Date.now() / 1000, true);
    setText(`${name}-problem`, answer.budgets_problem ?? "");
    $("state").textContent = `updated ${updated[name]}`;
  } catch (error) {
    if (signal.aborted) return;
    const message = error.status ? error.message : "The gateway does not answer.";
    if (!inside || [401, 403].includes(error.status)) shut({...error, message, status: error.status});
    else setText(`${name}-problem`, `This is not current${updated[name] ? ` (last answer: ${updated[name]})` : ""}. ${message}`);
  }
}

// Only one endpoint is asked whether the key is an operator's, because each refusal is a line of the audit log.
async function refresh() {
  const names = Object.keys(PARTS);
  if (!inside) await load(names.pop());
  if (inside) await Promise.all(names.map(load));
}

function reveal() {
  for (const part of document.querySelectorAll(".part, #leave")) part.hidden = !inside;
  $("asks").hidden = inside;
}

function enter() {
  if (inside) return;
  const typed = $("asks").contains(document.activeElement);
  [inside, $("key").value] = [true, ""];
  reveal();
  if (typed) $("tenants-title").focus();
}

function shut({message, status, code}) {
  inside = false;
  for (const name of Object.keys(PARTS)) { asked[name]?.abort(); $(name).replaceChildren(); }
  if ($("dialog").open && !$("dialog").querySelector(".secret")) $("dialog").close();  // only it shows a new key
  $("state").textContent = "";
  const why = code === "invalid_api_key" ? "" : message;  // the page itself says that a key is needed
  setText("why", sessionStorage.getItem("headway-key") && status === 401 ? `This key was not accepted. ${why}` : why);
  reveal();
  $("key").focus();
}

// Refreshes a part, independently of the others.
async function follow(name) {
  for (;;) {
    await new Promise(done => setTimeout(done, PARTS[name].every ?? EVERY_MS));
    if (inside && !document.hidden) await load(name);
  }
}

// Loads a part when typing pauses.
const timers = {};
function search(name) {
  clearTimeout(timers[name]);
  timers[name] = setTimeout(() => load(name), TYPING_MS);
}

// ---- keys

// A form's field for further settings, as JSON.
function parsed(text) {
  try {
    const found = JSON.parse(text || "{}");
    if (found && typeof found === "object" && !Array.isArray(found)) return found;
  } catch { /* the same error as for other values */ }
  throw {param: "more", message: "This is not a JSON object. Write {\"name\": value, ...}."};
}

// The values entered; those named in `counts` as numbers.
const entered = (values, counts) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== "").map(([name, value]) => [name, counts.includes(name) ? Number(value) : value]));
const count = {type: "number", min: 1, step: 1};

function create() {
  openForm({
    title: "Create a key", act: "Create", home: "keys-title",
    fields: [
      {name: "tenant", label: "Tenant", required: "", list: "tenant-names", autocomplete: "off", spellcheck: "false"},
      {name: "name", label: "Name", hint: "in logs and reports", autocomplete: "off"},
      {name: "expires_s", label: "Expires after, days", hint: "none: never", type: "number", min: 0, step: "any"},
      {...count, name: "max_queued", label: "Queued requests, at most"},
      {...count, name: "requests_per_min", label: "Requests per minute"},
      {...count, name: "tokens_per_min", label: "Tokens per minute"},
      {name: "budgets", label: "Budget", type: "number", min: 0, step: "any"},
      {name: "of", label: "Budget counts", options: [["tokens", "tokens"], ["cost", "cost"]], value: "tokens"},
      {name: "per", label: "Budget is per", options: [["day", "day (UTC)"], ["month", "month (UTC)"]], value: "day"},
      {name: "soft", label: "Soft budget: requests beyond it are served, without promises", type: "checkbox"},
      {name: "classes", label: "Classes", hint: "with commas; none: all", wide: true, autocomplete: "off", spellcheck: "false"},
      {name: "more", label: "Further limits of [[keys]], as JSON", hint: "such as {\"ttft_ms\": 500, \"priority\": 0}", type: "textarea", rows: 2, spellcheck: "false"},
    ],
    async send({classes, expires_s, budgets, of, per, soft, more, ...values}) {
      const body = {...parsed(more), ...entered(values, ["max_queued", "requests_per_min", "tokens_per_min"])};
      if (classes) body.classes = classes.split(",").map(name => name.trim()).filter(name => name);
      if (expires_s) body.expires_s = 86400 * Number(expires_s);
      if (budgets) body.budgets = [...body.budgets ?? [], {per, [of]: Number(budgets), soft}];
      const {data: [made]} = await call("POST", KEYS, body);
      return {said: `The key ${made.id} of ${made.tenant} was created.`, next: () => showSecret(made)};
    },
  });
}

function rotate(key) {
  openForm({
    title: `Rotate ${key.prefix}…`, act: "Rotate", home: "keys-title",
    text: `A new key of ${key.tenant} gets its limits and lifetime. The old one ends after the time that you give.`,
    fields: [{name: "grace_s", label: "Hours for which the old key stays valid", hint: "none: it ends at once", type: "number", min: 0, step: "any"}],
    async send({grace_s}) {
      const {data: [made]} = await call("POST", `${KEYS}/${encodeURIComponent(key.id)}/rotate`, {grace_s: 3600 * Number(grace_s)});
      return {said: `The key ${made.id} takes the place of ${key.id}.`, next: () => showSecret(made)};
    },
  });
}

function revoke(key) {
  openForm({
    title: `Revoke ${key.prefix}…`, act: "Revoke", kind: "danger", home: "keys-title",
    text: `Within a second no gateway accepts this key of ${key.tenant} any more. Answers in progress continue. This cannot be undone.`,
    async send() {
      await call("DELETE", `${KEYS}/${encodeURIComponent(key.id)}`);
      return {said: `The key ${key.id} of ${key.tenant} is revoked.`};
    },
  });
}

// ---- engines

const pathOf = (one, more = "") => `${ENGINES}/${encodeURIComponent(one.id)}${more}`;
const force = {name: "force", type: "checkbox"};
const chosen = values => new URLSearchParams(Object.entries(values).filter(([, value]) => value === true));

function add() {
  openForm({
    title: "Add an engine", act: "Add", home: "engines-title",
    text: "With an address Headway uses a server that runs there; without, it starts vLLM.",
    fields: [
      {name: "url", label: "Address", hint: "such as http://gpu-2:8000", type: "url", autocomplete: "off"},
      {name: "model", label: "Model", hint: "a directory or a name; none: smollm2", autocomplete: "off", spellcheck: "false"},
      {name: "id", label: "Name", hint: "none: the next free of e0, e1, ...", autocomplete: "off", spellcheck: "false"},
      {name: "kind", label: "Kind of server", options: [["", "vLLM"], ["openai", "another one with OpenAI's API"]]},
      {name: "api_key", label: "Its key", hint: "or env:NAME, file:PATH", type: "password", autocomplete: "new-password"},
      {...count, name: "max_running", label: "Requests in one iteration, at most"},
      {name: "agent", label: "Agent that starts it", hint: "where there are several agents", autocomplete: "off"},
      {name: "more", label: "Further settings of [[engines]], as JSON", hint: "such as {\"gpus\": 1, \"max_model_len\": 8192}", type: "textarea", rows: 2, spellcheck: "false"},
    ],
    async send({more, agent, ...values}) {
      const query = agent ? `?${new URLSearchParams({agent})}` : "";
      const {data} = await call("POST", `${ENGINES}${query}`, {...parsed(more), ...entered(values, ["max_running"])});
      return {said: `Added: ${data.map(one => one.id).join(", ")}. An engine takes work when it is up.`};
    },
  });
}

function drain(one) {
  openForm({
    title: `Drain ${one.id}`, act: "Drain", home: "engines-title",
    text: "It takes no new work, ends what is inside it, and stops. It stays in the list and can be used again.",
    fields: [{...force, label: "Also if requests wait for a model that no other engine has; they go on waiting"}],
    async send(values) {
      await call("POST", `${pathOf(one, "/drain")}?${chosen(values)}`);
      return {said: `${one.id} is being drained.`};
    },
  });
}

function useAgain(one) {
  openForm({
    title: `Use ${one.id} again`, act: "Use again", home: "engines-title",
    text: "It takes work again: at once if it is still draining, otherwise when it has started.",
    async send() {
      await call("POST", `${ENGINES}/roll`, {engines: [one.id]});
      return {said: `${one.id} is used again.`};
    },
  });
}

function remove(one) {
  openForm({
    title: `Remove ${one.id}`, act: "Remove", kind: "danger", home: "engines-title",
    text: "It is drained, then forgotten. After a restart of Headway it is there again if the configuration has it.",
    fields: [
      {name: "now", type: "checkbox", label: "Stop it at once; its streams end as if it had died"},
      {...force, label: "Also if requests wait for a model that no other engine has; they end with an error"},
    ],
    async send(values) {
      await call("DELETE", `${pathOf(one)}?${chosen(values)}`);
      return {said: `${one.id} is being removed.`};
    },
  });
}

// ----

for (const form of document.querySelectorAll("form[role=search]")) form.addEventListener("submit", event => event.preventDefault());
$("enter").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("headway-key", $("key").value.trim());
  refresh();
});
$("leave").addEventListener("click", () => {
  sessionStorage.removeItem("headway-key");
  location.reload();
});
for (const id of ["window", "find-tenant"]) $(id).addEventListener("input", () => search("tenants"));
for (const id of ["find-key", "ended"]) $(id).addEventListener("input", () => search("keys"));
$("create").addEventListener("click", create);
$("add").addEventListener("click", add);
refresh();
for (const name of Object.keys(PARTS)) follow(name);
