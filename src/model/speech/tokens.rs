//! Token ids of a speech model: special ones by vocabulary size, languages, what is never said.

use crate::model::tokenizer::Tokenizer;
use crate::types::TokenId;
use crate::types::speech::{LANGUAGES, SpeechFailure, SpeechOptions, Task, language_code};

use super::WhisperDims;

/// What is never said, besides special tokens: the English vocabulary's ids.
const UNSPOKEN_ENGLISH: [u32; 84] = [
    1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 357, 366, 438,
    532, 685, 705, 796, 930, 1058, 1220, 1267, 1279, 1303, 1343, 1377, 1391, 1635, 1782, 1875, 2162, 2361,
    2488, 3467, 4008, 4211, 4600, 4808, 5299, 5855, 6329, 7203, 9609, 9959, 10563, 10786, 11420, 11709,
    11907, 13163, 13697, 13700, 14808, 15306, 16410, 16791, 17992, 19203, 19510, 20724, 22305, 22935, 27007,
    30109, 30420, 33409, 34949, 40283, 40493, 40549, 47282, 49146,
];
/// The same of the multilingual vocabularies.
const UNSPOKEN: [u32; 82] = [
    1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522,
    542, 873, 893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961,
    4183, 4667, 6585, 6647, 7273, 9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635,
    15265, 15618, 16553, 16604, 18362, 18956, 20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650,
    32302, 32470, 36865, 42863, 47425, 49870, 50254,
];

/// A word's space alone, which does not begin a text.
const SPACE: u32 = 220;

/// See the module.
#[derive(Debug)]
pub struct SpeechTokens {
    /// Of the text.
    pub tokenizer: Tokenizer,
    /// Ends a window's text. All ids below are text.
    pub eot: u32,
    /// Begins a window.
    pub sot: u32,
    languages: u32,
    is_multilingual: bool,
    translates: bool,
    vocabulary: u32,
}

impl SpeechTokens {
    /// Ids follow from the size of the vocabulary.
    pub fn new(tokenizer: Tokenizer, dims: &WhisperDims) -> Self {
        let vocabulary = u32::try_from(dims.vocabulary).unwrap_or(u32::MAX);
        let is_multilingual = vocabulary >= 51_865;
        let eot = if is_multilingual { 50_257 } else { 50_256 };
        // Distilled decoders and turbo's have few layers: they never learnt to translate.
        let translates = is_multilingual && dims.decoder_layers * 2 > dims.encoder_layers;
        let languages = if is_multilingual { vocabulary.saturating_sub(51_766).min(100) } else { 99 };
        Self { tokenizer, eot, sot: eot + 1, languages, is_multilingual, translates, vocabulary }
    }

    /// Whether the model knows other languages than English.
    pub fn is_multilingual(&self) -> bool {
        self.is_multilingual
    }

    /// Whether it can translate.
    pub fn translates(&self) -> bool {
        self.translates
    }

    /// Tokens in all.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// First and one past the last language id.
    pub fn language_ids(&self) -> std::ops::Range<u32> {
        self.sot + 1..self.sot + 1 + self.languages
    }

    /// The id of the order to translate.
    pub fn translate(&self) -> u32 {
        self.sot + 1 + self.languages
    }

    /// The id of the order to transcribe.
    pub fn transcribe(&self) -> u32 {
        self.translate() + 1
    }

    /// Announces what came before.
    pub fn previous(&self) -> u32 {
        self.translate() + 3
    }

    /// Says that nobody speaks.
    pub fn no_speech(&self) -> u32 {
        self.translate() + 4
    }

    /// Orders text without times.
    pub fn no_timestamps(&self) -> u32 {
        self.translate() + 5
    }

    /// The time 0.00; one more is 0.02 s later.
    pub fn timestamps(&self) -> u32 {
        self.translate() + 6
    }

    /// A timestamp token's index, in 0.02 s.
    pub fn time_of(&self, token: u32) -> Option<u32> {
        token.checked_sub(self.timestamps())
    }

    /// Ids that are never sampled, in order.
    pub fn suppressed(&self) -> Vec<u32> {
        let text: &[u32] = if self.is_multilingual { &UNSPOKEN } else { &UNSPOKEN_ENGLISH };
        let special = self.translate()..self.no_timestamps();
        text.iter().copied().chain([self.sot]).chain(special).collect()
    }

    /// Ids that do not come first.
    pub fn not_first(&self) -> [u32; 2] {
        [SPACE, self.eot]
    }

    /// The language's id for a code, a name or a tag ("pt-BR"); `None` for one that is not known.
    pub fn language(&self, name: &str) -> Option<(&'static str, u32)> {
        let code = language_code(name)?;
        let index = LANGUAGES.iter().position(|(known, _)| *known == code)?;
        let index = u32::try_from(index).ok().filter(|index| *index < self.languages)?;
        Some((LANGUAGES[index as usize].0, self.sot + 1 + index))
    }

    /// The code of a language's id.
    pub fn language_of(&self, id: u32) -> Option<&'static str> {
        let index = id.checked_sub(self.sot + 1).filter(|index| *index < self.languages)?;
        LANGUAGES.get(index as usize).map(|(code, _)| *code)
    }

    /// Refuses options that this model cannot serve.
    ///
    /// # Errors
    /// `Option`, which names the field and the fix.
    pub fn check(&self, options: &SpeechOptions) -> Result<(), SpeechFailure> {
        let wrong = |field, message: String| Err(SpeechFailure::Option { field, message });
        let known = |code: &&'static str| self.language(code).is_some();
        if !self.is_multilingual() && options.language.is_some_and(|code| code != "en") {
            return wrong(
                "language",
                "this model knows English only; leave it out, or load a multilingual model".into(),
            );
        }
        let asked = options.language.iter().chain(&options.languages);
        if let Some(code) = asked.copied().find(|code| !known(code)) {
            return wrong("language", format!("this model does not know `{code}`"));
        }
        if options.task == Task::Translate && !self.translates() {
            return wrong(
                "task",
                "this model cannot translate; load a multilingual one, not turbo or distilled".into(),
            );
        }
        Ok(())
    }

    /// What a window begins with. `language` is ignored by English models.
    pub fn beginning(&self, language: Option<u32>, task: Task, timestamps: bool) -> Vec<u32> {
        let mut ids = vec![self.sot];
        if self.is_multilingual {
            ids.push(language.unwrap_or(self.sot + 1));
            ids.push(if task == Task::Translate { self.translate() } else { self.transcribe() });
        }
        if !timestamps {
            ids.push(self.no_timestamps());
        }
        ids
    }

    /// Text ids of what a user wrote, as if more text came before it.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let ids = self.tokenizer.encode_text(&format!(" {}", text.trim()));
        ids.map(|ids| ids.iter().map(|id| id.0).filter(|id| *id < self.eot).collect()).unwrap_or_default()
    }

    /// Bytes of one text token; none of special ones.
    pub fn bytes(&self, id: u32) -> Vec<u8> {
        if id < self.eot { self.tokenizer.token_bytes(TokenId(id)) } else { Vec::new() }
    }

    /// Text of the text tokens among these; what is no whole character is left out at the end, and
    /// replaced elsewhere.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.bytes(*id)).collect();
        let whole = match std::str::from_utf8(&bytes) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => bytes.len(),
        };
        String::from_utf8_lossy(&bytes[..whole]).into_owned()
    }
}
