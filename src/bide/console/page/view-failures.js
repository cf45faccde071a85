// View 5: failed messages in groups; retry, edit, archive and discard them.

import { h, replace } from "./dom.js";
import { bytes, number, quantity, relative, time } from "./format.js";
import { action, ask, badge, body, empty, facts, field, head, notice, source, table, toast, values } from "./ui.js";

const POLL = 1000;

export async function show(page, context) {
  const { parameters } = context;
  if (parameters.id) return showOne(page, context);
  const running = h("div", {});
  const box = h("div", {});
  const total = h("div", { class: "split level" });
  const queues = context.get("queues");
  replace(page, head("Failures", "Messages in error and dead-letter queues. Viewing messages does not remove them from a queue.",
    h("button", { type: "button", onclick: context.again }, "Refresh")), running, box, total);
  let load;
  const follow = (changed) => watch(running, context, changed, () => load?.());
  follow(false);
  const found = await queues;
  const queue = parameters.queue ?? found.queues.find((one) => one.is_likely && one.messages)?.name ?? found.queues.find((one) => one.is_likely)?.name ?? "error";
  const by = parameters.by ?? "exception";
  const choice = h("select", { name: "queue", onchange: (event) => context.go("failures", { queue: event.target.value, by }) },
    [...new Set([queue, ...found.queues.map((one) => one.name)])].map((name) => {
      const known = found.queues.find((one) => one.name === name);
      return h("option", { value: name, selected: name === queue }, known ? `${name} (${number(known.messages)})` : name);
    }));
  const groups = h("section", { class: "card flat" }, h("div", { class: "empty" }, "Reading the queue…"));
  replace(
    box,
    found.why ? notice(found.why, "warn") : null,
    h("form", { class: "filter", onsubmit: (event) => event.preventDefault() },
      field("Queue", choice),
      field("Group by", h("select", { onchange: (event) => context.go("failures", { queue, by: event.target.value }) },
        [["exception", "exception"], ["type", "message type"], ["key", "key"]].map(([one, text]) => h("option", { value: one, selected: one === by }, text)))),
    ),
    groups,
  );
  load = () => readGroups(groups, total, context, queue, by, follow);
  await load();
}

async function readGroups(groups, total, context, queue, by, follow) {
  replace(total);
  let listed;
  try {
    listed = await context.get("failures", { queue, by });
  } catch (error) {
    if (error.status === 401) throw error;
    return void replace(groups, error.status === 404 ? empty(`There is no queue ${queue}`, "Endpoints put failed messages into the queue error.") : notice(error.message, "bad"));
  }
  if (!listed.groups.length) return void replace(groups, empty("No failed messages", `The queue ${queue} is empty.`));
  const name = { exception: "group", type: "message_type", key: "key" }[by];
  replace(
    groups,
    table(
      [
        ["Failure", (one) => failureOf(one, by)],
        ["Messages", (one) => number(one.count), "number"],
        ["Failed on", (one) => one.queues.map((text) => h("div", { class: "break" }, text))],
        ["Last", (one) => (one.last ? [h("span", { class: "nowrap" }, time(one.last)), h("div", { class: "quiet small" }, relative(one.last))] : "?"), "nowrap"],
        ["", (one) => h("div", { class: "row" },
          h("a", { class: "button tiny", href: context.link("failures", { queue, id: one.example, group: one.group, by }) }, "View"),
          one.group.startsWith("(no ") ? null : operations(context, queue, { [name]: one.group }, follow)), "actions"],
      ],
      listed.groups,
    ),
  );
  replace(total,
    source("exact", `${quantity(listed.total, "message")} in ${queue}: read just now${listed.more ? `; ${listed.more} more groups` : ""}`),
    h("div", { class: "row" }, operations(context, queue, { all: true }, follow, " all")));
}

// The name of a group of exceptions ends with their place: "ValueError at shop.py in charge".
function failureOf(one, by) {
  const [name, ...place] = by === "exception" ? one.group.split(" at ") : [one.group];
  return [
    h("b", { class: "break" }, name),
    one.text ? h("div", { class: "line", title: one.text }, one.text) : null,
    place.length ? h("div", { class: "quiet small break" }, `at ${place.join(" at ")}`) : null,
  ];
}

function operations(context, queue, chosen, follow, all = "") {
  const selected = Object.fromEntries(Object.entries(chosen).filter(([name]) => name !== "all" && name !== "ids"));
  const count = () => (chosen.ids ? { count: chosen.ids.length, queues: {} } : context.get("failures/count", { queue, ...selected }));
  const pace = () => field("Spread over, such as 10m; empty: at once", h("input", { name: "over", placeholder: "at once", autocomplete: "off" }));
  const start = (path) => async (given) => {
    const extra = {};
    if (given.over) extra.over = given.over;
    if (given.allow) extra.allow = given.allow.split(/[\s,]+/).filter(Boolean);
    await context.post(path, { queue, ...chosen, ...extra });
    toast("started");
    follow(true);
  };
  return [
    action(`Retry${all}`, async () => {
      const { count: number, queues } = await count();
      if (!context.isShown()) return;
      const names = Object.entries(queues).map(([name, one]) => `${name} (${one})`).join(", ");
      await ask({
        title: `Retry ${quantity(number, "message")}?`,
        text: h("p", { class: "break" }, names ? `They go back to: ${names}.` : "They go back to the queues where they failed."),
        fields: [
          pace(),
          field("Allowed queues, such as orders.*; empty: all", h("input", { name: "allow", autocomplete: "off" })),
        ],
        confirm: "Retry",
        work: start("failures/retry"),
      });
    }),
    action(`Archive${all}`, async () => {
      const { count: number } = await count();
      if (!context.isShown()) return;
      await ask({
        title: `Archive ${quantity(number, "message")}?`,
        text: h("p", { class: "break" }, `They move to ${queue}.archive, which keeps them for 30 days.`),
        fields: [pace()],
        confirm: "Archive",
        work: start("failures/archive"),
      });
    }),
    action(`Discard${all}`, async () => {
      const { count: number } = await count();
      if (!context.isShown()) return;
      await ask({
        title: `Discard ${quantity(number, "message")}?`,
        text: h("p", {}, "They are deleted; their ids are recorded in the operator log. This cannot be undone."),
        fields: [pace()],
        confirm: "Discard",
        kind: "bad",
        work: start("failures/discard"),
      });
    }, "tiny bad"),
  ];
}

// Show operations and their progress until none is running. If an operation has changed the queue, load it again.
async function watch(box, context, changed, load) {
  if (box.dataset.watching) return void (box.dataset.watching = "again");
  let parts = new Map();
  try {
    while (context.isShown() && box.isConnected) {
      changed ||= box.dataset.watching === "again";
      box.dataset.watching = "true";
      let isRunning = true;
      try {
        const { operations: all } = await context.get("operations");
        if (!context.isShown()) return;
        parts = drawOperations(box, parts, all.filter((one, place) => one.state === "running" || place < 3), context);
        isRunning = all.some((one) => one.state === "running");
        changed ||= isRunning;
        if (changed && !isRunning) await load();
      } catch (error) {
        if (error.status === 401) return void context.again();
        // A screen reader reads each new alert.
        if (box.textContent !== error.message) replace(box, notice(error.message, "bad"));
        parts = new Map();
      }
      if (isRunning) await new Promise((done) => setTimeout(done, POLL));
      else if (box.dataset.watching !== "again") return;
    }
  } finally {
    delete box.dataset.watching;
  }
}

// Draw operations whose state changed. To draw the others again would take the focus, or a click, from their buttons.
function drawOperations(box, parts, shown, context) {
  const now = new Map(shown.map((one) => {
    const name = `${one.id} ${one.state}`;
    return [name, parts.get(name) ?? operation(one, context)];
  }));
  [...now.values()].forEach((part, place) => part.update(shown[place]));
  if (!parts.size) replace(box);
  for (const [name, part] of parts) if (!now.has(name)) part.section.remove();
  [...now.values()].forEach(({ section }, place) => {
    if (box.children[place] !== section) box.insertBefore(section, box.children[place] ?? null);
  });
  return now;
}

function operation(one, context) {
  const kind = { running: "accent", done: "good", stopped: "warn", failed: "bad" }[one.state];
  const kept = Object.entries(one.result?.kept ?? {});
  const progress = one.state === "running" ? h("progress", {}) : null;
  const count = h("p", { class: "small" });
  const update = (now) => {
    const done = now.result?.done ?? now.done;
    count.textContent = `${number(done)}${now.total ? ` of ${number(now.total)}` : ""} done${now.result?.left ? `, ${number(now.result.left)} left` : ""}`;
    if (progress && now.total) Object.assign(progress, { max: now.total, value: done });
  };
  const section = h("section", { class: "card operation" },
    h("div", { class: "split" },
      h("div", {}, h("h3", {}, `${one.name} · ${one.queue}`), h("p", { class: "quiet break" }, one.text)),
      h("div", { class: "row" }, badge(one.state, kind), one.state === "running" ? action("Stop", () => context.post("operations/stop", { id: one.id }), "tiny bad") : null)),
    progress,
    count,
    kept.map(([reason, count]) => h("p", { class: "small" }, `${number(count)} stay: ${reason}`)),
    one.error ? notice(one.error, "bad") : null);
  return { section, update };
}

async function showOne(page, context) {
  const { queue, id, group, by } = context.parameters;
  replace(page, head("Failed message", "Reading the queue…"));
  const [one, more] = await Promise.all([
    context.get("failure", { queue, id }),
    context.get("failures/messages", group ? { queue, [{ type: "message_type", key: "key" }[by] ?? "group"]: group } : { queue }),
  ]);
  const running = h("div", {});
  // The message stays on the page when it has left the queue.
  const follow = (changed) => watch(running, context, changed, () => {});
  replace(
    page,
    h("p", { class: "back" }, h("a", { href: context.link("failures", { queue, by }) }, "← Failures")),
    h("div", { class: "head" },
      h("div", {}, h("h1", { class: "break" }, one.exception ?? one.reason), h("p", { class: "break" }, one.text ?? "")),
      h("div", { class: "row" }, editing(context, queue, one), operations(context, queue, { ids: [one.id] }, follow))),
    running,
    h("div", { class: "columns" },
      h("section", { class: "card" }, h("h2", {}, "Failure"), facts([
        ["Failed on", one.queue], ["Reason", one.reason], ["At", one.failed_at ? `${time(one.failed_at)} (${relative(one.failed_at)})` : null],
        ["Endpoint", one.endpoint], ["Host", one.host], ["Caused by", one.inner_exception ? `${one.inner_exception}: ${one.inner_text ?? ""}` : null],
        ["Type", one.type], ["Message id", one.message_id ? h("code", {}, one.message_id) : null], ["Id", h("code", {}, one.id)], ["Key", one.key ? h("a", { href: context.link("find", { text: one.key }) }, one.key) : null],
        ["Sent by", one.sent_by], ["First sent to", one.exchange ? `exchange ${one.exchange}, ${one.routing_key}` : one.routing_key],
      ])),
      h("section", { class: "card" }, h("h2", {}, "Body"), body(one.body))),
    h("section", { class: "card" }, h("h2", {}, "Stack trace"), one.stack ? h("pre", { class: "trace" }, one.stack) : h("p", { class: "quiet" }, "The message has no stack trace. Messages that the broker dead-lettered have none.")),
    h("div", { class: "columns" },
      h("section", { class: "card" }, h("h2", {}, "Headers"), values(one.headers)),
      h("section", { class: "card" }, h("h2", {}, "Properties"), values(one.properties), one.deaths.length ? [h("h2", {}, "Dead-lettered"), values(one.deaths)] : null)),
    h("section", { class: "card flat" },
      h("h2", { class: "title" }, group ? "Messages of this group" : "Messages of this queue"),
      table([
        ["Message", (row) => h("a", { class: "mono", href: context.link("failures", { queue, id: row.id, group, by }) }, row.id)],
        ["Type", (row) => h("span", { class: "break" }, row.type ?? "")],
        ["Failed on", (row) => h("span", { class: "break" }, row.queue ?? "?")],
        ["Failure", (row) => h("span", { class: "line" }, [row.exception, row.text].filter(Boolean).join(": ") || row.reason)],
        ["At", (row) => (row.failed_at ? time(row.failed_at) : "?"), "nowrap"],
        ["Size", (row) => bytes(row.size), "number"],
      ], more.messages),
      more.has_more ? h("p", { class: "empty" }, `The first 100 messages of the ${group ? "group" : "queue"}.`) : null),
  );
}

function editing(context, queue, one) {
  if (!one.body.is_text || one.body.is_cut) return null;
  return action("Edit", () => ask({
    title: "Send this message back with another body",
    text: h("p", { class: "quiet" }, `It gets a new message id, and goes to ${one.queue ?? "the queue where it failed"}.`),
    wide: true,
    fields: [
      field("Body", h("textarea", { name: "body", value: one.body.text, rows: "12" })),
      field("Target queue; empty: where it failed", h("input", { name: "to", autocomplete: "off" })),
    ],
    confirm: "Send back",
    work: async (given) => {
      const result = await context.post("failure/edit", { queue, id: one.id, body: given.body, to: given.to });
      toast(`sent back as ${result.message_id}`);
      if (context.isShown()) context.go("failures", { queue });
    },
  }));
}
