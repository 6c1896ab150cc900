//! `greenroom cache explain`: where two requests part, and what that costs.
//!
//! Reads two bodies of `/v1/chat/completions`, turns them into prompts as the server does, and compares
//! these token by token. No weights are read.

use std::path::Path;
use std::time::SystemTime;

use greenroom::config::Config;
use greenroom::http::read_chat_request;
use greenroom::model::load;
use greenroom::model::text::{Rendered, TextModel, strip_nonce_lines};
use greenroom::types::{ChatRequest, TokenId};
use serde_json::{Value, json};

use super::{ExplainArgs, Stop, home, settings, terminal};
use crate::exit::Exit;

/// Characters shown before and after the difference.
const CONTEXT: usize = 40;
/// Tokens shown of each side.
const SHOWN: usize = 6;

/// One request as a prompt.
struct Prompt {
    request: ChatRequest,
    rendered: Rendered,
    text: String,
    ids: Vec<TokenId>,
    stripped: u32,
}

/// Where two prompts part.
struct Difference {
    /// Tokens that both begin with.
    shared: usize,
    /// Bytes of text that both begin with.
    at: usize,
}

/// Prints what the two have in common.
pub(super) fn explain(args: &ExplainArgs) -> Result<Exit, Stop> {
    let config = settings::plain(args.settings.config.as_deref())?;
    let found = home::model(args.model.as_deref(), &config)?;
    let text = load::open_text(&found.path).map_err(|error| failed(error.to_string()))?;
    let now = SystemTime::now();
    let (a, b) = (prompt(&args.a, &text, &config, now)?, prompt(&args.b, &text, &config, now)?);
    let difference = compare(&a, &b);
    let place = place(&b, &text, difference.at, now);
    let hints = hints(&a, &b, &difference);
    let anew = b.ids.len() - difference.shared;
    let seconds = args.tokens_per_s.filter(|rate| *rate > 0.0).map(|rate| anew as f64 / rate);
    if args.json {
        let side = |prompt: &Prompt| {
            json!({
                "tokens": prompt.ids.len(),
                "stripped_lines": prompt.stripped,
                "text": around(&prompt.text, difference.at),
                "next_tokens": next(&text, &prompt.ids, difference.shared),
            })
        };
        let report = json!({
            "shared_tokens": difference.shared,
            "computed_tokens": anew,
            "seconds": seconds,
            "at_byte": difference.at,
            "in": place,
            "a": side(&a),
            "b": side(&b),
            "hints": hints,
        });
        return print(&format!("{report:#}\n"));
    }
    let mut out = format!(
        "A  {:>8} tokens  {}\nB  {:>8} tokens  {}\n",
        a.ids.len(),
        args.a.display(),
        b.ids.len(),
        args.b.display()
    );
    out.push_str(&format!("shared {:>4} tokens; after A, B computes {anew}", difference.shared));
    out.push_str(&seconds.map_or(String::from("\n"), |seconds| format!(", {seconds:.1} s\n")));
    if difference.shared == a.ids.len() && difference.shared == b.ids.len() {
        out.push_str("they are the same prompt\n");
    } else {
        out.push_str(&format!("they part in {place}:\n"));
        for (name, prompt) in [("A", &a), ("B", &b)] {
            out.push_str(&format!("  {name}  {}\n", around(&prompt.text, difference.at)));
        }
        for (name, prompt) in [("A", &a), ("B", &b)] {
            let tokens = next(&text, &prompt.ids, difference.shared);
            out.push_str(&format!("  {name} goes on with {}\n", Value::from(tokens)));
        }
    }
    for hint in hints {
        out.push_str(&format!("hint: {hint}\n"));
    }
    print(&out)
}

fn print(text: &str) -> Result<Exit, Stop> {
    terminal::say(text).map_err(|error| failed(format!("cannot write: {error}")))?;
    Ok(Exit::Ok)
}

fn failed(message: String) -> Stop {
    Stop::new(Exit::Failure, message)
}

fn prompt(path: &Path, text: &TextModel, config: &Config, now: SystemTime) -> Result<Prompt, Stop> {
    let wrong = |message: String| failed(format!("{}: {message}", path.display()));
    let body = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let mut request = read_chat_request(&body).map_err(wrong)?;
    let stripped = strip_nonce_lines(&mut request, &config.cache.nonce_lines).lines;
    let rendered = text.render(&request, now).map_err(|error| wrong(error.to_string()))?;
    let ids = text.encode(&rendered).map_err(|error| wrong(error.to_string()))?;
    Ok(Prompt { text: rendered.text(), request, rendered, ids, stripped })
}

fn compare(a: &Prompt, b: &Prompt) -> Difference {
    let shared = a.ids.iter().zip(&b.ids).take_while(|(a, b)| a == b).count();
    let common = a.text.chars().zip(b.text.chars()).take_while(|(a, b)| a == b);
    Difference { shared, at: common.map(|(c, _)| c.len_utf8()).sum() }
}

/// The message that a place of the prompt's text belongs to, in words.
fn place(prompt: &Prompt, text: &TextModel, at: usize, now: SystemTime) -> String {
    let messages = &prompt.request.messages;
    let whole = prompt.rendered.text();
    for (index, message) in messages.iter().enumerate() {
        let part = text.render_messages(&prompt.request, &messages[..=index], false, now);
        let Ok(part) = part else { continue };
        let end = whole.bytes().zip(part.text().bytes()).take_while(|(a, b)| a == b).count();
        if at < end {
            let content = message.content.as_deref().unwrap_or_default();
            let is_before = whole.find(content).is_some_and(|begin| at < begin);
            let what =
                if is_before && !prompt.request.tools.is_empty() { " or the tools before it" } else { "" };
            return format!("messages[{index}] ({}){what}", message.role.as_str());
        }
    }
    "what follows the messages".into()
}

/// The text around a place, on one line, the place marked.
fn around(text: &str, at: usize) -> String {
    let (before, after) = text.split_at(at.min(text.len()));
    let begin = before.char_indices().rev().take(CONTEXT).last().map_or(before.len(), |(at, _)| at);
    let end = after.char_indices().nth(CONTEXT).map_or(after.len(), |(at, _)| at);
    format!("{}▸{}", before[begin..].escape_debug(), after[..end].escape_debug())
}

fn next(text: &TextModel, ids: &[TokenId], from: usize) -> Vec<String> {
    let rest = ids.get(from..).unwrap_or(&[]);
    rest.iter().take(SHOWN).map(|id| text.tokenizer.decode(&[*id], true)).collect()
}

/// What often makes prompts part too early.
fn hints(a: &Prompt, b: &Prompt, difference: &Difference) -> Vec<String> {
    let mut hints = Vec::new();
    if a.stripped + b.stripped > 0 {
        hints.push(format!(
            "leading lines that differ each time were taken out ({} of A, {} of B): cache.nonce_lines",
            a.stripped, b.stripped
        ));
    }
    if a.request.cache.salt != b.request.cache.salt {
        hints.push(
            "the salts differ: nothing is shared, whatever the prompts have in common (cache_salt)".into(),
        );
    }
    let names = |prompt: &Prompt| {
        let mut tools: Vec<String> = prompt.request.tools.iter().map(canonical).collect();
        tools.sort();
        tools
    };
    if a.request.tools != b.request.tools || texts(&a.request.tools) != texts(&b.request.tools) {
        if texts(&a.request.tools) != texts(&b.request.tools) && a.request.tools == b.request.tools {
            hints.push("the tools have their keys in another order: send them as they were".into());
        } else if names(a) == names(b) {
            hints.push(
                "the tools are the same in another order: send \"sort_tools\": true, or keep the order"
                    .into(),
            );
        } else {
            hints.push("the tools differ: what follows them is computed again".into());
        }
    }
    let word = |prompt: &Prompt| {
        let text = &prompt.text;
        let at = difference.at.min(text.len());
        let begin = text[..at].rfind(char::is_whitespace).map_or(0, |at| at + 1);
        let end = text[at..].find(char::is_whitespace).map_or(text.len(), |end| at + end);
        text[begin..end].to_owned()
    };
    let (one, other) = (word(a), word(b));
    let ends = a.text.len().min(b.text.len()) <= difference.at;
    if !ends && looks_like_time(&one) && looks_like_time(&other) {
        hints.push(format!(
            "`{one}` and `{other}` look like a time or a date: put it at the end, or leave it out"
        ));
    } else if !ends && looks_like_id(&one) && looks_like_id(&other) {
        hints.push(format!(
            "`{one}` and `{other}` look like identifiers that differ each time: put them at the end, or name the line in cache.nonce_lines"
        ));
    }
    hints
}

fn texts(tools: &[Value]) -> Vec<String> {
    tools.iter().map(Value::to_string).collect()
}

/// A tool's name and text, whatever the order of its keys.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let mut parts: Vec<String> =
                map.iter().map(|(key, value)| format!("{key}:{}", canonical(value))).collect();
            parts.sort();
            format!("{{{}}}", parts.join(","))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(canonical).collect::<Vec<_>>().join(",")),
        other => other.to_string(),
    }
}

fn looks_like_time(word: &str) -> bool {
    let digits = word.chars().filter(char::is_ascii_digit).count();
    let marks = word.chars().filter(|c| [':', '-', '/', '.'].contains(c)).count();
    digits >= 3 && marks >= 1 && word.chars().all(|c| c.is_ascii_digit() || ":-/.TZ+,;()".contains(c))
}

fn looks_like_id(word: &str) -> bool {
    let digits = word.chars().filter(char::is_ascii_digit).count();
    let plain = word.chars().filter(|c| c.is_ascii_alphanumeric()).count();
    word.len() >= 6 && digits >= 2 && plain * 4 >= word.len() * 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_and_identifiers_are_told_from_words() {
        for word in ["12:01", "2026-12-02", "2026-12-02T10:00:01Z", "02/12/2026"] {
            assert!(looks_like_time(word), "{word}");
        }
        for word in ["river", "1999", "v1.2.3-rc", "--"] {
            assert!(!looks_like_time(word), "{word}");
        }
        for word in ["cch=1f2e3d4c;", "550e8400-e29b-41d4-a716-446655440000", "req_01HZX9"] {
            assert!(looks_like_id(word), "{word}");
        }
        for word in ["identity", "42", "a1"] {
            assert!(!looks_like_id(word), "{word}");
        }
    }

    #[test]
    fn the_place_is_marked_and_lines_stay_lines() {
        assert_eq!(around("one\ntwo three", 8), "one\\ntwo ▸three");
        assert_eq!(around("añb", 3), "añ▸b");
        assert_eq!(around("", 0), "▸");
    }
}
