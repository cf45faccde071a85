// The frame of the console: sign-in, views, virtual hosts, keyboard shortcuts, light and dark.

import { about, get, loadAbout, post, signIn, RequestError } from "./api.js";
import { h, replace, s } from "./dom.js";
import { ask, empty, facts, field, notice } from "./ui.js";
import * as waiting from "./view-waiting.js";
import * as find from "./view-find.js";
import * as schedules from "./view-schedules.js";
import * as many from "./view-many.js";
import * as failures from "./view-failures.js";
import * as problems from "./view-problems.js";
import * as lateness from "./view-lateness.js";
import * as log from "./view-log.js";

const VIEWS = [
  ["waiting", "Waiting", waiting],
  ["find", "Find a message", find],
  ["schedules", "Schedules", schedules],
  ["many", "Bulk changes", many],
  ["failures", "Failures", failures],
  ["problems", "Problems", problems],
  ["lateness", "Lateness", lateness],
  ["log", "Operator log", log],
];

const content = document.getElementById("content");
let shown = 0;

// -- light and dark

const dark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  let chosen = null;
  try {
    chosen = localStorage.getItem("bide-theme");
  } catch {
    // Without storage, the setting of the system applies.
  }
  document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
}

function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("bide-theme", next);
  } catch {
    document.documentElement.dataset.theme = next;
    return;
  }
  applyTheme();
}

applyTheme();
dark.addEventListener("change", applyTheme);

// -- routing: the view and its parameters are in the part of the address behind "#", so that each view has a link

export function where() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const name = path.replace(/^\//, "");
  const parameters = Object.fromEntries(new URLSearchParams(query));
  return { name: VIEWS.some(([one]) => one === name) ? name : "waiting", parameters };
}

export function address(name, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${name}${query ? `?${query}` : ""}`;
}

function selectedVhost(parameters) {
  return about.vhosts.find((one) => one.name === parameters.vhost) ?? about.vhosts[0];
}

// -- the frame

// Replace the children of an element, and keep the focus in its place.
function redraw(element, ...children) {
  const place = [...element.children].indexOf(document.activeElement);
  replace(element, ...children);
  element.children[place]?.focus();
}

const half = () =>
  s("svg", { class: "icon", viewBox: "0 0 16 16" }, s("circle", { cx: 8, cy: 8, r: 6.25 }), s("path", { d: "M8 1.75a6.25 6.25 0 0 1 0 12.5z" }));

function frame() {
  const { name, parameters } = where();
  const here = selectedVhost(parameters);
  const vhost = about.vhosts.length > 1 ? { vhost: here.name } : {};
  const choice = about.vhosts.length > 1
    ? h(
        "select",
        { "aria-label": "Virtual host", onchange: (event) => (location.hash = address(name, { vhost: event.target.value })) },
        about.vhosts.map((one) => h("option", { value: one.name, selected: one === here }, one.name)),
      )
    : null;
  redraw(
    document.getElementById("top"),
    h("a", { class: "brand", href: address("waiting", vhost) }, h("img", { src: "icon.svg", alt: "" }), "bide"),
    choice,
    h("span", { class: "broker grow" }, `${here.broker} · ${here.layout}`),
    h("span", { class: "grow" }),
    about.read_only ? h("span", { class: "badge warn" }, "read-only") : null,
    about.user ? h("span", { class: "badge wide-only" }, about.user) : null,
    h("button", { type: "button", class: "plain", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: toggleTheme }, half()),
    h("button", { type: "button", class: "plain wide-only", title: "Keyboard shortcuts (?)", "aria-label": "Keyboard shortcuts", onclick: showShortcuts }, "?"),
  );
  redraw(
    document.getElementById("views"),
    VIEWS.map(([one, title], place) =>
      h("a", { href: address(one, vhost), "aria-current": one === name ? "page" : null, "aria-keyshortcuts": place + 1 }, title, h("kbd", { "aria-hidden": "true" }, place + 1)),
    ),
  );
  document.querySelector("#views [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

async function show() {
  const { name, parameters } = where();
  const number = ++shown;
  frame();
  const [, title, view] = VIEWS.find(([one]) => one === name);
  document.title = `${title} · bide console`;
  const vhost = selectedVhost(parameters).name;
  const { hash } = location;
  const kept = about.vhosts.length > 1 ? { vhost } : {};
  const context = {
    parameters,
    get: (path, values = {}) => get(path, { vhost, ...values }),
    post: (path, values = {}) => post(path, { vhost, ...values }),
    link: (one, values = {}) => address(one, { ...kept, ...values }),
    go: (one, values = {}) => (location.hash = address(one, { ...kept, ...values })),
    // An answer may come when another view is shown.
    again: () => isOpen() && location.hash === hash && show(),
    isShown: () => number === shown,
  };
  const page = h("div", { class: "view" });
  try {
    const hadFocus = content.contains(document.activeElement);
    replace(content, page);
    if (hadFocus) content.focus({ preventScroll: true });
    await view.show(page, context);
  } catch (error) {
    if (number !== shown) return;
    if (error instanceof RequestError && error.status === 401) return signOut();
    replace(page, h("div", { class: "head" }, h("h1", {}, title)), notice(error.message, "bad"), again(context));
  }
  if (number === shown) page.dataset.ready = "true";
}

const again = (context) => h("button", { type: "button", onclick: context.again }, "Try again");

// -- keyboard shortcuts

document.querySelector(".skip").addEventListener("click", (event) => {
  // The part of the address behind "#" is the view.
  event.preventDefault();
  content.focus();
});

// Before the sign-in there is no view.
const isOpen = () => about.vhosts.length > 0 && !document.body.classList.contains("signed-out");

const keys = (pairs) => facts(pairs.map(([key, text]) => [h("kbd", {}, key), text]));

function showShortcuts() {
  ask({
    title: "Keyboard shortcuts",
    text: [
      keys([["1 to 8", "opens a view"], ["r", "loads the view again"], ["/", "goes to the first field"], ["t", "changes between light and dark"]]),
      h("h3", {}, "In a skyline"),
      keys([["← →", "move"], ["+ −", "zoom"], ["Enter", "lists the schedules of the bar"], ["Esc", "shows everything"]]),
    ],
  });
}

addEventListener("keydown", (event) => {
  if (!isOpen() || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog")) return;
  if (event.target.closest?.("input, textarea, select")) return;
  const view = VIEWS[Number(event.key) - 1];
  if (view) {
    const { parameters } = where();
    location.hash = address(view[0], about.vhosts.length > 1 ? { vhost: selectedVhost(parameters).name } : {});
  } else if (event.key === "r") show();
  else if (event.key === "t") toggleTheme();
  else if (event.key === "?") showShortcuts();
  else if (event.key === "/") {
    event.preventDefault();
    content.querySelector("input, select")?.focus();
  }
});

// -- sign-in

function signOut(problem) {
  document.body.classList.add("signed-out");
  replace(document.getElementById("top"));
  replace(document.getElementById("views"));
  const token = h("input", { name: "token", type: "password", autocomplete: "off", required: true });
  replace(
    content,
    h(
      "div",
      { class: "sign-in" },
      h(
        "div",
        { class: "card" },
        h("h1", {}, "bide console"),
        h("p", { class: "quiet" }, "Open the address that bide console printed, or enter its token."),
        h(
          "form",
          {
            onsubmit: (event) => {
              event.preventDefault();
              enter(token.value);
            },
          },
          field("Token", token),
          problem ? notice(problem, "bad") : null,
          h("button", { class: "main", type: "submit" }, "Sign in"),
        ),
      ),
    ),
  );
  token.focus();
}

async function enter(token) {
  try {
    await signIn(token);
    await start();
  } catch (error) {
    signOut(error.message);
  }
}

async function start() {
  await loadAbout();
  document.body.classList.remove("signed-out");
  if (!about.vhosts.length) replace(content, empty("No virtual host", "Start the console with --vhost."));
  else await show();
}

async function open() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token !== null) {
    // Remove the token from the history of the browser.
    history.replaceState(null, "", location.pathname);
    return enter(token);
  }
  try {
    await start();
  } catch (error) {
    if (error.status === 401) signOut();
    else replace(content, h("div", { class: "alone" }, notice(error.message, "bad")));
  }
}

addEventListener("hashchange", () => {
  if (new URLSearchParams(location.hash.slice(1)).has("token")) open();
  else if (isOpen()) show();
});
open();
