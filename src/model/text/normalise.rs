//! Lines that are different in every request and stand before everything that is not. Pure.
//!
//! Coding agents put such a line first in the system prompt; with it no prefix is ever found
//! again. Lines that match one of the operator's patterns are taken out while they lead the first
//! system message. Nothing else is touched: neither the same line further down, nor in what anybody
//! else says.

use crate::types::{ChatRequest, Role};

/// What was taken out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stripped {
    /// How many lines.
    pub lines: u32,
    /// The pattern that the first of them matched.
    pub pattern: Option<String>,
}

/// Takes leading lines that match out of the first system message; one without anything else goes.
/// A part of a content that came in parts ends a line: clients put the line into a part of its own,
/// and parts are joined without anything between them.
pub fn strip_nonce_lines(request: &mut ChatRequest, patterns: &[String]) -> Stripped {
    let mut stripped = Stripped::default();
    let ChatRequest { messages, cache, .. } = request;
    let Some(first) = messages.first_mut().filter(|message| message.role == Role::System) else {
        return stripped;
    };
    let Some(content) = first.content.as_mut() else { return stripped };
    let mut done = 0;
    while done < content.len() {
        let (line, next) = line_from(content, done, &cache.first_parts);
        let Some(pattern) = patterns.iter().find(|pattern| matches(pattern, line)) else { break };
        stripped.lines += 1;
        stripped.pattern.get_or_insert_with(|| pattern.clone());
        done = next;
    }
    if stripped.lines == 0 {
        return stripped;
    }
    content.drain(..done);
    cache.first_parts = cache.first_parts.iter().filter_map(|end| end.checked_sub(done)).collect();
    // A template may insist on a system message, but never on this one.
    if content.trim().is_empty() && messages.len() > 1 {
        messages.remove(0);
        cache.first_parts.clear();
        cache.breakpoints = cache.breakpoints.iter().filter_map(|mark| mark.checked_sub(1)).collect();
    }
    stripped
}

/// The line that begins at `start`, without its end, and where the next one begins.
fn line_from<'t>(text: &'t str, start: usize, parts: &[usize]) -> (&'t str, usize) {
    let broken = text[start..].find('\n').map(|at| (start + at, start + at + 1));
    let is_end = |end: &&usize| **end > start && text.is_char_boundary(**end);
    let parted = parts.iter().find(is_end).map(|end| (*end, *end));
    let (end, next) = broken.into_iter().chain(parted).min().unwrap_or((text.len(), text.len()));
    let line = &text[start..end];
    (line.strip_suffix('\r').unwrap_or(line), next)
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
    use crate::types::{CacheTerms, ChatMessage};

    const LINE: &str = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=1f2e3;";

    fn patterns() -> Vec<String> {
        crate::config::CacheConfig::default().nonce_lines
    }

    fn stripped(role: Role, content: &str) -> (Vec<ChatMessage>, u32) {
        let messages = vec![ChatMessage::text(role, content), ChatMessage::text(Role::User, LINE)];
        let mut request = ChatRequest { messages, ..ChatRequest::default() };
        let lines = strip_nonce_lines(&mut request, &patterns()).lines;
        (request.messages, lines)
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
        let alone = || ChatRequest {
            messages: vec![ChatMessage::text(Role::System, LINE)],
            ..ChatRequest::default()
        };
        let mut request = alone();
        assert_eq!(strip_nonce_lines(&mut request, &patterns()).lines, 1);
        assert_eq!(request.messages.len(), 1, "a conversation keeps one message");
        assert_eq!(strip_nonce_lines(&mut alone(), &[]).lines, 0);
    }

    /// A system prompt in parts, as agents send it.
    fn in_parts(parts: &[&str], breakpoints: &[usize]) -> ChatRequest {
        let mut content = String::new();
        let mut first_parts = Vec::new();
        for part in parts {
            content.push_str(part);
            first_parts.push(content.len());
        }
        let messages = vec![ChatMessage::text(Role::System, content), ChatMessage::text(Role::User, "hi")];
        let cache = CacheTerms { first_parts, breakpoints: breakpoints.to_vec(), ..CacheTerms::default() };
        ChatRequest { messages, cache, ..ChatRequest::default() }
    }

    #[test]
    fn a_part_ends_a_line_and_what_follows_it_stays() {
        for (parts, left) in [
            (&[LINE, "You are an agent.\nBe brief."][..], "You are an agent.\nBe brief."),
            (&[LINE, LINE, "You;"], "You;"),
            (&["", LINE, "", "You;"], "You;"),
            (&[LINE, "\nYou;"], "\nYou;"),
            (&["You ", LINE], &format!("You {LINE}")),
        ] {
            let mut request = in_parts(parts, &[0]);
            strip_nonce_lines(&mut request, &patterns());
            assert_eq!(first(&request.messages), Some(left), "{parts:?}");
            assert_eq!(request.cache.breakpoints, [0]);
        }
    }

    #[test]
    fn marks_stay_on_their_messages_when_the_first_one_goes() {
        let mut request = in_parts(&[LINE], &[0, 1]);
        strip_nonce_lines(&mut request, &patterns());
        assert_eq!((request.messages.len(), request.cache.breakpoints), (1, vec![0]));
    }

    #[test]
    fn text_on_the_same_line_is_no_part_of_the_known_line() {
        let together = format!("{LINE} You are an agent.\nBe brief.");
        let (messages, lines) = stripped(Role::System, &together);
        assert_eq!((first(&messages), lines), (Some(together.as_str()), 0));
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
