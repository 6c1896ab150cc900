// The dictation tab: what is said into the microphone, or in a file, becomes text while it is heard.
//
// Sections: subtitles, takes, the whole, microphone, recording, files, the speech model, start.
// Invariants: those of base.js; one recording at a time; what was heard stays on the page however its
// recording ends; the microphone is released with every end; nothing is read aloud while it listens.

import {
  $, EventStream, Failure, address, announce, copyText, el, failureBox, failureOf, failureOfResponse, icon, iconButton, lasting, recordOf, session,
} from "./base.js";

// ---- subtitles ------------------------------------------------------------------------------

const two = (number) => String(Math.floor(number)).padStart(2, "0");

/** Hours, minutes, seconds and milliseconds: rounded once, then split. */
function stamp(ms, point) {
  return `${two(ms / 3600000)}:${two((ms / 60000) % 60)}:${two((ms / 1000) % 60)}${point}${String(ms % 1000).padStart(3, "0")}`;
}

/**
 * Writes cues as the server would: none is empty, each lasts at least a millisecond.
 * @param {{start: number, end: number, text: string}[]} cues @param {"srt" | "vtt" | "txt"} kind @returns {string}
 */
export function subtitles(cues, kind) {
  const said = cues.map(({ start, end, text }) => ({ start, end, text: text.trim() })).filter((cue) => cue.text);
  if (kind === "txt") return said.map((cue) => `${cue.text}\n`).join("");
  const point = kind === "srt" ? "," : ".";
  const blocks = said.map(({ start, end, text }, index) => {
    const from = Math.round(Math.max(start, 0) * 1000);
    const to = Math.max(Math.round(end * 1000), from + 1);
    // An empty line would end a cue, an arrow would begin one.
    const line = text.replaceAll("-->", "->").replace(/\s*\n\s*/g, "\n");
    return `${kind === "srt" ? `${index + 1}\n` : ""}${stamp(from, point)} --> ${stamp(to, point)}\n${line}\n\n`;
  });
  return (kind === "vtt" ? "WEBVTT\n\n" : "") + blocks.join("");
}

/** Minutes and seconds, and hours where there are any. */
function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const tail = `${Math.floor(whole / 60) % 60}:${two(whole % 60)}`;
  return whole < 3600 ? tail : `${Math.floor(whole / 3600)}:${tail.padStart(5, "0")}`;
}

// ---- takes ----------------------------------------------------------------------------------

const MEDIA_TYPES = { srt: "application/x-subrip", vtt: "text/vtt", txt: "text/plain" };
const SAVES = { srt: "Save as subtitles (SRT)", vtt: "Save as subtitles (WebVTT)", txt: "Save as text" };
const RUNNING = ["live", "finishing", "waiting", "sending", "hearing"];

/** Ends of text that no space follows. */
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\u3000-\u303f\uff00-\uff65]$/u;

function joined(...parts) {
  const said = parts.map((part) => part.trim()).filter(Boolean);
  return said.reduce((text, part) => text + (text && !UNSPACED.test(text) ? " " : "") + part, "");
}

function save(text, kind, name) {
  const url = URL.createObjectURL(new Blob([text], { type: `${MEDIA_TYPES[kind]};charset=utf-8` }));
  const link = el("a", { href: url, download: `${name}.${kind}`, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/**
 * One recording or file on the page. The record that it shows is plain data, kept for the session:
 * `{live, name, file, state, seconds, rows: [{utterance, start, end, text, tentative, cues}], error}`.
 */
class Take {
  constructor(record, actions = {}) {
    this.record = record;
    this.actions = actions;
    this.lines = [];
    this.note = el("span", { class: "take-note" });
    this.copy = iconButton("act", "copy", "Copy this text", () => copyText(this.text(), this.copy));
    this.send = iconButton("act to-chat", "chat", "Put this text into the message box of the chat", () => hand(this.text()));
    this.saves = Object.entries(SAVES).map(([kind, label]) =>
      el("button", { type: "button", class: "act save", title: label, "aria-label": label, "data-kind": kind, onclick: () => save(subtitles(this.cues(), kind), kind, record.file) }, kind.toUpperCase()));
    this.halt = el("button", { type: "button", class: "plain halt", onclick: () => this.actions.halt?.() }, "Stop");
    this.rows = el("div", { class: "rows" });
    this.dots = el("div", { class: "waiting", "aria-hidden": "true" }, el("i"), el("i"), el("i"));
    this.under = el("div", { class: "under" }, this.copy, this.send, ...this.saves);
    const head = el("header", { class: "take-head" }, icon(record.live ? "mic" : "file"), el("h3", {}, record.name), this.note, this.halt);
    this.root = el("article", { class: "take", "aria-label": record.name }, head, this.rows, this.dots, this.under);
    this.refresh();
  }

  get running() {
    return RUNNING.includes(this.record.state);
  }

  text() {
    return joined(...this.record.rows.flatMap((row) => [row.text, row.tentative]));
  }

  /** With times for all of it, also for what no final text came for. */
  cues() {
    const { rows, seconds } = this.record;
    return rows.flatMap((row, index) => {
      const next = rows[index + 1]?.start ?? Math.max(seconds, row.start);
      return row.cues?.length ? row.cues : [{ start: row.start, end: row.end ?? next, text: joined(row.text, row.tentative) }];
    });
  }

  row(utterance, start = 0) {
    const { rows } = this.record;
    let row = rows.find((row) => row.utterance === utterance);
    if (!row) rows.push((row = { utterance, start, end: null, text: "", tentative: "", cues: null }));
    return row;
  }

  refresh() {
    const { record, running } = this;
    const rows = record.rows.filter((row) => row.text || row.tentative);
    this.root.dataset.state = record.state;
    this.root.setAttribute("aria-busy", String(running));
    rows.forEach((row, index) => this.showRow((this.lines[index] ??= this.line()), row));
    for (const line of this.lines.splice(rows.length)) line.root.remove();
    this.dots.hidden = !running || record.state === "waiting";
    this.halt.hidden = !running || record.live;
    this.under.hidden = rows.length === 0 || running;
    this.note.textContent = this.words();
    if (this.failure && !record.error) this.failure = this.failure.remove();
    if (record.error && !this.failure) {
      this.failure = failureBox(record.error, this.actions.again);
      this.under.before(this.failure);
    }
  }

  line() {
    const [at, said, tentative] = [el("span", { class: "at" }), el("span"), el("span", { class: "tentative" })];
    const root = el("div", { class: "said" }, at, el("p", {}, said, " ", tentative));
    this.rows.append(root);
    return { root, at, said, tentative };
  }

  /** Only what differs is touched: a selection in finished text stays. */
  showRow(line, row) {
    for (const [node, text] of [[line.at, clock(row.start)], [line.said, row.text.trim()], [line.tentative, row.tentative.trim()]]) {
      if (node.textContent !== text) node.textContent = text;
    }
  }

  words() {
    const { state, seconds, rows } = this.record;
    switch (state) {
      case "live": return "listening";
      case "finishing": return "writing down the last words";
      case "waiting": return "waits for its turn";
      case "sending": return "being sent";
      case "hearing": return seconds ? `heard up to ${clock(seconds)}` : "being heard";
      case "stopped": return `${clock(seconds)}, stopped`;
      case "error": return seconds ? `${clock(seconds)}, not complete` : "";
      default: return rows.length ? clock(seconds) : `${clock(seconds)}, no speech in it`;
    }
  }

  end(state, error = null) {
    this.record.state = state;
    this.record.error = error;
    // What came last is what is known of it: it stays, as text like the rest.
    for (const row of this.record.rows) [row.text, row.tentative] = [joined(row.text, row.tentative), ""];
    this.record.rows = this.record.rows.filter((row) => row.text);
    this.refresh();
    showWhole();
    remember();
  }
}

let takes = [];
/** Puts text into the chat's message box; null where there is no chat. */
let toChat = null;

function remember() {
  session.set("dictation", takes.length ? takes.map((take) => take.record) : null);
}

function addTake(record, actions) {
  const take = new Take(record, actions);
  takes.push(take);
  $("takes").append(take.root);
  showWhole();
  follow(true);
  return take;
}

function dropTake(take) {
  takes = takes.filter((other) => other !== take);
  take.root.remove();
  showWhole();
  remember();
}

function restore() {
  const kept = session.get("dictation", []);
  for (const record of Array.isArray(kept) ? kept : []) {
    const sound = Array.isArray(record?.rows) && record.rows.every((row) => typeof row?.text === "string" && typeof row.tentative === "string");
    if (!sound || typeof record.name !== "string") continue;
    if (RUNNING.includes(record.state)) record.state = "stopped";
    const take = addTake(record);
    if (record.state === "stopped" && !take.text()) dropTake(take);
  }
}

// ---- the whole ------------------------------------------------------------------------------

const wholeText = () => takes.map((take) => take.text()).filter(Boolean).join("\n\n");

function showWhole() {
  $("dictate-welcome").hidden = takes.length > 0;
  $("whole").hidden = !takes.some((take) => take.text());
}

function clearAll() {
  for (const take of takes) take.actions.halt?.();
  recording?.abandon();
  takes = [];
  $("takes").replaceChildren();
  notice(null);
  showWhole();
  remember();
  announce("Cleared");
  $("record").focus();
}

function hand(text) {
  if (text && toChat) toChat(text);
}

let sticks = true;

/** Keeps the newest words in view, unless the reader went up. */
function follow(again = false) {
  if (again) sticks = true;
  const box = $("dictate-scroll");
  if (sticks) box.scrollTop = box.scrollHeight;
}

function watchScrolling() {
  const box = $("dictate-scroll");
  box.addEventListener("scroll", () => (sticks = box.scrollHeight - box.scrollTop - box.clientHeight < 40), { passive: true });
  new ResizeObserver(() => follow()).observe(box);
}

function notice(error) {
  const place = $("dictate-notice");
  place.replaceChildren();
  if (!error) return;
  const close = iconButton("act", "close", "Hide this message", () => {
    notice(null);
    $("record").focus();
  });
  const box = failureBox(recordOf(error));
  box.append(close);
  place.append(box);
}

// ---- microphone -----------------------------------------------------------------------------

const MICROPHONE = {
  NotAllowedError: ["The microphone is not allowed", "The browser, or its user, said no. Allow it in the browser's settings for this page, then start again."],
  NotFoundError: ["No microphone was found", "Connect one and start again, or choose a recording from a file."],
  NotReadableError: ["The microphone does not answer", "Another program may be using it. Close that, then start again."],
};
const SAME = { SecurityError: "NotAllowedError", PermissionDeniedError: "NotAllowedError", OverconstrainedError: "NotFoundError", DevicesNotFoundError: "NotFoundError", AbortError: "NotReadableError" };

/** The microphone, or a `Failure` that says what stands in the way. */
async function openMicrophone() {
  if (!navigator.mediaDevices?.getUserMedia) {
    throw window.isSecureContext
      ? new Failure("This browser has no microphone for pages", "Use a current browser, or choose a recording from a file.")
      : new Failure("The browser keeps the microphone from this page", "Browsers give it to pages over https and to http://localhost only. A recording can be chosen from a file here all the same.");
  }
  if (!window.MediaRecorder) throw new Failure("This browser cannot record", "Use a current browser, or choose a recording from a file.");
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  } catch (error) {
    const known = MICROPHONE[SAME[error.name] ?? error.name];
    throw known ? new Failure(...known) : new Failure("The microphone could not be opened", String(error.message || error.name));
  }
}

const RECORDS_AS = ["audio/webm;codecs=opus", "audio/mp4;codecs=mp4a.40.2", "audio/mp4", "audio/ogg;codecs=opus"];

function recorderOf(stream) {
  const mimeType = RECORDS_AS.find((type) => MediaRecorder.isTypeSupported(type));
  return new MediaRecorder(stream, { ...(mimeType && { mimeType }), audioBitsPerSecond: 64000 });
}

/** Shows how loud it is around the button, so that one sees that one is heard. */
class Level {
  #frame = 0;

  constructor(stream) {
    try {
      this.context = new AudioContext();
      this.analyser = this.context.createAnalyser();
      this.context.createMediaStreamSource(stream).connect(this.analyser);
    } catch {
      return; // Only the picture is missing then.
    }
    const samples = new Float32Array(this.analyser.fftSize);
    let shown = 0;
    const look = () => {
      this.analyser.getFloatTimeDomainData(samples);
      const power = samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length;
      // From -55 dB, a quiet room, to -15 dB, a voice that is near; it falls slower than it rises.
      const level = Math.min(Math.max((10 * Math.log10(power + 1e-9) + 55) / 40, 0), 1);
      shown = Math.max(level, shown * 0.9);
      $("record").style.setProperty("--level", shown.toFixed(3));
      this.#frame = requestAnimationFrame(look);
    };
    look();
  }

  stop() {
    cancelAnimationFrame(this.#frame);
    $("record").style.removeProperty("--level");
    this.context?.close().catch(() => {});
  }
}

// ---- recording ------------------------------------------------------------------------------

/** The recording under way, or null. */
let recording = null;

const PHASES = {
  idle: ["Start recording", "mic", ""],
  asking: ["Do not record", "stop", "Waiting for the microphone…"],
  live: ["Stop recording", "stop", "Recording"],
  finishing: ["Do not wait for the last words", "stop", "Writing down the last words…"],
};
const BUSY = ["session_limit", "rate_limit_exceeded", "queue_full"];
const TRY_LATER = 1013;

function socketAddress(language) {
  const url = address("v1/audio/stream");
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.searchParams.set("encoding", "container");
  url.searchParams.set("partials", "true");
  if (language) url.searchParams.set("language", language);
  return url;
}

class Recording {
  phase = "asking";
  language = language();
  queue = [];
  error = null;

  /** From permission to the first words. Throws a `Failure`. */
  async begin() {
    this.stream = await openMicrophone();
    if (this.phase === "over") return this.release();
    this.recorder = recorderOf(this.stream);
    const now = new Date();
    const time = `${two(now.getHours())}:${two(now.getMinutes())}`;
    const day = `${now.getFullYear()}-${two(now.getMonth() + 1)}-${two(now.getDate())}`;
    const record = { live: true, name: `Recording, ${time}`, file: `recording-${day}-${time.replace(":", "")}`, state: "live", seconds: 0, rows: [], error: null };
    this.take = addTake(record);
    this.connect();
    this.recorder.ondataavailable = ({ data }) => data.size > 0 && this.say(data);
    this.recorder.onstop = () => {
      this.say(JSON.stringify({ type: "finish" }));
      this.release();
    };
    this.recorder.onerror = () => this.stop();
    for (const track of this.stream.getTracks()) track.onended = () => this.stop();
    this.recorder.start(250);
    this.started = performance.now();
    this.level = new Level(this.stream);
    this.timer = setInterval(() => this.tick(), 200);
    this.enter("live");
    announce("Recording");
  }

  connect() {
    this.socket = new WebSocket(socketAddress(this.language));
    this.socket.onopen = () => {
      for (const message of this.queue.splice(0)) this.socket.send(message);
      this.queue = null;
    };
    this.socket.onmessage = ({ data }) => {
      try {
        this.takeIn(JSON.parse(data));
      } catch (error) {
        this.error ??= new Failure("The server sent something odd", "A part of the text could not be read.", { detail: String(error.message) });
      }
    };
    this.socket.onclose = ({ code }) => this.closed(code);
  }

  /** Sends, or keeps until the connection stands: what is said meanwhile is not lost. */
  say(message) {
    if (this.queue) this.queue.push(message);
    else if (this.socket.readyState === 1) this.socket.send(message);
  }

  takeIn(message) {
    const { take } = this;
    const { record } = take;
    switch (message.type) {
      case "speech.started":
        take.row(message.utterance, message.start);
        break;
      case "speech.stopped":
        take.row(message.utterance).end = message.end;
        break;
      case "transcript.partial": {
        if (speech) speech.state = "loaded";
        const row = take.row(message.utterance);
        [row.text, row.tentative] = [message.committed, message.tentative];
        break;
      }
      case "transcript.committed":
      case "transcript.final": {
        const row = take.row(message.utterance);
        [row.text, row.tentative] = [message.text, ""];
        if (message.segments) {
          row.cues = message.segments.map(({ start, end, text }) => ({ start, end, text }));
          row.start = row.cues[0]?.start ?? row.start;
        }
        break;
      }
      case "session.done":
        this.isDone = true;
        break;
      case "error": {
        const code = message.error?.code;
        const title = BUSY.includes(code) ? "The server is busy" : /unavailable|loading|shutting|draining/.test(code) ? "The server is not ready" : "The dictation broke off";
        this.error = failureOf(message.error, title);
        break;
      }
      default: // New kinds of messages do no harm.
    }
    record.seconds = Math.max(record.seconds, message.audio_s ?? 0, message.end ?? 0);
    take.refresh();
    showWhole();
    follow();
  }

  closed(code) {
    if (this.phase === "over") return;
    if (this.isDone) return this.end("done");
    const failure = this.error
      ?? (code === TRY_LATER ? new Failure("The server is busy", "Start again in a moment.") : null)
      ?? (this.queue ? new Failure("The dictation could not begin", "The server does not answer, or something on the way to it lets no WebSocket through.") : null)
      ?? new Failure("The connection was lost", "What was heard until then is kept.");
    this.end("error", failure);
  }

  tick() {
    $("elapsed").textContent = clock((performance.now() - this.started) / 1000);
  }

  enter(phase) {
    this.phase = phase;
    showRecorder();
    if (!this.take || phase === "over") return;
    this.take.record.state = phase;
    this.take.refresh();
  }

  /** No more is said: what was said is still written down. */
  stop() {
    if (this.phase === "asking") this.end("stopped");
    if (this.phase !== "live") return;
    this.length = (performance.now() - this.started) / 1000;
    this.take.record.seconds = Math.max(this.take.record.seconds, this.length);
    this.enter("finishing");
    this.hush();
    if (this.recorder.state !== "inactive") this.recorder.stop();
  }

  /** Nothing of it is waited for any more. */
  abandon() {
    if (this.phase === "over") return;
    this.say(JSON.stringify({ type: "cancel" }));
    this.end("stopped");
  }

  hush() {
    clearInterval(this.timer);
    this.level?.stop();
    this.level = null;
  }

  release() {
    for (const track of this.stream?.getTracks() ?? []) {
      track.onended = null;
      track.stop();
    }
  }

  end(state, failure = null) {
    const { take } = this;
    this.enter("over");
    recording = null;
    if (this.recorder) {
      this.recorder.ondataavailable = this.recorder.onstop = null;
      if (this.recorder.state !== "inactive") this.recorder.stop();
    }
    this.hush();
    this.release();
    if (this.socket) {
      this.socket.onmessage = this.socket.onclose = null;
      this.socket.close();
    }
    showRecorder();
    if (!take) return notice(failure);
    if (this.started) take.record.seconds = Math.max(take.record.seconds, this.length ?? (performance.now() - this.started) / 1000);
    take.end(state);
    const text = take.text();
    if (!text) dropTake(take);
    if (failure) notice(failure);
    else if (!text && state === "done") notice(new Failure("Nothing was heard", "Check that the right microphone is chosen, and that it is not muted."));
    else announce(text || "Stopped");
    follow();
  }
}

async function toggle() {
  if (recording?.phase === "finishing") return recording.abandon();
  if (recording) return recording.stop();
  notice(null);
  const mine = (recording = new Recording());
  showRecorder();
  try {
    await mine.begin();
  } catch (error) {
    if (mine.phase !== "over") mine.end("error", error);
  }
}

function showRecorder() {
  const phase = recording?.phase ?? "idle";
  const [label, picture, state] = PHASES[phase] ?? PHASES.idle;
  $("recorder").dataset.phase = phase;
  $("record").title = label;
  $("record").querySelector(".unseen").textContent = label;
  $("record").querySelector("use").setAttribute("href", `#i-${picture}`);
  $("elapsed").hidden = phase === "idle";
  if (phase === "asking") $("elapsed").textContent = clock(0);
  $("pick").hidden = phase !== "idle";
  $("language").disabled = phase !== "idle";
  $("tab-dictate").toggleAttribute("data-recording", phase === "live");
  $("tab-dictate-state").textContent = phase === "live" ? ", recording" : "";
  showState(state);
}

// ---- files ----------------------------------------------------------------------------------

const FILE_TITLES = { 400: "This file could not be heard", 413: "The file is too large", 415: "This file could not be heard" };
/** Files go to the server one after the other. */
let line = Promise.resolve();

function hearFiles(files) {
  for (const file of files) {
    const record = { live: false, name: file.name || "Recording", file: (file.name || "recording").replace(/\.[^.]{1,5}$/, ""), state: "waiting", seconds: 0, rows: [], error: null };
    const actions = {};
    const take = addTake(record, actions);
    const queue = () => {
      const controller = new AbortController();
      actions.halt = () => {
        controller.abort();
        if (record.state === "waiting") take.end("stopped");
      };
      Object.assign(record, { state: "waiting", error: null, rows: [], seconds: 0 });
      take.refresh();
      line = line.then(() => controller.signal.aborted || hear(file, take, controller.signal));
    };
    actions.again = queue;
    queue();
  }
}

/** Has a file written down, as it is heard. Never throws: every end is shown. */
async function hear(file, take, signal) {
  const { record } = take;
  const refresh = () => {
    take.refresh();
    showWhole();
    follow();
  };
  const read = (event) => {
    if (event.type === "error") throw failureOf(event.error, "The server broke off");
    if (event.type === "transcript.text.done") record.seconds = Math.max(record.seconds, event.usage?.seconds ?? 0);
    if (event.type !== "transcript.text.delta") return event.type === "transcript.text.done";
    const start = event.start ?? record.seconds;
    record.seconds = Math.max(event.end ?? 0, record.seconds);
    const row = take.row(record.rows.length, start);
    Object.assign(row, { end: record.seconds, text: event.delta.trim() });
    return false;
  };
  try {
    record.state = "sending";
    refresh();
    const response = await post(file, signal);
    record.state = "hearing";
    refresh();
    const reader = response.body.getReader();
    const stream = new EventStream();
    let isDone = false;
    while (!isDone) {
      const piece = await reader.read();
      if (piece.done) throw new Failure("The connection ended early", "The text is not complete.");
      for (const data of stream.feed(piece.value)) isDone = read(JSON.parse(data)) || isDone;
      refresh();
    }
    take.end("done");
    announce(take.text() || `${record.name}: no speech in it`);
  } catch (error) {
    if (signal.aborted) return take.end("stopped");
    const failure = error instanceof Failure ? error : new Failure("The connection broke", "The text is not complete.", { detail: String(error.message ?? "") });
    take.end("error", recordOf(failure));
    announce(`${failure.title}. ${failure.message}`);
  } finally {
    follow();
  }
}

async function post(file, signal) {
  const form = new FormData();
  form.append("stream", "true");
  if (language()) form.append("language", language());
  form.append("file", file, file.name || "recording");
  let response;
  try {
    response = await fetch(address("v1/audio/transcriptions"), { method: "POST", body: form, signal });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Failure("The server does not answer", "Check that it is running, then try again.");
  }
  if (!response.ok) throw await failureOfResponse(response, FILE_TITLES);
  return response;
}

/** While this tab is shown, files may be dropped anywhere on the page. */
function watchDrops() {
  const holdsFiles = (event) => !$("dictate-panel").hidden && event.dataTransfer?.types.includes("Files");
  let depth = 0;
  const mark = (change) => {
    depth = change === 0 ? 0 : Math.max(0, depth + change);
    $("dictate-panel").toggleAttribute("data-dropping", depth > 0);
  };
  document.addEventListener("dragenter", (event) => holdsFiles(event) && mark(1));
  document.addEventListener("dragleave", (event) => holdsFiles(event) && mark(-1));
  document.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "copy";
  });
  document.addEventListener("drop", (event) => {
    mark(0);
    if (!holdsFiles(event)) return;
    event.preventDefault();
    hearFiles(event.dataTransfer.files);
  });
}

// ---- the speech model -----------------------------------------------------------------------

const LANGUAGES = "ar cs da de el en es fa fi fr he hi hu id it ja ko nl no pl pt ro ru sv th tr uk vi zh".split(" ");
/** As `/health` says it: `{id, state}`, or null. */
let speech = null;
let isReachable = true;

const isEnglish = () => Boolean(speech?.id.endsWith(".en"));

/** The language that is spoken; empty where the model finds it out or knows but one. */
function language() {
  return isEnglish() ? "" : $("language").value;
}

function buildLanguages() {
  const names = new Intl.DisplayNames(["en"], { type: "language" });
  const options = LANGUAGES.map((code) => [names.of(code), code]).sort(([a], [b]) => a.localeCompare(b));
  $("language").append(...options.map(([name, code]) => el("option", { value: code }, name)));
  const kept = lasting.get("language", "");
  if (LANGUAGES.includes(kept)) $("language").value = kept;
  $("language").addEventListener("change", () => lasting.set("language", $("language").value || null));
}

/** Shows what the tab does, or else how the speech model is. */
function showState(doing = PHASES[recording?.phase ?? "idle"]?.[2] ?? "") {
  const idle = !isReachable ? "The server does not answer; trying again" : speech?.state === "loaded" ? "Ready" : "Ready; the model is loaded with the first words";
  $("dictate-state").dataset.health = !isReachable ? "offline" : "ready";
  const text = doing || idle;
  if ($("dictate-state-text").textContent !== text) $("dictate-state-text").textContent = text;
}

/** Takes over what `/health` says of speech: `{id, state}`, null without a model, undefined where it is unknown. */
export function showSpeech(now) {
  isReachable = now !== undefined;
  if (now !== undefined) speech = now;
  $("speech-model").textContent = speech?.id ?? "";
  $("heard-by").textContent = `Speech becomes text by ${speech?.id ?? "the model"} on ${location.host}, and goes nowhere else.`;
  $("language-choice").hidden = isEnglish();
  $("english").hidden = !isEnglish();
  showState();
}

// ---- start ----------------------------------------------------------------------------------

/** Escape stops what runs; false where there is nothing to stop. */
export function escapeDictation() {
  if (!recording) return false;
  toggle();
  return true;
}

export function focusDictation() {
  $("record").focus({ preventScroll: true });
}

/** Begins. `chat` puts text into the chat's message box. */
export function startDictation(chat) {
  toChat = chat;
  buildLanguages();
  restore();
  watchScrolling();
  watchDrops();
  showRecorder();
  $("record").addEventListener("click", toggle);
  $("copy-whole").addEventListener("click", () => copyText(wholeText(), $("copy-whole")));
  $("send-whole").addEventListener("click", () => hand(wholeText()));
  $("clear-whole").addEventListener("click", clearAll);
  for (const button of [$("pick"), $("pick-first")]) button.addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    hearFiles([...$("files").files]);
    $("files").value = "";
  });
  window.addEventListener("pagehide", remember);
}
