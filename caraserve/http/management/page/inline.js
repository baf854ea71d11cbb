// Text inside of a block: code, bold, italics, struck out, and links to http and https.

import { element } from "./text.js";

const DEEPEST = 8;  // of bold in italics and so on
const SPECIAL = /[\\`*_~[<]|https?:\/\//g;
// Bounded repeats over disjoint characters: no text takes long.
const LINK = /\[([^[\]]{1,500})\]\(<?((?:[^()\s<>]|\([^()\s<>]{0,200}\)){1,2000})>?(?:[ \t]+"[^"\n]{0,200}")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`*|]{1,2000}/y;
const ESCAPED = /[!-/:-@[-`{-~]/, WORD = /[\p{L}\p{N}]/u, ELEMENTS = { "**": "strong", "__": "strong", "*": "em", _: "em", "~~": "del" };

// Elements and texts, in their order.
export function inline(text, inLink = false) {
  return new Reader(text, inLink).read();
}

class Reader {
  #text;
  #inLink;
  #at = 0;
  #found = [];  // elements and texts
  #open = [];  // marks that may get an end: where their text is in `found`
  #unclosed = new Set();  // lengths of backticks that have no end

  constructor(text, inLink) {
    this.#text = text;
    this.#inLink = inLink;
  }

  read() {
    while (this.#at < this.#text.length) {
      SPECIAL.lastIndex = this.#at;
      const special = SPECIAL.exec(this.#text)?.index ?? this.#text.length;
      if (special > this.#at) this.#found.push(this.#text.slice(this.#at, special));
      this.#at = special;
      if (special < this.#text.length) this.#special(this.#text[special]);
    }
    return this.#found;
  }

  #special(character) {
    if (character === "\\") this.#escaped();
    else if (character === "`") this.#code();
    else if (character === "[") this.#link();
    else if (character === "<") this.#take(1);
    else if (character === "h") this.#address();
    else this.#mark(character);
  }

  #take(length) {
    this.#found.push(this.#text.slice(this.#at, this.#at + length));
    this.#at += length;
  }

  #escaped() {
    const next = this.#text[this.#at + 1] ?? "";
    if (ESCAPED.test(next)) this.#at++;
    this.#take(1);
  }

  #run(character) {
    let end = this.#at;
    while (this.#text[end] === character) end++;
    return end - this.#at;
  }

  #code() {
    const length = this.#run("`"), text = this.#text;
    let end = this.#unclosed.has(length) ? -1 : this.#at + length;
    while (end !== -1) {
      end = text.indexOf("`".repeat(length), end);
      if (end === -1 || (text[end + length] !== "`" && text[end - 1] !== "`")) break;
      while (text[end] === "`") end++;
    }
    if (end === -1) {
      this.#unclosed.add(length);
      this.#take(length);
      return;
    }
    const inside = text.slice(this.#at + length, end);
    const isPadded = inside.length > 2 && inside.startsWith(" ") && inside.endsWith(" ");
    this.#found.push(element("code", "", isPadded ? inside.slice(1, -1) : inside));
    this.#at = end + length;
  }

  #link() {
    LINK.lastIndex = this.#at;
    const found = this.#inLink ? null : LINK.exec(this.#text), link = found && linkTo(found[2]);
    if (!link) {
      this.#take(1);
      return;
    }
    for (const child of inline(found[1], true)) link.append(child);
    this.#found.push(link);
    this.#at = LINK.lastIndex;
  }

  #address() {
    ADDRESS.lastIndex = this.#at;
    const found = this.#inLink ? null : ADDRESS.exec(this.#text)?.[0];
    let end = found?.length ?? 0;
    // A full stop after an address belongs to the sentence, as does a bracket that was opened before it.
    while (end && (/[.,:;!?]/.test(found[end - 1]) || (found[end - 1] === ")" && !found.includes("(")))) end--;
    const link = end ? linkTo(found.slice(0, end)) : null;
    if (!link) {
      this.#take(4);
      return;
    }
    link.append(found.slice(0, end));
    this.#found.push(link);
    this.#at += end;
  }

  #mark(character) {
    const length = this.#run(character), before = this.#text[this.#at - 1] ?? " ", after = this.#text[this.#at + length] ?? " ";
    const inWord = character === "_" && WORD.test(before) && WORD.test(after);
    if (length > 3 || inWord || (character === "~" && length !== 2)) {
      this.#take(length);
      return;
    }
    let left = length;
    if (/\S/.test(before)) while (left && this.#close(character, left)) left -= this.#closed;
    if (left && /\S/.test(after) && this.#open.length < DEEPEST && !(character === "_" && WORD.test(before))) {
      for (const part of left === 3 ? [2, 1] : [left]) {
        this.#open.push({ mark: character.repeat(part), at: this.#found.length });
        this.#found.push(character.repeat(part));  // it stays text unless it gets an end
      }
    } else if (left) {
      this.#found.push(character.repeat(left));
    }
    this.#at += length;
  }

  #closed = 0;

  // Ends what was opened last with as many of these characters, if something was. Marks inside of it stay text.
  #close(character, most) {
    const fits = wanted => this.#open.findLastIndex(({ mark }) => mark[0] === character && wanted(mark.length));
    const exact = fits(length => length === most), at = exact === -1 ? fits(length => length <= most) : exact;
    if (at === -1 || this.#open[at].at === this.#found.length - 1) return false;
    const { mark, at: begin } = this.#open[at], made = element(ELEMENTS[mark]);
    for (const child of this.#found.splice(begin + 1)) made.append(child);
    this.#found[begin] = made;
    this.#open.length = at;
    this.#closed = mark.length;
    return true;
  }
}

// A link to a page of the web; null for addresses of other kinds, which stay text.
function linkTo(address) {
  if (!/^https?:\/\//i.test(address) || !URL.canParse(address)) return null;
  const link = element("a");
  link.href = address;
  link.rel = "noopener noreferrer nofollow";
  link.target = "_blank";
  link.title = address;
  return link;
}
