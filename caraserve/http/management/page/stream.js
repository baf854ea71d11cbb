// Asks for one answer and notes it in a step of the conversation as it arrives: text, reasoning, calls, times.

import { lines, post, reasonOf } from "./api.js";

// Browsers open six connections to a server without HTTP/2: one is left for what the page asks meanwhile.
const MOST = 5;
let running = 0;
const queue = [];  // of functions that let one of those go on that wait for another to end

// Waits until fewer than MOST answers arrive. Throws if `signal` is aborted before.
async function begin(signal) {
  if (running < MOST) {
    running += 1;
    return;
  }
  await new Promise((resolve, reject) => {
    queue.push(resolve);
    signal.addEventListener("abort", () => {
      const at = queue.indexOf(resolve);
      if (at === -1) return;
      queue.splice(at, 1);
      reject(signal.reason);
    }, { once: true });
  });
}

function end() {
  if (queue.length) queue.shift()();
  else running -= 1;
}

// Never throws: what goes wrong is noted too. `changed` is called after each event that has a part of the answer, and for a
// long prompt before those, with how much of it is computed.
export async function runStep(step, body, signal, changed) {
  const facts = step.facts;
  let began = performance.now(), first = null, last = null, hasBegun = false;
  try {
    await begin(signal);
    hasBegun = true;
    began = performance.now();
    const answer = await post(step.sent.path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
    facts.instance = answer.headers.get("x-caraserve-instance") ?? undefined;
    facts.version = answer.headers.get("x-caraserve-adapter") ?? undefined;
    facts.ignored = answer.headers.get("x-caraserve-ignored") ?? undefined;
    for await (const line of lines(answer)) {
      if (line.startsWith(": phases ")) facts.phases = phasesIn(line.slice(9));
      if (line.startsWith(": prefill ")) changed(line.slice(2));
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      if (event.usage) noteUsage(facts, event.usage);
      if (!noteChoice(step, event.choices?.[0])) continue;
      last = performance.now();
      facts.ttft_ms ??= (first = last) - began;
      changed();
    }
    if (facts.tokens > 1 && first !== null) facts.tpot_ms = (last - first) / (facts.tokens - 1);
    step.finish ??= "stop";
  } catch (error) {
    if (signal.aborted) step.finish = "stopped";
    else step.error = reasonOf(error);
  } finally {
    if (hasBegun) end();
  }
  facts.total_ms = performance.now() - began;
}

function noteUsage(facts, usage) {
  facts.tokens = usage.completion_tokens;
  facts.prompt_tokens = usage.prompt_tokens;
  facts.cached_tokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
}

// Adds what a choice of an event has; returns whether it has text, reasoning or calls.
function noteChoice(step, choice) {
  const delta = choice?.delta;
  step.finish = choice?.finish_reason ?? step.finish;
  const reasoning = delta?.reasoning_content ?? delta?.reasoning;  // servers send one, or both
  const text = delta?.content ?? choice?.text;
  if (reasoning) step.reasoning += reasoning;
  if (text) step.text += text;
  for (const part of delta?.tool_calls ?? []) {
    const call = step.calls[part.index] ??= { id: part.id, name: "", arguments: "", result: null };
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(reasoning || text || delta?.tool_calls?.length);
}

const phasesIn = text => Object.fromEntries(text.split(";").map(pair => pair.split("=")).map(([name, value]) => [name, Number(value)]));
