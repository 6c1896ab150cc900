//! Lines that are different in every request and stand before everything that is not. Pure.
//!
//! Coding agents put such a line first in the system prompt; with it no prefix is ever found
//! again. Lines that match one of the operator's patterns are taken out while they lead the first
//! system message. Nothing else is touched: neither the same line further down, nor in what anybody
//! else says.

use crate::types::{ChatMessage, Role};

/// What was taken out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stripped {
    /// How many lines.
    pub lines: u32,
    /// The pattern that the first of them matched.
    pub pattern: Option<String>,
}

/// Takes leading lines that match out of the first system message; one without anything else goes.
pub fn strip_nonce_lines(messages: &mut Vec<ChatMessage>, patterns: &[String]) -> Stripped {
    let mut stripped = Stripped::default();
    let Some(first) = messages.first_mut().filter(|message| message.role == Role::System) else {
        return stripped;
    };
    let Some(content) = first.content.as_mut() else { return stripped };
    let mut rest = content.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
        let line = line.strip_suffix('\r').unwrap_or(line);
        let Some(pattern) = patterns.iter().find(|pattern| matches(pattern, line)) else { break };
        stripped.lines += 1;
        stripped.pattern.get_or_insert_with(|| pattern.clone());
        rest = after;
    }
    if stripped.lines > 0 {
        let rest = rest.to_owned();
        let is_empty = rest.trim().is_empty();
        *content = rest;
        // A template may insist on a system message, but never on this one.
        if is_empty && messages.len() > 1 {
            messages.remove(0);
        }
    }
    stripped
}

/// Whether all of a line matches; `*` is anything.
fn matches(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=1f2e3;";

    fn patterns() -> Vec<String> {
        crate::config::CacheConfig::default().nonce_lines
    }

    fn stripped(role: Role, content: &str) -> (Vec<ChatMessage>, u32) {
        let mut messages = vec![ChatMessage::text(role, content), ChatMessage::text(Role::User, LINE)];
        let lines = strip_nonce_lines(&mut messages, &patterns()).lines;
        (messages, lines)
    }

    fn first(messages: &[ChatMessage]) -> Option<&str> {
        messages[0].content.as_deref()
    }

    #[test]
    fn a_leading_line_goes_and_nothing_else_does() {
        for (content, left, lines) in [
            (format!("{LINE}\nYou are an agent."), "You are an agent.".to_owned(), 1),
            (format!("{LINE}\r\n{LINE}\nYou"), "You".to_owned(), 2),
            (format!("You\n{LINE}\n"), format!("You\n{LINE}\n"), 0),
            (format!(" {LINE}\nYou"), format!(" {LINE}\nYou"), 0),
            (format!("It said: {LINE}"), format!("It said: {LINE}"), 0),
            (String::new(), String::new(), 0),
        ] {
            let (messages, count) = stripped(Role::System, &content);
            assert_eq!((first(&messages), count), (Some(left.as_str()), lines), "{content}");
        }
    }

    #[test]
    fn what_others_say_stays_and_an_empty_system_message_goes() {
        let (messages, lines) = stripped(Role::User, LINE);
        assert_eq!((first(&messages), lines, messages.len()), (Some(LINE), 0, 2));
        let (messages, lines) = stripped(Role::System, LINE);
        assert_eq!((messages[0].role, lines, messages.len()), (Role::User, 1, 1));
        let mut alone = vec![ChatMessage::text(Role::System, LINE)];
        assert_eq!(strip_nonce_lines(&mut alone, &patterns()).lines, 1);
        assert_eq!(alone.len(), 1, "a conversation keeps one message");
        assert_eq!(strip_nonce_lines(&mut vec![ChatMessage::text(Role::System, LINE)], &[]).lines, 0);
    }

    #[test]
    fn a_pattern_is_about_a_whole_line() {
        for (pattern, line, expected) in [
            ("a*c", "abc", true),
            ("a*c", "ac", true),
            ("a*c", "abcd", false),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "acb", false),
            ("abc", "abc", true),
            ("abc", "abcd", false),
            ("*", "anything", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, line), expected, "{pattern} {line}");
        }
    }
}
