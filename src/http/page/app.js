// The chat page's behaviour: ES modules without dependencies. This one is the chat and the page around it.
//
// Sections: completion, Markdown, messages, turns, settings, health, tabs, start.
// Invariants: those of base.js; at most one answer streams at a time.

import {
  $, EventStream, Failure, address, announce, copyText, el, failureBox, failureOf, failureOfResponse, icon, iconButton, lasting, recordOf, session,
} from "./base.js";
import { escapeDictation, focusDictation, showSpeech, startDictation } from "./dictate.js";

// ---- completion -----------------------------------------------------------------------------

/** Streams a chat completion: yields each chunk, throws a `Failure`, or an AbortError on stop. */
async function* completion(body, signal) {
  let response;
  try {
    response = await fetch(address("v1/chat/completions"), {
      method: "POST",
      headers: { "content-type": "application/json", accept: "text/event-stream" },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Failure("The server does not answer", "Check that it is running, then try again.");
  }
  if (!response.ok) throw await failureOfResponse(response);
  const reader = response.body.getReader();
  const stream = new EventStream();
  let finished = false;
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new Failure("The connection broke", "The answer above is not complete.");
    }
    if (piece.done) break;
    for (const data of stream.feed(piece.value)) {
      if (data === "[DONE]") return;
      let chunk;
      try {
        chunk = JSON.parse(data);
      } catch {
        throw new Failure("The server sent something odd", "A part of the answer could not be read.");
      }
      if (chunk.error) throw failureOf(chunk.error, "The answer broke off");
      finished ||= Boolean(chunk.choices?.[0]?.finish_reason);
      yield chunk;
    }
  }
  if (!finished) throw new Failure("The connection ended early", "The answer above is not complete.");
}

// ---- Markdown: inline -----------------------------------------------------------------------

const MAX_DEPTH = 8;
const MAX_LABEL = 400;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", "#39": "'", nbsp: "\u00a0" };
const PUNCTUATION = /[\p{P}\p{S}]/u;
const LINK_TAIL = /\(\s*(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/y;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const BARE_LINK = /https?:\/\/[^\s<>"'`|]+/iy;
const ENTITY = /&(amp|lt|gt|quot|apos|nbsp|#39);/y;

/** The address if it is one of the three harmless kinds, else null. */
function safeAddress(raw) {
  if (!/^(https?:\/\/|mailto:)/i.test(raw)) return null;
  try {
    const url = new URL(raw);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** Reads one run of inline text in one pass: a stack of open emphases, closed by later marks. */
class Inline {
  constructor(text, { depth = 0, links = true, open = false } = {}) {
    this.source = text;
    this.at = 0;
    this.depth = depth;
    this.links = links;
    this.open = open;
    this.hopeless = new Set();
    this.frames = [{ node: document.createDocumentFragment(), mark: "", size: 0 }];
  }

  get top() {
    return this.frames[this.frames.length - 1];
  }

  write(text, node = this.top.node) {
    if (!text) return;
    if (node.lastChild?.nodeType === Node.TEXT_NODE) node.lastChild.appendData(text);
    else node.append(text);
  }

  /** Gives up an open emphasis: its mark becomes text again. */
  drop() {
    const frame = this.frames.pop();
    this.write(frame.mark.repeat(frame.size));
    const children = [...frame.node.childNodes];
    if (children[0]?.nodeType === Node.TEXT_NODE) this.write(children.shift().data);
    this.top.node.append(...children);
  }

  close() {
    const frame = this.frames.pop();
    this.top.node.append(frame.node);
  }

  run() {
    const { source } = this;
    const special = /[\\`*_~[!<&h\n]/g;
    while (this.at < source.length) {
      special.lastIndex = this.at;
      const next = special.exec(source)?.index ?? source.length;
      this.write(source.slice(this.at, next));
      this.at = next;
      if (next < source.length && !this.step(source[next])) {
        this.write(source[next]);
        this.at += 1;
      }
    }
    while (this.frames.length > 1) {
      // While an answer streams, bold text is shown bold before its closing mark arrives.
      if (this.open && this.top.size === 2 && this.top.node.hasChildNodes()) this.close();
      else this.drop();
    }
    return this.frames[0].node;
  }

  step(char) {
    switch (char) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "*": case "_": case "~": return this.emphasis(char);
      case "!": return this.source[this.at + 1] === "[" && this.link(1);
      case "[": return this.link(0);
      case "<": return this.address(ANGLE_LINK);
      case "h": return this.address(BARE_LINK);
      case "&": return this.entity();
      default: return this.lineBreak();
    }
  }

  escape() {
    const next = this.source[this.at + 1];
    if (next === undefined || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.write(next);
    this.at += 2;
    return true;
  }

  lineBreak() {
    this.top.node.append(el("br"));
    this.at += 1;
    return true;
  }

  entity() {
    const match = matchAt(ENTITY, this.source, this.at);
    if (!match) return false;
    this.write(ENTITIES[match[1]]);
    this.at += match[0].length;
    return true;
  }

  runLength(char) {
    let end = this.at;
    while (this.source[end] === char) end += 1;
    return end - this.at;
  }

  code() {
    const size = this.runLength("`");
    const start = this.at + size;
    let end = this.hopeless.has(size) ? -1 : this.closingTicks(size, start);
    if (end < 0) {
      this.hopeless.add(size);
      if (!this.open || start >= this.source.length) {
        this.write("`".repeat(size));
        this.at = start;
        return true;
      }
      end = this.source.length;
    }
    let text = this.source.slice(start, end).replaceAll("\n", " ");
    if (/^ .*[^ ].* $|^ `|` $/.test(text)) text = text.replace(/^ /, "").replace(/ $/, "");
    this.top.node.append(el("code", {}, text));
    this.at = Math.min(end + size, this.source.length);
    return true;
  }

  closingTicks(size, from) {
    const ticks = "`".repeat(size);
    for (let at = this.source.indexOf(ticks, from); at >= 0; at = this.source.indexOf(ticks, at)) {
      let end = at + size;
      while (this.source[end] === "`") end += 1;
      if (end - at === size) return at;
      at = end;
    }
    return -1;
  }

  emphasis(char) {
    const { source, at } = this;
    const size = this.runLength(char);
    const before = source[at - 1] ?? " ";
    const after = source[at + size] ?? " ";
    const edge = (c) => /\s/.test(c);
    const mark = (c) => PUNCTUATION.test(c);
    let opens = !edge(after) && (!mark(after) || edge(before) || mark(before));
    let closes = !edge(before) && (!mark(before) || edge(after) || mark(after));
    if (char === "_") [opens, closes] = [opens && (!closes || mark(before)), closes && (!opens || mark(after))];
    let left = size;
    if (size > 3 || (char === "~" && size !== 2)) opens = closes = false;
    while (closes && left > 0) {
      const index = this.frames.findLastIndex((frame) => frame.mark === char && frame.size <= left);
      if (index < 1) break;
      left -= this.frames[index].size;
      while (this.frames.length - 1 > index) this.drop();
      this.close();
    }
    while (opens && left > 0 && this.frames.length <= MAX_DEPTH) {
      const taken = left >= 2 ? 2 : 1;
      const tag = char === "~" ? "del" : taken === 2 ? "strong" : "em";
      this.frames.push({ node: el(tag), mark: char, size: taken });
      left -= taken;
    }
    this.write(char.repeat(left));
    this.at += size;
    return true;
  }

  link(bang) {
    if (!this.links || this.depth >= MAX_DEPTH) return false;
    const start = this.at + bang + 1;
    const end = this.labelEnd(start);
    const match = end < 0 ? null : matchAt(LINK_TAIL, this.source, end + 1);
    const href = match && safeAddress(match[1] ?? match[2]);
    if (!href) return false;
    const label = this.source.slice(start, end);
    const anchor = anchorTo(href);
    anchor.append(renderInline(label || href, { depth: this.depth + 1, links: false }));
    this.top.node.append(anchor);
    this.at = end + 1 + match[0].length;
    return true;
  }

  labelEnd(start) {
    const limit = Math.min(this.source.length, start + MAX_LABEL);
    for (let at = start, nested = 0; at < limit; at += 1) {
      const char = this.source[at];
      if (char === "\\") at += 1;
      else if (char === "[") nested += 1;
      else if (char === "]" && nested-- === 0) return at;
    }
    return -1;
  }

  address(pattern) {
    if (!this.links || (pattern === BARE_LINK && /[\p{L}\p{N}]/u.test(this.source[this.at - 1] ?? ""))) return false;
    const match = matchAt(pattern, this.source, this.at);
    if (!match) return false;
    let raw = match[1] ?? match[0];
    let length = match[0].length;
    if (pattern === BARE_LINK) {
      raw = raw.slice(0, MAX_LABEL * 5).replace(/[.,:;!?*_~\])]{1,20}$/, (tail) => (tail[0] === ")" && raw.includes("(") ? ")" : ""));
      length = raw.length;
    }
    const href = safeAddress(raw);
    if (!href) return false;
    const anchor = anchorTo(href);
    anchor.append(raw);
    this.top.node.append(anchor);
    this.at += length;
    return true;
  }
}

function anchorTo(href) {
  return el("a", { href, target: "_blank", rel: "noopener noreferrer" });
}

function renderInline(text, options) {
  return new Inline(text, options).run();
}

// ---- Markdown: blocks -----------------------------------------------------------------------

const FENCE = /^( *)(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s|$)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const TABLE_RULE = /^[ |:-]*-[ |:-]*$/;

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

function fenceOf(line) {
  const match = FENCE.exec(line);
  return match && !(match[2][0] === "`" && match[3].includes("`")) ? match : null;
}

function cellsOf(line) {
  const cells = [];
  let cell = "";
  const row = line.trim().replace(/^\|/, "");
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") cell += row[(at += 1)];
    else if (row[at] === "|") [cell, cells[cells.length]] = ["", cell.trim()];
    else cell += row[at];
  }
  if (cell.trim() || !cells.length) cells.push(cell.trim());
  return cells;
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  if (!lines[at].includes("|") || rule === undefined || !rule.includes("|") || !TABLE_RULE.test(rule)) return false;
  const rules = cellsOf(rule);
  return rules.every((cell) => /^:?-+:?$/.test(cell)) && rules.length === cellsOf(lines[at]).length;
}

function startsBlock(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  return Boolean(
    fenceOf(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, at)
    || (item && item[3] && (/^[-*+]/.test(item[2]) || /^1[.)]/.test(item[2]))),
  );
}

/** Splits lines into blocks `{kind, raw, …}`. `raw` is the block's own source, by which it is compared. */
function splitBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = takeBlock(lines, at);
    block.raw = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

function takeBlock(lines, at) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) return takeFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.trim().slice(heading[1].length).trim().replace(/(^|\s)#{1,20}$/, "");
    return [{ kind: "heading", level: heading[1].length, text }, at + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return takeQuote(lines, at);
  if (isTable(lines, at)) return takeTable(lines, at);
  if (ITEM.test(line)) return takeList(lines, at);
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines, end)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((part) => part.trim()).join("\n") }, end];
}

function takeFence(lines, at, [, indent, mark, info]) {
  const body = [];
  let end = at + 1;
  let closed = false;
  for (; end < lines.length && !closed; end += 1) {
    const text = lines[end].trim();
    closed = text.length >= mark.length && text === mark[0].repeat(text.length);
    if (!closed) body.push(lines[end].slice(Math.min(indentOf(lines[end]), indent.length)));
  }
  const language = info.trim().split(/[\s{]/, 1)[0].slice(0, 32);
  return [{ kind: "code", language, text: body.join("\n") }, end];
}

function takeQuote(lines, at) {
  const body = [];
  let end = at;
  while (end < lines.length && !isBlank(lines[end]) && (QUOTE.test(lines[end]) || !startsBlock(lines, end))) {
    body.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return [{ kind: "quote", lines: body }, end];
}

function takeTable(lines, at) {
  const align = cellsOf(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : undefined));
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) {
    rows.push(cellsOf(lines[end]));
    end += 1;
  }
  return [{ kind: "table", align, head: cellsOf(lines[at]), rows }, end];
}

/** A list with its nested content. An item owns what is indented by two or more beyond its list. */
function takeList(lines, start) {
  const first = ITEM.exec(lines[start]);
  const base = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let loose = false;
  let at = start;
  while (at < lines.length) {
    const line = lines[at];
    const item = ITEM.exec(line);
    const inner = indentOf(line) >= base + 2;
    const last = items[items.length - 1];
    if (isBlank(line)) {
      let next = at;
      while (next < lines.length && isBlank(lines[next])) next += 1;
      const sibling = next < lines.length && ITEM.exec(lines[next]);
      const goesOn = next < lines.length && (indentOf(lines[next]) >= base + 2 || (sibling && /\d/.test(sibling[2]) === ordered));
      if (!goesOn) break;
      loose = true;
      last.lines.push("");
      at = next;
      continue;
    }
    if (last && inner) {
      last.lines.push(line.slice(Math.min(indentOf(line), last.offset)));
    } else if (item && /\d/.test(item[2]) === ordered && !RULE.test(line)) {
      items.push({ lines: [item[3] ?? ""], offset: item[1].length + item[2].length + 1 });
    } else if (item || last.lines[last.lines.length - 1] === "" || startsBlock(lines, at)) {
      break;
    } else {
      last.lines.push(line.trim());
    }
    at += 1;
  }
  return [{ kind: "list", ordered, first: parseInt(first[2], 10), loose, items }, at];
}

function renderBlock(block, options) {
  switch (block.kind) {
    case "heading": return wrap(`h${block.level}`, renderInline(block.text, options));
    case "rule": return el("hr");
    case "code": return renderCode(block, options);
    case "quote": return wrap("blockquote", renderLines(block.lines, options));
    case "table": return renderTable(block);
    case "list": return renderList(block, options);
    default: return wrap("p", renderInline(block.text, options));
  }
}

function wrap(tag, content) {
  return el(tag, {}, content);
}

function renderCode({ language, text }, { open }) {
  const code = el("code", {}, document.createTextNode(text));
  if (!open) tint(code, language);
  const copy = el("button", { type: "button", class: "code-copy" }, icon("copy"), el("span", {}, "Copy"));
  copy.addEventListener("click", () => copyText(code.textContent, copy));
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copy);
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0", "aria-label": `Code, ${language || "text"}` }, code));
}

const COMMENTS = {
  hash: /(?<![^\s])#.*/,
  dash: /--.*/,
  slash: /\/\/.*|\/\*[\s\S]*?(?:\*\/|$)/,
};
const LANGUAGES = {
  hash: "python py bash sh shell zsh ruby rb yaml yml toml r perl makefile make dockerfile elixir",
  dash: "sql lua haskell hs",
  slash: "javascript js typescript ts jsx tsx json java c cpp c++ h csharp cs go rust rs swift kotlin kt scala dart php css zig",
};
const KEYWORDS = new Set(("and as async await break case catch class const continue def default defer del do done elif else end enum esac except export "
  + "extends false False fi finally fn for from func function if impl implements import in interface is lambda let local loop match mod module move mut new nil "
  + "None not null of or package pass private protected pub public raise require return self static struct super switch then this throw trait true True try "
  + "type typeof undefined unless until use using var void where while with yield "
  + "SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT RIGHT INNER OUTER ON AS AND OR NOT NULL GROUP BY ORDER LIMIT HAVING DISTINCT").split(" "));
const TOKENS = new Map();

/** The pattern that finds comments, strings, numbers and words of a language, or undefined. */
function tokensOf(language) {
  const name = language.toLowerCase();
  const family = Object.keys(LANGUAGES).find((key) => LANGUAGES[key].split(" ").includes(name));
  if (!family) return undefined;
  const single = ["rust", "rs"].includes(name) ? "'(?:\\\\.|[^'\\\\\\n])'" : "'(?:\\\\.|[^'\\\\\\n])*'";
  const strings = `"""[\\s\\S]*?(?:"""|$)|"(?:\\\\.|[^"\\\\\\n])*"|${single}|\`(?:\\\\.|[^\`\\\\])*\``;
  if (!TOKENS.has(name)) TOKENS.set(name, new RegExp(`(${COMMENTS[family].source})|(${strings})|\\b(\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g"));
  return TOKENS.get(name);
}

/** Colours a finished code block. What is not recognised stays as it is; the text never changes. */
function tint(code, language) {
  const tokens = tokensOf(language);
  const text = code.textContent;
  if (!tokens || text.length > 20000) return;
  const parts = [];
  let done = 0;
  for (const match of text.matchAll(tokens)) {
    const kind = match[1] ? "comment" : match[2] ? "string" : match[3] ? "number" : KEYWORDS.has(match[4]) ? "word" : "";
    if (!kind) continue;
    parts.push(text.slice(done, match.index), el("span", { class: `t-${kind}` }, match[0]));
    done = match.index + match[0].length;
  }
  code.replaceChildren(...parts, text.slice(done));
}

function renderTable({ align, head, rows }) {
  const row = (cells, tag) => el("tr", {}, ...align.map((side, column) =>
    el(tag, { class: side, scope: tag === "th" ? "col" : undefined }, renderInline(cells[column] ?? ""))));
  const table = el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

function renderList({ ordered, first, loose, items }, options) {
  const list = el(ordered ? "ol" : "ul", { start: ordered && first !== 1 ? String(first) : undefined });
  items.forEach((item, index) => {
    const lines = item.lines.slice();
    const task = /^\[([ xX])\] /.exec(lines[0]);
    if (task) lines[0] = (task[1] === " " ? "☐ " : "☑ ") + lines[0].slice(4);
    const open = options.open && index === items.length - 1;
    const content = renderLines(lines, { ...options, open });
    const li = el("li");
    for (const node of [...content.childNodes]) {
      if (node.nodeName === "P" && !loose) li.append(...node.childNodes);
      else li.append(node);
    }
    list.append(li);
  });
  return list;
}

function renderLines(lines, { depth = 0, open = false }) {
  const fragment = document.createDocumentFragment();
  if (depth >= MAX_DEPTH) {
    fragment.append(wrap("p", renderInline(lines.join("\n"), { depth })));
    return fragment;
  }
  const blocks = splitBlocks(lines);
  blocks.forEach((block, index) => fragment.append(renderBlock(block, { depth: depth + 1, open: open && index === blocks.length - 1 })));
  return fragment;
}

function linesOf(text) {
  return text.split(/\r\n|\n|\r/).map((line) => line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    ")));
}

/**
 * Renders Markdown as nodes. HTML in the text stays text; links are http, https or mailto.
 * @param {string} text @returns {DocumentFragment}
 */
export function renderMarkdown(text) {
  return renderLines(linesOf(text), {});
}

/** A Markdown view of a growing text: blocks that did not change keep their nodes. */
class Prose {
  constructor(root) {
    this.root = root;
    this.blocks = [];
    this.nodes = [];
  }

  /** Shows `text`; `open` says that more may follow. Returns the nodes that will not change again. */
  update(text, open) {
    const blocks = splitBlocks(linesOf(text));
    let keep = 0;
    while (keep < blocks.length && this.blocks[keep]?.raw === blocks[keep].raw && this.blocks[keep].kind === blocks[keep].kind && !this.blocks[keep].open) keep += 1;
    if (this.extendCode(blocks[keep], keep, open && keep === blocks.length - 1)) keep += 1;
    for (const node of this.nodes.splice(keep)) node.remove();
    for (let index = keep; index < blocks.length; index += 1) {
      const last = open && index === blocks.length - 1;
      blocks[index].open = last;
      const node = renderBlock(blocks[index], { depth: 1, open: last });
      this.nodes.push(node);
      this.root.append(node);
    }
    this.blocks = blocks;
    return open ? this.nodes.slice(0, -1) : this.nodes;
  }

  /** A code block that only grew keeps its nodes, so its scroll position and selection stay. */
  extendCode(block, index, open) {
    const old = this.blocks[index];
    if (!block || !old?.open || block.kind !== "code" || old.kind !== "code") return false;
    if (block.language !== old.language || !block.text.startsWith(old.text)) return false;
    const code = this.nodes[index].querySelector("code");
    code.firstChild.appendData(block.text.slice(old.text.length));
    if (!open) tint(code, block.language);
    block.open = open;
    return true;
  }
}

// ---- messages -------------------------------------------------------------------------------

function spokenForm(node) {
  const parts = node.querySelectorAll("li, th, td");
  if (parts.length) return [...parts].map((part) => (part.querySelector("li") ? part.firstChild : part).textContent).join(", ");
  if (!node.classList.contains("code")) return node.textContent;
  return `${node.querySelector("pre").getAttribute("aria-label")}, ${node.querySelector("code").textContent.split("\n").length} lines`;
}

/** Splits a leading `<think>` part, which some models write, from the answer proper. */
function partsOf({ content, reasoning }) {
  const match = /^\s*<think>([\s\S]*?)(<\/think>\s*|$)/.exec(content);
  if (!match) return { thought: (reasoning ?? "").trim(), text: content };
  return { thought: match[1].trim(), text: content.slice(match[0].length) };
}

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 2 : 1)} s`;

/** One message on the page; the record that it shows is plain data, kept for the session. */
class MessageView {
  constructor(record) {
    this.record = record;
    const user = record.role === "user";
    this.content = el("div", { class: user ? "content" : "content prose" });
    this.stats = el("div", { class: "stats" });
    this.under = el("div", { class: "under" });
    this.root = el("article", { class: "message", "data-role": record.role, "aria-label": user ? "You" : "Answer" }, this.content, this.under);
    if (user) {
      this.content.textContent = record.content;
      this.under.append(iconButton("act only-last edit", "edit", "Edit and send again (Up arrow)", () => this.edit()));
    } else {
      this.prose = new Prose(this.content);
      this.spoken = 0;
      this.copy = iconButton("act", "copy", "Copy answer", () => copyText(partsOf(this.record).text, this.copy));
      this.under.append(this.copy, iconButton("act only-last again", "again", "Regenerate", regenerate), this.stats);
    }
    this.refresh();
  }

  /** Shows the record as it is now. */
  refresh() {
    const { role, state } = this.record;
    this.root.dataset.state = state;
    if (role === "user") return;
    const streaming = state === "streaming";
    const { thought, text } = partsOf(this.record);
    this.showThought(thought, streaming && !text);
    const settled = this.prose.update(text, streaming);
    for (; streaming && this.spoken < settled.length; this.spoken += 1) announce(spokenForm(settled[this.spoken]));
    const waits = streaming && !text && !thought;
    if (waits && !this.dots) this.content.before((this.dots = el("div", { class: "waiting", "aria-hidden": "true" }, el("i"), el("i"), el("i"))));
    if (!waits && this.dots) {
      this.dots.remove();
      this.dots = null;
    }
    this.content.hidden = !text;
    this.root.setAttribute("aria-busy", String(streaming));
    this.copy.hidden = streaming || !text;
    this.showFailure();
    this.showStats();
  }

  showThought(thought, running) {
    if (!thought) return;
    if (!this.thought) {
      this.thought = el("details", { class: "thinking" }, el("summary"), el("div"));
      this.content.before(this.thought);
    }
    this.thought.firstChild.textContent = running ? "Thinking…" : "Thought first";
    this.thought.lastChild.textContent = thought;
  }

  showFailure() {
    const { error } = this.record;
    if (!error || this.failure) return;
    this.failure = failureBox(error, regenerate);
    this.under.before(this.failure);
  }

  showStats() {
    const { state, stats, finish } = this.record;
    const parts = [];
    if (state === "stopped") parts.push("stopped");
    if (stats?.tokens) parts.push(`${stats.exact ? "" : "about "}${stats.tokens} ${stats.tokens === 1 ? "token" : "tokens"}`);
    if (stats?.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
    if (stats?.first !== undefined) parts.push(`first after ${seconds(stats.first)}`);
    else if (state === "streaming" && stats?.waited >= 1000) parts.push(`reading the prompt, ${Math.floor(stats.waited / 1000)} s`);
    if (stats?.prompt) parts.push(`prompt ${stats.prompt}`);
    const spans = parts.map((part) => el("span", {}, part));
    if (finish === "length") spans.push(el("span", { class: "note" }, "cut at the token limit"));
    this.stats.replaceChildren(...spans);
  }

  /** Ends the spoken form: what was not said yet, then how it ended. */
  conclude() {
    for (; this.spoken < this.prose.nodes.length; this.spoken += 1) announce(spokenForm(this.prose.nodes[this.spoken]));
    const { state, error } = this.record;
    announce(state === "error" ? `${error.title}. ${error.message}` : state === "stopped" ? "Stopped" : "Answer complete");
  }

  edit() {
    if (busy || this.editor) return;
    const area = el("textarea", { "aria-label": "Edit message", rows: "2" });
    area.value = this.record.content;
    const close = () => {
      this.editor.replaceWith(this.content);
      this.editor = null;
      this.root.classList.remove("editing");
      this.under.hidden = false;
    };
    const cancel = () => {
      close();
      this.under.querySelector(".edit").focus();
    };
    const save = () => {
      const text = area.value.trim();
      if (!text || busy || !settingsAreValid()) return;
      close();
      this.record.content = text;
      this.content.textContent = text;
      dropAfter(this);
      respond();
    };
    area.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        save();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
    });
    const row = el("div", { class: "row" }, el("button", { type: "button", class: "plain", onclick: cancel }, "Cancel"), el("button", { type: "button", class: "primary", onclick: save }, "Send again"));
    this.editor = el("div", { class: "editor" }, area, row);
    this.content.replaceWith(this.editor);
    this.root.classList.add("editing");
    this.under.hidden = true;
    area.focus();
  }
}

// ---- turns ----------------------------------------------------------------------------------

/** The views of the conversation, in order; their records are what is sent and kept. */
let views = [];
/** The answer in progress, `{controller}`, or null. */
let busy = null;

function remember() {
  session.set("chat", views.length ? views.map((view) => view.record) : null);
}

function addMessage(record) {
  const view = new MessageView(record);
  views.push(view);
  $("messages").append(view.root);
  $("welcome").hidden = true;
  return view;
}

function dropAfter(view) {
  for (const gone of views.splice(views.indexOf(view) + 1)) gone.root.remove();
}

/** The conversation as the API takes it: no empty answers, and turns that alternate. */
function messagesToSend() {
  const messages = [];
  const system = $("system-prompt").value.trim();
  if (system) messages.push({ role: "system", content: system });
  for (const { record } of views) {
    if (!record.content.trim()) continue;
    const last = messages[messages.length - 1];
    if (record.role === "user" && last?.role === "user") last.content += `\n\n${record.content}`;
    else messages.push({ role: record.role, content: record.content });
  }
  return messages;
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || busy || !settingsAreValid()) return;
  $("prompt").value = "";
  fitPrompt();
  addMessage({ role: "user", content: text, state: "done" });
  respond();
}

function regenerate() {
  if (busy || !settingsAreValid()) return;
  const last = views[views.length - 1];
  if (last?.record.role === "assistant") {
    views.pop();
    last.root.remove();
  }
  if (views.length) respond();
}

function setBusy(value) {
  busy = value;
  $("send").hidden = Boolean(value);
  $("stop").hidden = !value;
  $("messages").toggleAttribute("data-busy", Boolean(value));
  fitPrompt();
}

function stop() {
  busy?.controller.abort();
}

/** Measures an answer by the page's own clock; token counts come from the server's usage. */
class Meter {
  start = performance.now();
  pieces = 0;
  usage = null;

  piece() {
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
  }

  stats() {
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const span = this.last - this.first;
    return {
      tokens,
      exact: Boolean(this.usage),
      prompt: this.usage?.prompt_tokens,
      first: this.first === undefined ? undefined : this.first - this.start,
      rate: tokens > 1 && span > 0 ? ((tokens - 1) * 1000) / span : undefined,
      waited: performance.now() - this.start,
    };
  }
}

function take(chunk, record, meter) {
  const choice = chunk.choices?.[0];
  const said = choice?.delta?.content;
  const thought = choice?.delta?.reasoning_content;
  if (said || thought) meter.piece();
  if (said) record.content += said;
  if (thought) record.reasoning = (record.reasoning ?? "") + thought;
  if (choice?.finish_reason) record.finish = choice.finish_reason;
  if (chunk.usage) meter.usage = chunk.usage;
}

/** Asks for the next answer and shows it as it comes. Never throws: every end is shown. */
async function respond() {
  const controller = new AbortController();
  const body = { messages: messagesToSend(), stream: true, stream_options: { include_usage: true }, ...sampling() };
  if ($("model").value) body.model = $("model").value;
  const record = { role: "assistant", content: "", state: "streaming" };
  const view = addMessage(record);
  const meter = new Meter();
  setBusy({ controller });
  announce("Answering");
  follow(true);
  let frame = 0;
  const show = () => {
    frame = 0;
    record.stats = meter.stats();
    view.refresh();
    follow();
  };
  const clock = setInterval(() => (frame ||= requestAnimationFrame(show)), 500);
  try {
    for await (const chunk of completion(body, controller.signal)) {
      take(chunk, record, meter);
      frame ||= requestAnimationFrame(show);
    }
    record.state = "done";
  } catch (error) {
    if (controller.signal.aborted) record.state = "stopped";
    else {
      record.state = "error";
      record.error = recordOf(error);
      checkHealth();
    }
  }
  clearInterval(clock);
  cancelAnimationFrame(frame);
  // Closes the connection also when the end was found before its last byte.
  controller.abort();
  show();
  view.conclude();
  const hadFocus = document.activeElement === $("stop") || document.activeElement === document.body;
  setBusy(null);
  if (hadFocus && !matchMedia("(pointer: coarse)").matches) $("prompt").focus({ preventScroll: true });
  remember();
}

function newChat() {
  stop();
  for (const view of views.splice(0)) view.root.remove();
  session.set("chat", null);
  $("welcome").hidden = false;
  $("latest").hidden = true;
  $("prompt").focus();
}

function restore() {
  const kept = session.get("chat", []);
  for (const record of Array.isArray(kept) ? kept : []) {
    if (!["user", "assistant"].includes(record?.role) || typeof record.content !== "string") continue;
    if (record.state === "streaming") record.state = "stopped";
    addMessage(record);
  }
  $("welcome").hidden = views.length > 0;
  follow(true);
}

// ---- scrolling ------------------------------------------------------------------------------

let sticks = true;

/** Keeps the end in view, unless the reader went up; `again` goes back to the end. */
function follow(again = false) {
  if (again) sticks = true;
  const box = $("scroll");
  if (sticks) box.scrollTop = box.scrollHeight;
  $("latest").hidden = sticks || box.scrollHeight - box.clientHeight < 80;
}

function watchScrolling() {
  const box = $("scroll");
  const look = () => {
    sticks = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    $("latest").hidden = sticks;
  };
  box.addEventListener("scroll", look, { passive: true });
  box.addEventListener("wheel", (event) => {
    if (event.deltaY < 0 && box.scrollTop > 0) sticks = false;
  }, { passive: true });
  $("latest").addEventListener("click", () => {
    follow(true);
    $("prompt").focus({ preventScroll: true });
  });
  new ResizeObserver(() => follow()).observe(box);
}

// ---- settings -------------------------------------------------------------------------------

const FIELDS = [
  { key: "temperature", label: "Temperature", min: 0, max: 2, range: "0 to 2; 0 is greedy" },
  { key: "top_p", label: "Top P", min: 0, max: 1, range: "0 to 1" },
  { key: "top_k", label: "Top K", min: 0, max: 1000, whole: true, range: "0 to 1,000; 0 is off" },
  { key: "min_p", label: "Min P", min: 0, max: 1, range: "0 to 1" },
  { key: "max_tokens", label: "Max tokens", min: 1, max: 1000000, whole: true, range: "1 to 1,000,000" },
  { key: "seed", label: "Seed", min: 0, max: 4294967295, whole: true, range: "0 to 4,294,967,295" },
];

function buildSettings() {
  const kept = lasting.get("sampling", {});
  for (const { key, label, min, max, whole, range } of FIELDS) {
    const id = `sampling-${key}`;
    const input = el("input", { id, type: "number", inputmode: whole ? "numeric" : "decimal", min: String(min), max: String(max), step: whole ? "1" : "any", placeholder: "default", "aria-describedby": `${id}-range`, autocomplete: "off" });
    if (typeof kept[key] === "number") input.value = String(kept[key]);
    input.addEventListener("input", () => {
      markValidity(input);
      lasting.set("sampling", sampling());
    });
    $("sampling").append(el("div", { class: "field" }, el("label", { for: id }, label), input, el("p", { class: "hint", id: `${id}-range` }, range)));
  }
  const system = $("system-prompt");
  system.value = String(lasting.get("system", ""));
  system.addEventListener("input", () => lasting.set("system", system.value || null));
  $("reset").addEventListener("click", () => {
    for (const input of $("sampling").querySelectorAll("input")) {
      input.value = "";
      markValidity(input);
    }
    lasting.set("sampling", null);
  });
}

function markValidity(input) {
  const valid = input.validity.valid;
  input.setAttribute("aria-invalid", String(!valid));
  $(`${input.id}-range`).classList.toggle("bad", !valid);
}

/** What the user set, and only that: an empty field leaves the choice to the server. */
function sampling() {
  const values = {};
  for (const { key } of FIELDS) {
    const input = $(`sampling-${key}`);
    if (input.value !== "" && input.validity.valid) values[key] = input.valueAsNumber;
  }
  return values;
}

/** False, with the settings open at the first wrong field, if a value is out of its range. */
function settingsAreValid() {
  const wrong = FIELDS.map(({ key }) => $(`sampling-${key}`)).find((input) => !input.validity.valid);
  if (!wrong) return true;
  markValidity(wrong);
  openSettings(true);
  wrong.focus();
  return false;
}

const covers = matchMedia("(max-width: 60rem)");

function openSettings(open) {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", String(open));
  coverWhatIsBehind();
}

/** Where the settings lie over the conversation, nothing behind them can take the focus. */
function coverWhatIsBehind() {
  const covered = covers.matches && !$("settings").hidden;
  for (const part of document.querySelectorAll(".bar, .room")) part.inert = covered;
}

function closeSettings() {
  openSettings(false);
  $("open-settings").focus();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const chosen = lasting.get("theme", null);
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  const dark = chosen ? chosen === "dark" : prefersDark.matches;
  const label = dark ? "Use light colours" : "Use dark colours";
  $("theme").title = label;
  $("theme").querySelector(".unseen").textContent = label;
  $("theme").querySelector("use").setAttribute("href", dark ? "#i-sun" : "#i-moon");
  return dark;
}

function toggleTheme() {
  const dark = !showTheme();
  // A choice that is the system's own is not kept: the page follows the system again.
  lasting.set("theme", dark === prefersDark.matches ? null : dark ? "dark" : "light");
  showTheme();
}

// ---- health and models ----------------------------------------------------------------------

const HEALTH = {
  ready: "Ready",
  loading: "The model is loading…",
  degraded: "Working, with trouble",
  draining: "The server is shutting down",
  failed: "The model has failed; see the server's log",
  offline: "The server does not answer; trying again",
};

let health = "unknown";
let healthTimer = 0;

function healthOf(response, body) {
  const word = String(body?.status ?? body?.state ?? "").toLowerCase();
  if (Object.hasOwn(HEALTH, word)) return word;
  if (["starting", "initializing"].includes(word)) return "loading";
  if (response.ok) return "ready";
  return response.status === 503 ? "loading" : "failed";
}

async function checkHealth() {
  clearTimeout(healthTimer);
  let now = "offline";
  try {
    const response = await fetch(address("health"), { cache: "no-store", signal: AbortSignal.timeout(8000) });
    const body = await response.json().catch(() => null);
    now = healthOf(response, body);
    if (body) showServices(body);
  } catch {
    // Offline, as assumed.
    showSpeech(undefined);
  }
  if (now !== health) {
    health = now;
    $("state").dataset.health = now;
    $("state-text").textContent = HEALTH[now];
    if (now !== "offline") loadModels();
  }
  clearTimeout(healthTimer);
  if (!document.hidden) healthTimer = setTimeout(checkHealth, now === "ready" ? 15000 : 2500);
}

async function loadModels() {
  const select = $("model");
  let ids = [];
  try {
    const response = await fetch(address("v1/models"), { cache: "no-store", signal: AbortSignal.timeout(8000) });
    const body = await response.json();
    ids = body.data.filter((model) => model.facts?.kind !== "transcription").map((model) => String(model.id));
  } catch {
    // Shown below as no model; the next change of health asks again.
  }
  const wanted = select.value || lasting.get("model", "");
  if (ids.length) {
    select.replaceChildren(...ids.map((id) => el("option", { value: id }, id)));
    select.value = ids.includes(wanted) ? wanted : ids[0];
  } else {
    select.replaceChildren(el("option", { value: "" }, "No model yet"));
  }
  select.disabled = ids.length === 0;
  showWhere();
}

function showWhere() {
  const model = $("model").value;
  $("where").textContent = `Answers come from ${model || "the model"} on ${location.host}.`;
}

// ---- tabs -----------------------------------------------------------------------------------

/** What this server has; both until it has answered. */
const served = { chat: true, speech: false };
let tab = "chat";

/** Shows what the server has: with both a choice, else the one. */
function showServices(body) {
  showSpeech(body.speech?.id ? { id: String(body.speech.id), state: body.speech.state } : null);
  served.speech = Boolean(body.speech?.id);
  served.chat = !served.speech || !Array.isArray(body.models) || body.models.length > 0;
  $("tabs").hidden = !(served.chat && served.speech);
  document.body.toggleAttribute("data-no-chat", !served.chat);
  for (const name of ["chat", "dictate"]) {
    const panel = $(`${name}-panel`);
    if ($("tabs").hidden) {
      panel.removeAttribute("role");
      panel.removeAttribute("aria-labelledby");
    } else {
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-labelledby", `tab-${name}`);
    }
  }
  const wanted = lasting.get("tab", "chat");
  showTab(!served.chat || (wanted === "dictate" && served.speech) ? "dictate" : "chat");
}

function showTab(name) {
  if (tab === name) return;
  const hadFocus = [document.body, $("prompt"), $("record")].includes(document.activeElement);
  tab = name;
  const dictates = name === "dictate";
  if (dictates && !$("settings").hidden) openSettings(false);
  $("chat-panel").hidden = $("picker").hidden = $("new-chat").hidden = $("open-settings").hidden = dictates;
  $("dictate-panel").hidden = $("speech-model").hidden = !dictates;
  for (const [id, isChosen] of [["tab-chat", !dictates], ["tab-dictate", dictates]]) {
    $(id).setAttribute("aria-selected", String(isChosen));
    $(id).tabIndex = isChosen ? 0 : -1;
  }
  $("skip").href = dictates ? "#record" : "#prompt";
  $("skip").textContent = dictates ? "Skip to the record button" : "Skip to the message box";
  if (!dictates) follow();
  if (hadFocus && !matchMedia("(pointer: coarse)").matches) {
    if (dictates) focusDictation();
    else $("prompt").focus({ preventScroll: true });
  }
}

/** A choice that is kept: the page begins with it the next time. */
function chooseTab(name) {
  lasting.set("tab", name === "chat" ? null : name);
  showTab(name);
}

function onTabKey(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -2, End: 2 }[event.key];
  if (!step) return;
  event.preventDefault();
  const name = Math.abs(step) === 1 ? (tab === "chat" ? "dictate" : "chat") : step < 0 ? "chat" : "dictate";
  $(`tab-${name}`).focus();
  chooseTab(name);
}

/** Puts dictated text into the message box, behind what stands there. */
function takeDictation(text) {
  const prompt = $("prompt");
  prompt.value = prompt.value.trim() ? `${prompt.value.trimEnd()}\n\n${text}` : text;
  chooseTab("chat");
  fitPrompt();
  prompt.focus();
  prompt.setSelectionRange(prompt.value.length, prompt.value.length);
  prompt.scrollTop = prompt.scrollHeight;
}

// ---- start ----------------------------------------------------------------------------------

const growsByItself = CSS.supports("field-sizing", "content");

function fitPrompt() {
  const prompt = $("prompt");
  $("send").disabled = Boolean(busy) || prompt.value.trim() === "";
  if (growsByItself) return;
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

/** Enter that ends a composition (Chinese, Japanese, Korean input) is not ours. */
function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}

function onPromptKey(event) {
  if (isComposing(event)) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && $("prompt").value === "") {
    const last = views.findLast((view) => view.record.role === "user");
    if (last && !busy) {
      event.preventDefault();
      last.edit();
    }
  }
}

function onEscape(event) {
  if (event.key !== "Escape" || isComposing(event)) return;
  if (tab === "dictate" && escapeDictation()) return;
  if (tab === "chat" && busy) stop();
  else if (!$("settings").hidden) closeSettings();
}

function start() {
  showTheme();
  buildSettings();
  restore();
  startDictation(takeDictation);
  watchScrolling();
  $("prompt").addEventListener("input", fitPrompt);
  $("prompt").addEventListener("keydown", onPromptKey);
  $("send").addEventListener("click", send);
  $("stop").addEventListener("click", stop);
  $("new-chat").addEventListener("click", newChat);
  $("theme").addEventListener("click", toggleTheme);
  $("open-settings").addEventListener("click", () => {
    const open = $("settings").hidden;
    openSettings(open);
    if (open) $("settings-title").focus();
  });
  $("close-settings").addEventListener("click", closeSettings);
  $("model").addEventListener("change", () => {
    lasting.set("model", $("model").value);
    showWhere();
  });
  for (const idea of document.querySelectorAll(".idea")) {
    idea.addEventListener("click", () => {
      $("prompt").value = idea.textContent;
      fitPrompt();
      send();
    });
  }
  for (const name of ["chat", "dictate"]) $(`tab-${name}`).addEventListener("click", () => chooseTab(name));
  $("tabs").addEventListener("keydown", onTabKey);
  document.addEventListener("keydown", onEscape);
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(healthTimer) : checkHealth()));
  prefersDark.addEventListener("change", showTheme);
  covers.addEventListener("change", coverWhatIsBehind);
  window.addEventListener("pagehide", remember);
  fitPrompt();
  checkHealth();
  if (!matchMedia("(pointer: coarse)").matches) $("prompt").focus({ preventScroll: true });
}

start();
