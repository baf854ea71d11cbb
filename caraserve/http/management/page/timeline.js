// Draws the last minute of batches: a row for each adapter, a bar for each half second, a mark for each load.

import { byId, count } from "./text.js";

const ROW = 24, GAP = 4, LEAST_LABEL = 90, RIGHT = 8, LEAST_TICK = 60;

export function drawTimeline({ interval_ms, intervals, rows, others }, loads) {
  const canvas = byId("timeline"), shown = others.cells.length ? [...rows, { ...others, adapter: "others" }] : rows;
  const width = canvas.clientWidth, height = Math.max(1, shown.length) * ROW + 18, scale = devicePixelRatio;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d"), style = getComputedStyle(document.body);
  // A canvas takes no light-dark(), so the colours come from elements that have them.
  const colour = name => getComputedStyle(document.querySelector(`.legend .${name}`)).backgroundColor;
  const colours = { prefill: colour("prefill"), decode: colour("decode"), load: colour("load") };
  const text = style.color, soft = getComputedStyle(byId("legend")).color;
  paint.scale(scale, scale);
  paint.font = `13px ${style.fontFamily}`;
  paint.textBaseline = "middle";
  // The longest name, but at most two fifths of the width; the pointer over a row shows the whole name.
  const widest = Math.max(0, ...shown.map(row => paint.measureText(row.adapter).width)) + 12;
  const label = Math.min(Math.max(LEAST_LABEL, widest), 0.4 * width);
  canvas.onpointermove = event => { canvas.title = shown[Math.floor(event.offsetY / ROW)]?.adapter ?? ""; };
  const step = (width - label - RIGHT) / intervals;
  const most = Math.max(1, ...shown.flatMap(row => row.cells.map(([, prefill, decode]) => prefill + decode)));
  shown.forEach((row, place) => {
    const bottom = (place + 1) * ROW - GAP;
    paint.fillStyle = text;
    paint.fillText(shortened(paint, row.adapter, label - 12), 0, bottom - (ROW - GAP) / 2);
    paint.fillStyle = soft;
    paint.globalAlpha = 0.35;
    paint.fillRect(label, bottom, width - label - RIGHT, 1);
    paint.globalAlpha = 1;
    for (const [at, prefill, decode] of row.cells) {
      const x = label + at * step, full = ROW - GAP - 2;
      // Square roots, with two pixels at least: one decoded token stays visible beside a long prompt.
      const tall = Math.max(2, full * Math.sqrt((prefill + decode) / most)), lower = tall * decode / (prefill + decode);
      paint.fillStyle = colours.decode;
      paint.fillRect(x, bottom - lower, Math.max(1, step - 1), lower);
      paint.fillStyle = colours.prefill;
      paint.fillRect(x, bottom - tall, Math.max(1, step - 1), tall - lower);
    }
    paint.fillStyle = colours.load;
    for (const load of loads.filter(one => one.adapter === row.adapter)) {
      const start = label + Math.max(0, load.began) * step, end = label + load.ended * step;
      paint.fillRect(start, bottom + 1, Math.max(3, end - start), 3);
    }
  });
  paint.fillStyle = soft;
  const ticks = 15000 / interval_ms * step < LEAST_TICK ? [60, 30, 0] : [60, 45, 30, 15, 0];
  for (const seconds of ticks) {
    const x = label + (intervals - seconds * 1000 / interval_ms) * step;
    paint.textAlign = seconds === 0 ? "right" : "left";
    paint.fillText(seconds ? `−${seconds} s` : "now", x, height - 7);
  }
  canvas.setAttribute("aria-label", inWords(shown));
}

function inWords(rows) {
  const sum = (row, part) => row.cells.reduce((total, cell) => total + cell[part], 0);
  const words = rows.map(row => `${row.adapter}: ${count(sum(row, 1))} prefill and ${count(sum(row, 2))} decode tokens`);
  return words.length ? `In the last 60 seconds ${words.join("; ")}` : "No batches in the last 60 seconds";
}

function shortened(paint, text, width) {
  if (paint.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && paint.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return `${text.slice(0, length)}…`;
}
