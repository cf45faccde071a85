"use strict";
// Filters and zoom. The functions below draw the same plots as plots.py, for a part of the messages; a test compares
// them mark by mark. All texts of messages go through textContent, so none is read as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 52, RIGHT = 12, AXIS = 38, NARROW = 600, FEWEST = 12, CHARACTER_WIDTH = 0.58, BOLD = 0.7;
const MINUTE = 60e3, HOUR = 3600e3, DAY = 24 * HOUR;
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const UNITS = [[DAY, "d"], [HOUR, "h"], [MINUTE, "min"], [1000, "s"], [1, "ms"]];
const DURATIONS = [
  ...[-3, -2, -1, 0, 1, 2, 3, 4].map((power) => 10 ** power), MINUTE, 10 * MINUTE, HOUR, 10 * HOUR,
  ...[0, 1, 2, 3, 4].map((power) => DAY * 10 ** power),
];
/** The whole range of each time axis. */
const WHOLE = { flow: [data.first, data.first + data.width * data.spans], pending: null };
if (data.pending) WHOLE.pending = [data.pending.first, data.pending.first + data.pending.width * data.pending.spans];
const state = { target: 0, type: 0, flow: null, pending: null };

// Texts

const two = (number) => String(number).padStart(2, "0");
const count = (number) => Math.round(number).toLocaleString("en-US");
const digits = (number, precision = 3) => String(Number(number.toPrecision(precision)));

function brief(number) {
  const found = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(number) >= size);
  return found ? digits(number / found[0]) + found[1] : digits(number);
}

function milliseconds(value) {
  if (value === null) return "–";
  const found = UNITS.find(([size]) => Math.abs(value) >= size);
  if (!found) return value ? `${Number(value.toPrecision(1))} ms` : "0 ms";
  const number = value / found[0];
  return `${Math.abs(number) >= 100 ? count(number) : digits(number)} ${found[1]}`;
}

function span(value) {
  const found = [[DAY, "day"], [HOUR, "hour"], [MINUTE, "minute"], [1000, "second"]].find(([size]) => value >= size);
  if (!found) return `${value} ms`;
  const number = value / found[0];
  return number === 1 ? found[1] : `${digits(number, 6)} ${found[1]}s`;
}

function moment(value) {
  const at = new Date(value);
  const date = [at.getUTCFullYear(), two(at.getUTCMonth() + 1), two(at.getUTCDate())].join("-");
  return `${date} ${clock(at)}:${two(at.getUTCSeconds())}`;
}

const clock = (at) => `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
const total = (numbers) => numbers.reduce((some, one) => some + one, 0);
const quantity = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function shortened(text, width, bold) {
  const letters = Math.max(Math.floor(width / ((bold ? BOLD : CHARACTER_WIDTH) * 12)), 1);
  const all = [...text];
  return all.length <= letters ? text : `${all.slice(0, letters - 1).join("").trimEnd()}…`;
}

// Scales: a function from a value to pixels

const linear = (low, high, start, end) => (value) => start + ((value - low) / (high - low)) * (end - start);
const logarithmic = (low, high, start, end) => (value) =>
  start + (Math.log10(Math.max(value, low) / low) / Math.log10(high / low)) * (end - start);

function ticks(low, high, about) {
  const rough = (high - low) / about;
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const far = (one) => Math.abs(Math.log10(one / rough));
  const nice = [1, 2, 5, 10].map((one) => one * magnitude).reduce((some, one) => (far(one) < far(some) ? one : some));
  const step = Math.max(nice, 1);
  const first = Math.ceil(low / step), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(last - first + 1, 0) }, (_, number) => step * (first + number));
}

function durationTicks(low, high, place, apart) {
  const found = [];
  for (const value of DURATIONS) {
    const far = !found.length || Math.abs(place(value) - place(found.at(-1))) >= apart;
    if (low * 0.999 <= value && value <= high * 1.001 && far) found.push(value);
  }
  return found;
}

const spanFor = (whole, parts) => data.round.find((one) => whole / one <= parts) ?? data.round.at(-1);
const floored = (value, step) => Math.floor(value / step) * step;

function tickTexts(value, step) {
  const at = new Date(value), month = MONTHS[at.getUTCMonth()], day = `${month} ${at.getUTCDate()}`;
  if (step >= 28 * DAY) return [`${month} ${at.getUTCFullYear()}`, ""];
  if (step >= DAY) return [day, String(at.getUTCFullYear())];
  const seconds = `${clock(at)}:${two(at.getUTCSeconds())}`;
  if (step < 1000) return [`${seconds}.${Math.floor(at.getUTCMilliseconds() / 100)}`, day];
  return [step < MINUTE ? seconds : clock(at), day];
}

function widened(first, last, width) {
  const missing = Math.max(FEWEST - Math.floor((last - first) / width), 0), before = Math.floor(missing / 2);
  return [first - width * before, last + width * (missing - before)];
}

// Marks: elements of SVG

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    made.setAttribute(key, typeof value === "number" ? String(Math.round(value * 10) / 10) : value);
  }
  if (text !== undefined) made.textContent = text;
  return made;
}

const points = (all) => all.map((one) => one.map((value) => Math.round(value * 10) / 10).join(",")).join(" ");
const area = (all, role) => element("polygon", { class: `a-${role}`, points: points(all) });

function line(all, role, width = 1, dashed = false) {
  const dashes = dashed ? { "stroke-dasharray": "4 3" } : {};
  return element("polyline", { class: `s-${role}`, "stroke-width": width, ...dashes, points: points(all) });
}

function bar(x, y, width, height, role, tip) {
  const made = element("rect", { class: `f-${role}`, x, y, width, height });
  if (tip) made.append(element("title", {}, tip));
  return made;
}

function label(x, y, text, { role = "ink", size = 12, anchor = "", bold = false } = {}) {
  const weight = bold ? { "font-weight": 600 } : {}, side = anchor ? { "text-anchor": anchor } : {};
  return element("text", { class: `f-${role}`, x, y, "font-size": size, ...weight, ...side }, text);
}

function* timeAxis(first, last, frame, panels = [frame]) {
  const place = linear(first, last, frame.left, frame.right);
  const step = spanFor(last - first, Math.max(Math.floor((frame.right - frame.left) / 74), 2));
  let date = "";
  for (let value = floored(first, step); value <= last; value += step) {
    if (value < first) continue;
    const x = place(value), [upper, lower] = tickTexts(value, step);
    for (const panel of panels) yield line([[x, panel.top], [x, panel.bottom]], "grid");
    for (const [text, below] of [[upper, 16], [lower === date ? "" : lower, 30]]) {
      const half = (text.length * CHARACTER_WIDTH * 11) / 2;
      const middle = Math.min(Math.max(x, frame.left - 10 + half), frame.right + 10 - half);
      if (text) yield label(middle, frame.bottom + below, text, { role: "faint", size: 11, anchor: "middle" });
    }
    date = lower;
  }
}

function* valueAxis(place, values, frame, text) {
  for (const value of values) {
    const y = place(value);
    yield line([[frame.left, y], [frame.right, y]], "grid");
    yield label(frame.left - 8, y + 4, text(value), { role: "faint", size: 11, anchor: "end" });
  }
}

function* legend(entries, x, y) {
  for (const [text, role] of entries) {
    yield bar(x, y - 9, 10, 10, role);
    yield label(x + 15, y, text, { role: "faint" });
    x += 34 + CHARACTER_WIDTH * 12 * text.length;
  }
}

function* filled(values, places, base, role) {
  const outline = values.flatMap((value, number) => [[places[number], value], [places[number + 1], value]]);
  yield area([[outline[0][0], base], ...outline, [outline.at(-1)[0], base]], role);
  yield line(outline, role, 1.5);
}

// Plots: their marks, the rows of their table, and their time axis

/** Scheduled, delivered and waiting messages in the spans of the zoom. */
function flowOf(choice) {
  const short = data.short, [first, last] = state.flow ?? WHOLE.flow;
  const rounded = data.round.filter((one) => one % short === 0);
  const width = state.flow ? rounded.find((one) => (last - first) / one <= 120) ?? data.width : data.width;
  const start = floored(first, width), number = Math.ceil((last - start) / width), each = width / short;
  const found = { first: start, width, last: start + width * number, scheduled: [], delivered: [], waiting: [] };
  const sum = (values, from, to) => total(values.slice(Math.max(from, 0), Math.max(to, 0)));
  const offset = Math.round((start - data.first) / short);
  let waiting = sum(choice.scheduled, 0, offset) - sum(choice.delivered, 0, offset);
  for (let place = 0; place < number; place++) {
    const edges = [offset + place * each, offset + (place + 1) * each];
    found.scheduled.push(sum(choice.scheduled, ...edges));
    found.delivered.push(sum(choice.delivered, ...edges));
    waiting += found.scheduled[place] - found.delivered[place];
    found.waiting.push(waiting);
  }
  return found;
}

function flow(choice, width) {
  const found = flowOf(choice), wide = width > NARROW, half = wide ? 96 : 80, lower = wide ? 84 : 70;
  const frame = { left: LEFT, right: width - RIGHT, top: 30, bottom: 30 + 2 * half }, middle = 30 + half;
  const times = widened(found.first, found.last, found.width);
  const place = linear(...times, frame.left, frame.right);
  const places = [...found.scheduled, 0].map((_, number) => place(found.first + found.width * number));
  const highest = Math.max(...found.scheduled, ...found.delivered, 1);
  const up = linear(0, highest, middle, frame.top), down = linear(0, highest, middle, frame.bottom);
  const marks = [...timeAxis(...times, frame)];
  for (const scale of [up, down]) marks.push(...valueAxis(scale, ticks(0, highest, 2).filter(Boolean), frame, brief));
  marks.push(...filled(found.scheduled.map(up), places, middle, "in"));
  marks.push(...filled(found.delivered.map(down), places, middle, "out"));
  marks.push(line([[frame.left, middle], [frame.right, middle]], "faint"));
  found.scheduled.forEach((scheduled, number) => {
    const delivered = found.delivered[number], from = moment(found.first + found.width * number);
    const tip = `${from}: ${count(scheduled)} scheduled, ${count(delivered)} delivered`;
    const [start, end] = places.slice(number, number + 2);
    if (scheduled || delivered) marks.push(bar(start, frame.top, end - start, 2 * half, "pointed", tip));
  });
  marks.push(...legend([["scheduled", "in"], ["delivered", "out"]], frame.left, 16));
  marks.push(label(frame.right, 16, `per ${span(found.width)}`, { role: "faint", anchor: "end" }));
  const top = frame.bottom + 64, below = { left: frame.left, right: frame.right, top, bottom: top + lower };
  const least = Math.min(0, ...found.waiting), most = Math.max(...found.waiting, 1);
  const scale = linear(least, most, below.bottom, below.top);
  marks.push(...timeAxis(...times, below), ...valueAxis(scale, ticks(least, most, 2), below, brief));
  marks.push(...filled(found.waiting.map(scale), places, scale(0), "waiting"));
  marks.push(...legend([["waiting", "waiting"]], frame.left, below.top - 12));
  const rows = found.scheduled.map((scheduled, number) => {
    const counts = [scheduled, found.delivered[number], found.waiting[number]];
    return [moment(found.first + found.width * number), ...counts.map(count)];
  });
  return { marks, rows, times, height: below.bottom + AXIS };
}

function latenessRange([low, high]) {
  return low ? `${milliseconds(low)} to ${milliseconds(high)}` : `less than ${milliseconds(high)}`;
}

function lateness(choice, width) {
  const height = width > NARROW ? 250 : 230, last = data.bins.at(-1), shown = choice.bins;
  const frame = { left: LEFT, right: width - RIGHT, top: 48, bottom: height - AXIS };
  const ratio = last[1] / Math.max(last[0], last[1] / 10);
  const low = Math.min(...data.bins.map((one) => one[0] || one[1] / ratio)), high = Math.max(last[1], low * 100);
  const across = logarithmic(low, high, frame.left, frame.right);
  const most = Math.max(...shown, 1), up = linear(0, most, frame.bottom, frame.top);
  const marks = [...valueAxis(up, ticks(0, most, 3), frame, brief)];
  for (const value of durationTicks(low, high, across, 50)) {
    const x = across(value), anchor = x > frame.right - 10 ? "end" : x < frame.left + 10 ? "" : "middle";
    marks.push(line([[x, frame.top], [x, frame.bottom]], "grid"));
    marks.push(label(x, frame.bottom + 16, milliseconds(value), { role: "faint", size: 11, anchor }));
  }
  data.bins.forEach((bin, number) => {
    if (!shown[number]) return;
    const start = across(bin[0]), top = Math.min(up(shown[number]), frame.bottom - 1);
    const wide = Math.max(across(bin[1]) - start - 1, 1);
    const tip = `${latenessRange(bin)}: ${quantity(shown[number], "message")}`;
    marks.push(bar(start + 0.5, top, wide, frame.bottom - top, "out", tip));
  });
  const known = ["p50", "p95", "p99"].map((name, number) => [name, choice.late[number]]);
  const room = known.map(([name, value]) => CHARACTER_WIDTH * 12 * `${name} ${milliseconds(value)}`.length);
  let free = frame.left;
  known.forEach(([name, value], number) => {
    if (value === null) return;
    const x = across(Math.max(value, low)), after = total(room.slice(number + 1).map((one) => one + 10));
    const start = Math.min(Math.max(x - room[number] / 2, free), frame.right - room[number] - after);
    marks.push(line([[x, frame.top - 8], [x, frame.bottom]], "mark", 1.5, true));
    marks.push(line([[start + room[number] / 2, frame.top - 22], [x, frame.top - 8]], "faint"));
    marks.push(label(start, frame.top - 28, `${name} ${milliseconds(value)}`, { bold: name === "p99" }));
    free = start + room[number] + 10;
  });
  marks.push(label((frame.left + frame.right) / 2, height - 4, "late", { role: "faint", size: 11, anchor: "middle" }));
  const all = total(shown);
  let sum = 0;
  const rows = data.bins.map((bin, number) => {
    sum += shown[number];
    return [latenessRange(bin), count(shown[number]), `${((100 * sum) / (all || 1)).toFixed(3)} %`];
  });
  const latest = milliseconds(choice.late[3]);
  const note = `From due time to delivery, on a logarithmic scale. The latest was ${latest} late.`;
  return { marks, rows, height, note };
}

function latenessOverTime(choice, width) {
  const height = 200, frame = { left: LEFT, right: width - RIGHT, top: 30, bottom: height - AXIS };
  const [first, last] = state.flow ?? WHOLE.flow, times = widened(first, last, data.width);
  const place = linear(...times, frame.left, frame.right);
  const inside = (value) => Math.min(Math.max(place(value), frame.left), frame.right);
  const starts = choice.p50.map((_, number) => data.first + data.width * number);
  const shown = (number) => choice.p50[number] !== null && starts[number] < last && starts[number] + data.width > first;
  const known = [choice.p50, choice.p99].flatMap((values) => values.filter((_, number) => shown(number)));
  const least = Math.min(...known.map((one) => Math.max(one, 1)), Infinity), most = Math.max(...known, 1);
  const low = 10 ** Math.floor(Math.log10(known.length ? least : 1));
  const high = 10 ** Math.max(Math.ceil(Math.log10(most)), Math.round(Math.log10(low)) + 1);
  const up = logarithmic(low, high, frame.bottom, frame.top);
  const marks = [...timeAxis(...times, frame)];
  marks.push(...valueAxis(up, durationTicks(low, high, up, 24), frame, milliseconds));
  for (const [values, role] of [[choice.p50, "in"], [choice.p99, "bad"]]) {
    let outline = [];
    [...values, null].forEach((value, number) => {
      if (value !== null && shown(number)) {
        const y = up(Math.max(value, low));
        outline.push([inside(starts[number]), y], [inside(starts[number] + data.width), y]);
      } else if (outline.length) {
        marks.push(line(outline, role, 1.75));
        outline = [];
      }
    });
  }
  marks.push(...legend([["p50", "in"], ["p99", "bad"]], frame.left, 16));
  marks.push(label(frame.right, 16, `per ${span(data.width)}`, { role: "faint", anchor: "end" }));
  const numbers = starts.map((_, number) => number).filter(shown);
  const rows = numbers.map((one) => [moment(starts[one]), ...[choice.p50[one], choice.p99[one]].map(milliseconds)]);
  return { marks, rows, times, height };
}

/** The panels of pending messages: one for each target, or one for the selected target or type. */
function panelsOf(choice) {
  if (state.type) {
    const names = [state.target ? data.targets[state.target - 1] : "", data.types[state.type - 1]].filter(Boolean);
    const { pending: counts, overdue } = choice;
    return [{ name: names.join(", "), counts, overdue, pending: total(counts), late: total(overdue) }];
  }
  if (!state.target) return data.pending.targets;
  const none = data.pending.targets[0].counts.map(() => 0), name = data.targets[state.target - 1];
  const found = data.pending.each[state.target - 1];
  return [found ?? { name, counts: none, overdue: none, pending: 0, late: 0 }];
}

function pending(choice, width) {
  const { width: each, now } = data.pending, [first, last] = state.pending ?? WHOLE.pending, all = panelsOf(choice);
  const [tall, gap] = width > NARROW ? [72, 30] : [60, 32], top = 28, bottom = top + all.length * (tall + gap);
  const frame = { left: LEFT, right: width - RIGHT, top, bottom };
  const panels = all.map((_, number) => {
    const base = top + (number + 1) * (tall + gap);
    return { left: frame.left, right: frame.right, top: base - tall, bottom: base };
  });
  const times = widened(first, last, each), place = linear(...times, frame.left, frame.right);
  const starts = all[0].counts.map((_, number) => data.pending.first + each * number);
  const shown = starts.map((_, number) => number).filter((one) => starts[one] < last && starts[one] + each > first);
  const highest = Math.max(1, ...all.flatMap((one) => shown.map((number) => one.counts[number])));
  const marks = [...timeAxis(...times, frame, panels)], rows = [];
  marks.push(...legend([["due later", "in"], ["overdue", "bad"]], frame.left, 14));
  marks.push(label(frame.right, 14, `per ${span(each)}`, { role: "faint", anchor: "end" }));
  all.forEach((one, index) => {
    const panel = panels[index], up = linear(0, highest, panel.bottom, panel.top);
    marks.push(...valueAxis(up, ticks(0, highest, 2).filter(Boolean), panel, brief));
    const counts = count(one.pending) + (one.late ? `, ${count(one.late)} overdue` : "");
    const room = panel.right - panel.left - CHARACTER_WIDTH * 12 * counts.length - 12;
    marks.push(label(panel.left, panel.top - 8, shortened(one.name, room, true), { bold: true }));
    marks.push(label(panel.right, panel.top - 8, counts, { role: one.late ? "bad" : "faint", anchor: "end" }));
    for (const number of shown.filter((number) => one.counts[number])) {
      const start = Math.max(place(starts[number]), panel.left);
      const end = Math.min(place(starts[number] + each), panel.right);
      const wide = Math.max(end - start - (end - start > 3 ? 1 : 0), 1);
      const whole = one.counts[number], overdue = one.overdue[number];
      const high = Math.min(up(whole), panel.bottom - 1.5);
      const base = panel.bottom - ((panel.bottom - high) * overdue) / whole;
      const tip = `${one.name}, due from ${moment(starts[number])}: ${count(whole)}, ${count(overdue)} overdue`;
      if (base > high) marks.push(bar(start, high, wide, base - high, "in", tip));
      if (overdue) marks.push(bar(start, base, wide, panel.bottom - base, "bad", tip));
      rows.push([one.name, moment(starts[number]), count(whole), count(overdue)]);
    }
    marks.push(line([[panel.left, panel.bottom], [panel.right, panel.bottom]], "faint"));
    if (now !== null && times[0] < now && now < times[1]) {
      marks.push(line([[place(now), panel.top], [place(now), panel.bottom]], "mark", 1.2, true));
    }
  });
  const note = state.type
    ? "Only the table of messages has types: schedules, and messages that wait for a retry, are left out."
    : "Messages waiting for the target, by due time. The dashed line marks the last message that the audit saw.";
  return { marks, rows, times, height: bottom + AXIS, note };
}

/** The rows of the table of overdue messages. */
function overdue(choice) {
  return { rows: choice.oldest, note: "At most 20 overdue messages of this filter, those with the earliest due times." };
}

// The page

const PLOTS = { flow, lateness, "lateness-over-time": latenessOverTime, pending };
const ZOOMS = { flow: "flow", "lateness-over-time": "flow", pending: "pending" };
const everywhere = (name, value) => data.choices[0][name].map(() => value);
/** The choice of a target and a type without messages. */
const NOTHING = {
  ...Object.fromEntries(["scheduled", "delivered", "bins", "pending", "overdue"].map((name) => [name, everywhere(name, 0)])),
  ...Object.fromEntries(["p50", "p99", "late"].map((name) => [name, everywhere(name, null)])),
  oldest: [],
};

/** The sections that the filters apply to, with their original content. */
const sections = [...Object.keys(PLOTS), "overdue"]
  .map((name) => document.getElementById(name))
  .filter((section) => section?.querySelector("tbody"))
  .map((section) => {
    const body = section.querySelector("tbody"), svgs = [...section.querySelectorAll("svg")];
    const drawn = svgs.map((svg) => [svg.getAttribute("viewBox"), [...svg.childNodes]]);
    const note = section.querySelector("figcaption, p");
    return { name: section.id, section, body, svgs, drawn, rows: [...body.childNodes], note, text: note.textContent };
  });

const chosen = () => data.choices.find((one) => one.target === state.target && one.type === state.type) ?? NOTHING;
const widthOf = (svg) => Number(svg.getAttribute("viewBox").split(" ")[2]);
const make = (name, attributes = {}, ...children) => {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
};

function tableRow(cells, body) {
  const heads = body.closest("table").querySelectorAll("thead th"), made = make("tr");
  cells.forEach((text, number) => {
    const cell = make(number ? "td" : "th", { textContent: text });
    if (!number) cell.scope = "row";
    else cell.dataset.name = heads[number].textContent;
    if (heads[number].className) cell.className = heads[number].className;
    made.append(cell);
  });
  return made;
}

function draw() {
  const choice = chosen(), filtered = state.target || state.type;
  for (const { name, body, svgs, drawn, rows, note, text } of sections) {
    const zoomed = ZOOMS[name] && state[ZOOMS[name]];
    svgs.forEach((svg, number) => {
      const [box, nodes] = drawn[number];
      if (!filtered && !zoomed) {
        svg.setAttribute("viewBox", box);
        svg.replaceChildren(...nodes);
        return;
      }
      const width = Number(box.split(" ")[2]), { marks, height } = PLOTS[name](choice, width);
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren(nodes.find((one) => one.nodeName === "title"), ...marks);
    });
    const found = (PLOTS[name] ?? overdue)(choice, NARROW);
    body.replaceChildren(...(filtered || zoomed ? found.rows.map((one) => tableRow(one, body)) : rows));
    note.textContent = (filtered && found.note) || text;
  }
  document.body.classList.toggle("filtered", Boolean(filtered));
  for (const button of document.querySelectorAll(".zoom .whole")) button.disabled = !state[button.value];
  const sum = (values) => count(total(values));
  const late = `lateness ${milliseconds(choice.late[0])} at p50, ${milliseconds(choice.late[2])} at p99`;
  const counts = ["scheduled", "delivered", "overdue"].map((name) => `${sum(choice[name])} ${name}`).join(", ");
  document.getElementById("chosen").textContent = filtered ? `${counts}; ${late}` : "";
}

function zoomTo(name, first, last) {
  const [start, end] = WHOLE[name], least = FEWEST * (name === "flow" ? data.short : data.pending.width);
  const width = Math.min(Math.max(last - first, least), end - start);
  const from = Math.min(Math.max((first + last - width) / 2, start), end - width);
  state[name] = width >= end - start ? null : [from, from + width];
  draw();
}

function zoomBy(name, factor, shift) {
  const [first, last] = state[name] ?? WHOLE[name], width = last - first, middle = (first + last) / 2 + shift * width;
  zoomTo(name, middle - (width * factor) / 2, middle + (width * factor) / 2);
}

function zoomControls(name) {
  const button = (text, title, onclick) =>
    make("button", { type: "button", textContent: text, title, ariaLabel: title, onclick });
  const whole = button("Whole range", "Show the whole range", () => zoomTo(name, ...WHOLE[name]));
  Object.assign(whole, { className: "whole", value: name, disabled: true });
  return make("div", { className: "zoom", role: "group", ariaLabel: "Zoom" },
    button("+", "Zoom in", () => zoomBy(name, 0.5, 0)), button("−", "Zoom out", () => zoomBy(name, 2, 0)),
    button("←", "Earlier", () => zoomBy(name, 1, -0.5)), button("→", "Later", () => zoomBy(name, 1, 0.5)), whole);
}

/** Zoom into the part of a plot over which the pointer is dragged. */
function zoomOnDrag(svg, plot, name) {
  let from = null, mark = null;
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.min(Math.max(((event.clientX - box.left) / box.width) * widthOf(svg), LEFT), widthOf(svg) - RIGHT);
  };
  svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = at(event);
    mark = svg.appendChild(element("rect", { class: "a-mark", x: from, y: 0, width: 0, height: "100%" }));
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (from === null) return;
    mark.setAttribute("x", Math.min(from, at(event)));
    mark.setAttribute("width", Math.abs(at(event) - from));
  });
  svg.addEventListener("pointercancel", () => { mark?.remove(); from = null; });
  svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [first, last] = [from, at(event)].sort((one, other) => one - other);
    const { times } = PLOTS[plot](chosen(), widthOf(svg));
    const time = linear(LEFT, widthOf(svg) - RIGHT, ...times);
    mark.remove();
    from = null;
    if (last - first > 4) zoomTo(name, time(first), time(last));
  });
}

function filterOf(text, key, names) {
  const options = ["all", ...names].map((name, number) => make("option", { value: number, textContent: name }));
  const select = make("select", { id: `filter-${key}` }, ...options);
  select.onchange = () => {
    state[key] = Number(select.value);
    draw();
  };
  return make("label", {}, text, select);
}

const filters = [["Target ", "target", data.targets], ["Type ", "type", data.types]];
const reset = make("button", { type: "button", textContent: "Reset" });
reset.onclick = () => {
  Object.assign(state, { target: 0, type: 0, flow: null, pending: null });
  for (const select of document.querySelectorAll(".filters select")) select.value = "0";
  draw();
};
const controls = filters.filter((one) => one[2].length).map((one) => filterOf(...one));
const status = make("p", { id: "chosen", role: "status" });
document.querySelector(".cards").after(
  make("div", { className: "filters", role: "group", ariaLabel: "Filters" }, ...controls, reset, status));
for (const { name, section, svgs } of sections) {
  section.classList.add("filtering");
  if (!ZOOMS[name] || !WHOLE[ZOOMS[name]]) continue;
  section.classList.add("zooms");
  section.querySelector("figcaption").after(zoomControls(ZOOMS[name]));
  for (const svg of svgs) zoomOnDrag(svg, name, ZOOMS[name]);
}
