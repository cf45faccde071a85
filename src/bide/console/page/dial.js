// The levels of a delay infrastructure: a clock with a ring for each level, or bars if each level has one queue.

import { h, s, replace } from "./dom.js";
import { duration, number, quantity } from "./format.js";

const SIZE = 440;
const INNER = 56;
const WIDTH = 21;
const GAP = 5;
const START = 0.11;

const point = (radius, part) => {
  const angle = part * 2 * Math.PI - Math.PI / 2;
  return `${(SIZE / 2 + radius * Math.cos(angle)).toFixed(2)} ${(SIZE / 2 + radius * Math.sin(angle)).toFixed(2)}`;
};

function slice(inner, outer, from, to) {
  const large = to - from > 0.5 ? 1 : 0;
  return `M${point(outer, from)}A${outer} ${outer} 0 ${large} 1 ${point(outer, to)}L${point(inner, to)}A${inner} ${inner} 0 ${large} 0 ${point(inner, from)}Z`;
}

export function dial(levels, total) {
  const note = h("p", { class: "quiet small", "aria-live": "polite" }, "Touch a slot, or point at it, to see its number of messages. Messages move from the centre outwards, ring by ring, and are due when they leave the last ring.");
  const highest = Math.max(...levels.flatMap((one) => one.counts), 1);
  const rings = levels.map((level, place) => {
    const inner = INNER + place * (WIDTH + GAP);
    const slots = level.counts.map((count, index) => {
      const digit = index + 1;
      const part = (1 - START) / level.highest;
      const from = START / 2 + index * part;
      const slot = s("path", {
        class: count ? "slot full" : "slot",
        d: slice(inner, inner + WIDTH, from + part * 0.06, from + part * 0.94),
        "fill-opacity": count ? (0.3 + 0.7 * (Math.log1p(count) / Math.log1p(highest))).toFixed(3) : null,
        tabindex: count ? "0" : null,
        role: count ? "img" : null,
        "aria-label": count ? `${quantity(count, "message")}: ${duration(level.unit * digit)}` : null,
      });
      const describe = () =>
        replace(note, `${quantity(count, "message")} ${count === 1 ? "waits" : "wait"} ${duration(level.unit * digit)} here. Computed: ${count === 1 ? "it is" : "each is"} due within ${duration(level.unit * (digit + 1))}.`);
      slot.addEventListener("pointerenter", describe);
      slot.addEventListener("focus", describe);
      return slot;
    });
    const label = s("text", { class: "ring", x: SIZE / 2, y: SIZE / 2 - inner - WIDTH / 2 + 4, "text-anchor": "middle" }, duration(level.unit, 1).replace("\u00a0", "\u202f"));
    return [slots, label];
  });
  const picture = s(
    "svg",
    { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "group", "aria-label": `${quantity(total, "message")} in the levels, drawn as a clock` },
    rings,
    s("text", { class: "big", x: SIZE / 2, y: SIZE / 2 + 2, "text-anchor": "middle" }, short(total)),
    s("text", { x: SIZE / 2, y: SIZE / 2 + 18, "text-anchor": "middle" }, "waiting"),
  );
  return [picture, note];
}

export const short = (value) =>
  value >= 1e9 ? `${(value / 1e9).toFixed(1)} G` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e5 ? `${Math.round(value / 1e3)} k` : number(value);

export function bars(levels) {
  const highest = Math.max(...levels.map((one) => one.total), 1);
  return levels.map((level) =>
    h("div", { class: "row" }, h("span", { class: "nowrap" }, duration(level.unit)), h("progress", { max: highest, value: level.total }), h("span", {}, number(level.total))),
  );
}
