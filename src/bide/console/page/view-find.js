// View 2: where a message is, hop by hop.

import { h, replace } from "./dom.js";
import { duration, relative, target, targetName, time } from "./format.js";
import { actions } from "./schedule-actions.js";
import { badge, empty, facts, field, head, repeated, source, table } from "./ui.js";
import { state } from "./view-schedules.js";

export async function show(page, context) {
  const { parameters } = context;
  const text = h("input", { name: "text", value: parameters.text ?? "", placeholder: "such as invoice:42", autocomplete: "off", spellcheck: "false" });
  const result = h("div", {});
  replace(
    page,
    head("Find a message", "By the key of its schedule, or by its message id."),
    h("form", { class: "filter", onsubmit: (event) => {
      event.preventDefault();
      if (text.value.trim()) context.go("find", { text: text.value.trim() });
    } }, field("Key or message id", text), h("button", { type: "submit", class: "main" }, "Find")),
    result,
  );
  if (!parameters.text) {
    return void replace(result, h("section", { class: "card" }, empty("Which message?",
      "A key is looked up in the index of the gates, and the answer is exact. A message id is searched for in the streams of the taps and in error queues.")));
  }
  replace(result, h("section", { class: "card" }, h("p", { class: "quiet" }, "Searching the gates, the taps and the error queues…")));
  const found = await context.get("find", { text: parameters.text });
  const [gate, ...rest] = found.places;
  const tap = h("div", {});
  const places = h("section", { class: "card flat" });
  const more = repeated("Search older messages", async () => draw(await context.get("find/taps", { text: parameters.text, older: 1 })), context);

  // Returns whether older messages can be searched.
  function draw(inTaps) {
    const hasMore = inTaps.older > 0 && !inTaps.tap?.scheduled_at;
    more.hidden = !hasMore;
    replace(tap, inTaps.tap ? tapped(inTaps.tap)
      : found.schedule || found.failed.length ? null
      : h("section", { class: "card" }, empty("Nothing was found", "The list below shows which places were searched. Only taps record messages without a key.")));
    replace(places, table([
      ["Place", (one) => h("span", { class: "break" }, one.place)],
      ["Result", (one) => badge(one.found ? "found" : one.looked ? "not here" : "not searched", one.found ? "good" : one.looked ? "" : "warn"), "aside"],
      ["Note", (one) => h("span", { class: "quiet" }, one.note)],
    ], [gate, ...inTaps.places, ...rest.slice(inTaps.places.length)]));
    return hasMore;
  }

  draw({ ...found, places: found.places.slice(1, 3) });
  replace(
    result,
    found.schedule ? waiting(found.schedule, context) : null,
    tap,
    found.failed.map((one) => failure(one, context)),
    places,
    h("div", { class: "row" }, more),
  );
}

const hop = (kind, title, text) => h("li", { class: kind }, h("b", {}, title), h("div", { class: "quiet break" }, text));

function waiting(one, context) {
  return h("section", { class: "card" },
    h("div", { class: "split" },
      h("div", {}, h("h2", { class: "break" }, h("a", { href: context.link("schedules", { key: one.key }) }, one.key)), h("div", { class: "row" }, state(one), source("exact", "exact, from the index of the gates"))),
      h("div", { class: "row" }, actions(context, one, context.again))),
    h("ol", { class: "hops" },
      hop("seen", "Schedule log", `partition ${one.partition}, version ${one.version ?? "none"}`),
      one.state === "under-way"
        ? hop("here", "Under way", "a gate has claimed it and delivers it")
        : hop("here", "Index of the gate", one.state === "paused" ? "paused: nothing is delivered" : `waits until ${time(one.due)} (${relative(one.due)})`),
      hop("computed", target(one), "the gate publishes it here when it is due")));
}

function tapped(one) {
  const hops = one.hops.filter((step) => step.wait);
  return h("section", { class: "card" },
    h("h2", { class: "break" }, one.message_id),
    facts([
      ["Target", one.target ? targetName(one.target) : null],
      ["Due", one.due ? `${time(one.due)} (${relative(one.due)})` : "not in its headers"],
      ["Late by", one.due && one.delivered_at ? duration(Math.max(one.delivered_at - one.due, 0)) : null],
    ]),
    h("ol", { class: "hops" },
      one.scheduled_at ? hop("seen", "Scheduled", `seen by the tap at ${time(one.scheduled_at)}`) : hop("computed", "Scheduled", "not among the messages that were read"),
      hops.map((step) => hop(step.is_here ? "computed here" : "computed", step.to, `${step.is_here ? "computed: here now, " : "computed: "}from ${time(step.from)} for ${duration(step.wait)}`)),
      one.delivered_at ? hop("seen", "Due", `seen by the tap at ${time(one.delivered_at)}`) : hop("computed", "Due", one.due ? `computed: ${time(one.due)}` : "not seen by the tap")));
}

function failure(one, context) {
  return h("section", { class: "card" },
    h("div", { class: "split" }, h("div", {}, h("h2", { class: "break" }, one.exception ?? one.reason), source("exact", `in the queue ${one.in}`)),
      h("a", { class: "button", href: context.link("failures", { queue: one.in, id: one.id, group: one.group }) }, "View")),
    h("p", { class: "break" }, one.text ?? ""),
    h("ol", { class: "hops" },
      hop("seen", one.queue ?? "?", `failed${one.failed_at ? ` at ${time(one.failed_at)}` : ""}`),
      hop("here", one.in, "it waits here until it is retried, archived or discarded")));
}
