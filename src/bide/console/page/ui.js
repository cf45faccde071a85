// Elements that several views share.

import { h, replace } from "./dom.js";
import { about } from "./api.js";

export const head = (title, text, ...actions) =>
  h("div", { class: "head" }, h("div", {}, h("h1", {}, title), h("p", { class: "quiet" }, text)), ...actions);

export const source = (kind, text) => h("span", { class: `source ${kind}` }, text);

export const badge = (text, kind = "") => h("span", { class: `badge ${kind}` }, text);

export const notice = (text, kind = "") => h("p", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : null }, text);

export const empty = (title, text) => h("div", { class: "empty" }, h("b", {}, title), h("p", {}, text));

export const stat = (value, text) => h("div", {}, h("b", {}, value), h("span", {}, text));

export const field = (label, input) => h("label", { class: "field" }, h("span", {}, label), input);

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function table(columns, rows, { link, stacks = true } = {}) {
  const cells = (row) =>
    columns.map(([label, content, kind]) => h("td", { class: kind, "data-label": label }, h("div", {}, content(row))));
  const line = (row) => {
    if (!link) return h("tr", {}, cells(row));
    // The keyboard opens a row by the link or button in it.
    return h("tr", { class: "link", onclick: (event) => event.target.closest("button, a, input") || link(row) }, cells(row));
  };
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: stacks ? "stack" : null },
      h("thead", {}, h("tr", {}, columns.map(([label, , kind]) => h("th", { class: kind, scope: "col" }, label)))),
      h("tbody", {}, rows.map(line)),
    ),
  );
}

export function toast(text, kind = "") {
  const shown = h("div", { class: `toast ${kind}` }, text);
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), kind === "bad" ? 12000 : 6000);
}

export const failed = (error) => toast(error.message, "bad");

// A button that changes something. Read-only consoles do not show it.
export function action(text, work, kind = "tiny") {
  if (about.read_only) return null;
  return h(
    "button",
    {
      type: "button",
      class: kind,
      onclick: async (event) => {
        const button = event.currentTarget;
        button.disabled = true;
        try {
          await work();
        } catch (error) {
          failed(error);
        } finally {
          button.disabled = false;
          // A disabled button loses the focus, and a closed dialog cannot give it back.
          if ([document.body, document.getElementById("content")].includes(document.activeElement)) button.focus({ preventScroll: true });
        }
      },
    },
    text,
  );
}

// A button that repeats a step until the step returns false, or until you press the button again.
export function repeated(text, step, context) {
  let going = false;
  const button = h("button", {
    type: "button",
    onclick: async () => {
      if (going) return void (going = false);
      going = true;
      button.textContent = "Stop";
      button.setAttribute("aria-busy", "true");
      try {
        let goesOn = true;
        while (goesOn && going && context.isShown()) goesOn = await step();
      } catch (error) {
        failed(error);
      } finally {
        going = false;
        button.removeAttribute("aria-busy");
        button.textContent = text;
      }
    },
  }, text);
  return button;
}

// A dialog. `work` gets the values of the fields by name; the dialog shows its error. Without `confirm` it only informs.
export function ask({ title, text, fields = [], confirm, kind = "", work, wide = false }) {
  return new Promise((done) => {
    // Another one may have been opened while the messages of this one were counted.
    if (document.querySelector("dialog")) {
      toast("close the open dialog first", "bad");
      return done(null);
    }
    const problem = h("div", {});
    const button = confirm ? h("button", { class: `main ${kind}`, type: "submit" }, confirm) : null;
    const close = h("button", { type: "button", onclick: () => dialog.close() }, confirm ? "Back" : "Close");
    const form = h(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          if (!confirm) return;
          button.disabled = true;
          const values = {};
          for (const input of form.querySelectorAll("[name]")) {
            values[input.name] = input.type === "checkbox" ? input.checked : input.value;
          }
          try {
            const result = await work(values);
            done(result ?? true);
            dialog.close();
          } catch (error) {
            if (!dialog.open) return failed(error);
            replace(problem, notice(error.message, "bad"));
            button.disabled = false;
          }
        },
      },
      h("h2", {}, title),
      text,
      h("div", { class: "fields" }, fields),
      problem,
      h("div", { class: "buttons" }, close, button),
    );
    const dialog = h("dialog", { class: wide ? "wide" : null, onclose: () => {
      dialog.remove();
      // The button that opened the dialog may be gone, because the view was loaded again.
      if (document.activeElement === document.body) document.getElementById("content").focus({ preventScroll: true });
      done(null);
    } }, form);
    document.body.append(dialog);
    dialog.showModal();
  });
}

export function copy(text) {
  return h("span", { class: "command" }, h("code", {}, text), h(
    "button",
    {
      type: "button",
      class: "plain tiny",
      "aria-label": `Copy ${text}`,
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(text);
          toast("copied");
        } catch {
          toast("the browser does not allow copying here", "bad");
        }
      },
    },
    "Copy",
  ));
}

export function body(found) {
  if (!found.size) return h("p", { class: "quiet" }, "The body is empty.");
  let text = found.text;
  if (found.is_text && !found.is_cut) {
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // The text is not JSON.
    }
  }
  const notes = [found.is_text ? null : "base64", found.is_cut ? "the beginning only" : null].filter(Boolean);
  return h("div", {}, h("p", { class: "quiet small" }, `${found.size} bytes${notes.length ? `, ${notes.join(", ")}` : ""}`), h("pre", {}, text));
}

export const values = (given) =>
  Object.keys(given ?? {}).length ? h("pre", {}, JSON.stringify(given, null, 2)) : h("p", { class: "quiet" }, "None.");
