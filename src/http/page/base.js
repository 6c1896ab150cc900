// What the page's modules share: elements, storage, the event stream, the API's addresses and failures.
//
// Invariants: text from a model or from the server reaches the document only through text nodes
// and `textContent`, never as HTML; every address is relative to the page, so the page works under
// any prefix.

export const $ = (id) => document.getElementById(id);

/** Makes an element. Strings among `children` become text nodes; nothing is parsed. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

export function iconButton(className, name, label, onclick) {
  return el("button", { type: "button", class: className, title: label, "aria-label": label, onclick }, icon(name));
}

// ---- storage --------------------------------------------------------------------------------

// Keys carry the page's path: two Greenrooms mounted in one origin keep apart.
const scope = `greenroom:${location.pathname}:`;

/** A JSON view of a Storage area that works, forgetfully, where the browser forbids storage. */
function storage(area) {
  return {
    get(key, fallback) {
      try {
        const value = JSON.parse(window[area].getItem(scope + key));
        return value ?? fallback;
      } catch {
        return fallback;
      }
    },
    set(key, value) {
      try {
        if (value === null) window[area].removeItem(scope + key);
        else window[area].setItem(scope + key, JSON.stringify(value));
      } catch {
        // Full or forbidden: the page goes on without remembering.
      }
    },
  };
}

export const lasting = storage("localStorage");
export const session = storage("sessionStorage");

// ---- event stream ---------------------------------------------------------------------------

/** Server-sent events from bytes that may be cut anywhere, also inside a character or a CRLF. */
export class EventStream {
  #decoder = new TextDecoder();
  #rest = "";
  #data = [];

  /** Feeds bytes and returns the `data` of every event that they completed. */
  feed(bytes) {
    this.#rest += this.#decoder.decode(bytes, { stream: true });
    // A CR at the end may be half of a CRLF: it waits for the next bytes.
    const end = this.#rest.endsWith("\r") ? this.#rest.length - 1 : this.#rest.length;
    const lines = this.#rest.slice(0, end).split(/\r\n|\n|\r/);
    this.#rest = lines.pop() + this.#rest.slice(end);
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

// ---- API ------------------------------------------------------------------------------------

export const address = (path) => new URL(path, document.baseURI.replace(/[?#].*$/, ""));

/** Something to tell the user: a title, a message, a detail, and how many seconds to wait. */
export class Failure extends Error {
  constructor(title, message, { detail = "", wait = 0 } = {}) {
    super(message);
    Object.assign(this, { title, detail, wait });
  }
}

const TITLES = {
  400: "The request was refused",
  401: "Not signed in",
  403: "Not allowed",
  404: "Not found",
  413: "The message is too large",
  429: "The server is busy",
  503: "The server is not ready",
};

export function failureOf(error, title, wait = 0) {
  const message = typeof error === "string" ? error : error?.message;
  const detail = [error?.code ?? error?.type, error?.param && `field: ${error.param}`].filter(Boolean).join(", ");
  return new Failure(title, String(message || "The server gave no reason."), { detail, wait });
}

function secondsToWait(header) {
  if (!header) return 0;
  const seconds = /^\d+$/.test(header.trim()) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.min(Math.max(Math.ceil(seconds), 0), 600) : 0;
}

export async function failureOfResponse(response, titles = {}) {
  const text = await response.text().catch(() => "");
  let error = text.slice(0, 500).trim();
  try {
    const body = JSON.parse(text);
    error = body.error ?? body.message ?? error;
  } catch {
    if (/^<|^$/.test(error)) error = `HTTP ${response.status} ${response.statusText}`.trim();
  }
  const title = titles[response.status] ?? TITLES[response.status] ?? `The server answered with an error (${response.status})`;
  return failureOf(error, title, secondsToWait(response.headers.get("retry-after")));
}

// ---- telling --------------------------------------------------------------------------------

/** A failure on the page: what went wrong, and `again` to press once it may be tried again. */
export function failureBox({ title, message, detail, until }, again) {
  const retry = el("button", { type: "button", class: "plain retry", onclick: again }, "Try again");
  const words = el("p", {}, el("strong", {}, title), message, detail ? el("small", {}, detail) : "");
  const box = el("div", { class: "failure" }, words, again ? retry : "");
  const tick = () => {
    const left = Math.ceil((until - Date.now()) / 1000);
    retry.disabled = left > 0;
    retry.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left > 0 && box.isConnected) setTimeout(tick, 250);
  };
  if (until > Date.now()) setTimeout(tick, 0);
  return box;
}

/** A failure as plain data that can be kept. */
export function recordOf(error) {
  const { title, message, detail, wait } = error instanceof Failure ? error : new Failure("The page failed", String(error));
  return { title, message, detail, until: Date.now() + wait * 1000 };
}

/** Tells a screen reader, without moving anything on the page. */
export function announce(text) {
  const log = $("announcer");
  while (log.childElementCount > 40) log.firstChild.remove();
  log.append(el("p", {}, text));
}

export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Plain http on another host has no clipboard API: the old way still works there.
    const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const use = button.querySelector("use");
  use.setAttribute("href", "#i-check");
  button.classList.add("yes");
  announce("Copied");
  setTimeout(() => {
    use.setAttribute("href", "#i-copy");
    button.classList.remove("yes");
  }, 1600);
}
