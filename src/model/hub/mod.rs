//! The Hugging Face hub: pulling models into the cache that all programs of the
//! hub's share, and finding them there without asking anybody.
//!
//! Addresses, the cache's folders and the hub's own endpoint come from the crate
//! `hf-hub`. Its transfers do not check what arrived, take no second look at the
//! disk's space and know no offline mode, so those are our own: resumed by range,
//! verified before a file gets its name, one process at a time a file.
//!
//! What a hub or mirror says is untrusted: names that leave their folder, answers
//! without end, redirects that would carry the token away. Everything here blocks;
//! it is for commands, never for an actor.
//!
//! Invariant: a file in `blobs/` under its own name was whole and right when it
//! got it, and a snapshot is handed out only when nothing of it is missing.

mod client;
mod fetch;
mod id;
mod layout;
mod pull;
mod select;
mod settings;

use std::path::PathBuf;

use crate::types::ByteSize;

pub use id::HubId;
pub use layout::{Cached, CachedModel};
pub use pull::{Hub, Progress, Pulled};
pub use settings::{HubSettings, Token};

/// One quantisation of a repository that has several.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Variant {
    /// As it is asked for.
    pub name: String,
    /// Size of its files, where the hub says it.
    pub bytes: Option<u64>,
}

/// A pull that did not happen, or a model that is not here. Every message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// Not the name of a model.
    #[error("`{text}` is not a hub id: {message}")]
    Id {
        /// As given.
        text: String,
        /// What is wrong.
        message: String,
    },
    /// There is no folder for the cache.
    #[error("there is no home folder for the hub's cache: set HF_HOME to a folder")]
    NoCache,
    /// Nothing of it is here.
    #[error("{id} is not on this machine: run `greenroom pull {id}`")]
    Absent {
        /// Which.
        id: String,
    },
    /// Only a part of it is here.
    #[error("{id} is here only in part, {} is missing: run `greenroom pull {id}`", listed(missing, 5))]
    Incomplete {
        /// Which.
        id: String,
        /// Files that are missing or cut short.
        missing: Vec<String>,
    },
    /// It would have to be asked for, and must not.
    #[error("{id} cannot be pulled offline: unset HF_HUB_OFFLINE (and hub.offline), or pull it elsewhere")]
    Offline {
        /// Which.
        id: String,
    },
    /// Nobody answers.
    #[error(
        "{host} cannot be reached: {message}; check the network, HF_ENDPOINT and proxy settings; \
         what is already on this machine works without it (HF_HUB_OFFLINE=1)"
    )]
    Unreachable {
        /// Host name.
        host: String,
        /// The last try's error.
        message: String,
    },
    /// An endpoint that is no address.
    #[error("HF_ENDPOINT: `{endpoint}` is not an address such as https://hub.example")]
    Endpoint {
        /// As given.
        endpoint: String,
    },
    /// No such repository, or it is private.
    #[error("{repo}: there is no such model, or it is private{}", token_hint(*had_token))]
    NoRepo {
        /// `ORG/NAME`.
        repo: String,
        /// Whether a token was sent.
        had_token: bool,
    },
    /// No such branch, tag or commit.
    #[error("{repo} has no revision `{revision}`")]
    NoRevision {
        /// `ORG/NAME`.
        repo: String,
        /// As asked for.
        revision: String,
    },
    /// The listing names a file that is not there.
    #[error("{repo} has no file `{file}` at this revision")]
    NoFile {
        /// `ORG/NAME`.
        repo: String,
        /// Which.
        file: String,
    },
    /// Its conditions must be accepted first.
    #[error("{repo} is gated: accept its conditions on its page with your account{}", token_hint(*had_token))]
    Gated {
        /// `ORG/NAME`.
        repo: String,
        /// Whether a token was sent.
        had_token: bool,
    },
    /// The token was not accepted.
    #[error("the hub refused access to {repo} (status {status}){}", token_hint(*had_token))]
    Denied {
        /// `ORG/NAME`.
        repo: String,
        /// 401 or 403.
        status: u16,
        /// Whether a token was sent.
        had_token: bool,
    },
    /// An answer that is no use.
    #[error("{host} answered {status} for {what}, also after {tries} tries: try again later")]
    Status {
        /// Host name.
        host: String,
        /// Of the last answer.
        status: u16,
        /// What was asked for.
        what: String,
        /// How often it was asked.
        tries: usize,
    },
    /// An answer that breaks the protocol.
    #[error("{what}: the answer cannot be used: {message}")]
    Protocol {
        /// What was asked for.
        what: String,
        /// What is wrong with it.
        message: String,
    },
    /// What arrived is not what the hub says it is.
    #[error(
        "{file} arrived damaged: its {kind} is {found}, {expected} was promised; it was thrown away: pull again, \
         and suspect a proxy or mirror if it stays so"
    )]
    Checksum {
        /// Which.
        file: String,
        /// `sha256` or `git hash`.
        kind: &'static str,
        /// Promised.
        expected: String,
        /// Computed.
        found: String,
    },
    /// The disk is too small.
    #[error(
        "no space in {}: {} are needed, {} are free; make room, or set HF_HOME to a larger disk",
        place.display(), ByteSize(*need), ByteSize(*free)
    )]
    NoSpace {
        /// The cache.
        place: PathBuf,
        /// Bytes still to be written.
        need: u64,
        /// Bytes there are.
        free: u64,
    },
    /// Several quantisations.
    #[error("{repo} holds several quantisations; name one, or files by --file:{}", choices(repo, variants))]
    Choose {
        /// `ORG/NAME`.
        repo: String,
        /// Those there are.
        variants: Vec<Variant>,
    },
    /// The repository itself lacks parts of a model.
    #[error("{repo} lacks {} of the model's parts, so it cannot be used: {}", missing.len(), missing.join(", "))]
    PartsMissing {
        /// `ORG/NAME`.
        repo: String,
        /// Names of the files that should be there.
        missing: Vec<String>,
    },
    /// Not that quantisation.
    #[error("{repo} has no quantisation `{asked}`{}", if variants.is_empty() {
        ": it holds no GGUF files".to_owned()
    } else {
        format!("; there are:{}", choices(repo, variants))
    })]
    NoVariant {
        /// `ORG/NAME`.
        repo: String,
        /// As asked for.
        asked: String,
        /// Those there are.
        variants: Vec<Variant>,
    },
    /// Neither safetensors nor GGUF.
    #[error("{repo} holds neither safetensors nor GGUF files, only {}", listed(found, 12))]
    NothingUsable {
        /// `ORG/NAME`.
        repo: String,
        /// Some of what it holds.
        found: Vec<String>,
    },
    /// A pattern that fits nothing.
    #[error("--file {pattern}: {repo} has no such file; it holds {}", listed(found, 40))]
    NoMatch {
        /// `ORG/NAME`.
        repo: String,
        /// As given.
        pattern: String,
        /// Some of what it holds.
        found: Vec<String>,
    },
    /// The file system said no.
    #[error("{}: {source}; HF_HOME or HF_HUB_CACHE names another place for the cache", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

fn token_hint(had_token: bool) -> &'static str {
    if had_token {
        "; the token that was sent (HF_TOKEN, or the hub's token file) does not open it"
    } else {
        "; if you have access, set HF_TOKEN to a token of your account"
    }
}

fn listed(names: &[String], most: usize) -> String {
    let mut text = names.iter().take(most).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > most {
        text += &format!(" and {} more", names.len() - most);
    }
    text
}

fn choices(repo: &str, variants: &[Variant]) -> String {
    let line = |variant: &Variant| {
        let size = variant.bytes.map_or_else(String::new, |bytes| format!("  {}", ByteSize(bytes)));
        format!("\n  {repo}:{}{size}", variant.name)
    };
    variants.iter().map(line).collect()
}
