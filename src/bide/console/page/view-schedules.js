// View 3: schedules, with their next runs.

import { h, replace } from "./dom.js";
import { number, quantity, relative, target, time } from "./format.js";
import { actions, edit } from "./schedule-actions.js";
import { badge, body, empty, facts, field, head, source, table, values } from "./ui.js";

export const state = (one) => badge(one.state, { paused: "warn", "under-way": "accent" }[one.state] ?? "good");

// A rule breaks between its fields only, not at the hyphen of MON-FRI.
const rule = (text) => h("code", { class: "rule" }, text.split(" ").map((field, place) => [place ? " " : "", h("span", { class: "nowrap" }, field)]));

export async function show(page, context) {
  const { parameters } = context;
  if (parameters.key) return showOne(page, context);
  const given = Object.fromEntries(["prefix", "to", "exchange", "due_from", "due_before", "recurring", "after"].map((one) => [one, parameters[one]]));
  const prefix = h("input", { name: "prefix", value: parameters.prefix ?? "", placeholder: "such as invoice:", autocomplete: "off" });
  const to = h("input", { name: "to", value: parameters.to ?? "", placeholder: "such as reminders", autocomplete: "off" });
  const recurring = h("input", { name: "recurring", type: "checkbox", checked: parameters.recurring === "1" });
  const list = h("section", { class: "card flat" }, h("div", { class: "empty" }, "Asking the gates…"));
  replace(
    page,
    head("Schedules", "Delayed messages with a key, in the order of keys.", h("button", { type: "button", onclick: context.again }, "Refresh")),
    h("form", {
      class: "filter",
      onsubmit: (event) => {
        event.preventDefault();
        context.go("schedules", { ...given, after: "", prefix: prefix.value, to: to.value, recurring: recurring.checked ? "1" : "" });
      },
    },
      field("Key begins with", prefix),
      field("Target queue", to),
      h("label", { class: "check" }, recurring, "Recurring only"),
      h("button", { type: "submit", class: "main" }, "Show"),
      parameters.due_from || parameters.due_before
        ? h("a", { class: "button", href: context.link("schedules", { ...given, due_from: "", due_before: "", after: "" }) },
            `Due ${parameters.due_from ? `from ${time(parameters.due_from)} ` : ""}${parameters.due_before ? `before ${time(parameters.due_before)} ` : ""}✕`)
        : null),
    list,
  );
  const found = await context.get("schedules", given);
  if (!found.gates.ok) return void replace(list, empty("No gate answers", found.gates.why));
  if (!found.schedules.length) {
    return void replace(list, empty("No schedule", parameters.after ? "There are no more schedules." : "No schedule matches."));
  }
  const count = found.count === null ? null : quantity(found.count, "schedule");
  replace(
    list,
    table(
      [
        ["Key", (one) => h("a", { class: "mono break", href: context.link("schedules", { key: one.key }) }, one.key)],
        ["State", state, "aside"],
        ["Target", (one) => h("span", { class: "break" }, target(one))],
        ["Next", (one) => [time(one.due), h("div", { class: "quiet small" }, relative(one.due))], "nowrap"],
        ["Runs", (one) => (one.every ? [rule(one.every), h("div", { class: "quiet small" }, one.time_zone ?? "")] : h("span", { class: "quiet" }, "once"))],
        ["", (one) => h("div", { class: "row" }, actions(context, one, context.again)), "actions"],
      ],
      found.schedules,
      { link: (one) => context.go("schedules", { key: one.key }) },
    ),
  );
  const chosen = { prefix: given.prefix, to: given.to, exchange: given.exchange, due_from: given.due_from, due_before: given.due_before };
  const isAll = !Object.values(chosen).some(Boolean);
  page.append(
    h("div", { class: "split level" },
      source("exact", count === null ? "exact, from the index of the gates" : `${count} in all: exact, from the index of the gates`),
      h("div", { class: "row" },
        // A change of many has no condition for recurring schedules.
        count === null ? null : h("a", { class: "button", href: context.link("many", { ...chosen, all: isAll ? "1" : "", count: "1" }) }, `Change all ${number(found.count)}`),
        found.after !== null ? h("a", { class: "button", href: context.link("schedules", { ...given, after: found.after }) }, "Next page") : null)),
  );
}

async function showOne(page, context) {
  const { key } = context.parameters;
  replace(page, head(key, "Asking the gates…"));
  let one;
  try {
    one = await context.get("schedule", { key });
  } catch (error) {
    if (error.status !== 404) throw error;
    replace(page, head(key, "Schedule"), h("section", { class: "card" }, empty("Nothing waits under this key", "It was delivered, cancelled, or never scheduled. Find a message searches more places.")),
      h("a", { class: "button", href: context.link("find", { text: key }) }, "Find this message"));
    return;
  }
  replace(
    page,
    h("p", { class: "back" }, h("a", { href: context.link("schedules") }, "← Schedules")),
    h("div", { class: "head" }, h("div", {}, h("h1", { class: "break" }, one.key), h("div", { class: "row" }, state(one), source("exact", "exact, from the index of the gates"))),
      h("div", { class: "row" }, one.state === "under-way" ? null : edit(context, one, context.again), actions(context, one, context.again))),
    h("div", { class: "columns" },
      h("section", { class: "card" }, h("h2", {}, "Schedule"), facts([
        ["Due", `${time(one.due)} (${relative(one.due)})`],
        ["Target", target(one)],
        ["Routing key", one.routing_key],
        ["Runs", one.every ? [rule(one.every), ` ${one.time_zone ?? ""}`] : "once"],
        ["Under way", one.under_way.join(", ")],
        ["Version", h("code", {}, one.version ?? "none")],
        ["Id", h("code", {}, one.id)],
        ["Partition", String(one.partition)],
      ])),
      one.every ? h("section", { class: "card" }, h("h2", {}, "Next runs"),
        source("computed", "computed from the rule; the first one is exact"),
        one.next_runs_why ? h("p", { class: "quiet" }, one.next_runs_why) : h("ol", {}, one.next_runs.map((run) => h("li", {}, `${time(run)} (${relative(run)})`)))) : null,
      h("section", { class: "card" }, h("h2", {}, "Body"), body(one.body)),
      h("section", { class: "card" }, h("h2", {}, "Headers"), values(one.headers), h("h2", {}, "Properties"), values(one.properties))),
  );
}
