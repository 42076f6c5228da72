// What the SDKs make of the server's answers: plain, streams, helpers, tools, errors, cancellation.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const url = process.argv[2].replace(/\/$/, "");
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const answer = "It is three.";
const schema = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const model = "small";
const messages = [{ role: "user", content: "What is one and two?" }];
const many = [{ role: "user", content: "Say many words." }];
let failed = 0;

async function attempt(name, work) {
  try {
    await work();
    console.log(`ok      ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`failed  ${name}: ${error.name}: ${String(error.message).slice(0, 300)} ${String(error.cause ?? "").slice(-500)}`);
  }
}

async function three(stream) {
  let seen = 0;
  for await (const _ of stream) if (++seen === 3) break;
  stream.controller?.abort();
}

const chatTools = [{ type: "function", function: { name: "add", parameters: schema } }];
await attempt("openai chat: plain", async () => {
  const got = await openai.chat.completions.create({ model, messages });
  assert.equal(got.choices[0].message.content, answer);
});
await attempt("openai chat: stream helper, tools", async () => {
  const got = await openai.chat.completions.stream({ model, messages, tools: chatTools }).finalChatCompletion();
  assert.equal(got.choices[0].finish_reason, "tool_calls");
  assert.deepEqual(JSON.parse(got.choices[0].message.tool_calls[0].function.arguments), { a: 1, b: 2 });
});
await attempt("openai chat: runTools", async () => {
  const add = { name: "add", parameters: schema, parse: JSON.parse, function: ({ a, b }) => String(a + b) };
  const runner = openai.chat.completions.runTools({ model, messages, tools: [{ type: "function", function: add }] });
  assert.equal(await runner.finalContent(), answer);
});
await attempt("openai chat: custom tool", async () => {
  const custom = [{ type: "custom", custom: { name: "add", description: "Adds." } }];
  const got = await openai.chat.completions.create({ model, messages, tools: custom });
  const { message } = got.choices[0];
  assert.deepEqual(message.tool_calls[0].custom, { name: "add", input: '{"a": 1, "b": 2}' });
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "3" };
  const last = await openai.chat.completions.create({ model, messages: [...messages, message, result], tools: custom });
  assert.equal(last.choices[0].message.content, answer);
});
await attempt("openai chat: error", () =>
  assert.rejects(openai.chat.completions.create({ model, messages: [] }), { status: 400, param: "$.messages" }));
await attempt("openai chat: cancelled", async () =>
  three(await openai.chat.completions.create({ model, messages: many, stream: true })));

const tools = [{ type: "function", name: "add", parameters: schema, strict: false }];
const input = messages[0].content;
await attempt("openai responses: plain", async () => {
  const got = await openai.responses.create({ model, input });
  assert.equal(got.output_text, answer);
  assert.equal((await openai.responses.retrieve(got.id)).output_text, answer);
});
await attempt("openai responses: stream helper, tools, goes on by its id", async () => {
  const got = await openai.responses.stream({ model, input, tools }).finalResponse();
  assert.deepEqual(got.output.map((item) => item.type), ["reasoning", "message", "function_call"]);
  const call = got.output[2];
  const output = [{ type: "function_call_output", call_id: call.call_id, output: "3" }];
  const last = await openai.responses.create({ model, input: output, previous_response_id: got.id, tools });
  assert.equal(last.output_text, answer);
});
await attempt("openai responses: error", () =>
  assert.rejects(openai.responses.create({ model, input: [{ role: "poem", content: "" }] }), { status: 400, param: "$.input[0].role" }));
await attempt("openai responses: compacted, goes on from the summary", async () => {
  const got = await openai.responses.compact({ model, input: [...messages, { role: "assistant", content: answer }] });
  assert.deepEqual(got.output.map((item) => item.type), ["message", "compaction"]);
  const last = await openai.responses.create({ model, input: [...got.output, ...messages] });
  assert.equal(last.output_text, answer);
});
await attempt("openai responses: cancelled", async () =>
  three(await openai.responses.create({ model, input: many[0].content, stream: true })));

const claude = { model, max_tokens: 3000 };
const described = [{ name: "add", input_schema: schema }];
await attempt("anthropic: plain", async () => {
  const got = await anthropic.messages.create({ ...claude, messages });
  assert.equal(got.content[0].text, answer);
});
await attempt("anthropic: stream helper, tools, result", async () => {
  const got = await anthropic.messages.stream({ ...claude, messages, tools: described }).finalMessage();
  assert.deepEqual(got.content.map((block) => block.type), ["thinking", "text", "tool_use"]);
  assert.deepEqual(got.content[2].input, { a: 1, b: 2 });
  const result = { type: "tool_result", tool_use_id: got.content[2].id, content: "3" };
  const turns = [...messages, { role: "assistant", content: got.content }, { role: "user", content: [result] }];
  const last = await anthropic.messages.create({ ...claude, messages: turns, tools: described });
  assert.equal(last.content[0].text, answer);
});
await attempt("anthropic: count_tokens, models", async () => {
  const count = await anthropic.messages.countTokens({ model, messages });
  const { usage } = await anthropic.messages.create({ ...claude, messages });
  const counted = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  assert.equal(counted, count.input_tokens);
  const listed = [];
  for await (const one of anthropic.models.list()) listed.push(one.id);
  assert.deepEqual(listed, [model]);
});
await attempt("anthropic: error", () =>
  assert.rejects(anthropic.messages.create({ ...claude, messages: [] }), (error) =>
    error.status === 400 && error.error.error.type === "invalid_request_error"));
await attempt("anthropic: cancelled", async () =>
  three(await anthropic.messages.create({ ...claude, messages: many, stream: true })));

const add = tool({
  description: "Adds.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const own = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = {
  "chat": own.chat(model),
  "responses": own.responses(model),
  "messages": createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model),
};
for (const [name, chosen] of Object.entries(models)) {
  const asked = { model: chosen, prompt: input, tools: { add }, stopWhen: stepCountIs(3), maxOutputTokens: 3000, maxRetries: 0 };
  await attempt(`vercel ${name}: tool loop`, async () => {
    const got = await generateText(asked);
    assert.equal(got.text, answer);
    assert.equal(got.steps.length, 2);
  });
  await attempt(`vercel ${name}: tool loop, streamed`, async () => {
    const errors = [];
    const got = streamText({ ...asked, onError: ({ error }) => errors.push(error) });
    let text = "";
    for await (const piece of got.textStream) text += piece;
    assert.deepEqual(errors, []);
    assert.ok(text.endsWith(answer));
  });
}
const installed = ["openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic"];
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8")).version;
console.log(`${failed} failed; ${installed.map((name) => `${name} ${version(name)}`).join(", ")}, node ${process.version}`);
process.exit(failed ? 1 : 0);
