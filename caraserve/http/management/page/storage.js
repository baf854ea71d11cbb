// Conversations in this browser: at most so many and so large together; the ones that were changed longest ago go first.

const PREFIX = "caraserve-conversation-";
export const MOST = 50, MOST_BYTES = 4_000_000;  // browsers keep 5 MB or 10 MB for a server

const bytesOf = text => 2 * text.length;  // a browser keeps UTF-16

export class ConversationStorage {
  #bytes = new Map();  // of each conversation that is kept

  // All conversations, the newest first. What cannot be read is left out.
  all() {
    const found = [];
    this.#bytes.clear();
    for (let at = 0; at < localStorage.length; at++) {
      const key = localStorage.key(at);
      if (!key.startsWith(PREFIX)) continue;
      const text = localStorage.getItem(key);
      try {
        const conversation = JSON.parse(text);
        if (!Array.isArray(conversation.turns)) continue;
        found.push(conversation);
        this.#bytes.set(conversation.id, bytesOf(text));
      } catch {
        continue;  // of another version
      }
    }
    return found.sort((one, other) => other.changed_ms - one.changed_ms);
  }

  get bytes() { return [...this.#bytes.values()].reduce((sum, one) => sum + one, 0); }

  get number() { return this.#bytes.size; }

  // Keeps a conversation, and returns the ids of those that had to go. Throws if it is too large.
  keep(conversation) {
    const text = JSON.stringify(conversation), gone = [];
    if (bytesOf(text) > MOST_BYTES) throw new Error("this conversation is too large to be kept");
    const others = this.all().filter(({ id }) => id !== conversation.id);
    this.#bytes.set(conversation.id, bytesOf(text));
    while (others.length && (this.number > MOST || this.bytes > MOST_BYTES)) gone.push(this.remove(others.pop().id));
    for (;;) {
      try {
        localStorage.setItem(PREFIX + conversation.id, text);
        return gone;
      } catch (error) {  // the browser has less room than it might
        if (!others.length) throw error;
        gone.push(this.remove(others.pop().id));
      }
    }
  }

  remove(id) {
    localStorage.removeItem(PREFIX + id);
    this.#bytes.delete(id);
    return id;
  }
}

export const isKept = key => key === null || key.startsWith(PREFIX);
