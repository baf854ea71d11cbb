// The features of Node's client libraries: node cases.mjs URL prints one line of JSON for each.
import { generateObject, generateText, embed, jsonSchema, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import OpenAI from "openai";

const url = process.argv[2];
const model = "poet";
const question = "How is the weather?";
const schema = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({ name: "caraserve", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const messages = [{ role: "user", content: question }];

function check(value) {
  if (!["Oslo", "Rome"].includes(value.city) || !Number.isInteger(value.days)) throw new Error(JSON.stringify(value));
}

function providerCases(distribution, route, model) {
  const tools = { weather: tool({ description: "The weather.", inputSchema: jsonSchema(schema) }) };
  const fields = { model, tools, toolChoice: "required", prompt: question, maxOutputTokens: 200, maxRetries: 0 };
  const call = { toolCallId: "call_1", toolName: "weather" };
  const history = [
    { role: "user", content: question },
    { role: "assistant", content: [{ type: "tool-call", ...call, input: { city: "Oslo", days: 1 } }] },
    { role: "tool", content: [{ type: "tool-result", ...call, output: { type: "text", value: "It rains." } }] },
  ];
  return [
    [distribution, `${route}: tools, and their results`, async () => {
      check((await generateText(fields)).toolCalls[0].input);
      const answer = await generateText({ model, tools, messages: history, maxOutputTokens: 4, maxRetries: 0 });
      if (answer.usage.outputTokens !== 4) throw new Error(JSON.stringify(answer.usage));
    }],
    [distribution, `${route}: tools, streamed`, async () => {
      check((await streamText(fields).toolCalls)[0].input);
    }],
    [distribution, `${route}: generateObject`, async () => {
      const { tools: _, toolChoice, ...rest } = fields;
      check((await generateObject({ ...rest, schema: jsonSchema(schema) })).object);
    }],
  ];
}

const cases = [
  ["openai", "tools, required", async () => {
    const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
    const answer = await client.chat.completions.create({ model, messages, tools, tool_choice: "required" });
    check(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  }],
  ["openai", "responses, streamed", async () => {
    const stream = await client.responses.create({ model, input: question, stream: true, max_output_tokens: 16 });
    const kinds = [];
    for await (const event of stream) kinds.push(event.type);
    if (kinds.at(-1) !== "response.incomplete") throw new Error(kinds.join(" "));
  }],
  ["openai", "embeddings", async () => {
    const found = await client.embeddings.create({ model, input: "sea" });
    if (!(found.data[0].embedding.length > 0)) throw new Error("no numbers");
  }],
  ["ai", "generateObject", async () => {
    check((await generateObject({ model: provider(model), schema: jsonSchema(schema), prompt: question })).object);
  }],
  ["ai", "tools", async () => {
    const tools = { weather: tool({ description: "The weather.", inputSchema: jsonSchema(schema) }) };
    const answer = await generateText({ model: provider(model), tools, toolChoice: "required", prompt: question });
    check(answer.toolCalls[0].input);
  }],
  ["ai", "tools, streamed", async () => {
    const tools = { weather: tool({ description: "The weather.", inputSchema: jsonSchema(schema) }) };
    const stream = streamText({ model: provider(model), tools, toolChoice: "required", prompt: question });
    check((await stream.toolCalls)[0].input);
  }],
  ["ai", "embed", async () => {
    const found = await embed({ model: provider.textEmbeddingModel(model), value: "sea" });
    if (!(found.embedding.length > 0)) throw new Error("no numbers");
  }],
  ...providerCases("@ai-sdk/openai", "responses", createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).responses(model)),
  ...providerCases("@ai-sdk/anthropic", "messages", createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model)),
];

for (const [distribution, feature, run] of cases) {
  let error = null;
  try {
    await run();
  } catch (problem) {
    error = String(problem.message ?? problem).split("\n")[0];
  }
  console.log(JSON.stringify({ distribution, feature, error }));
}
