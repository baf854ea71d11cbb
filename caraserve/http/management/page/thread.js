// The turns of one conversation, and the answers under way. It goes on while another conversation is shown.

import { AnswerCard } from "./answer.js";
import { newAnswer } from "./conversation.js";
import { copyButton } from "./copy.js";
import { button, element } from "./text.js";

export class Thread {
  #turns = [];  // [node, cards] of each turn
  #running = null;  // the AbortController of the answers under way
  #page;

  // `page`: settings, names() that are chosen, origins(names), changed(thread), say(text).
  constructor(conversation, page) {
    this.conversation = conversation;
    this.#page = page;
    this.node = element("div", "thread");
    conversation.turns.forEach(() => this.#addTurn());
    this.#draw();
  }

  get isRunning() { return this.#running !== null; }

  stop() { this.#running?.abort(); }

  async send(prompt) {
    const sent = this.#page.settings.sent();
    if (this.isRunning || !sent || !this.#page.names().length) return;
    this.conversation.turns.push({ prompt, answers: this.#page.names().map(newAnswer) });
    const cards = this.#addTurn();
    cards.forEach(card => card.begin(sent));
    this.#draw(cards);
    await this.#run(cards);
  }

  async #run(cards) {
    const running = this.#running = new AbortController();
    this.conversation.changed_ms = Date.now();
    this.#page.changed(this);
    const origins = await this.#page.origins(cards.map(card => card.answer.name));  // first, so that all are sent at once
    await Promise.all(cards.map(async (card, at) => {
      card.origin = origins[at];
      await card.run(running.signal);
      card.draw(true);
      this.#page.say(`${card.answer.name}: ${card.end}`);
    }));
    this.#running = null;
    this.#page.changed(this);
  }

  #addTurn() {
    const at = this.#turns.length, turn = this.conversation.turns[at], turns = this.conversation.turns.slice(0, at + 1);
    const actions = { regenerate: card => this.#again(card), sendResults: card => this.#goOn(card) };
    const cards = turn.answers.map(answer => new AnswerCard(turns, answer, this.#page.settings.isPlain, actions));
    const node = element("section", "turn", element("h2", "hidden", `Turn ${at + 1}`), this.#prompt(at),
      element("div", "answers", ...cards.map(card => card.node)));
    this.#turns.push({ node, cards });
    this.node.append(node);
    return cards;
  }

  // Draws the turns again whose buttons depend on which is the last one, but not cards that are about to run.
  #draw(running = []) {
    for (const { cards } of this.#turns.slice(-2)) {
      const isLast = cards === this.#turns.at(-1).cards;
      for (const card of cards) if (!running.includes(card)) card.draw(isLast);
    }
  }

  #prompt(at) {
    const { prompt } = this.conversation.turns[at];
    const edit = button("Edit", () => this.#edit(at, box), `Edit prompt ${at + 1}; later turns are dropped`);
    const box = element("div", "prompt", element("div", "plain", prompt),
      element("div", "actions", copyButton(() => prompt, `Copy prompt ${at + 1}`), edit));
    return box;
  }

  #edit(at, box) {
    if (this.isRunning) return;
    const text = element("textarea"), form = element("form", "prompt", text), send = element("button", "", "Send");
    const back = () => {
      const again = this.#prompt(at);
      form.replaceWith(again);
      again.querySelector("button:last-child").focus();
    };
    Object.assign(text, { value: this.conversation.turns[at].prompt, rows: 3, required: true });
    text.setAttribute("aria-label", `Prompt ${at + 1}`);
    form.append(element("div", "actions", send, button("Cancel", back)));
    form.addEventListener("submit", event => {
      event.preventDefault();
      if (this.isRunning || !this.#page.settings.sent()) return;
      this.conversation.turns.length = at;
      for (const { node } of this.#turns.splice(at)) node.remove();
      this.send(text.value);
    });
    text.addEventListener("keydown", event => { if (event.key === "Escape") back(); });
    box.replaceWith(form);
    text.focus();
  }

  // Has the same turn answered again by one adapter, with the settings of now.
  async #again(card) {
    const sent = this.#page.settings.sent();
    if (this.isRunning || !sent) return;
    card.restart(sent);
    await this.#run([card]);
  }

  // Sends the results of an answer's calls.
  async #goOn(card) {
    if (this.isRunning) return;
    const { sent } = card.answer.steps.at(-1), fields = { ...sent.fields };
    // Who must call a function would call one again and again.
    if (fields.tools && fields.tool_choice !== "none") fields.tool_choice = "auto";
    card.draw(false);
    card.begin({ ...sent, fields });
    await this.#run([card]);
  }
}
