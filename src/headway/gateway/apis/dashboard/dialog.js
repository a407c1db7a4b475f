// Modal forms, one at a time: to create and add, and to confirm actions that cannot be undone.

// The label of a button that several rows have; it includes the row's object.
function action(text, object, does) {
  const button = element("button", "", text);
  button.type = "button";
  button.ariaLabel = `${text} ${object}`;
  button.addEventListener("click", does);
  return button;
}

// Focus returns to the button that opened the form, which may have been drawn again, or to the heading above it.
function regain(label, home) {
  if (document.activeElement !== document.body) return;
  const button = [...document.querySelectorAll("main button")].find(one => labelOf(one) === label);
  (inside ? button ?? $(home) : $("key")).focus();
}

// field: {name, label, hint, type, value, options, wide, ...attributes of its input}. Returns the input with
// its label, hint and problem.
function fieldOf({name, label, hint, type = "text", value = "", options, wide = ["textarea", "checkbox"].includes(type), ...more}) {
  const input = document.createElement(options ? "select" : type === "textarea" ? type : "input");
  if (options) input.append(...options.map(([key, text]) => new Option(text, key)));
  Object.assign(input, {id: `field-${name}`, name, ...input.tagName === "INPUT" && {type}, value});
  for (const [attribute, given] of Object.entries(more)) if (given !== false) input.setAttribute(attribute, given);
  const caption = element("label", "", label), under = element("small", "dim", hint ?? ""), problem = element("small", "problem");
  caption.htmlFor = input.id;
  [under.id, problem.id] = [`${input.id}-hint`, `${input.id}-problem`];
  input.setAttribute("aria-describedby", `${under.id} ${problem.id}`);
  const parts = type === "checkbox" ? [element("span", "check", input, caption)] : [caption, input];
  return element("div", wide ? "field wide" : "field", ...parts, under, problem);
}

// Shows an error beside its field, or above the buttons if it has none.
function showProblem(form, error) {
  for (const node of form.querySelectorAll(".problem")) node.textContent = "";
  for (const input of form.elements) input.removeAttribute("aria-invalid");
  const name = (error.param ?? "").replace(/^(keys|engines)\.\d+\./, "").split(".")[0];
  const input = form.elements.namedItem(name);
  (input ? $(`${input.id}-problem`) : form.querySelector("p.problem")).textContent = error.message;
  if (!input) return;
  input.setAttribute("aria-invalid", "true");
  input.focus();
}

// home: id of the heading that gets the focus if the button is gone. send: takes the values by name and resolves to
// {said, next}: a message, and optionally a function that shows more; errors are shown in the form. Without send the
// form only shows text. more: further buttons.
function openForm({title, text = "", fields = [], act, kind = "primary", home, send, more = []}) {
  const dialog = $("dialog"), opener = document.activeElement, label = labelOf(opener);
  const form = document.createElement("form"), cancel = element("button", "", send ? "Cancel" : "Close"), about = element("p", "about", text);
  const heading = element("h2", "", title), problem = element("p", "problem"), submit = element("button", kind, act);
  [heading.id, about.id, cancel.type] = ["dialog-title", "dialog-text", "button"];
  problem.setAttribute("role", "alert");
  form.append(heading, about, element("div", "fields", ...fields.map(fieldOf)), problem, element("div", "acts", cancel, ...more, ...send ? [submit] : []));
  let busy = false;
  form.addEventListener("submit", async event => {
    event.preventDefault();
    if (busy || !send) return;
    busy = true;
    submit.ariaBusy = "true";
    try {
      const {said, next} = await send(Object.fromEntries([...form.elements].filter(one => one.name).map(one => [one.name, one.type === "checkbox" ? one.checked : one.value.trim()])));
      if (form.isConnected) {  // otherwise it was closed in the meantime
        const closed = new Promise(done => dialog.addEventListener("close", done, {once: true}));
        dialog.close();
        await closed;
      }
      say(said);
      const current = refresh();
      while (next && dialog.open) await new Promise(done => dialog.addEventListener("close", done, {once: true}));
      next?.();
      await current;
      if (!dialog.open) regain(label, home);
    } catch (error) {
      if (form.isConnected) showProblem(form, error);
      else say(error.message);
    } finally {
      busy = false;
      submit.ariaBusy = null;
    }
  });
  cancel.addEventListener("click", () => dialog.close());
  dialog.onclose = () => {
    if (dialog.open) return;  // the event is from an earlier form
    dialog.replaceChildren();  // removes the text of a key, too
    regain(label, home);
  };
  dialog.replaceChildren(form);
  dialog.showModal();
}

// Shows the text of a new key, which is stored nowhere.
function showSecret({key, id}) {
  const copy = element("button", "primary", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    const input = $("field-text");
    input.select();
    try {  // browsers offer the clipboard over HTTPS only
      await navigator.clipboard.writeText(input.value);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    }
  });
  openForm({
    title: `The new key ${id}`, text: "It is shown only now: gateways keep its hash. Copy it before you close this.", home: "keys-title", more: [copy],
    fields: [{name: "text", label: "Key", type: "textarea", rows: 2, value: key, readonly: "", class: "secret", spellcheck: "false", autocomplete: "off"}],
  });
}
