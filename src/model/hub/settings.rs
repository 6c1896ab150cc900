//! Where the hub is and what is known about it: the variables that every
//! program of the hub's reads.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// A secret: never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A token, unless there is nothing in it or it could not be a header's value.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let usable = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        usable.then(|| Self(text.to_owned()))
    }

    /// What a request carries.
    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// How the hub is reached and where its files are kept.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HubSettings {
    /// The folder that all programs of the hub's share; `None` where there is no home.
    pub cache: Option<PathBuf>,
    /// Address of the hub or of a mirror; `None`: the hub's own.
    pub endpoint: Option<String>,
    /// Sent to the endpoint alone.
    pub token: Option<Token>,
    /// Ask nobody.
    pub offline: bool,
    /// Before the second try; it doubles with each.
    pub retry_delay: Duration,
    /// A connection on which nothing comes for so long is given up and begun again.
    pub stall_limit: Duration,
}

impl HubSettings {
    /// From variables: `HF_HUB_CACHE`, `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN` and `HF_HUB_OFFLINE`, with the names that older programs know.
    pub fn from_variables(read: impl Fn(&str) -> Option<OsString>) -> Self {
        let value = |name: &str| read(name).filter(|value| !value.is_empty());
        let is_on = |name: &str| {
            value(name).is_some_and(|value| {
                matches!(value.to_string_lossy().to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
            })
        };
        let user = value("HOME").map(PathBuf::from);
        let absolute = |path: OsString| match (PathBuf::from(&path).strip_prefix("~"), &user) {
            (Ok(below), Some(user)) => user.join(below),
            _ => PathBuf::from(path),
        };
        let home = value("HF_HOME")
            .map(&absolute)
            .or_else(|| Some(absolute(value("XDG_CACHE_HOME")?).join("huggingface")))
            .or_else(|| Some(user.clone()?.join(".cache/huggingface")));
        let cache = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"]
            .iter()
            .find_map(|name| value(name))
            .map(&absolute)
            .or_else(|| Some(home.clone()?.join("hub")));
        let given = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].iter().find_map(|name| value(name));
        let stored = || {
            if is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
                return None;
            }
            let path = value("HF_TOKEN_PATH").map(&absolute).or_else(|| Some(home.clone()?.join("token")))?;
            Token::new(&std::fs::read_to_string(path).ok()?)
        };
        Self {
            cache,
            endpoint: value("HF_ENDPOINT").map(|value| value.to_string_lossy().into_owned()),
            token: given.and_then(|value| Token::new(&value.to_string_lossy())).or_else(stored),
            offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
            retry_delay: Duration::from_millis(500),
            stall_limit: Duration::from_secs(30),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> HubSettings {
        HubSettings::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into())
        })
    }

    #[test]
    fn the_nearest_variable_names_the_cache() {
        let cache =
            |variables: &[(&str, &str)]| settings(variables).cache.map(|path| path.display().to_string());
        assert_eq!(cache(&[]), None);
        assert_eq!(cache(&[("HOME", "/h")]).as_deref(), Some("/h/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).as_deref(), Some("/x/huggingface/hub"));
        let all = [("HOME", "/h"), ("HF_HOME", "~/hf"), ("XDG_CACHE_HOME", "/x")];
        assert_eq!(cache(&all).as_deref(), Some("/h/hf/hub"));
        assert_eq!(cache(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/hf")]).as_deref(), Some("/c"));
    }

    #[test]
    fn a_token_comes_from_its_variable_or_its_file_and_is_never_printed() {
        let home = tempfile::tempdir().expect("a folder");
        std::fs::write(home.path().join("token"), "from-file\n").expect("writable");
        let home = home.path().display().to_string();
        let found = settings(&[("HF_HOME", &home)]);
        assert_eq!(found.token.as_ref().map(Token::header).as_deref(), Some("Bearer from-file"));
        assert!(!format!("{found:?}").contains("from-file"));
        let given = settings(&[("HF_HOME", &home), ("HF_TOKEN", " given ")]);
        assert_eq!(given.token.map(|token| token.header()).as_deref(), Some("Bearer given"));
        assert!(settings(&[("HF_HOME", &home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]).token.is_none());
        assert!(Token::new("two\r\nlines").is_none());
    }

    #[test]
    fn offline_is_a_truth_value() {
        assert!(
            settings(&[("HF_HUB_OFFLINE", "1")]).offline && settings(&[("HF_HUB_OFFLINE", "True")]).offline
        );
        assert!(!settings(&[("HF_HUB_OFFLINE", "0")]).offline && !settings(&[]).offline);
    }
}
