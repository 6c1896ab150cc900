//! SentencePiece vocabularies: ids, odd vocabularies, long texts.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use common::{fetched, json, token_cases};
use greenroom::model::load;
use greenroom::model::tokenizer::{ScoredToken, SentencePieceParts, TokenKind, Tokenizer};
use greenroom::types::TokenId;
use proptest::prelude::*;
use serde_json::Value;

fn token(text: &str, kind: TokenKind, score: f32) -> ScoredToken {
    ScoredToken { text: text.into(), kind, score }
}

/// `<unk>`, `<s>`, `</s>`, 256 bytes, then these, better ones first.
fn parts(words: &[&str]) -> SentencePieceParts {
    let mut tokens = vec![
        token("<unk>", TokenKind::Unknown, 0.0),
        token("<s>", TokenKind::Control, 0.0),
        token("</s>", TokenKind::Control, 0.0),
    ];
    tokens.extend((0..=255).map(|byte| token(&format!("<0x{byte:02X}>"), TokenKind::Byte, 0.0)));
    tokens.extend(
        words.iter().zip(0u16..).map(|(word, rank)| token(word, TokenKind::Normal, -f32::from(rank))),
    );
    SentencePieceParts {
        tokens,
        add_space_prefix: false,
        remove_extra_whitespaces: false,
        controls_strip_right: false,
        bos: Some(TokenId(1)),
        add_bos: None,
    }
}

fn build(parts: SentencePieceParts) -> Tokenizer {
    Tokenizer::from_sentencepiece(parts, "test".as_ref()).expect("builds")
}

/// The pieces of a text, as text where they are some.
fn split(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode_text(text).expect("encodes");
    ids.iter().map(|&id| String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned()).collect()
}

#[test]
fn the_best_score_merges_first_and_the_leftmost_of_equals() {
    let words = ["bc", "ab", "abc", "a", "b", "c", "aa"];
    assert_eq!(split(&build(parts(&words)), "abcabaaa"), ["abc", "ab", "aa", "a"]);
    // Without `abc` the better `bc` leaves the `a` alone.
    assert_eq!(split(&build(parts(&["bc", "ab", "a", "b", "c"])), "abc"), ["a", "bc"]);
    let mut equal = parts(&["a", "b", "aa", "ab", "ba"]);
    for token in &mut equal.tokens {
        token.score = -1.0;
    }
    assert_eq!(split(&build(equal.clone()), "aaab"), ["aa", "ab"]);
    assert_eq!(split(&build(equal), "bab"), ["ba", "b"]);
}

#[test]
fn spaces_and_characters_without_a_piece_are_spelled() {
    let tokenizer = build(parts(&["a", "\u{2581}", "\u{2581}a"]));
    assert_eq!(split(&tokenizer, " a  a"), [" a", " ", " a"]);
    let ids = tokenizer.encode_text("é\u{0}a").expect("encodes");
    assert_eq!(ids, [3 + 0xc3, 3 + 0xa9, 3, 259].map(TokenId));
    assert_eq!(tokenizer.decode(&ids, false), "é\u{0}a");
    // What looks like a byte or a control token in a text is text.
    let plain = tokenizer.encode_text("<0x41></s><unk>").expect("encodes");
    assert!(plain.iter().all(|id| id.0 > 2 && id.0 != 3 + 0x41), "{plain:?}");
    assert_eq!(tokenizer.encode_with_specials("a</s>").expect("encodes"), [259, 2].map(TokenId));
}

#[test]
fn the_prefix_is_added_where_the_file_says_so_and_never_to_nothing() {
    let mut with = parts(&["a", "\u{2581}", "\u{2581}a"]);
    with.add_space_prefix = true;
    let with = build(with);
    assert_eq!(split(&with, "a a"), [" a", " a"]);
    assert_eq!(split(&with, ""), Vec::<String>::new());
    let ids = with.encode_with_specials("a</s>a</s>").expect("encodes");
    assert_eq!(ids, [261, 2, 261, 2].map(TokenId));
    assert!(with.wants_bos());
    let mut squeezing = parts(&["a", "\u{2581}", "\u{2581}a"]);
    squeezing.remove_extra_whitespaces = true;
    assert_eq!(split(&build(squeezing), "  a   a "), ["a", " a"]);
}

#[test]
fn user_defined_tokens_go_first_and_unused_ones_are_taken_apart() {
    let mut parts = parts(&["a", "b", "ab", "abab", "\u{2581}"]);
    parts.tokens.push(token("  ", TokenKind::UserDefined, 0.0));
    parts.tokens.push(token("ba", TokenKind::UserDefined, 0.0));
    assert_eq!(split(&build(parts.clone()), "ab   ab"), ["ab", "  ", " ", "ab"]);
    assert_eq!(split(&build(parts.clone()), "abab"), ["a", "ba", "b"]);
    parts.tokens.truncate(3 + 256 + 5);
    for unused in [vec!["ab"], vec!["abab"], vec!["ab", "abab"], vec!["a", "b", "ab", "abab"]] {
        for token in &mut parts.tokens {
            token.kind = match token.kind {
                TokenKind::Normal | TokenKind::Unused if unused.contains(&token.text.as_str()) => {
                    TokenKind::Unused
                }
                TokenKind::Unused => TokenKind::Normal,
                kind => kind,
            };
        }
        let tokenizer = build(parts.clone());
        let ids = tokenizer.encode_text("abab").expect("encodes");
        assert!(ids.iter().all(|id| parts.tokens[id.0 as usize].kind != TokenKind::Unused), "{unused:?}");
        assert_eq!(tokenizer.decode(&ids, false), "abab");
        if unused == ["ab"] {
            assert_eq!(split(&tokenizer, "abab"), ["abab"]);
            assert_eq!(split(&tokenizer, "aba"), ["a", "b", "a"]);
        }
    }
}

#[test]
fn a_vocabulary_that_cannot_spell_every_text_is_refused_without_an_unknown_token() {
    let mut gap = parts(&["a"]);
    gap.tokens[0].kind = TokenKind::Control;
    gap.tokens[100].kind = TokenKind::Unused;
    let error = Tokenizer::from_sentencepiece(gap.clone(), "x.gguf".as_ref()).expect_err("is refused");
    assert!(error.to_string().contains("every byte"), "{error}");
    gap.tokens[0].kind = TokenKind::Unknown;
    assert_eq!(build(gap).encode_text("\u{61}\u{5d}").expect("encodes")[0], TokenId(259));
    let mut wrong = parts(&["a"]);
    wrong.tokens[5].text = "<0xZZ>".into();
    let error = Tokenizer::from_sentencepiece(wrong, "x.gguf".as_ref()).expect_err("is refused");
    assert!(error.to_string().contains("<0xZZ>"), "{error}");
    let long = "a".repeat(2000);
    let error = Tokenizer::from_sentencepiece(parts(&[&long]), "x.gguf".as_ref()).expect_err("is refused");
    assert!(error.to_string().contains("2000 bytes"), "{error}");
}

/// A text of a million equal characters: few tokens, no stack, no quadratic time. A quadratic
/// encoder needs hours for it.
#[test]
fn a_megabyte_of_one_character_is_encoded_whatever_the_vocabulary() {
    let lengths: Vec<String> = (1..=300).map(|len| "a".repeat(len)).collect();
    let mut words: Vec<&str> = lengths.iter().map(String::as_str).collect();
    words.extend(["\u{2581}", "\u{2581}\u{2581}", "\u{2581}\u{2581}\u{2581}\u{2581}"]);
    let mut reversed = words.clone();
    reversed.reverse();
    for words in [words, reversed] {
        let tokenizer = build(parts(&words));
        for text in ["a".repeat(1 << 20), " ".repeat(1 << 20), "\n".repeat(1 << 20), "a b".repeat(1 << 19)] {
            let ids = tokenizer.encode_text(&text).expect("encodes");
            assert_eq!(tokenizer.decode(&ids, false), text);
        }
    }
}

#[test]
#[ignore = "long: needs the file of native/gemma.sh"]
fn gemma_3_gives_the_reference_ids() {
    let text = load::open_text(&fetched("models/gemma-3-270m-q4_k_m.gguf")).expect("opens");
    let ids = |value: &Value| -> Vec<TokenId> {
        value.as_array().expect("ids").iter().map(|id| TokenId(id.as_u64().expect("an id") as u32)).collect()
    };
    for case in token_cases("gemma3") {
        let source = case["text"].as_str().expect("a text");
        let special = text.tokenizer.encode_with_specials(source).expect("encodes");
        assert_eq!(special, ids(&case["ids"]), "with specials: {source:?}");
        let ordinary = text.tokenizer.encode_text(source).expect("encodes");
        // The other engine takes this user-defined token for an end; the model's tokenizer.json does not.
        if source.contains("</s>") {
            assert!(ordinary.contains(&TokenId(212)), "{ordinary:?}");
        } else {
            assert_eq!(ordinary, ids(&case["ids_no_special"]), "ordinary: {source:?}");
        }
        assert_eq!(
            text.tokenizer.decode(&ordinary, false),
            case["decoded_no_special"].as_str().expect("a text")
        );
    }
    for case in json("tokenizer/hf-gemma3.json")["cases"].as_array().expect("cases") {
        let source = case["text"].as_str().expect("a text");
        let special = text.tokenizer.encode_with_specials(source).expect("encodes");
        assert_eq!(special, ids(&case["ids"]), "tokenizer.json: {source:?}");
    }
    assert!(text.tokenizer.wants_bos() && text.template.is_none());
    assert_eq!(text.end_tokens, [TokenId(1), TokenId(106)]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Doubles, empty pieces, any scores, any kinds: some ids, and the text again where nothing is unknown.
    #[test]
    fn no_vocabulary_panics_or_loses_text(
        words in proptest::collection::vec(("[ab\u{2581}é]{0,5}", any::<f32>(), 0..4u8), 0..24),
        text in "[abé \u{2581}xy]{0,60}",
        prefix in any::<bool>(),
    ) {
        let mut parts = parts(&[]);
        for (word, score, kind) in &words {
            let kind = [TokenKind::Normal, TokenKind::Unused, TokenKind::UserDefined, TokenKind::Control][usize::from(*kind)];
            parts.tokens.push(token(word, kind, *score));
        }
        parts.add_space_prefix = prefix;
        let kinds: Vec<TokenKind> = parts.tokens.iter().map(|token| token.kind).collect();
        let tokenizer = build(parts);
        let ids = tokenizer.encode_text(&text).expect("encodes");
        for id in &ids {
            prop_assert!(!matches!(kinds[id.0 as usize], TokenKind::Control | TokenKind::Unused | TokenKind::Unknown));
        }
        let decoded = tokenizer.decode(&ids, false);
        if !prefix {
            // Without a piece for the space its bytes are those of what stands for it.
            prop_assert_eq!(decoded.replace('\u{2581}', " "), text.replace('\u{2581}', " "));
        }
    }
}

#[test]
fn phi3s_control_tokens_swallow_white_space_after_them_and_three_do_not() {
    let mut parts = parts(&["a", "\u{2581}", "\n"]);
    parts.tokens.push(token("<|user|>", TokenKind::Control, 0.0));
    parts.tokens.push(token("<|endoftext|>", TokenKind::Control, 0.0));
    let ids = |parts: &SentencePieceParts| {
        let text = "<s> a<|user|>\n a<|endoftext|>\na";
        build(parts.clone())
            .encode_with_specials(text)
            .expect("encodes")
            .iter()
            .map(|id| id.0)
            .collect::<Vec<_>>()
    };
    let newline = 261;
    assert_eq!(ids(&parts), [1, 260, 259, 262, newline, 260, 259, 263, newline, 259]);
    parts.controls_strip_right = true;
    assert_eq!(ids(&parts), [1, 260, 259, 262, 259, 263, newline, 259]);
}

#[test]
fn a_control_token_of_endless_length_is_refused_by_id() {
    for kind in [TokenKind::Control, TokenKind::UserDefined] {
        let mut parts = parts(&["a"]);
        parts.tokens.push(token(&"<".repeat(20_000), kind, 0.0));
        let error =
            Tokenizer::from_sentencepiece(parts, "test".as_ref()).expect_err("is refused").to_string();
        assert!(error.contains("260") && error.contains("20000 bytes"), "{error}");
    }
}
