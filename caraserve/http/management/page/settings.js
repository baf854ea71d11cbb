// How prompts are sent: as chat or text, the system prompt, samplers, tools, a JSON schema. An empty field is not sent, so
// that the adapter's default applies, then the model's.

import { button, byId, choices, element, field } from "./text.js";

const NUMBERS = [  // of vLLM's names and ranges
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }],
  ["max_tokens", "Max. tokens", { min: 1, step: 1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: "any" }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: "any" }],
  ["repetition_penalty", "Repetition penalty", { min: 0, max: 2, step: "any" }]
];
const ROUTES = [["chat", "chat messages"], ["text", "plain text, which goes on"]];
const EFFORTS = [["", "as the model does"], ["none", "none"], ["low", "low"], ["medium", "medium"], ["high", "high"]];
const CHOICES = [["auto", "if the model wants to"], ["required", "always"], ["none", "never"]];
const TOOLS = [{
  type: "function",
  function: {
    name: "look_up",
    description: "Looks up a topic.",
    parameters: { type: "object", properties: { topic: { enum: ["cats", "bread", "the sea"] } }, required: ["topic"] }
  }
}];
const SCHEMA = {
  type: "object",
  properties: { topic: { type: "string" }, kind: { type: "string" }, answer: { type: "array", items: { type: "string" } } },
  required: ["topic", "kind", "answer"]
};

export class Settings {
  #fields = new Map();
  #reveal;

  // `changed` is called after each change, `reveal` before a field with a wrong value is named.
  constructor(changed, reveal) {
    this.#reveal = reveal;
    const form = byId("settings-form");
    form.append(
      this.#add("route", "select", "Send prompts as"), this.#add("system", "textarea", "System prompt", { rows: 3 }),
      element("div", "numbers", ...NUMBERS.map(([name, label, range]) =>
        this.#add(name, "input", label, { type: "number", placeholder: "default", ...range }))),
      this.#add("stop", "textarea", "Stop strings, one on a line; \\n is a line's end", { rows: 2, spellcheck: false }),
      this.#add("reasoning_effort", "select", "Reasoning"),
      this.#part("Tools", this.#add("tools", "textarea", "Functions that may be called, as JSON", { rows: 6, spellcheck: false }),
        this.#add("tool_choice", "select", "Call one"),
        this.#add("several_calls", "input", "Several calls in one answer", { type: "checkbox" }), this.#example("tools", TOOLS)),
      this.#part("JSON schema", this.#add("schema", "textarea", "Schema that answers follow", { rows: 6, spellcheck: false }),
        this.#example("schema", SCHEMA)),
      this.#add("plain", "input", "Show answers as they are, without Markdown", { type: "checkbox" }),
      button("Defaults", () => {
        this.values = {};
        changed();
      })
    );
    choices(this.#field("route"), ROUTES);
    choices(this.#field("reasoning_effort"), EFFORTS);
    choices(this.#field("tool_choice"), CHOICES);
    form.addEventListener("input", event => {
      event.target.setCustomValidity("");
      if (event.target === this.#field("tools")) this.#offerFunctions();
      changed();
    });
    form.addEventListener("submit", event => event.preventDefault());
  }

  get values() {
    return Object.fromEntries([...this.#fields].map(([name, one]) => [name, one.type === "checkbox" ? one.checked : one.value]));
  }

  set values(values) {
    for (const [name, one] of this.#fields) {
      if (one.type === "checkbox") one.checked = Boolean(values[name]);
      else if (one.tagName === "SELECT" && !(name in values)) one.selectedIndex = 0;
      else if (name !== "tool_choice") one.value = values[name] ?? "";
      one.setCustomValidity("");
    }
    this.#offerFunctions(values.tool_choice ?? CHOICES[0][0]);
  }

  // What the server says that it can: the longest context, and whether the model has a chat template.
  limit(mostTokens, canChat) {
    this.#field("max_tokens").max = mostTokens;
    if (!canChat) this.#field("route").value = "text";
  }

  get isPlain() { return this.#field("plain").checked; }

  // The path, the system prompt and the fields of a request; null if a value is wrong, which the browser then names.
  sent() {
    const isChat = this.#field("route").value === "chat", fields = {};
    for (const [name] of NUMBERS) if (this.#field(name).value !== "") fields[name] = this.#field(name).valueAsNumber;
    const stop = this.#field("stop").value.split("\n").filter(Boolean).map(one => one.replaceAll("\\n", "\n"));
    if (stop.length) fields.stop = stop;
    const tools = isChat ? this.#json("tools", Array.isArray, "a list of functions") : undefined;
    const schema = this.#json("schema", value => typeof value === "object" && value !== null, "an object");
    if (tools?.length) Object.assign(fields, { tools, tool_choice: this.#chosen(), parallel_tool_calls: this.#field("several_calls").checked });
    if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    if (isChat && this.#field("reasoning_effort").value) fields.reasoning_effort = this.#field("reasoning_effort").value;
    if (!byId("settings-form").checkValidity()) {
      this.#reveal();
      byId("settings-form").querySelector(":invalid").closest("details")?.setAttribute("open", "");
      byId("settings-form").reportValidity();
      return null;
    }
    return { path: isChat ? "v1/chat/completions" : "v1/completions", system: isChat ? this.#field("system").value.trim() : "", fields };
  }

  #field(name) { return this.#fields.get(name); }

  #add(name, tag, label, properties = {}) {
    const [node, made] = field(tag, label, { name, ...properties });
    if (properties.type === "checkbox") node.classList.add("box");
    this.#fields.set(name, made);
    return node;
  }

  #part(title, ...nodes) { return element("details", "", element("summary", "", title), ...nodes); }

  #example(name, value) {
    return button("Insert an example", () => {
      this.#field(name).value = JSON.stringify(value, null, 2);
      this.#field(name).dispatchEvent(new Event("input", { bubbles: true }));
    }, `Insert an example of ${name === "tools" ? "a function" : "a schema"}`);
  }

  // The value of a field with JSON; undefined if it is empty or wrong, and then the field says so.
  #json(name, isRight, wanted) {
    const one = this.#field(name);
    if (!one.value.trim()) return undefined;
    try {
      const value = JSON.parse(one.value);
      if (isRight(value)) return value;
      one.setCustomValidity(`This must be ${wanted}.`);
    } catch (error) {
      one.setCustomValidity(`This is no JSON: ${error.message}`);
    }
    return undefined;
  }

  // "Call one" also has the names of the functions.
  #offerFunctions(chosen = this.#field("tool_choice").value) {
    let names = [];
    try {
      names = JSON.parse(this.#field("tools").value).map(tool => tool.function.name);
    } catch { /* it is still being typed */ }
    choices(this.#field("tool_choice"), [...CHOICES, ...names.map(name => [`call ${name}`, `always ${name}`])], chosen);
  }

  #chosen() {
    const value = this.#field("tool_choice").value;
    return value.startsWith("call ") ? { type: "function", function: { name: value.slice(5) } } : value;
  }
}
