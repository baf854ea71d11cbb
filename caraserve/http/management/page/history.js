// The list of conversations that this browser keeps.

import { button, byId, counted, element, setText, size } from "./text.js";
import { titleOf } from "./conversation.js";
import { ConversationStorage, isKept, MOST } from "./storage.js";

export class History {
  #storage = new ConversationStorage();
  #open;
  #current = null;
  #failed = "";

  // `open` is called with a conversation that is to be shown, or null for a new one.
  constructor(open) {
    this.#open = open;
    byId("delete-all").addEventListener("click", () => {
      if (confirm("Delete all conversations in this browser?")) this.#deleteAll();
    });
    addEventListener("storage", event => { if (isKept(event.key)) this.show(this.#current); });  // another tab has changed it
  }

  // The conversation that was changed last; null if there is none.
  newest() { return this.#all()[0] ?? null; }

  keep(conversation) {
    if (!conversation.turns.length) return;
    this.#failed = "";
    try {
      this.#storage.keep(conversation);
    } catch (error) {
      this.#failed = error.name === "QuotaExceededError" ? "this browser has no room for it" : error.message;
    }
  }

  // Lists all; `current` is the id of the one that is shown.
  show(current) {
    this.#current = current;
    const all = this.#all();
    byId("conversations").replaceChildren(...all.map(conversation => {
      const title = titleOf(conversation), open = button(title, () => this.#open(conversation));
      if (conversation.id === current) open.setAttribute("aria-current", "true");
      return element("li", "", open, button("×", () => this.#delete(conversation.id), `Delete ${title}`));
    }));
    const kept = `${counted(all.length, "conversation")} of at most ${MOST}, ${size(this.#storage.bytes)}.`;
    setText("kept", this.#failed ? `Not kept: ${this.#failed}.` : `Kept in this browser only, for all who use it: ${kept}`);
    byId("delete-all").disabled = all.length === 0;
  }

  #all() {
    try {
      return this.#storage.all();
    } catch {
      this.#failed = "this browser keeps nothing";
      return [];
    }
  }

  #delete(id) {
    this.#storage.remove(id);
    if (id === this.#current) this.#open(null);
    else this.show(this.#current);
    byId("new").focus();  // the button is gone
  }

  #deleteAll() {
    for (const { id } of this.#all()) this.#storage.remove(id);
    this.#open(null);
    byId("new").focus();
  }
}
