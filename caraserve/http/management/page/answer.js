// The answer of one adapter in a turn: its steps, what may be done with it, and how it ended.

import { bodyOf, newStep } from "./conversation.js";
import { copyButton, showText } from "./copy.js";
import { curl, python } from "./snippets.js";
import { StepView } from "./step.js";
import { runStep } from "./stream.js";
import { button, element } from "./text.js";

const ENDS = { length: "cut off at max. tokens", stop: "complete", tool_calls: "calls a function", stopped: "stopped" };

export class AnswerCard {
  #turns;
  #status = element("p", "soft");
  #steps = element("div", "steps");
  #views = [];
  #actions = element("div", "actions");
  #isPlain;
  #page;

  // `turns`: to the one with this answer. `page` has what the buttons do: regenerate(card), sendResults(card).
  constructor(turns, answer, isPlain, page) {
    this.#turns = turns;
    this.answer = answer;
    this.#isPlain = isPlain;
    this.#page = page;
    this.node = element("article", "answer", element("h3", "", answer.name), this.#status, this.#steps, this.#actions);
    answer.steps.forEach(() => this.#addView());
    this.draw(false);
  }

  // Adds a step, which `run` will fill.
  begin(sent) {
    this.answer.steps.push(newStep(sent));
    this.#addView();
    this.node.setAttribute("aria-busy", "true");
    this.#say("waiting", false);
    this.#actions.replaceChildren();
  }

  // Starts again with the first step.
  restart(sent) {
    this.answer.steps.length = this.#views.length = 0;
    this.#steps.replaceChildren();
    this.begin(sent);
  }

  // Where the adapter was just before the prompt is sent.
  set origin(text) { this.#step.facts.tier = text; }

  async run(signal) {
    const step = this.#step, view = this.#views.at(-1), body = bodyOf(this.#turns, this.answer, this.answer.steps.length - 1);
    let isAnswering = false;
    await runStep(step, body, signal, progress => {
      if (progress) return this.#say(progress, false);
      if (!isAnswering) this.#say("answering", false);
      isAnswering = true;
      return view.later();
    });
    this.node.removeAttribute("aria-busy");
  }

  // Draws all of it; `isLast`: whether it is in the last turn, where it may be made again and calls may be answered.
  draw(isLast) {
    this.#views.forEach((view, at) => view.end(isLast && at === this.#views.length - 1));
    const step = this.#step;
    if (!step) return;
    this.#say(step.error ?? ENDS[step.finish] ?? "was not finished", step.error !== null);
    const text = () => this.answer.steps.map(one => one.text).filter(Boolean).join("\n\n"), name = this.answer.name;
    this.#actions.replaceChildren(copyButton(text, `Copy the answer of ${name}`));
    if (isLast) this.#actions.append(button("Again", () => this.#page.regenerate(this), `Ask ${name} again`));
    this.#actions.append(
      button("curl", () => this.#show("curl", curl), `Show what was sent to ${name} as a curl command`),
      button("Python", () => this.#show("Python", python), `Show what was sent to ${name} as Python`)
    );
  }

  // How it ended, in words.
  get end() { return this.#status.textContent; }

  get #step() { return this.answer.steps.at(-1); }

  #addView() {
    const step = this.answer.steps[this.#views.length], { path, fields } = step.sent;
    const isPlain = this.#isPlain || !path.endsWith("chat/completions") || Boolean(fields.response_format);
    const view = new StepView(step, isPlain, () => this.#page.sendResults(this));
    this.#views.push(view);
    this.#steps.append(view.node);
  }

  #say(state, isBad) {
    const tier = this.#step.facts.tier;
    this.#status.className = isBad ? "bad" : "soft";
    this.#status.textContent = tier && !isBad ? `${tier} · ${state}` : state;
  }

  #show(kind, text) {
    const at = this.answer.steps.length - 1, { path } = this.answer.steps[at].sent;
    showText(`${kind}: what was sent to ${this.answer.name}`, text(path, bodyOf(this.#turns, this.answer, at)));
  }
}
