// View 7: lateness of delayed messages by minute.

import { h, replace, s } from "./dom.js";
import { clock, day, lateness, niceSteps, number, quantity, time } from "./format.js";
import { ticks } from "./skyline.js";
import { empty, field, head, notice, source, stat, table } from "./ui.js";

const HEIGHT = 240;
const LEFT = 56;
const RIGHT = 20;

export async function show(page, context) {
  const minutes = Number(context.parameters.minutes ?? 60);
  const card = h("section", { class: "card" }, h("p", { class: "quiet" }, "Reading the tap…"));
  replace(page,
    head("Lateness", "Time from the due time of a delayed message until it leaves the last level: p50 and p99 by minute.",
      h("button", { type: "button", onclick: context.again }, "Refresh")),
    h("div", { class: "filter row" }, [[15, "15 min"], [60, "1 h"], [360, "6 h"], [1440, "24 h"]].map(([one, text]) =>
      h("a", { class: "button", "aria-current": one === minutes ? "true" : null, href: context.link("lateness", { minutes: one }) }, text))),
    card);
  const found = await context.get("lateness", { minutes });
  if (found.why) {
    return void replace(card, empty("Lateness is not known", found.why),
      h("p", { class: "quiet" }, "The broker does not record delivery times. A tap does: run bide tap on. The metrics of gates and endpoints contain lateness, too."));
  }
  if (!found.minutes.length) return void replace(card, empty("No delayed message was delivered in this time", `The stream ${found.stream} has no message with a due time since ${time(found.since)}.`));
  const total = found.minutes.reduce((sum, one) => sum + one.count, 0);
  replace(card,
    h("div", { class: "split" }, h("div", {}, h("h2", {}, quantity(total, "message")), source("exact", `exact for messages in the stream ${found.stream}`)),
      h("div", { class: "row small" }, ["p50", "p99"].map((name, place) => h("span", { class: "key" }, h("span", { class: `swatch b${place + 1}` }), name)))),
    found.is_whole ? null : notice(`Only the latest ${number(found.limit)} messages were read.`, "warn"),
    found.without_due ? h("p", { class: "quiet small" }, `${quantity(found.without_due, "message")} without a due time ${found.without_due === 1 ? "is" : "are"} not counted.`) : null,
    h("div", { class: "stats" },
      stat(lateness(Math.max(...found.minutes.map((one) => one.p50))), "highest p50"),
      stat(lateness(Math.max(...found.minutes.map((one) => one.p99))), "highest p99"),
      stat(lateness(Math.max(...found.minutes.map((one) => one.max))), "highest lateness")),
    plot(found),
    h("details", {}, h("summary", {}, "As a table"), table([
      ["Minute", (one) => `${minutes > 360 ? `${day(one.at)} ` : ""}${clock(one.at, false)}`], ["Messages", (one) => number(one.count), "number"],
      ["p50 (ms)", (one) => number(one.p50), "number"], ["p99 (ms)", (one) => number(one.p99), "number"], ["Highest (ms)", (one) => number(one.max), "number"],
    ], found.minutes, { stacks: false })));
}

function plot(found) {
  const box = h("div", { class: "plot" });
  const draw = () => {
    const width = Math.max(box.clientWidth || 800, 280);
    const inner = width - LEFT - RIGHT;
    const steps = niceSteps(Math.max(...found.minutes.map((one) => one.p99), 1));
    const highest = Math.max(steps.at(-1), ...found.minutes.map((one) => one.p99));
    const x = (at) => LEFT + ((at - found.since) / Math.max(found.now - found.since, 1)) * inner;
    // A point is in the middle of its minute. The current minute ends now.
    const middle = (one) => x(Math.min(one.at + 30000, found.now)).toFixed(1);
    const y = (value) => 12 + (1 - value / highest) * (HEIGHT - 44);
    // A minute without messages breaks the line.
    const line = (name) => found.minutes.map((one, place) => {
      const before = found.minutes[place - 1];
      return `${before && one.at - before.at === 60000 ? "L" : "M"}${middle(one)} ${y(one[name]).toFixed(1)}`;
    }).join("");
    const [labels] = ticks(found.since, found.now, Math.max(inner / 64, 2));
    replace(box, s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": "Lateness by minute" },
      steps.map((value) => [s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, highest < 1000 ? `${number(value)} ms` : `${number(value / 1000)} s`)]),
      labels.map((at) => s("text", { x: x(at), y: HEIGHT - 8, "text-anchor": "middle" }, clock(at, false))),
      s("path", { class: "s2", d: line("p99") }), s("path", { class: "s1", d: line("p50") }),
      found.minutes.map((one) => [
        s("circle", { class: "f2", r: 2.5, cx: middle(one), cy: y(one.p99) }, s("title", {}, `${time(one.at)}: p99 ${one.p99} ms of ${one.count}`)),
        s("circle", { class: "f1", r: 2.5, cx: middle(one), cy: y(one.p50) }, s("title", {}, `${time(one.at)}: p50 ${one.p50} ms of ${one.count}`)),
      ])));
  };
  const watch = new ResizeObserver(() => (box.isConnected ? draw() : watch.disconnect()));
  draw();
  queueMicrotask(() => watch.observe(box));
  return box;
}
