// What the openai package for Node does against a Headway: URL, printed as one JSON object.
import { createRequire } from "node:module";

const [folder, url] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai").default;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const ask = { model: "smollm2", max_tokens: 8, messages: [{ role: "user", content: "Hi." }] };
const respond = { model: "smollm2", max_output_tokens: 8, input: "Hi." };

const chat = await client.chat.completions.create(ask);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const first = await client.responses.create(respond);
const next = await client.responses.create({ ...respond, previous_response_id: first.id });
let events = "";
for await (const event of await client.responses.create({ ...respond, stream: true })) {
  if (event.type === "response.output_text.delta") events += event.delta;
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
console.log(JSON.stringify({
  chat: chat.choices[0].message.content,
  stream: streamed,
  responses: next.output_text,
  "responses stream": events,
  models,
}));
