// View 8: the operator log.

import { h, replace } from "./dom.js";
import { number, quantity, relative, time } from "./format.js";
import { ask, badge, empty, facts, head, notice, source, table, values } from "./ui.js";

const result = (one) => {
  const parts = [];
  if (one.result.outcome) parts.push(one.result.outcome);
  const done = one.result.count ?? one.result.done ?? one.result.sent;
  if (done !== undefined) parts.push(`${number(done)} done`);
  if (one.result.error) parts.push(one.result.error);
  if (one.result.forgotten?.length) parts.push(`${quantity(one.result.forgotten.length, "partition")} not counted`);
  if (one.result.left) parts.push(`${number(one.result.left)} left`);
  return parts.join(", ");
};

const chosen = (one) => {
  const { key, selection, ...rest } = one.details;
  const { ids, body, new_message_id: _, ...shown } = { ...(key ? { key } : {}), ...(selection ?? {}), ...rest };
  const parts = Object.entries(shown)
    .filter(([, value]) => value !== false && (!Array.isArray(value) || value.length))
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  if (body) parts.unshift("new body");
  if (Array.isArray(ids)) parts.unshift(quantity(ids.length, "message"));
  return parts.join(", ") || "all";
};

const details = (one) => ask({
  title: `${one.operation} · ${one.queue}`,
  wide: true,
  text: h("div", {},
    facts([["When", time(one.at)], ["Ended", one.ended ? time(one.ended) : "not recorded"], ["Who", one.who], ["Broker user", one.user], ["Messages recorded", one.ids ? number(one.ids) : null], ["Run", one.run ? h("code", {}, one.run) : null]]),
    h("h3", {}, "Chosen"), values(one.details), h("h3", {}, "Result"), values(one.result)),
});

export async function show(page, context) {
  const card = h("section", { class: "card flat" }, h("div", { class: "empty" }, "Reading the operator log…"));
  replace(page, head("Operator log", "Who changed what, from this console and from bide errors.", h("button", { type: "button", onclick: context.again }, "Refresh")), card);
  const found = await context.get("history");
  if (!found.operations.length) return void replace(card, empty("Nothing was changed yet", `Operations are recorded in the stream ${found.stream} before they begin.`));
  replace(card, table([
    ["When", (one) => [time(one.at), h("div", { class: "quiet small" }, relative(one.at))], "nowrap"],
    ["Who", (one) => [h("span", { class: "break" }, one.who), h("div", { class: "quiet small" }, `broker user ${one.user}`)], "who"],
    ["What", (one) => h("button", { type: "button", class: "link", onclick: () => details(one) }, one.operation), "nowrap"],
    ["Where", (one) => h("span", { class: "break" }, one.queue), "name"],
    ["Chosen", (one) => h("div", { class: "line", title: chosen(one) }, chosen(one))],
    ["Result", (one) => [badge(one.state, { ended: "good", interrupted: "warn" }[one.state] ?? "accent"), h("div", { class: "quiet small" }, result(one))]],
  ], found.operations, { link: details }));
  page.append(source("exact", `from the stream ${found.stream}${found.malformed ? `; ${found.malformed} of its messages are not records` : ""}`));
  if (found.malformed) page.append(notice("Other clients wrote to the operator log.", "warn"));
}
