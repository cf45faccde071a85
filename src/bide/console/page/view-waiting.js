// View 1: waiting messages, by due time and target, and by level.

import { h, replace } from "./dom.js";
import { bars, dial, short } from "./dial.js";
import { clock, day, duration, number, quantity, relative, targetName, time, zone } from "./format.js";
import { colour, skyline } from "./skyline.js";
import { badge, empty, head, notice, repeated, source, stat, table } from "./ui.js";

const TAPPED = "Due times of messages without a key";

const iso = (milliseconds) => new Date(milliseconds).toISOString();

export async function show(page, context) {
  const { parameters } = context;
  context.colours = new Map();
  const sky = h("section", { class: "card", "aria-busy": "true" }, h("p", { class: "quiet" }, "Asking the gates…"));
  const levels = h("section", { class: "card", "aria-busy": "true" }, h("p", { class: "quiet" }, "Counting the queues…"));
  replace(
    page,
    head("Waiting", `Messages that are not due yet. Times are local (${zone()}).`, h("button", { type: "button", onclick: context.again }, "Refresh")),
    sky,
    levels,
  );
  const filter = { prefix: parameters.prefix, to: parameters.to, exchange: parameters.exchange };
  const times = { start: parameters.start, end: parameters.end };
  const asked = context.get("timeline", { ...times, ...filter });
  const counted = context.get("levels");
  const shown = [
    asked.then((found) => keyed(sky, found, context, filter), (error) => broken(sky, "Schedules", error)),
    counted.then((found) => unkeyed(levels, found, context), (error) => broken(levels, "Delayed messages without a key", error)),
  ];
  if (parameters.tap) {
    const card = h("section", { class: "card", "aria-busy": "true" }, h("p", { class: "quiet" }, "Reading the tap…"));
    levels.before(card);
    const ask = (older) => context.get("tapped", { ...times, to: filter.to, exchange: filter.exchange, older });
    // The schedules are drawn first, so that their targets get the first colours.
    const drawn = shown[0].catch(() => null);
    shown.push(ask().then(async (found) => (await drawn, tapped(card, found, ask, context, filter)), (error) => broken(card, TAPPED, error)));
  }
  await Promise.all(shown);
}

function broken(card, title, error) {
  if (error.status === 401) throw error;
  replace(card, h("h2", {}, title), notice(error.message, "bad"));
}

function keyed(card, found, context, filter) {
  card.removeAttribute("aria-busy");
  if (!found.gates.ok) {
    replace(
      card,
      h("div", { class: "split" }, h("h2", {}, "Schedules"), source("missing", "no gate answers")),
      empty("The schedules cannot be counted", found.gates.why),
    );
    return;
  }
  const { parameters } = context;
  const { all, zoom } = moves(context, filter);
  const pick = (from, before) => context.go("schedules", { ...filter, due_from: iso(from), due_before: iso(before) });
  const filtered = filter.to || filter.exchange || filter.prefix;
  replace(
    card,
    h("div", { class: "split" }, h("div", {}, h("h2", {}, "Schedules"), source("exact", "exact, from the index of the gates")),
      h("div", { class: "row" },
        filtered ? h("a", { class: "button", href: context.link("waiting", { start: parameters.start, end: parameters.end, tap: parameters.tap }) }, "Clear filter") : null,
        parameters.start ? h("button", { type: "button", onclick: all }, "All times") : null,
        upToTheLast(found, zoom),
        found.before ? h("button", { type: "button", onclick: () => zoom(found.first, found.now + found.width) }, "Overdue") : null,
        h("a", { class: "button", href: context.link("schedules", filter) }, "List"))),
    found.gates.why ? notice(found.gates.why, "warn") : null,
    found.total
      ? picture(found, { pick, zoom, reset: all, noun: "schedule", enter: "lists" }, context, filter)
      : empty("No schedule waits", filtered ? "No schedule matches the filter." : "Schedules are delayed messages with a key: client.schedule(...), or bide schedule add."),
  );
}

function moves(context, filter) {
  const kept = { ...filter, tap: context.parameters.tap };
  return {
    zoom: (start, end) => context.go("waiting", { ...kept, start: iso(start), end: iso(end) }),
    all: () => context.go("waiting", kept),
  };
}

const upToTheLast = (found, zoom) => found.total && found.last !== null && found.after
  ? h("button", { type: "button", onclick: () => zoom(Math.min(found.first, found.now), found.last + 1) }, "Up to the last") : null;

// Totals, the skyline, its legend, and the numbers as a table.
function picture(found, actions, context, filter) {
  const { parameters } = context;
  colour(found.targets, context.colours);
  const outside = [
    found.before ? `${number(found.before)} before` : null,
    found.after ? `${number(found.after)} after` : null,
  ].filter(Boolean);
  return [
    h("div", { class: "stats" },
      stat(number(found.total), `${actions.noun}s`),
      stat(found.first === null ? "–" : relative(found.first, found.now), "first due"),
      stat(found.last === null ? "–" : relative(found.last, found.now), "last due"),
      stat(duration(found.width), "per bar")),
    skyline(found, actions),
    outside.length ? h("p", { class: "quiet small" }, `Outside this picture: ${outside.join(", ")}.`) : null,
    h("div", { class: "legend", role: "group", "aria-label": "Targets" }, found.targets.map((one) => {
      const name = targetName(one.target);
      const label = [h("span", { class: `swatch b${one.colour}` }), name, h("span", { class: "quiet" }, number(one.total))];
      if (one.target === null) return h("span", { class: "row small" }, label);
      const chosen = one.target.startsWith("q:") ? { to: one.target.slice(2) } : { exchange: one.target.slice(2) };
      return h("button", { type: "button", title: `Only ${name}`, onclick: () => context.go("waiting", { ...chosen, prefix: filter.prefix, start: parameters.start, end: parameters.end, tap: parameters.tap }) }, label);
    })),
    h("details", {}, h("summary", {}, "As a table"), numbers(found, actions.noun)),
  ];
}

function numbers(found, noun) {
  const rows = [];
  for (let place = 0; place < found.number; place++) {
    const shown = found.targets.filter((one) => one.counts[place]);
    if (shown.length) rows.push([found.start + place * found.width, shown, place]);
  }
  return table([
    ["From", (row) => `${day(row[0])} ${clock(row[0], found.width < 60000)}`, "nowrap"],
    [`${noun[0].toUpperCase()}${noun.slice(1)}s`, (row) => number(row[1].reduce((sum, one) => sum + one.counts[row[2]], 0)), "number"],
    ["Targets", (row) => row[1].map((one) => `${targetName(one.target)}: ${number(one.counts[row[2]])}`).join(", ")],
  ], rows, { stacks: false });
}

// Due times of the messages in the index of the tap.
function tapped(card, found, ask, context, filter) {
  card.removeAttribute("aria-busy");
  const about = h("p", { class: "quiet small" });
  const box = h("div", {});
  const { all, zoom } = moves(context, filter);
  const more = repeated("Read older messages", async () => draw(await ask(1)), context);
  const last = h("span", {});

  // Returns whether there are older messages to read.
  function draw(now) {
    const { tap } = now;
    const left = !tap.why && tap.older > 0 && !tap.is_full;
    more.hidden = !left;
    about.textContent = `${quantity(tap.number, "message")} of ${tap.stream}`
      + (tap.since === null ? "" : `, stored since ${time(tap.since)}`)
      + (tap.older ? `; ${number(tap.older)} older ones are not counted${tap.is_full ? ", because the index is full" : ""}` : "");
    replace(last, upToTheLast(now, zoom));
    const isOpen = box.querySelector("details")?.open;
    const hadFocus = box.querySelector(".plot")?.contains(document.activeElement);
    replace(box, now.total
      ? picture(now, { pick: zoom, zoom, reset: all, noun: "message", enter: "zooms" }, context, filter)
      : empty("No message waits", "None of the messages in the index is due later."));
    const details = box.querySelector("details");
    if (isOpen && details) details.open = true;
    // The skyline draws itself in a microtask of its own, which comes first.
    if (hadFocus) queueMicrotask(() => box.querySelector(".plot svg")?.focus({ preventScroll: true }));
    return left;
  }

  if (found.tap.why) return void replace(card, h("h2", {}, TAPPED), empty("There is no index", found.tap.why));
  draw(found);
  replace(
    card,
    h("div", { class: "split" }, h("div", {}, h("h2", {}, TAPPED), source("computed", "computed from what the tap saw"), about),
      h("div", { class: "row" }, more, context.parameters.start ? h("button", { type: "button", onclick: all }, "All times") : null, last)),
    box,
  );
}

function unkeyed(card, found, context) {
  card.removeAttribute("aria-busy");
  const kind = found.source === "management" ? "counted by the broker, up to 5 s ago (management API)"
    : found.source === "amqp" ? "counted by the broker just now (over AMQP)" : "not known";
  const title = h("div", { class: "split" },
    h("div", {}, h("h2", {}, "Delayed messages without a key"), source(found.source ? "counted" : "missing", kind)),
    h("div", { class: "row" }, badge(`${found.layout} layout`),
      context.parameters.tap ? null : h("a", { class: "button", href: context.link("waiting", { ...context.parameters, tap: 1 }) }, "Due times from the tap")));
  if (!found.source) {
    replace(card, title, empty("The queues cannot be counted", found.why));
    return;
  }
  if (!found.total) {
    replace(card, title, found.why ? notice(found.why, "warn") : null,
      empty("No message waits in the levels", `${quantity(found.queues, "queue")} of the layout ${found.layout} ${found.queues === 1 ? "is" : "are"} declared.`));
    return;
  }
  const isClock = found.levels.some((one) => one.highest > 1);
  const rows = found.levels.filter((one) => isClock || one.total);
  replace(
    card,
    title,
    found.why ? notice(found.why, "warn") : null,
    h("div", { class: "dial" },
      h("div", {}, isClock ? dial(found.levels, found.total) : bars(found.levels)),
      h("div", {},
        table([
          ["Level", (one) => `${duration(one.unit)}${one.highest > 1 ? ` to ${duration(one.unit * one.highest)}` : ""}`, "nowrap"],
          ["Queues in use", (one) => number(one.counts.filter(Boolean).length), "number"],
          ["Messages", (one) => short(one.total), "number"],
        ], rows, { stacks: false }),
        h("p", { class: "quiet small below" }, "The broker counts messages by queue. It does not know when each message is due. A tap records that."))),
  );
}
