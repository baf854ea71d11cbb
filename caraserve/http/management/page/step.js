// One step of an answer: its reasoning, its text as it arrives, the calls it makes, and its times.

import { MarkdownView } from "./markdown.js";
import { button, count, counted, duration, element, facts, field } from "./text.js";

const PAUSE_MS = 100;  // between two drawings of a text that grows
const PHASES = ["queued", "load", "prefill", "decode"];  // one after another; the others overlap with them

export class StepView {
  #step;
  #timer = null;
  #words;
  #reasoning = element("div", "reasoning");
  #reasoned = element("summary");
  #folded;
  #calls = element("div", "calls");
  #facts = element("div", "facts");
  #sendResults;

  // `isPlain`: the text is shown as it is, without Markdown. `sendResults` is called when the results of calls are there.
  constructor(step, isPlain, sendResults) {
    this.#step = step;
    this.#sendResults = sendResults;
    this.#words = isPlain ? new PlainView() : new MarkdownView();
    this.#reasoning.tabIndex = 0;
    this.#folded = element("details", "", this.#reasoned, this.#reasoning);
    this.node = element("div", "step", this.#folded, this.#words.node, this.#calls, this.#facts);
    this.#draw();
  }

  // Draws what has arrived, soon.
  later() {
    this.#timer ??= setTimeout(() => this.#draw(), PAUSE_MS);
  }

  // Draws the whole step; `canAnswer`: whether results of its calls may still be sent.
  end(canAnswer) {
    this.#draw();
    this.#drawCalls(canAnswer);
    this.#drawFacts();
  }

  #draw() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const { text, reasoning } = this.#step;
    this.#folded.hidden = !reasoning;
    if (reasoning !== this.#reasoning.textContent) {
      this.#reasoning.textContent = reasoning;
      this.#reasoned.textContent = `Reasoning, ${counted(reasoning.split(/\s+/).filter(Boolean).length, "word")}`;
    }
    this.#words.show(text);
  }

  #drawCalls(canAnswer) {
    this.#calls.replaceChildren();
    const { calls } = this.#step;
    for (const call of calls) {
      const [result, text] = field("textarea", `Result of ${call.name}`, { rows: 2, value: call.result ?? "", readOnly: !canAnswer });
      text.addEventListener("input", () => { call.result = text.value; });
      const given = element("pre", "", indented(call.arguments));
      given.tabIndex = 0;
      this.#calls.append(element("div", "call", element("span", "", "calls ", element("code", "", call.name)), given, result));
    }
    if (calls.length && canAnswer) this.#calls.append(button(calls.length > 1 ? "Send results" : "Send result", this.#sendResults));
  }

  #drawFacts() {
    const { facts: noted } = this.#step, short = [];
    if (noted.ttft_ms !== undefined) short.push(["TTFT", duration(noted.ttft_ms)]);
    if (noted.tpot_ms !== undefined) short.push(["TPOT", duration(noted.tpot_ms)]);
    if (noted.tokens !== undefined) short.push(["tokens", count(noted.tokens)]);
    if (noted.prompt_tokens !== undefined) {
      short.push(["prompt", `${count(noted.prompt_tokens)}${noted.cached_tokens ? `, ${count(noted.cached_tokens)} cached` : ""}`]);
    }
    const more = element("details", "", element("summary", "", "More"), facts(longFacts(noted)));
    this.#facts.replaceChildren(facts(short), ...(noted.phases ? [barOf(noted.phases)] : []), ...(short.length ? [more] : []));
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;  // it was cut off
  }
}

function longFacts({ total_ms, phases, instance, version, ignored }) {
  const found = [["total", duration(total_ms)]];
  for (const name of phases ? PHASES : []) found.push([name, duration(phases[name])]);
  if (phases?.stalled) found.push(["waited for its weights", duration(phases.stalled)]);
  if (phases?.interrupted) found.push(["waited for others' loads", duration(phases.interrupted)]);
  if (phases?.cpu_layers) found.push(["layers computed by CPU workers", count(phases.cpu_layers)]);
  if (instance) found.push(["instance", instance]);
  if (version) found.push(["version", version.replace(/@(.{12}).*/, "@$1…")]);
  if (ignored) found.push(["ignored fields", ignored]);
  return found;
}

function barOf(phases) {
  const bar = element("div", "phases", ...PHASES.map(name => {
    const part = element("i", name);
    part.style.flexGrow = phases[name] || 0;
    return part;
  }));
  bar.setAttribute("aria-hidden", "true");  // the list of facts has the same
  return bar;
}

class PlainView {
  constructor() {
    this.node = element("div", "plain");
  }

  show(text) {
    if (this.node.textContent !== text) this.node.textContent = text;
  }
}
