//! How a model of the hub is named: `ORG/NAME[:QUANT][@REVISION]`.
//!
//! A name becomes folders and addresses, so nothing passes here that could leave them.

use super::HubError;

/// Longest organisation, name or revision.
const MAX_PART: usize = 200;
const MAIN: &str = "main";

/// A model of the hub, at a revision, in one of its quantisations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubId {
    /// `ORG/NAME`.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// The quantisation asked for, as `Q4_K_M`.
    pub variant: Option<String>,
}

impl HubId {
    /// Reads `ORG/NAME`, with `:QUANT` and `@REVISION` behind it in either order.
    ///
    /// # Errors
    /// `Id` with what is wrong.
    pub fn parse(text: &str) -> Result<Self, HubError> {
        let wrong = |message: String| HubError::Id { text: text.to_owned(), message };
        let end = text.find(['@', ':']).unwrap_or(text.len());
        let (repo, mut rest) = text.split_at(end);
        let Some((org, name)) = repo.split_once('/') else {
            return Err(wrong("a hub id has the form ORG/NAME".into()));
        };
        for part in [org, name] {
            check_name(part).map_err(&wrong)?;
        }
        let mut id = Self { repo: repo.to_owned(), revision: MAIN.to_owned(), variant: None };
        let mut has_revision = false;
        while let Some(mark) = rest.chars().next() {
            let value = &rest[1..];
            let end = value.find(if mark == '@' { ':' } else { '@' }).unwrap_or(value.len());
            let (value, after) = value.split_at(end);
            match mark {
                '@' if !has_revision => {
                    check_revision(value).map_err(&wrong)?;
                    id.revision = value.to_owned();
                    has_revision = true;
                }
                ':' if id.variant.is_none() => {
                    check_variant(value).map_err(&wrong)?;
                    id.variant = Some(value.to_owned());
                }
                _ => return Err(wrong("revision and quantisation can each be given once".into())),
            }
            rest = after;
        }
        Ok(id)
    }

    /// The name without the organisation: what the API calls the model.
    pub fn name(&self) -> &str {
        self.repo.rsplit('/').next().unwrap_or(&self.repo)
    }

    /// Whether the revision is a commit and not the name of one.
    pub(super) fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }
}

impl std::fmt::Display for HubId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.repo)?;
        if let Some(variant) = &self.variant {
            write!(f, ":{variant}")?;
        }
        if self.revision != MAIN {
            write!(f, "@{}", self.revision)?;
        }
        Ok(())
    }
}

/// Whether this is a full commit hash.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn check_name(part: &str) -> Result<(), String> {
    let plain = part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if part.is_empty() || part.len() > MAX_PART || !plain {
        return Err(format!("`{part}` is not a name: letters, digits, `-`, `_` and `.` are possible"));
    }
    // Two dashes separate organisation and name in the cache.
    if part.starts_with(['.', '-'])
        || part.ends_with(['.', '-'])
        || part.contains("..")
        || part.contains("--")
    {
        return Err(format!("`{part}` is not a name: it begins, ends or repeats with `.` or `-`"));
    }
    Ok(())
}

fn check_revision(revision: &str) -> Result<(), String> {
    let plain =
        revision.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/' | b'+'));
    let parts = revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.'));
    if revision.len() > MAX_PART || !plain || !parts || revision.contains("..") {
        return Err(format!("`{revision}` is not a branch, a tag or a commit"));
    }
    Ok(())
}

fn check_variant(variant: &str) -> Result<(), String> {
    let plain = variant.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if variant.is_empty() || variant.len() > MAX_PART || !plain {
        return Err(format!("`{variant}` is not a quantisation such as Q4_K_M"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (String, String, Option<String>) {
        let id = HubId::parse(text).expect("a good id");
        (id.repo, id.revision, id.variant)
    }

    #[test]
    fn revision_and_quantisation_come_in_either_order() {
        assert_eq!(parsed("org/name"), ("org/name".into(), "main".into(), None));
        let whole = ("org/na.me-1_b".into(), "refs/pr/3".into(), Some("Q4_K_M".into()));
        assert_eq!(parsed("org/na.me-1_b:Q4_K_M@refs/pr/3"), whole);
        assert_eq!(parsed("org/na.me-1_b@refs/pr/3:Q4_K_M"), whole);
        assert_eq!(HubId::parse("o/n@v1.0:Q8_0").expect("good").to_string(), "o/n:Q8_0@v1.0");
    }

    #[test]
    fn what_could_leave_its_folder_is_refused() {
        for text in [
            "",
            "name",
            "/name",
            "org/",
            "../x",
            "org/..",
            "org/a/b",
            "org/na me",
            "org/.git",
            "a--b/c",
            "org/x@",
            "org/x@../../etc",
            "org/x@/abs",
            "org/x@a//b",
            "org/x@.",
            "org/x@a?b",
            "org/x:",
            "org/x:a/b",
            "org/x:Q4:Q8",
            "org/x@a@b",
            "org\\x/y",
            "org/x%2f",
        ] {
            assert!(HubId::parse(text).is_err(), "{text}");
        }
    }
}
