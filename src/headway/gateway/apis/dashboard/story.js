// Why a request was late: what `headway explain` says of it.
const SHOWN = 40;  // stretches of a timeline, the longest ones
const STATES = {outside: "--amber", waiting: "--sky", prefill: "--blue", running: "--green", paused: "--pink"};
const shadeOf = state => `var(${STATES[state] ?? "--orange"})`;

function explainable(id, since) {
  const button = element("button", "id", id);
  button.type = "button";
  button.title = "Why was it late?";
  button.addEventListener("click", () => explain(id, since));
  return button;
}

async function explain(id, since) {
  const query = new URLSearchParams({id, ...since && {since}});
  $("story-id").textContent = id;
  $("verdict").textContent = "Reading the journal.";
  $("about").textContent = "";
  $("details").hidden = true;
  if (!$("story").open) $("story").showModal();
  const answer = await ask(`headway/explain?${query}`).then(response => {
    if (response.status === 401) $("asks").hidden = false;
    return response.json();
  }).catch(error => ({error}));
  if ($("story-id").textContent !== id) return;  // another one is wanted by now
  if (answer.error) $("verdict").textContent = answer.error.message;
  else showStory(answer);
}

function showStory(story) {
  const took = story.latency || 1, after = story.after_first_token, before = story.before_first_token;
  const longest = [...story.timeline].sort((a, b) => b.seconds - a.seconds).slice(0, SHOWN), left = story.timeline.length - longest.length;
  $("verdict").textContent = story.verdict;
  $("about").textContent = `${story.placement} Recipe ${story.recipe}; ${whole(story.prompt_tokens)} tokens in, ${whole(story.output_tokens)} out; `
    + `arrived at ${clock(story.began + story.arrival, true)}, took ${seconds(story.latency)}.`;
  fill("states", Object.entries(story.seconds).map(([state, s]) => [
    cell(state), cell(s.toFixed(3), "n"), cell(bar([[s / took, shadeOf(state)]], `${Math.round(100 * s / took)} %`)),
    cell((before[state] ?? 0).toFixed(3), "n"), cell((after[state] ?? 0).toFixed(3), "n"),
  ]));
  fill("spans", story.timeline.filter(span => longest.includes(span)).map(span => [
    cell(span.state), cell((span.start - story.arrival).toFixed(3), "n"), cell(span.seconds.toFixed(3), "n"), cell(span.because, "long"),
  ]));
  $("short").textContent = left ? `${whole(left)} shorter stretches are left out.` : "";
  $("details").hidden = false;
}
