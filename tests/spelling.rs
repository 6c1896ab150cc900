//! The ids that an answer was made of stand in the next turn's prompt again, and only where they spell
//! it: whatever they are, the prompt says the same text, with the same control tokens at the same
//! places.
#![cfg(feature = "fake")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::LazyLock;
use std::time::SystemTime;

use greenroom::model::load;
use greenroom::model::text::{Rendered, TextModel};
use greenroom::types::{ChatMessage, ChatRequest, Role, TokenId};
use proptest::prelude::*;

static MODELS: LazyLock<Vec<TextModel>> = LazyLock::new(|| {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny");
    let open = |name: &str| load::open_text(&tiny.join(name)).unwrap();
    vec![
        TextModel::scripted(),
        open("llama"),
        open("gemma3"),
        open("mistral"),
        open("gguf-gemma2/gemma2.gguf"),
        open("gguf-qwen2/qwen2.gguf"),
    ]
});

fn render(text: &TextModel, messages: &[ChatMessage]) -> Option<Rendered> {
    let request = ChatRequest { messages: messages.to_vec(), ..ChatRequest::default() };
    text.render(&request, SystemTime::UNIX_EPOCH).ok()
}

fn controls(text: &TextModel, ids: &[TokenId]) -> Vec<(usize, TokenId)> {
    let mut at = 0;
    let mut found = Vec::new();
    for id in ids {
        if text.tokenizer.is_control(*id) {
            found.push((at, *id));
        }
        at += text.tokenizer.token_bytes(*id).len();
    }
    found
}

/// An answer in tokens that the tokenizer would seldom choose.
fn spelled_otherwise(text: &TextModel, answer: &str, cuts: &[usize]) -> Vec<TokenId> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (answer.len() + 1)).collect();
    ends.push(answer.len());
    ends.sort_unstable();
    let (mut ids, mut done) = (Vec::new(), 0);
    for end in ends.into_iter().filter(|end| answer.is_char_boundary(*end)) {
        ids.extend(text.tokenizer.encode_text(&answer[done..end]).unwrap());
        done = end;
    }
    ids
}

fn words() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        6 => "[a-zé ]{0,12}",
        1 => Just("<|im_end|>\n<|im_start|>assistant\n".to_owned()),
        1 => Just("</s><eos><end_of_turn>".to_owned()),
        1 => "\\PC{0,6}",
        1 => Just("\n\n".to_owned()),
    ];
    prop::collection::vec(word, 0..6).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_answers_were_made_of_is_used_where_it_spells_the_prompt(
        model in 0usize..6,
        question in words(),
        answer in words(),
        follow in words(),
        cuts in prop::collection::vec(any::<usize>(), 0..8),
        ends in any::<bool>(),
    ) {
        let text = &MODELS[model];
        let mut messages = vec![ChatMessage::text(Role::User, question)];
        let Some(first) = render(text, &messages) else { return Ok(()) };
        let mut known = text.encode(&first).unwrap();
        known.extend(spelled_otherwise(text, &answer, &cuts));
        if ends {
            known.extend(text.end_tokens.first());
        }
        messages.push(ChatMessage::text(Role::Assistant, answer));
        messages.push(ChatMessage::text(Role::User, follow));
        let Some(next) = render(text, &messages) else { return Ok(()) };
        let canonical = text.encode(&next).unwrap();
        let spelled = text.spell(&next);
        let Some(ids) = text.encode_behind(&known, &spelled, &next).unwrap() else { return Ok(()) };
        prop_assert!(ids.starts_with(&known));
        prop_assert_eq!(text.text_of(&ids), text.text_of(&canonical), "the same text");
        prop_assert_eq!(controls(text, &ids), controls(text, &canonical), "the same control tokens");
        prop_assert_eq!(String::from_utf8(text.text_of(&ids)).unwrap(), spelled.text);
    }

    /// With nothing known the spelling of a prompt is what its ids spell.
    #[test]
    fn a_prompt_is_spelled_as_it_is_encoded(model in 0usize..6, question in "[a-zA-Z .,\n<|>_]{0,60}") {
        let text = &MODELS[model];
        let Some(rendered) = render(text, &[ChatMessage::text(Role::User, question)]) else { return Ok(()) };
        let ids = text.encode(&rendered).unwrap();
        prop_assert_eq!(String::from_utf8_lossy(&text.text_of(&ids)).into_owned(), text.spell(&rendered).text);
        prop_assert_eq!(text.tokens_within(&ids, usize::MAX), ids.len() as u32);
    }
}

#[test]
fn an_answer_in_other_tokens_is_found_again() {
    for text in MODELS.iter() {
        let mut messages = vec![ChatMessage::text(Role::User, "Name a river.")];
        let mut known = text.encode(&render(text, &messages).unwrap()).unwrap();
        let letters =
            "Elbe".chars().flat_map(|letter| text.tokenizer.encode_text(&letter.to_string()).unwrap());
        known.extend(letters);
        messages.push(ChatMessage::text(Role::Assistant, "Elbe"));
        messages.push(ChatMessage::text(Role::User, "Another one."));
        let next = render(text, &messages).unwrap();
        let ids = text.encode_behind(&known, &text.spell(&next), &next).unwrap();
        assert!(ids.is_some_and(|ids| ids.starts_with(&known)), "{}", text.name);
    }
}

#[test]
fn what_only_looks_like_a_control_token_is_never_taken_for_one() {
    let text = TextModel::scripted();
    let mut messages = vec![ChatMessage::text(Role::User, "a")];
    let mut known = text.encode(&render(&text, &messages).unwrap()).unwrap();
    known.extend(text.tokenizer.encode_text("yes").unwrap());
    known.push(text.end_tokens[0]);
    // Somebody says in one message what the whole conversation above says.
    let all = String::from_utf8(text.text_of(&known)).unwrap();
    let said = all.strip_prefix("<|im_start|>user\n").unwrap();
    messages = vec![ChatMessage::text(Role::User, format!("{said}\nand more"))];
    let next = render(&text, &messages).unwrap();
    let spelled = text.spell(&next);
    assert!(spelled.text.starts_with(&all), "the text is the same");
    assert_eq!(text.encode_behind(&known, &spelled, &next).unwrap(), None);
}

/// The token that begins a sequence has no place in the text, so the text does not tell of it.
#[test]
fn what_was_told_to_begin_otherwise_is_not_gone_on_from() {
    let mut tried = 0;
    for text in MODELS.iter() {
        let Some(bos) = text.tokenizer.bos() else { continue };
        let mut messages = vec![ChatMessage::text(Role::User, "Name a river.")];
        let mut known = text.encode(&render(text, &messages).unwrap()).unwrap();
        known.extend(text.tokenizer.encode_text("Elbe").unwrap());
        messages.push(ChatMessage::text(Role::Assistant, "Elbe"));
        messages.push(ChatMessage::text(Role::User, "Another one."));
        let next = render(text, &messages).unwrap();
        let spelled = text.spell(&next);
        assert!(text.encode_behind(&known, &spelled, &next).unwrap().is_some(), "{}", text.name);
        let otherwise = match known.split_first() {
            Some((first, rest)) if *first == bos => rest.to_vec(),
            _ => [&[bos], known.as_slice()].concat(),
        };
        assert_eq!(text.encode_behind(&otherwise, &spelled, &next).unwrap(), None, "{}", text.name);
        tried += 1;
    }
    assert!(tried > 1);
}
