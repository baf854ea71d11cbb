// One answer in the comparison: its text as it arrives, its times, and what the server says of its phases.

import { lines, post, reasonOf } from "./api.js";
import { count, duration, element } from "./text.js";

const PHASES = ["queued", "load", "prefill", "decode"];  // one after another; the others overlap with them

export class Answer {
  constructor(name, tier) {
    this.name = name;
    this.card = element("article");
    const heading = element("h3", "", name);
    this.status = element("p", "soft", tier);
    this.text = element("div", "text");
    this.text.tabIndex = 0;
    this.reasoning = element("div", "reasoning soft");
    this.reasoning.hidden = true;
    this.words = element("div");
    this.text.append(this.reasoning, this.words);
    this.facts = element("dl");
    this.bar = element("div", "phases");
    this.bar.setAttribute("aria-hidden", "true");  // the list of facts has the same
    this.tier = tier;
    this.card.append(heading, this.status, this.text, this.facts, this.bar);
  }

  async run(path, body, signal) {
    const began = performance.now();
    let first = null, last = null, tokens = null, phases = "", finish = null;
    this.card.setAttribute("aria-busy", "true");
    try {
      const answer = await post(path, body, signal);
      const instance = answer.headers.get("x-caraserve-instance");
      if (instance) this.tier += `, answered by ${instance}`;
      this.#say("answering");
      for await (const line of lines(answer)) {
        if (line.startsWith(": phases ")) phases = line.slice(9);
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Error(event.error.message);
        tokens = event.usage?.completion_tokens ?? tokens;
        const choice = event.choices?.[0], delta = choice?.delta;
        finish = choice?.finish_reason ?? finish;
        const reasoning = delta?.reasoning_content ?? delta?.reasoning;  // servers send one, or both
        const piece = delta?.content ?? choice?.text;
        if (!reasoning && !piece) continue;
        last = performance.now();
        if (first === null) this.#fact("TTFT", duration((first = last) - began));
        if (reasoning) {
          this.reasoning.hidden = false;
          this.reasoning.append(reasoning);
        }
        if (piece) this.words.append(piece);
      }
      if (tokens > 1) this.#fact("TPOT", duration((last - first) / (tokens - 1)));
      if (tokens !== null) this.#fact("tokens", count(tokens));
      this.#fact("total", duration(performance.now() - began));
      if (phases) this.#showPhases(phases);
      this.#say(finish === "length" ? "cut off at max. tokens" : "complete");
    } catch (error) {
      if (signal.aborted) this.#say("stopped");
      else this.#fail(reasonOf(error));
    }
    this.card.removeAttribute("aria-busy");
  }

  #say(state) {
    this.status.textContent = `${this.tier} · ${state}`;
  }

  #fail(message) {
    this.status.className = "bad";
    this.status.textContent = message;
  }

  #fact(name, value) {
    const fact = element("div");
    fact.append(element("dt", "", name), element("dd", "", value));
    this.facts.append(fact);
  }

  #showPhases(text) {
    const phases = new Map(text.split(";").map(pair => pair.split("=")).map(([name, value]) => [name, Number(value)]));
    for (const name of PHASES) {
      const part = element("i", name);
      part.style.flexGrow = phases.get(name) || 0;
      this.bar.append(part);
      this.#fact(name, duration(phases.get(name)));
    }
    if (phases.get("stalled")) this.#fact("waited for its weights", duration(phases.get("stalled")));
    if (phases.get("interrupted")) this.#fact("waited for others' loads", duration(phases.get("interrupted")));
    if (phases.get("cpu_layers")) this.#fact("layers computed by CPU workers", count(phases.get("cpu_layers")));
  }
}
