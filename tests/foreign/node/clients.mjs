// `node clients.mjs URL MODEL`: what each client makes of the server's answers, as one JSON object.
// Everything is greedy and short, so that texts can be compared.

import Anthropic from "@anthropic-ai/sdk";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const limits = { temperature: 0, maxOutputTokens: 40, maxRetries: 0 };
const hello = [{ role: "user", content: "Hello" }];

async function aiSdk() {
  let sent;
  const watched = (address, init) => {
    sent = JSON.parse(init.body);
    return fetch(address, init);
  };
  const provider = createOpenAI({ ...options, fetch: watched });
  const told = {};
  // The provider's own default is the Responses API.
  for (const [name, language] of [
    ["responses", provider(model)],
    ["chat", provider.chat(model)],
  ]) {
    const first = await generateText({ model: language, messages: hello, ...limits });
    const messages = [...hello, ...first.responseMessages, { role: "user", content: "And?" }];
    const second = await generateText({ model: language, messages, ...limits });
    const stream = streamText({ model: language, messages, ...limits });
    let streamed = "";
    for await (const text of stream.textStream) streamed += text;
    told[name] = {
      first: first.text,
      second: second.text,
      streamed,
      inputTokens: [second.usage.inputTokens, (await stream.usage).inputTokens],
      references: (sent.input ?? []).filter(({ type }) => type === "item_reference").length,
    };
  }
  const gone = { type: "text", text: "x", providerOptions: { openai: { itemId: "msg_gone" } } };
  const messages = [{ role: "assistant", content: [gone] }, ...hello];
  told.unknownItem = await generateText({ model: provider(model), messages, ...limits }).then(
    () => "answered",
    (error) => error.statusCode,
  );
  return told;
}

async function openai() {
  const client = new OpenAI({ ...options, maxRetries: 0 });
  const asked = { model, messages: hello, max_tokens: 40, temperature: 0 };
  const chat = await client.chat.completions.create(asked);
  let chatStreamed = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
    chatStreamed += chunk.choices[0]?.delta?.content ?? "";
  const wish = { model, input: "Hello", max_output_tokens: 40, temperature: 0 };
  const response = await client.responses.create(wish);
  const stream = client.responses.stream(wish);
  let streamed = "";
  stream.on("response.output_text.delta", (event) => (streamed += event.delta));
  const final = await stream.finalResponse();
  const items = await client.responses.inputItems.list(response.id);
  const counted = await client.responses.inputTokens.count({ model, input: "Hello" });
  const replayed = [];
  for await (const event of await client.responses.retrieve(final.id, { stream: true }))
    replayed.push(event.type);
  const missing = await client.responses.retrieve("resp_none").catch((error) => error.status);
  return {
    chat: chat.choices[0].message.content,
    chatStreamed,
    response: response.output_text,
    streamed,
    final: final.output_text,
    items: items.data.map((item) => item.content[0].text),
    inputTokens: [response.usage.input_tokens, counted.input_tokens],
    replayed: [replayed[0], replayed.at(-1)],
    missing,
  };
}

async function anthropic() {
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const asked = { model, messages: hello, max_tokens: 40, temperature: 0 };
  const message = await client.messages.create(asked);
  const stream = client.messages.stream(asked);
  let streamed = "";
  stream.on("text", (text) => (streamed += text));
  const final = await stream.finalMessage();
  const counted = await client.messages.countTokens({ model, messages: hello });
  const refused = await client.messages
    .create({ ...asked, model: "nope" })
    .catch((error) => [error.status, error.error.error.type, error.requestID === error.error.request_id]);
  const used = ({ usage }) =>
    usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  return {
    text: message.content[0].text,
    streamed,
    final: final.content[0].text,
    inputTokens: [used(message), used(final), counted.input_tokens],
    refused,
  };
}

console.log(
  JSON.stringify({ aiSdk: await aiSdk(), openai: await openai(), anthropic: await anthropic() }),
);
