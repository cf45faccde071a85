// Changes of one schedule, and their results.

import { h } from "./dom.js";
import { action, ask, field, toast } from "./ui.js";

const OUTCOMES = {
  scheduled: "stored",
  moved: "moved",
  paused: "paused",
  resumed: "resumed",
  running: "delivered now",
  cancelled: "cancelled",
  "too-late": "too late: it is being delivered, or was delivered or set aside",
  "not-found": "nothing waits under this key",
  changed: "nothing was done: the schedule has changed since it was shown",
  forgotten: "applied more than an hour ago; the result is no longer known",
};

export const report = (result) => toast(`${result.key}: ${OUTCOMES[result.outcome] ?? result.outcome}`, ["too-late", "not-found", "changed", "forgotten"].includes(result.outcome) ? "bad" : "");

export const timeFields = () => [
  field("Delay from now, such as 90s, 2h or 3d", h("input", { name: "delay", autocomplete: "off" })),
  field("or a due time", h("input", { name: "at", type: "datetime-local", step: "1" })),
];

export function times(values) {
  const given = {};
  if (values.delay) given.delay = values.delay;
  if (values.at) given.deliver_at = new Date(values.at).toISOString();
  return given;
}

export function actions(context, one, after) {
  const change = (name, values = {}) => context.post("schedule/change", { action: name, key: one.key, version: one.version, ...values });
  const now = async (name) => {
    report(await change(name));
    after();
  };
  if (one.state === "under-way") return [];
  return [
    one.state === "paused" ? action("Resume", () => now("resume")) : action("Pause", () => now("pause")),
    action("Run now", () =>
      ask({
        title: `Run ${one.key} now?`,
        text: h("p", {}, one.every ? "An additional run is delivered now. The other runs stay." : "The message is delivered now instead of at its due time."),
        confirm: "Run now",
        work: () => now("run"),
      })),
    action("Move", () =>
      ask({
        title: `Move ${one.key}`,
        text: h("p", { class: "quiet" }, one.every ? "Only the next run moves." : "Message and target stay the same."),
        fields: timeFields(),
        confirm: "Move",
        work: async (values) => {
          report(await change("move", times(values)));
          after();
        },
      })),
    action("Cancel", () =>
      ask({
        title: `Cancel ${one.key}?`,
        text: h("p", {}, one.every ? "No more runs are delivered, except those that a gate has already claimed. This cannot be undone." : "The message is not delivered. This cannot be undone."),
        confirm: "Cancel the schedule",
        kind: "bad",
        work: () => now("cancel"),
      }), "tiny bad"),
  ];
}

export function edit(context, one, after) {
  const isText = one.body.is_text && !one.body.is_cut;
  return action("Edit", () =>
    ask({
      title: `Edit ${one.key}`,
      text: h("p", { class: "quiet" }, "Target, headers and properties stay the same."),
      wide: true,
      fields: [
        one.every ? h("div", { class: "row" },
          field("Runs: cron expression, or interval", h("input", { name: "every", value: one.every })),
          field("Time zone", h("input", { name: "time_zone", value: one.time_zone ?? "", placeholder: "UTC" }))) : null,
        isText ? field("Body", h("textarea", { name: "body", value: one.body.text, rows: "10" })) : h("p", { class: "quiet" }, "The body cannot be edited here: it is not text, or too long."),
      ].filter(Boolean),
      confirm: "Store",
      work: async (values) => {
        const given = { key: one.key, version: one.version };
        if (isText && values.body !== one.body.text) given.body = values.body;
        if (one.every && (values.every !== one.every || values.time_zone !== (one.time_zone ?? ""))) {
          given.every = values.every;
          if (values.time_zone) given.time_zone = values.time_zone;
        }
        report(await context.post("schedule/edit", given));
        after();
      },
    }));
}
