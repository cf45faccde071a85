// View 6: undeliverable messages and findings, each with the step that fixes it.

import { h, replace } from "./dom.js";
import { number, quantity } from "./format.js";
import { action, ask, badge, copy, empty, field, head, source, toast } from "./ui.js";

const KINDS = { problem: "bad", warning: "warn", ok: "good", "not checked": "" };

export async function show(page, context) {
  const stuck = h("section", { class: "card" }, h("p", { class: "quiet" }, "Counting undeliverable messages…"));
  const checks = h("section", { class: "card" }, h("p", { class: "quiet" }, "Checking the delay infrastructure and the schedule log. This takes some seconds."));
  replace(page, head("Problems", "Undeliverable messages, and the findings of bide delay verify.", h("button", { type: "button", onclick: context.again }, "Check again")), stuck, checks);
  await Promise.all([
    context.get("undeliverable").then((found) => undeliverable(stuck, found, context)),
    context.get("findings").then((found) => findings(checks, found)),
  ]);
}

function undeliverable(card, found, context) {
  const waiting = found.queues.filter((one) => one.messages);
  replace(
    card,
    h("div", { class: "split" }, h("div", {}, h("h2", {}, "Undeliverable messages"), source("counted", "counted by the broker just now"))),
    waiting.length
      ? waiting.map((one) => h("div", { class: "split" },
          h("div", {}, h("b", {}, quantity(one.messages, "message")), h("div", { class: "mono break" }, one.name)),
          h("div", { class: "row" },
            h("a", { class: "button tiny", href: context.link("failures", { queue: one.name }) }, "View"),
            action("Send on", () => resend(context, one)))))
      : empty("No undeliverable messages", "The undeliverable queues are empty."),
  );
}

const resend = (context, one) => ask({
  title: `Send on the messages of ${one.name}?`,
  text: h("p", {}, "First create or bind the missing targets. Each message goes to the target in its headers if a pattern allows the target. Other messages stay."),
  fields: [field("Allowed targets, such as orders.* or x:events", h("input", { name: "allow", required: true, autocomplete: "off" }))],
  confirm: "Send on",
  work: async (given) => {
    const result = await context.post("undeliverable/resend", { queue: one.name, allow: given.allow.split(/[\s,]+/).filter(Boolean) });
    const kept = Object.entries(result.kept).map(([reason, count]) => `${count} stay (${reason})`);
    toast([`${number(result.sent)} sent on`, ...kept].join("; "), kept.length ? "bad" : "");
    context.again();
  },
});

const summary = (problems, warnings) =>
  problems ? badge(quantity(problems, "problem"), "bad") : warnings ? badge(quantity(warnings, "warning"), "warn") : badge("no problems", "good");

// The text of a finding, with a button to copy each command that it quotes.
function textWithCommands(one) {
  let rest = one.text;
  const parts = one.commands.map((command) => {
    const [before] = rest.split(`'${command}'`, 1);
    // A command has a line of its own, so that the comma behind it would begin the next one.
    rest = rest.slice(before.length + command.length + 2).replace(/^[,.;)]+\s*/, "");
    return [before, copy(command)];
  });
  return [parts, rest];
}

function findings(card, found) {
  const count = (status) => found.findings.filter((one) => one.status === status).length;
  const rows = (which) => found.findings.filter(which).map((one) => h("div", { class: "finding" },
    h("div", {}, badge(one.status, KINDS[one.status])),
    h("div", { class: "break" }, h("b", {}, one.check), h("div", {}, one.status === "ok" ? one.text : textWithCommands(one)))));
  const bad = rows((one) => one.status === "problem" || one.status === "warning");
  card.classList.add("flat");
  replace(
    card,
    h("div", { class: "title" },
      h("div", { class: "row" }, h("h2", {}, "Checks"), summary(count("problem"), count("warning"))),
      h("p", { class: "quiet" }, `${found.layout} on ${found.broker}, RabbitMQ ${found.release}: ${quantity(count("ok"), "check")} passed, ${quantity(count("warning"), "warning")}, ${number(count("not checked"))} not checked`)),
    bad,
    h("details", { open: !bad.length, class: "more" }, h("summary", {}, "Other checks"), rows((one) => one.status === "ok" || one.status === "not checked")),
  );
}
