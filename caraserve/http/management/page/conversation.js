// A conversation: its turns, with the answers of several adapters to each, and what is sent to an adapter for the next.
//
// A turn has a prompt and answers. An answer has the name of an adapter and steps: the first one answers the prompt, each
// later one the results of the calls in the step before.

const TITLE_CHARACTERS = 60;

export const newConversation = (names, settings) =>
  ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), changed_ms: Date.now(), names: [...names], settings: { ...settings }, turns: [] });

export const titleOf = ({ turns }) => turns[0]?.prompt.trim().slice(0, TITLE_CHARACTERS) || "New conversation";

export const newAnswer = name => ({ name, steps: [] });

// `sent`: the path, the system prompt and the fields of the request, without the conversation.
export const newStep = sent => ({ text: "", reasoning: "", calls: [], finish: null, error: null, facts: {}, sent });

const hasText = answer => answer.steps.some(step => step.text || step.reasoning || step.calls.length);

// What an adapter sees of a turn: its own answer, or the first one of others if it has none.
function seenBy(name, turn) {
  const answers = turn.answers.filter(hasText);
  return answers.find(answer => answer.name === name) ?? answers[0];
}

// The body of the request that makes the step `at` of an answer, to the last of `turns`.
export function bodyOf(turns, answer, at) {
  const { path, system, fields } = answer.steps[at].sent, model = answer.name;
  if (path.endsWith("chat/completions")) return { model, messages: messagesOf(turns, answer, at, system), ...fields };
  return { model, prompt: textOf(turns, answer), ...fields };
}

function messagesOf(turns, answer, at, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns.slice(0, -1)) {
    const seen = seenBy(answer.name, turn);
    if (seen) messages.push({ role: "user", content: turn.prompt }, ...seen.steps.flatMap(messagesOfStep));
  }
  return [...messages, { role: "user", content: turns.at(-1).prompt }, ...answer.steps.slice(0, at).flatMap(messagesOfStep)];
}

function messagesOfStep({ text, reasoning, calls }) {
  if (!text && !reasoning && !calls.length) return [];
  const message = { role: "assistant", content: text };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls.length) {
    message.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return [message, ...calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }))];
}

// As plain text, each prompt goes on where the answer to the one before has ended.
function textOf(turns, answer) {
  const before = turns.slice(0, -1).map(turn => {
    const seen = seenBy(answer.name, turn);
    return seen ? turn.prompt + seen.steps.map(step => step.text).join("") : "";
  });
  return [...before, turns.at(-1).prompt].join("");
}
