// The Vercel AI SDK against a server that runs: through its OpenAI-compatible provider, the Responses API and
// the Messages API. SCRIPTED is a server whose model says what the question asks for; LIVE has a real model.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const { SCRIPTED, LIVE } = process.env;
const MODEL = "tiny";

const compatible = (url) =>
  createOpenAICompatible({
    name: "plait", baseURL: url + "/v1", apiKey: "k", includeUsage: true, supportsStructuredOutputs: true,
  })(MODEL);
const responses = (url) => createOpenAI({ baseURL: url + "/v1", apiKey: "k" }).responses(MODEL);
const messages = (url) => createAnthropic({ baseURL: url + "/v1", apiKey: "k" })(MODEL);

// Options without which a provider sends what only its own cloud serves, or does not ask for thinking.
const own = {
  openai: { store: false, reasoningSummary: "auto", forceReasoning: true },
  anthropic: { thinking: { type: "enabled", budgetTokens: 50 } },
};
const providers = { compatible, responses, messages };
const each = (name, run) => {
  for (const [kind, make] of Object.entries(providers)) test(`${kind}: ${name}`, () => run(make, kind));
};

const weather = (calls) =>
  tool({
    description: "The weather of the coming days.",
    inputSchema: z.object({ city: z.string(), days: z.number().int() }),
    execute: async (input) => {
      calls.push(input);
      return { forecast: "sunny" };
    },
  });
const asked = { prompt: "What is the weather?", providerOptions: own, maxRetries: 0 };

each("a chat with reasoning and usage", async (make) => {
  const result = await generateText({ ...asked, model: make(SCRIPTED), prompt: "Say hello." });
  assert.equal(result.text, "Hello, wörld! 👋");
  assert.equal(result.reasoningText, "I should greet.");
  assert.equal(result.finishReason, "stop");
  assert.ok(result.usage.inputTokens > 10);
  assert.ok(result.usage.outputTokens > 30);
});

each("a stream is the whole, piece by piece", async (make) => {
  const result = streamText({ ...asked, model: make(SCRIPTED), prompt: "Say hello." });
  const pieces = { text: [], reasoning: [] };
  for await (const part of result.fullStream) {
    if (part.type === "text-delta") pieces.text.push(part.text);
    if (part.type === "reasoning-delta") pieces.reasoning.push(part.text);
    assert.notEqual(part.type, "error", JSON.stringify(part));
  }
  assert.equal(pieces.text.join(""), "Hello, wörld! 👋");
  assert.equal(pieces.reasoning.join(""), "I should greet.");
  assert.ok(pieces.text.length > 5 && pieces.reasoning.length > 5);
  assert.equal(await result.finishReason, "stop");
  assert.ok((await result.usage).outputTokens > 30);
});

each("a tool is called, its result goes back, and the answer follows", async (make) => {
  const calls = [];
  const tools = { get_weather: weather(calls) };
  const result = await generateText({ ...asked, model: make(SCRIPTED), tools, stopWhen: isStepCount(4) });
  assert.deepEqual(calls, [{ city: "São Paulo", days: 3 }]);
  assert.equal(result.steps.length, 2);
  assert.equal(result.steps[0].finishReason, "tool-calls");
  assert.equal(result.steps[0].text, "Let me see.");
  assert.equal(result.text, "It will be sunny.");
});

each("a tool's arguments stream", async (make) => {
  const calls = [];
  const tools = { get_weather: weather(calls) };
  const result = streamText({ ...asked, model: make(SCRIPTED), tools, stopWhen: isStepCount(4) });
  const grown = [];
  for await (const part of result.fullStream) {
    if (part.type === "tool-input-delta") grown.push(part.delta);
    assert.notEqual(part.type, "error", JSON.stringify(part));
  }
  assert.deepEqual(JSON.parse(grown.join("")), { city: "São Paulo", days: 3 });
  assert.ok(grown.length > 5);
  assert.deepEqual(calls, [{ city: "São Paulo", days: 3 }]);
  assert.equal(await result.text, "It will be sunny.");
});

each("errors say what was wrong, and are not tried again where that is in vain", async (make) => {
  const tools = { "the weather": weather([]) };
  const wrong = { ...asked, model: make(SCRIPTED), maxRetries: 2, tools };
  await assert.rejects(generateText(wrong), (fault) => {
    assert.ok(APICallError.isInstance(fault), String(fault));
    assert.equal(fault.statusCode, 400);
    assert.equal(fault.isRetryable, false);
    assert.match(fault.message, /name must be letters, digits/);
    return true;
  });
});

// -- a real model, whose weights are random: what it says is its own, what it must be is not ----------

const Report = z.object({ city: z.string().max(20), days: z.number().int().min(0).max(9), wet: z.boolean() });

for (const [kind, make] of Object.entries({ compatible, responses })) {
  test(`${kind}: structured output parses`, async () => {
    const output = Output.object({ schema: Report, name: "report" });
    const given = { ...asked, model: make(LIVE), maxOutputTokens: 2000, output, temperature: 1, seed: 5 };
    const result = await generateText(given);
    assert.ok(Report.safeParse(result.output).success, JSON.stringify(result.output));
    const stream = streamText(given);
    let last;
    for await (const partial of stream.partialOutputStream) last = partial;
    assert.ok(Report.safeParse(last).success, JSON.stringify(last));
  });
}

each("a call that is required comes, with arguments that fit", async (make, kind) => {
  const calls = [];
  const inputSchema = z.object({ city: z.enum(["Rome", "Oslo"]), days: z.number().int().min(0).max(9) });
  const tools = { get_weather: { ...weather(calls), inputSchema } };
  const given = { ...asked, model: make(LIVE), tools, toolChoice: "required", maxOutputTokens: 600 };
  if (kind === "messages") given.providerOptions = {}; // Anthropic's own service takes no forced call with thinking
  const result = await generateText(given);
  assert.ok(result.toolCalls.length >= 1);
  assert.ok(result.toolCalls.every((call) => inputSchema.safeParse(call.input).success));
  assert.deepEqual(calls, result.toolCalls.map((call) => call.input));
  assert.equal(result.finishReason, "tool-calls");
});

test("compatible: a stream that is given up ends, and the server goes on", async () => {
  const stop = new AbortController();
  const given = { ...asked, model: compatible(LIVE), maxOutputTokens: 3000, abortSignal: stop.signal };
  const result = streamText({ ...given, onError: () => {} });
  let parts = 0;
  for await (const part of result.fullStream) {
    if (part.type.endsWith("-delta")) parts += 1;
    if (parts === 3) stop.abort();
  }
  assert.ok(parts >= 3 && parts < 3000);
  const again = await generateText({ ...asked, model: compatible(LIVE), maxOutputTokens: 5 });
  assert.equal(again.usage.outputTokens, 5);
});

test("compatible: an unknown model is a 404 that names the one that is served", async () => {
  const other = createOpenAICompatible({ name: "plait", baseURL: LIVE + "/v1", apiKey: "k" })("other");
  await assert.rejects(generateText({ ...asked, model: other }), (fault) => {
    assert.equal(fault.statusCode, 404);
    assert.match(fault.message, /'other' is not served here; this server has 'tiny'/);
    return true;
  });
});
