// Requests to the server of the console.

export const about = { csrf: "", read_only: false, vhosts: [], user: "" };

export class RequestError extends Error {
  constructor(status, text, kind) {
    super(text);
    this.status = status;
    this.kind = kind;
  }
}

async function call(method, path, values, headers = {}) {
  const options = { method, headers, credentials: "same-origin" };
  let address = path;
  if (method === "GET") {
    const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
    if (given.length) address += `?${new URLSearchParams(given)}`;
  } else {
    options.body = JSON.stringify(values);
    headers["content-type"] = "application/json";
  }
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new RequestError(0, "the console does not answer: is 'bide console' still running?", "gone");
  }
  let found = {};
  try {
    found = await answer.json();
  } catch {
    // The body is not JSON. The error has the status instead.
  }
  if (!answer.ok) throw new RequestError(answer.status, found.error ?? `status ${answer.status}`, found.kind);
  return found;
}

export async function loadAbout() {
  Object.assign(about, await call("GET", "api/about", {}));
}

export const signIn = (token) => call("POST", "session", { token });

export const get = (path, values = {}) => call("GET", `api/${path}`, values);

export const post = (path, values = {}) => call("POST", `api/${path}`, values, { "x-csrf-token": about.csrf });
