// Numbers, times and durations as text.

const numbers = new Intl.NumberFormat("en-US");

export const number = (value) => (value === null || value === undefined ? "?" : numbers.format(value));

export function quantity(value, noun, plural) {
  return `${number(value)} ${value === 1 ? noun : plural ?? noun + "s"}`;
}

const two = (value) => String(value).padStart(2, "0");

export function day(moment) {
  const at = new Date(moment);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

export function clock(moment, seconds = true) {
  const at = new Date(moment);
  return `${two(at.getHours())}:${two(at.getMinutes())}${seconds ? ":" + two(at.getSeconds()) : ""}`;
}

export const time = (moment) => (moment === null || moment === undefined ? "?" : `${day(moment)} ${clock(moment)}`);

export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";

const UNITS = [["d", 86400000], ["h", 3600000], ["min", 60000], ["s", 1000], ["ms", 1]];

export function duration(milliseconds, parts = 2) {
  let left = Math.round(Math.abs(milliseconds));
  const found = [];
  for (const [name, length] of UNITS) {
    if (left >= length && found.length < parts) {
      found.push(`${number(Math.floor(left / length))}\u00a0${name}`);
      left %= length;
    } else if (found.length) break;
  }
  return found.join("\u00a0") || "0\u00a0s";
}

export const lateness = (milliseconds) =>
  milliseconds < 1000 ? `${milliseconds}\u00a0ms` : milliseconds < 60000 ? `${(milliseconds / 1000).toFixed(1)}\u00a0s` : duration(milliseconds);

export function relative(moment, now = Date.now()) {
  const away = new Date(moment).getTime() - now;
  if (Math.abs(away) < 1000) return "now";
  // With one unit, the text for an hour and 59 minutes would be "1 h".
  const text = duration(away, Math.abs(away) < 3600000 ? 1 : 2);
  return away > 0 ? `in\u00a0${text}` : `${text}\u00a0ago`;
}

export function bytes(size) {
  if (size < 1000) return `${size} B`;
  return size < 1000000 ? `${(size / 1000).toFixed(1)} kB` : `${(size / 1000000).toFixed(1)} MB`;
}

export const target = (one) => (one.to !== null && one.to !== undefined ? one.to : `exchange ${one.exchange}`);

export const targetName = (text) =>
  text === null ? "other targets" : text.startsWith("q:") ? text.slice(2) : `exchange ${text.slice(2)}`;

export function niceSteps(highest, count = 4) {
  if (highest <= 0) return [0];
  const rough = highest / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough), 1);
  const steps = [];
  for (let value = 0; value < highest + step; value += step) steps.push(value);
  return steps;
}
