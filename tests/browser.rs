//! The chat page in a real browser: headless Chromium, driven over the WebDriver protocol, against
//! the real binary and the demo model.
//!
//! Not here: what the API answers (its own tests), and the page's looks, for which screenshots are
//! left in Cargo's directory for test files; dictation (`browser_dictation.rs`). Where Chromium or its driver
//! is not installed the test says so loudly and passes; with `GREENROOM_REQUIRE_BROWSER` set it fails.
//! Invariant: whatever happens, the browser, its driver and the server are ended at the end.

#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::process::Command;

use serde_json::json;

mod common;
mod webdriver;
use webdriver::{Browser, Process, chromium, http, wait_for};

/// Enter and Escape as WebDriver spells keys.
const ENTER: &str = "\u{E007}";
const ESCAPE: &str = "\u{E00C}";
/// Texts that would do harm if any part of them became HTML. `<` must survive in each as text.
const HOSTILE: [&str; 10] = [
    "<script>window.harmed = 1</script>",
    "<img src=x onerror=\"window.harmed = 2\">",
    "# <svg onload=window.harmed=3>",
    "- <iframe src=\"javascript:parent.harmed=4\"></iframe>",
    "> <style>body { display: none }</style>",
    "| <img src=x onerror=window.harmed=5> | b |\n|---|---|\n| <object data=x> | `<b>` |",
    "```html\"><img src=x onerror=window.harmed=6>\n<script>window.harmed=7</script>\n```",
    "[<b>](javascript:window.harmed=8) ![<i>](data:text/html,<script>alert(1)</script>)",
    "[<u>]( JaVaScRiPt:alert(1)) <javascript:alert(1)> [<u>](vbscript:x) [<u>](java\tscript:x)",
    "**<a href=\"javascript:window.harmed=9\" onclick=\"window.harmed=10\">_x_</a>** `<script>`",
];

#[test]
fn a_person_chats_in_the_page() {
    let Some((driver, chromium)) = chromium("chat page") else { return };
    let server = Process::start(&mut server_command(), "http://127.0.0.1:");
    wait_for("the model to be loaded", || {
        http(&server.address, "GET", "/readyz", None).is_ok_and(|(status, _)| status == 200)
    });
    let browser = Browser::open(&driver, &chromium);
    browser.go(&format!("http://{}/", server.address));
    browser.wait_until(
        "the page finds the server",
        "document.querySelector('#state').dataset.health === 'ready'",
    );
    assert!(
        browser.truth("return document.querySelector('#tabs').hidden"),
        "there is nothing to choose without a speech model"
    );
    browser.screenshot("browser-welcome.png");

    answer_grows_and_stops(&browser, &server.address);
    second_message_works(&browser);
    html_stays_text(&browser);
    reload_keeps_the_conversation(&browser);
    phone_has_no_sideways_scroll(&browser);
    let complaints = browser.log_lines("Content Security Policy");
    assert!(complaints.is_empty(), "the page breaks its own policy: {complaints:?}");
}

/// Types a message, sees the answer grow, stops it, and sees the server let go of it.
fn answer_grows_and_stops(browser: &Browser, server: &str) {
    let stopped = (0..3).any(|_| {
        browser.click("#new-chat");
        browser.type_into(
            "#prompt",
            &format!("Tell a very long story about the sea, with many chapters.{ENTER}"),
        );
        see_it_grow(browser) && stop(browser)
    });
    assert!(stopped, "three long answers ended before they could be stopped");
    wait_for("no ticket to live after the stop", || tickets_live(server) == 0);
    let said = browser.number(ANSWER_LENGTH);
    assert!(said > 0, "what was said before the stop is kept");
    let stats = browser.text("return document.querySelector('.message .stats').textContent");
    assert!(stats.contains("stopped"), "the answer is marked as stopped: {stats:?}");
    assert!(
        browser.truth(
            "return document.querySelector('#stop').hidden && !document.querySelector('#send').hidden"
        )
    );
}

const ANSWER_LENGTH: &str = "return [...document.querySelectorAll('.message[data-role=assistant] .content')].pop()?.textContent.length ?? 0";
const ANSWER_STATE: &str =
    "return [...document.querySelectorAll('.message[data-role=assistant]')].pop()?.dataset.state ?? 'none'";

/// True once two different lengths were seen while the answer streamed; false if it ended before.
fn see_it_grow(browser: &Browser) -> bool {
    let mut lengths: Vec<i64> = Vec::new();
    wait_for("the answer to grow or to end", || {
        let seen = browser.run(
            "const last = [...document.querySelectorAll('.message[data-role=assistant]')].pop();
             return last ? [last.dataset.state, last.querySelector('.content').textContent.length] : ['none', 0];",
        );
        let length = seen[1].as_i64().unwrap();
        if seen[0] == "streaming" && length > 0 && lengths.last() != Some(&length) {
            lengths.push(length);
        }
        assert_ne!(seen[0], "error", "the answer failed: {}", browser.text("return document.body.innerText"));
        lengths.len() >= 2 || seen[0] == "done"
    });
    assert!(lengths.is_sorted(), "an answer only grows: {lengths:?}");
    lengths.len() >= 2
}

/// Presses the stop button; false if the answer was faster.
fn stop(browser: &Browser) -> bool {
    if browser.try_click("#stop").is_err() {
        return false;
    }
    wait_for("the answer to end", || browser.text(ANSWER_STATE) != "streaming");
    browser.text(ANSWER_STATE) == "stopped"
}

/// A second message, kept short by the setting, ends by itself and shows its figures.
fn second_message_works(browser: &Browser) {
    browser.click("#open-settings");
    browser.type_into("#sampling-max_tokens", &format!("6{ESCAPE}"));
    assert!(browser.truth("return document.querySelector('#settings').hidden"), "Escape closes the settings");
    browser.type_into("#prompt", &format!("Say hello, then describe a ship.{ENTER}"));
    wait_for("the second answer", || {
        browser.number("return document.querySelectorAll('.message[data-role=assistant]').length") == 2
            && browser.text(ANSWER_STATE) != "streaming"
    });
    assert_eq!(browser.text(ANSWER_STATE), "done");
    let stats = browser.text("return [...document.querySelectorAll('.message .stats')].pop().textContent");
    let tokens: u32 =
        stats.split(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("no token count in {stats:?}"));
    assert!((1..=6).contains(&tokens), "the limit of 6 tokens holds: {stats:?}");
    assert!(stats.contains("first after"), "time to the first token is shown: {stats:?}");
    browser.screenshot("browser-chat.png");
}

/// Feeds the page's renderer with HTML and looks for anything that came alive.
fn html_stays_text(browser: &Browser) {
    let offences = browser.run_async(
        "const [texts, done] = arguments;
         import(new URL('page/app.js', location.href).href).then(async ({ renderMarkdown }) => {
           const offences = [];
           const place = document.createElement('div');
           document.body.append(place);
           for (const text of texts) {
             const fragment = renderMarkdown(text);
             if (!(fragment instanceof DocumentFragment)) offences.push(['not a fragment', text]);
             place.replaceChildren(fragment);
             if (!place.textContent.includes('<')) offences.push(['text lost', text]);
             for (const node of place.querySelectorAll('*')) {
               if (/^(script|img|iframe|object|embed|style|link|form|base|meta)$/i.test(node.nodeName)) offences.push([node.nodeName, text]);
               for (const { name, value } of node.attributes) {
                 if (/^on|^style$|^srcdoc$/i.test(name)) offences.push([name, text]);
                 if (/^(href|src)$/i.test(name) && !/^(https?:|mailto:|#)/i.test(value)) offences.push([value, text]);
               }
             }
             await new Promise(requestAnimationFrame);
           }
           place.replaceChildren(renderMarkdown('**bold** [a](https://example.org/)\\n\\n```rust\\nfn main() {}\\n```'));
           if (place.querySelector('strong')?.textContent !== 'bold') offences.push(['no bold', '']);
           if (!place.querySelector('a[href=\"https://example.org/\"][rel~=noopener]')) offences.push(['no link', '']);
           if (place.querySelector('pre code')?.textContent !== 'fn main() {}') offences.push(['no code', '']);
           place.remove();
           if (window.harmed !== undefined) offences.push(['a script ran', String(window.harmed)]);
           done(offences);
         }).catch((error) => done([[String(error), '']]));",
        json!([HOSTILE]),
    );
    assert_eq!(offences, json!([]), "text of an answer was interpreted");
}

fn reload_keeps_the_conversation(browser: &Browser) {
    let shown = "return [...document.querySelectorAll('.message .content')].map((node) => node.textContent).join('|')";
    let before = browser.text(shown);
    browser.run("location.reload()");
    browser.wait_until("the conversation is back", "document.querySelectorAll('.message').length === 4");
    assert_eq!(browser.text(shown), before);
}

/// At 360 px neither a long word, nor code, nor a table, nor the settings make the page wider.
fn phone_has_no_sideways_scroll(browser: &Browser) {
    browser.devtools(
        "Emulation.setDeviceMetricsOverride",
        json!({ "width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": true }),
    );
    browser.run_async(
        "const [text, done] = arguments;
         import(new URL('page/app.js', location.href).href).then(({ renderMarkdown }) => {
           [...document.querySelectorAll('.message[data-role=assistant] .content')].pop().append(renderMarkdown(text));
           document.querySelector('#scroll').scrollTop = 1e6;
           done(null);
         });",
        json!([format!(
            "{word}\n\n```text\n{word}\n```\n\n| {cell} | {cell} | {cell} |\n|---|---|---|\n| `{word}` | b | c |\n\n- `{word}`",
            word = "wide".repeat(60),
            cell = "a heading",
        )]),
    );
    let width = "const box = document.querySelector('#scroll');
         return [innerWidth, document.documentElement.scrollWidth, box.scrollWidth - box.clientWidth]";
    assert_eq!(browser.run(width), json!([360, 360, 0]));
    browser.screenshot("browser-phone.png");
    browser.click("#open-settings");
    assert_eq!(browser.run(width), json!([360, 360, 0]));
    browser.click("#close-settings");
}

/// Sum of the gauge over its labels, as `/metrics` shows it.
fn tickets_live(server: &str) -> i64 {
    let (status, text) = http(server, "GET", "/metrics", None).unwrap();
    assert_eq!(status, 200, "{text}");
    let values: Vec<f64> = text
        .lines()
        .filter(|line| line.starts_with("greenroom_tickets_live"))
        .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(!values.is_empty(), "/metrics has no greenroom_tickets_live");
    values.iter().sum::<f64>() as i64
}

/// The server under test. The only place that knows it.
fn server_command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.arg("serve").arg(common::demo_model()).args(["--port", "0"]);
    command
}
