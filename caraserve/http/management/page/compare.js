// The form that sends one prompt to several adapters at once.

import { Answer } from "./answer.js";
import { tierOf } from "./api.js";
import { byId, element } from "./text.js";

const MOST = 8;

export class Comparison {
  #running = null;  // the AbortController of the answers under way
  #changed;

  constructor(changed) {
    this.base = null;
    this.names = new Set();
    this.#changed = changed;
    byId("compare").addEventListener("submit", event => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("compare").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.#running?.abort());
  }

  get isFull() { return this.names.size >= MOST; }

  // Chooses the base model and some adapters, once, unless the user has chosen already.
  begin(base, adapters) {
    if (this.base !== null) return;
    this.base = base;
    for (const name of [base, ...adapters.slice(0, 3)]) this.names.add(name);
    this.#show();
  }

  choose(name, chosen) {
    if (chosen && !this.isFull) this.names.add(name);
    if (!chosen) this.names.delete(name);
    this.#show();
  }

  #show() {
    byId("chosen").replaceChildren(...[...this.names].map(name => {
      const item = element("li", "", name), remove = element("button", "", "×");
      remove.type = "button";
      remove.setAttribute("aria-label", `Leave out ${name}`);
      remove.addEventListener("click", () => {
        this.choose(name, false);
        byId("prompt").focus();  // the button is gone
      });
      item.append(remove);
      return item;
    }));
    byId("send").disabled = this.#running !== null || this.names.size === 0;
    byId("stop").disabled = this.#running === null;
    this.#changed();
  }

  async #send() {
    if (this.#running || !this.names.size) return;
    const running = this.#running = new AbortController();
    this.#show();
    const path = byId("route").value, prompt = byId("prompt").value;
    const common = {
      max_tokens: byId("max-tokens").valueAsNumber, temperature: byId("temperature").valueAsNumber,
      stream: true, stream_options: { include_usage: true },
      ...(path.includes("chat") ? { messages: [{ role: "user", content: prompt }] } : { prompt })
    };
    const answers = await Promise.all([...this.names].map(async name => new Answer(name, await this.#origin(name))));
    byId("answers").replaceChildren(...answers.map(answer => answer.card));
    await Promise.all(answers.map(answer => answer.run(path, { model: answer.name, ...common }, running.signal)));
    this.#running = null;
    this.#show();
  }

  // Where an adapter is just before the prompt is sent.
  async #origin(name) {
    if (name === this.base) return "base model";
    try {
      return `from ${await tierOf(name)}`;
    } catch {
      return "tier unknown";
    }
  }
}
