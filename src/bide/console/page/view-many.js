// View 4: count the schedules that match, then cancel, move, run, pause or resume all of them.

import { about } from "./api.js";
import { h, replace } from "./dom.js";
import { number, quantity } from "./format.js";
import { timeFields, times } from "./schedule-actions.js";
import { action, ask, badge, empty, field, head, notice, source, toast } from "./ui.js";

const all = (found) => found.count;

// Title, explanation, number of schedules that it changes, text of the result, and class of the buttons.
const ACTIONS = {
  pause: ["Pause", "Nothing is delivered until the schedules are resumed.", (found) => found.count - found.paused, (count) => `${number(count)} paused`, ""],
  resume: ["Resume", "Single messages that became due meanwhile are delivered now. Recurring schedules skip the runs that they missed.",
    (found) => found.paused, (count) => `${quantity(count, "schedule matches", "schedules match")}; the paused ones are resumed`, ""],
  run: ["Run now", "Each message is delivered now. Recurring schedules get an additional run.", all, (count) => `${number(count)} delivered now`, ""],
  move: ["Move", "Messages and targets stay the same. Only the next run of a recurring schedule moves.", all, (count) => `${number(count)} moved`, ""],
  cancel: ["Cancel", "The messages are not delivered. This cannot be undone.", all, (count) => `${number(count)} cancelled`, "bad"],
};

const local = (text) => {
  if (!text) return "";
  const at = new Date(text);
  return new Date(at.getTime() - at.getTimezoneOffset() * 60000).toISOString().slice(0, 19);
};

export async function show(page, context) {
  const { parameters } = context;
  const inputs = {
    prefix: h("input", { value: parameters.prefix ?? "", placeholder: "such as invoice:", autocomplete: "off" }),
    to: h("input", { value: parameters.to ?? "", placeholder: "such as reminders", autocomplete: "off" }),
    exchange: h("input", { value: parameters.exchange ?? "", autocomplete: "off" }),
    due_from: h("input", { type: "datetime-local", step: "1", value: local(parameters.due_from) }),
    due_before: h("input", { type: "datetime-local", step: "1", value: local(parameters.due_before) }),
  };
  const everything = h("input", { type: "checkbox", checked: parameters.all === "1" });
  const result = h("section", { class: "card" });
  const first = Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]));
  // The field of a time has no milliseconds, and is ambiguous in the hour when clocks go back.
  const inputValue = (name, input) =>
    input.value === first[name] ? parameters[name] : input.type === "datetime-local" ? new Date(input.value).toISOString() : input.value;
  const chosen = () => Object.fromEntries(Object.entries(inputs)
    .filter(([, input]) => input.value)
    .map(([name, input]) => [name, inputValue(name, input)]));
  replace(
    page,
    head("Bulk changes", "Change all schedules that match every condition. They are counted first."),
    h("form", {
      class: "filter grid",
      onsubmit: (event) => {
        event.preventDefault();
        context.go("many", { ...chosen(), all: everything.checked ? "1" : "", count: "1" });
        if (location.hash === lastHash) context.again();
      },
    },
      field("Key begins with", inputs.prefix), field("Target queue", inputs.to), field("Target exchange", inputs.exchange),
      field("Due from", inputs.due_from), field("Due before", inputs.due_before),
      h("div", { class: "row end" }, h("label", { class: "check" }, everything, "All schedules"),
        h("button", { type: "submit", class: "main" }, "Count"))),
    result,
  );
  const lastHash = location.hash;
  const given = chosen();
  const isAll = everything.checked;
  if (!parameters.count) return void replace(result, empty("Nothing was counted yet", "Give conditions, and count the schedules that match."));
  if (!Object.keys(given).length && !isAll) return void replace(result, notice("No condition was given: choose some schedules, or all of them.", "warn"));
  if (Object.keys(given).length && isAll) return void replace(result, notice("Give conditions or choose all schedules, not both.", "warn"));
  const found = await context.get("schedules/count", given);
  replace(
    result,
    h("div", { class: "split" },
      h("div", {}, h("h2", {}, quantity(found.count, "schedule matches", "schedules match")),
        found.paused ? h("p", {}, badge(`${number(found.paused)} paused`, "warn")) : null, source("exact", "exact, from the index of the gates")),
      h("a", { class: "button", href: context.link("schedules", given) }, "List")),
    about.read_only ? h("p", { class: "quiet" }, "This console is read-only.") : h("div", { class: "row" },
      Object.entries(ACTIONS).map(([name, one]) => {
        const button = action(one[0], () => change(context, name, one, given, isAll), one[4]);
        button.disabled = !one[2](found);
        return button;
      })),
  );
}

function report(text, forgotten) {
  if (!forgotten) return toast(text);
  const knows = forgotten === 1 ? "knows how many schedules it" : "know how many schedules they";
  toast(`${text}. ${quantity(forgotten, "partition")} applied the change more than an hour ago, and no longer ${knows} changed.`, "bad");
}

async function change(context, name, [title, text, numberOf, done, kind], given, isAll) {
  // Count again, because schedules may have been delivered since the page was shown.
  const count = numberOf(await context.get("schedules/count", given));
  if (!context.isShown()) return;
  await ask({
    title: `${title} ${quantity(count, "schedule")}?`,
    text: h("p", {}, text),
    fields: name === "move" ? timeFields() : [],
    confirm: `${title} ${number(count)}`,
    kind,
    work: async (values) => {
      const result = await context.post("schedules/change", { action: name, all: isAll, ...given, ...(name === "move" ? times(values) : {}) });
      report(done(result.count), result.forgotten.length);
      context.again();
    },
  });
}
