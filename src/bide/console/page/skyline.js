// A stacked bar chart of messages by due time and target, with zoom.

import { h, s, replace } from "./dom.js";
import { clock, day, duration, niceSteps, number, quantity, targetName } from "./format.js";

const FLOOR = 224;
const TOP = 20;
const LEFT = 48;
const RIGHT = 12;
const LABEL = 72;

const TICKS = [1, 5, 15, 60, 300, 900, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000, 7776000, 31536000, 315360000]
  .map((one) => one * 1000);

// The times of the labels and their distance. The times are round in local time, also after a change of clocks.
export function ticks(start, end, most) {
  const step = TICKS.find((one) => (end - start) / one <= most) ?? TICKS.at(-1);
  const offsetAt = (at) => new Date(at).getTimezoneOffset() * 60000;
  const offset = offsetAt(start);
  const found = [];
  for (let at = Math.ceil((start - offset) / step) * step + offset; at < end + step; at += step) {
    const moved = at + offsetAt(at) - offset;
    // Steps of up to an hour are round all the same. And a zone that skips the hour after midnight has no such time.
    found.push(step > 3600000 && offsetAt(moved) === offsetAt(at) ? moved : at);
  }
  return [found.filter((at) => at >= start && at < end), step];
}

const COLOURS = [1, 2, 3, 4, 5, 6, 7];

// Give each target a colour: the one that it has in another picture of the view, if it is free here. Other targets are grey.
export function colour(targets, known) {
  const free = new Set(COLOURS);
  for (const one of targets) {
    if (one.target === null) one.colour = 0;
    else if (free.delete(known.get(one.target))) one.colour = known.get(one.target);
  }
  for (const one of targets.filter((each) => each.colour === undefined)) {
    const taken = new Set(known.values());
    one.colour = [...free].find((each) => !taken.has(each)) ?? [...free][0];
    free.delete(one.colour);
    known.set(one.target, one.colour);
  }
}

export function skyline(data, { pick, zoom, reset, noun, enter }) {
  const box = h("div", { class: "plot" });
  const tip = h("div", { class: "tip", hidden: true });
  const spoken = h("p", { class: "spoken", "aria-live": "polite" });
  let cursor = null;
  let drawn = 0;
  let begun = null;

  const widthNow = () => Math.max(box.clientWidth || 800, 280);

  function draw() {
    const width = (drawn = widthNow());
    const end = data.start + data.width * data.number;
    const inner = width - LEFT - RIGHT;
    const x = (at) => LEFT + ((at - data.start) / (end - data.start)) * inner;
    const step = inner / data.number;
    const sums = Array.from({ length: data.number }, (_, place) => data.targets.reduce((sum, one) => sum + one.counts[place], 0));
    const steps = niceSteps(Math.max(...sums, 1));
    const highest = Math.max(...sums, steps.at(-1), 1);
    const y = (value) => TOP + (1 - value / highest) * (FLOOR - TOP);
    const floor = FLOOR;
    const bars = [];
    for (let place = 0; place < data.number; place++) {
      let sum = 0;
      data.targets.forEach((one) => {
        const count = one.counts[place];
        if (!count) return;
        const upper = y(sum + count);
        // A single message among a million has to be visible.
        const height = Math.max(y(sum) - upper, 1.5);
        const gap = step > 5 ? 1 : 0;
        bars.push(s("rect", {
          class: `f${one.colour}`, x: LEFT + place * step, y: y(sum) - height, width: Math.max(step - gap, 0.8), height,
        }));
        sum += count;
      });
    }
    const [labels, length] = ticks(data.start, end, Math.max(Math.floor(inner / LABEL), 2));
    // Times of a day have its date below the first label and below each midnight.
    const dated = new Set(length >= 86400000 ? [] : labels.filter((at, place) => place === 0 || clock(at) === "00:00:00"));
    if (dated.size > 1 && x([...dated][1]) - x(labels[0]) < LABEL) dated.delete(labels[0]);
    // The same for all labels: otherwise a scrollbar could appear and vanish with each drawing.
    const height = FLOOR + 36;
    // A label at an edge stays in the picture.
    const label = (at, bottom, text) =>
      s("text", { x: Math.min(x(at), width - text.length * 3.6), y: bottom, "text-anchor": "middle" }, text);
    const pointed = s("rect", { class: "pointed", y: TOP, height: floor - TOP, width: step, visibility: "hidden" });
    const chosen = s("rect", { class: "chosen", y: TOP, height: floor - TOP, visibility: "hidden" });
    const svg = s(
      "svg",
      {
        viewBox: `0 0 ${width} ${height}`, height, tabindex: "0", role: "application",
        "aria-label": `${quantity(data.total, noun)} by due time and target. Left and right move, plus and minus zoom, Enter ${enter}.`,
      },
      steps.map((value) => [
        s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, number(value)),
      ]),
      bars,
      labels.map((at) => [
        s("line", { class: "axis", x1: x(at), x2: x(at), y1: floor, y2: floor + 4 }),
        label(at, floor + 18, length >= 86400000 ? day(at) : clock(at, length < 60000)),
        dated.has(at) ? label(at, floor + 32, day(at)) : null,
      ]),
      s("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: floor, y2: floor }),
      data.now >= data.start && data.now < end
        ? [s("line", { class: "now", x1: x(data.now), x2: x(data.now), y1: TOP, y2: floor }), s("text", { x: x(data.now), y: TOP - 8, "text-anchor": "middle" }, "now")]
        : null,
      pointed,
      chosen,
    );

    const placeOf = (event) => {
      const frame = svg.getBoundingClientRect();
      const at = ((event.clientX - frame.left) / frame.width) * width;
      return Math.min(Math.max(Math.floor((at - LEFT) / step), 0), data.number - 1);
    };
    const from = (place) => data.start + place * data.width;

    const targetsAt = (place) => data.targets.filter((one) => one.counts[place]);
    const spokenAt = (place) => [
      `${day(from(place))} ${clock(from(place))}`,
      quantity(sums[place], noun),
      ...targetsAt(place).map((one) => `${targetName(one.target)} ${number(one.counts[place])}`),
    ].join(", ");

    function point(place) {
      cursor = place;
      pointed.setAttribute("x", LEFT + place * step);
      pointed.setAttribute("visibility", "visible");
      const rows = targetsAt(place);
      replace(
        tip,
        h("b", {}, `${day(from(place))} ${clock(from(place))}`),
        h("div", {}, `for ${duration(data.width)}: ${quantity(sums[place], noun)}`),
        rows.map((one) => h("span", {}, h("span", {}, targetName(one.target)), h("b", {}, number(one.counts[place])))),
      );
      tip.hidden = false;
      const middle = LEFT + (place + 0.5) * step;
      const room = tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(middle + 12, width - room - 4))}px`;
      if (middle + 12 + room > width) tip.style.left = `${Math.max(0, middle - room - 12)}px`;
      tip.style.top = "16px";
    }

    function leave() {
      tip.hidden = true;
      pointed.setAttribute("visibility", "hidden");
    }

    svg.addEventListener("pointerdown", (event) => {
      // The menu of the other buttons would keep the end of the press.
      if (event.button) return;
      begun = placeOf(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const place = placeOf(event);
      point(place);
      if (begun === null) return;
      const [first, last] = [Math.min(begun, place), Math.max(begun, place)];
      chosen.setAttribute("x", LEFT + first * step);
      chosen.setAttribute("width", (last - first + 1) * step);
      chosen.setAttribute("visibility", first === last ? "hidden" : "visible");
    });
    svg.addEventListener("pointerup", (event) => {
      const place = placeOf(event);
      const [first, last] = [Math.min(begun ?? place, place), Math.max(begun ?? place, place)];
      begun = null;
      chosen.setAttribute("visibility", "hidden");
      if (first !== last) zoom(from(first), from(last + 1));
      else if (sums[place]) pick(from(place), from(place + 1));
      else fit();
    });
    svg.addEventListener("pointercancel", () => {
      begun = null;
      fit();
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (move) {
        point(Math.min(Math.max((cursor ?? -Math.sign(move)) + move, 0), data.number - 1));
        spoken.textContent = spokenAt(cursor);
      } else if (event.key === "+" || event.key === "-") {
        const half = Math.max(Math.round(data.number * (event.key === "+" ? 0.25 : 1)), 1);
        const middle = cursor ?? Math.floor(data.number / 2);
        zoom(Math.max(from(middle - half), 0), from(middle + half + 1));
      } else if (event.key === "Escape") reset();
      else if (event.key === "Enter" && cursor !== null) pick(from(cursor), from(cursor + 1));
      else return;
      event.preventDefault();
    });
    const hadFocus = box.contains(document.activeElement);
    tip.hidden = true;
    replace(box, svg, tip);
    if (hadFocus) svg.focus({ preventScroll: true });
  }

  function fit() {
    if (begun === null && widthNow() !== drawn) draw();
  }

  const watch = new ResizeObserver(() => (box.isConnected ? fit() : watch.disconnect()));
  // By then the caller has put the box into the page, and its width is known.
  queueMicrotask(() => {
    draw();
    watch.observe(box);
  });
  return h("div", {}, box, spoken);
}
