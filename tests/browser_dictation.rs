//! Dictation in a real browser: headless Chromium whose microphone is a file, against the real binary
//! and the demo models.
//!
//! Not here: what the API answers (`http_audio.rs`), and the chat (`browser.rs`). Where Chromium or its driver
//! is not installed the tests say so loudly and pass; with `GREENROOM_REQUIRE_BROWSER` set they fail.
//! Invariant: whatever happens, the browser, its driver and the server are ended at the end.

#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

mod common;
mod webdriver;
use webdriver::{Browser, Process, chromium, http, wait_for};

const RIGHT: &str = "\u{E014}";
const ESCAPE: &str = "\u{E00C}";
/// What the fake microphone does after the words, seconds.
const SILENCE: usize = 60;
const PHASE: &str = "return document.querySelector('#recorder').dataset.phase";
const NOTICE: &str = "return document.querySelector('#dictate-notice').innerText";
const SAID: &str = "return document.querySelector('#takes').innerText";

#[test]
fn a_person_dictates_in_the_page() {
    let Some((driver, chromium)) = chromium("dictation") else { return };
    let (chat, speech) = (common::demo_model(), common::speech_model("whisper-tiny.en"));
    let server = serve(&[chat.as_os_str(), "--speech-model".as_ref(), speech.as_os_str()]);
    let browser = Browser::open_with(&driver, &chromium, &microphone("--use-fake-ui-for-media-stream"));
    browser.go(&format!("http://{}/", server.address));
    browser.wait_until("the choice of chat or dictation", "!document.querySelector('#tabs').hidden");
    let models =
        "return [...document.querySelectorAll('#model option')].map((option) => option.value).join()";
    wait_for("the chat model", || !browser.text(models).is_empty());
    assert!(!browser.text(models).contains("whisper"), "nobody chats with a speech model");

    // By keyboard alone.
    browser.type_into("#tab-chat", RIGHT);
    browser.wait_until("the tab is shown", "!document.querySelector('#dictate-panel').hidden");
    assert_eq!(browser.text("return document.activeElement.id"), "tab-dictate");
    assert!(browser.truth(
        "return document.querySelector('#tab-dictate').ariaSelected === 'true'
           && document.querySelector('#dictate-panel').role === 'tabpanel'
           && document.querySelector('#language-choice').hidden"
    ));
    browser.screenshot("dictation-welcome.png");

    files_become_text_and_subtitles(&browser);
    speech_becomes_text(&browser);
    text_goes_to_the_chat(&browser);
    hostile_text_stays_text(&browser);
    phone_has_no_sideways_scroll(&browser);
    what_is_wrong_is_said(&browser);
    a_lost_connection_keeps_the_text(&browser, server);
    let complaints = browser.log_lines("Content Security Policy");
    assert!(complaints.is_empty(), "the page breaks its own policy: {complaints:?}");
}

#[test]
fn a_server_without_chat_shows_dictation_only() {
    let Some((driver, chromium)) = chromium("dictation") else { return };
    let speech = common::speech_model("whisper-tiny.en");
    let server = serve(&[speech.as_os_str()]);
    let browser = Browser::open_with(&driver, &chromium, &microphone("--use-fake-ui-for-media-stream=deny"));
    browser.go(&format!("http://{}/", server.address));
    browser.wait_until("the dictation", "!document.querySelector('#dictate-panel').hidden");
    assert!(browser.truth(
        "return ['tabs', 'chat-panel', 'picker', 'new-chat', 'open-settings'].every((id) => document.getElementById(id).hidden)"
    ));
    assert_eq!(browser.text("return document.activeElement.id"), "record");
    // The user says no, and then has a file.
    browser.click("#record");
    wait_for("the refusal", || browser.text(NOTICE).contains("The microphone is not allowed"));
    assert_eq!(browser.text(PHASE), "idle");
    browser.screenshot("dictation-denied.png");
    browser.type_into("#files", common::data("audio/jfk.mp3").to_str().unwrap());
    browser.wait_until("the text", "document.querySelector('.take')?.dataset.state === 'done'");
    assert!(browser.text(SAID).to_lowercase().contains("fellow americans"), "{}", browser.text(SAID));
    assert!(browser.truth("return [...document.querySelectorAll('.to-chat')].every((button) => getComputedStyle(button).display === 'none')"));
    // What is no recording is told, in words.
    browser.type_into("#files", common::data("audio/SOURCES.md").to_str().unwrap());
    browser
        .wait_until("the error", "document.querySelectorAll('.take')[1]?.querySelector('.failure') !== null");
    let said = browser.text("return document.querySelector('.take .failure').innerText");
    assert!(said.starts_with("This file could not be heard"), "{said}");
}

/// A picked file is written down in segments; its subtitles are those that the server itself would write.
fn files_become_text_and_subtitles(browser: &Browser) {
    browser.run(
        "window.saved = null;
         const make = URL.createObjectURL;
         URL.createObjectURL = (blob) => ((window.saved = { blob }), make.call(URL, blob));
         HTMLAnchorElement.prototype.click = function () { window.saved.name = this.download; };
         document.querySelector('#files').addEventListener('change', (event) => (window.picked = event.target.files[0]), { capture: true });",
    );
    browser.type_into("#files", common::data("audio/jfk.wav").to_str().unwrap());
    browser.wait_until("the text of the file", "document.querySelector('.take')?.dataset.state === 'done'");
    assert!(browser.text(SAID).contains("your country"), "{}", browser.text(SAID));
    for kind in ["srt", "vtt"] {
        browser.click(&format!(".take .save[data-kind={kind}]"));
        let texts = browser.run_async(
            "const [kind, done] = arguments;
             const form = new FormData();
             form.append('response_format', kind);
             form.append('file', window.picked);
             Promise.all([
               window.saved.blob.text(),
               fetch('v1/audio/transcriptions', { method: 'POST', body: form }).then((response) => response.text()),
             ]).then(([saved, served]) => done([window.saved.name, saved, served]));",
            json!([kind]),
        );
        assert_eq!(texts[0], format!("jfk.{kind}"));
        assert_eq!(texts[1], texts[2], "the page's subtitles are the server's");
        assert!(texts[1].as_str().unwrap().contains("00:00:00"), "{texts}");
    }
    // The same file, dropped.
    browser.run(
        "const data = new DataTransfer();
         data.items.add(window.picked);
         const over = { bubbles: true, cancelable: true, dataTransfer: data };
         document.querySelector('#dictate-panel').dispatchEvent(new DragEvent('dragenter', over));
         window.marked = document.querySelector('#dictate-panel').hasAttribute('data-dropping');
         document.querySelector('#dictate-panel').dispatchEvent(new DragEvent('drop', over));",
    );
    browser.wait_until("the dropped file", "document.querySelectorAll('.take')[1]?.dataset.state === 'done'");
    assert!(browser.truth("return window.marked"));
    let shown =
        "return [...document.querySelectorAll('.take')].map((take) => take.querySelector('.rows').innerText)";
    let shown = browser.run(shown);
    assert_eq!(shown[0], shown[1]);
    browser.click("#clear-whole");
    assert_eq!(browser.number("return document.querySelectorAll('.take').length"), 0);
}

/// The microphone's words appear while it listens.
fn speech_becomes_text(browser: &Browser) {
    browser.type_into("#record", " ");
    wait_for("the recording", || browser.text(PHASE) == "live");
    assert!(browser.truth("return document.querySelector('#tab-dictate').hasAttribute('data-recording')"));
    wait_for("the words, while they are heard", || {
        assert_eq!(browser.text(PHASE), "live", "it ended by itself: {}", browser.text(NOTICE));
        browser.text(SAID).contains("country")
    });
    browser.screenshot("dictation-live.png");
    browser.click("#record");
    wait_for("the end", || browser.text(PHASE) == "idle");
    let said = browser.text(SAID);
    assert!(said.to_lowercase().contains("your country"), "{said}");
    assert_eq!(
        browser.text(
            "return [...document.querySelectorAll('.tentative')].map((node) => node.textContent).join('')"
        ),
        "",
        "nothing is tentative at the end"
    );
    assert_eq!(
        browser.text("return [...document.querySelectorAll('.take')].pop().dataset.state"),
        "done",
        "{}",
        browser.text(NOTICE)
    );
    assert_eq!(browser.text(NOTICE), "");
    browser.screenshot("dictation-done.png");
    // It outlives a reload, as the chat does.
    browser.run("location.reload()");
    browser.wait_until("the text is back", "document.querySelectorAll('.take').length > 0");
    browser.wait_until("the tab is back", "!document.querySelector('#dictate-panel').hidden");
    assert_eq!(browser.text(SAID), said);
}

fn text_goes_to_the_chat(browser: &Browser) {
    browser.click("#send-whole");
    browser.wait_until("the chat", "!document.querySelector('#chat-panel').hidden");
    let prompt = browser.text("return document.querySelector('#prompt').value");
    assert!(prompt.to_lowercase().contains("your country"), "{prompt}");
    assert!(
        browser.truth(
            "return document.activeElement.id === 'prompt' && !document.querySelector('#send').disabled"
        )
    );
    browser.click("#tab-dictate");
}

/// A server that answers with HTML, in place of the real one.
const HOSTILE_SERVER: &str = "
    window.RealSocket = WebSocket;
    window.WebSocket = class {
      readyState = 1;
      constructor(url) {
        window.asked = String(url);
        const bad = '<img src=x onerror=\"window.harmed = 1\"><script>window.harmed = 2</script>';
        const say = (message) => this.onmessage?.({ data: JSON.stringify(message) });
        setTimeout(() => {
          this.onopen();
          say({ type: 'session.created', session: {} });
          say({ type: 'something.new', text: bad });
          say({ type: 'speech.started', utterance: 0, start: 0 });
          say({ type: 'transcript.partial', utterance: 0, committed: bad, tentative: bad, audio_s: 1 });
          say({ type: 'speech.started', utterance: 1, start: 2 });
          say({ type: 'transcript.final', utterance: 1, text: bad, segments: [{ id: 0, start: 2, end: 3, text: bad }] });
          say({ type: 'error', error: { message: bad, code: bad } });
        });
      }
      send(message) {
        if (String(message).includes('finish')) setTimeout(() => this.onclose?.({ code: 1011 }));
      }
      close() {}
    };";

fn hostile_text_stays_text(browser: &Browser) {
    browser.click("#clear-whole");
    browser.run(HOSTILE_SERVER);
    // With a model that knows languages, one can be chosen.
    browser.run_async(
        "const [done] = arguments;
         import(new URL('page/dictate.js', location.href).href).then(({ showSpeech }) => {
           showSpeech({ id: 'whisper-base', state: 'loaded' });
           window.offered = !document.querySelector('#language-choice').hidden;
           document.querySelector('#language').value = 'de';
           document.querySelector('#record').click();
           document.querySelector('#language').value = '';
           showSpeech({ id: 'whisper-tiny.en', state: 'loaded' });
           done(null);
         });",
        json!([]),
    );
    browser.wait_until("the connection", "window.asked !== undefined");
    let asked = browser.text("return window.asked");
    assert!(asked.starts_with("ws://") && asked.contains("/v1/audio/stream?encoding=container"), "{asked}");
    assert!(asked.contains("language=de") && browser.truth("return window.offered"), "{asked}");
    browser.wait_until("the text", "document.querySelectorAll('.said').length === 2");
    // Here, as a busy machine may have nothing to say before it is certain: what may change looks different.
    let marked = browser.run(
        "const look = (node) => [getComputedStyle(node).color, getComputedStyle(node).textDecorationLine];
         const [committed, tentative] = document.querySelector('.said p').children;
         return [look(committed), look(tentative), tentative.textContent];",
    );
    assert_ne!(marked[0][0], marked[1][0]);
    assert_eq!((&marked[0][1], &marked[1][1]), (&json!("none"), &json!("underline")));
    assert!(marked[2].as_str().unwrap().starts_with("<img"), "{marked}");
    browser.screenshot("dictation-tentative.png");
    browser.type_into("#record", ESCAPE);
    wait_for("the error", || browser.text(NOTICE).contains("<img"));
    assert_eq!(browser.text(SAID).matches("<script>").count(), 3, "{}", browser.text(SAID));
    assert!(
        browser
            .truth("return !document.querySelector('main img, main script') && window.harmed === undefined")
    );
    assert!(browser.text(NOTICE).starts_with("The dictation broke off"), "{}", browser.text(NOTICE));
    browser.run("window.WebSocket = window.RealSocket");
}

/// At 360 px neither a long word nor any state of the recorder makes the page wider.
fn phone_has_no_sideways_scroll(browser: &Browser) {
    browser.devtools(
        "Emulation.setDeviceMetricsOverride",
        json!({ "width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": true }),
    );
    browser.run(
        "document.querySelector('.said p').firstChild.textContent = 'wide'.repeat(60);
         document.querySelector('.take h3').textContent = 'a_long_name_of_a_file'.repeat(10);
         document.querySelector('#language-choice').hidden = false;
         document.querySelector('#english').hidden = true;",
    );
    let width = "const box = document.querySelector('#dictate-scroll');
         return [innerWidth, document.documentElement.scrollWidth, box.scrollWidth - box.clientWidth]";
    assert_eq!(browser.run(width), json!([360, 360, 0]));
    browser.screenshot("dictation-phone.png");
    browser.click("#record");
    wait_for("the recording", || browser.text(PHASE) == "live");
    assert_eq!(browser.run(width), json!([360, 360, 0]));
    browser.type_into("#record", ESCAPE);
    wait_for("the end", || browser.text(PHASE) == "idle");
    browser.devtools("Emulation.clearDeviceMetricsOverride", json!({}));
}

/// No microphone, one that is taken, a page that may have none, a server that has no room.
fn what_is_wrong_is_said(browser: &Browser) {
    for (place, said) in [
        (
            "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('x', 'NotFoundError'); }",
            "No microphone was found",
        ),
        (
            "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('x', 'NotReadableError'); }",
            "The microphone does not answer",
        ),
        (
            "Object.defineProperty(navigator, 'mediaDevices', { value: undefined, configurable: true });
             Object.defineProperty(window, 'isSecureContext', { value: false, configurable: true })",
            "The browser keeps the microphone from this page",
        ),
        (
            "delete navigator.mediaDevices;
             delete navigator.mediaDevices.getUserMedia;
             window.RealSocket = WebSocket;
             window.WebSocket = class {
               constructor() {
                 setTimeout(() => {
                   this.onmessage({ data: JSON.stringify({ type: 'error', error: { message: '16 sessions are open', code: 'session_limit' } }) });
                   this.onclose?.({ code: 1013 });
                 });
               }
               send() {}
               close() {}
             }",
            "The server is busy",
        ),
    ] {
        browser.run(place);
        browser.click("#record");
        wait_for(said, || browser.text(NOTICE).starts_with(said));
        assert_eq!(browser.text(PHASE), "idle");
    }
    browser.run("window.WebSocket = window.RealSocket");
}

fn a_lost_connection_keeps_the_text(browser: &Browser, server: Process) {
    let takes = browser.number("return document.querySelectorAll('.take').length");
    browser.click("#record");
    let heard =
        format!("return document.querySelectorAll('.take')[{takes}]?.querySelector('.rows').innerText");
    wait_for("some words", || browser.text(&heard).len() > 10);
    drop(server);
    wait_for("the loss", || browser.text(NOTICE).starts_with("The connection was lost"));
    assert!(browser.text(&heard).len() > 10, "what was heard is kept");
    assert_eq!(browser.text(PHASE), "idle");
    browser.wait_until("the state", "document.querySelector('#dictate-state').dataset.health === 'offline'");
}

/// Chromium's flags for a microphone that says a sentence and then nothing.
fn microphone(ui: &str) -> [String; 3] {
    let words = common::samples("jfk.wav");
    let mut samples: Vec<u8> =
        words.iter().flat_map(|sample| ((sample * 32767.0) as i16).to_le_bytes()).collect();
    samples.resize(samples.len() + SILENCE * 16_000 * 2, 0);
    let size = u32::try_from(samples.len()).unwrap();
    let mut wav = b"RIFF".to_vec();
    wav.extend((size + 36).to_le_bytes());
    wav.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data");
    wav.extend(size.to_le_bytes());
    wav.extend(samples);
    let file: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join("microphone.wav");
    // Tests that run at the same time write the same.
    let own = file.with_extension(format!("{:?}", std::thread::current().id()));
    std::fs::write(&own, wav).unwrap();
    std::fs::rename(&own, &file).unwrap();
    [
        ui.to_owned(),
        "--use-fake-device-for-media-stream".to_owned(),
        format!("--use-file-for-fake-audio-capture={}%noloop", file.display()),
    ]
}

/// The server under test. The only place that knows it.
fn serve(arguments: &[&OsStr]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.arg("serve").args(arguments).args(["--device", "cpu", "--port", "0"]);
    let server = Process::start(&mut command, "http://127.0.0.1:");
    wait_for("the models", || {
        http(&server.address, "GET", "/readyz", None).is_ok_and(|(status, _)| status == 200)
    });
    server
}
