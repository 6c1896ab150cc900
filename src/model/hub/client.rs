//! Requests to the hub: who gets the token, which answers are tried again, what an answer's status means.

use std::io::Read;
use std::time::Duration;

use hf_hub::api::sync::ApiBuilder;
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use ureq::http::{HeaderMap, Response, Uri};
use ureq::{Agent, Body};

use super::id::is_commit;
use super::layout::is_safe;
use super::{HubError, HubId, HubSettings, Token};

/// Redirects followed for one request.
const MAX_REDIRECTS: usize = 8;
/// Tries of a request in all.
const TRIES: usize = 5;
/// Tries where nobody answers at all: mostly there is no network.
const TRIES_UNANSWERED: usize = 3;
/// Longest pause between tries, also when the hub asks for more.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Largest listing read.
const MAX_LISTING: u64 = 64 << 20;

/// What a repository holds at a commit.
#[derive(Debug, Deserialize)]
pub(super) struct Listing {
    /// The commit.
    pub sha: String,
    pub siblings: Vec<Sibling>,
}

/// A file of a listing.
#[derive(Debug, Deserialize)]
pub(super) struct Sibling {
    #[serde(rename = "rfilename")]
    pub name: String,
    #[serde(default)]
    pub size: Option<u64>,
    #[serde(default, rename = "blobId")]
    pub blob_id: Option<String>,
    #[serde(default)]
    pub lfs: Option<Lfs>,
}

/// What a listing says of a large file.
#[derive(Debug, Deserialize)]
pub(super) struct Lfs {
    #[serde(default)]
    pub sha256: Option<String>,
    #[serde(default)]
    pub size: Option<u64>,
}

/// What the hub says of a file before it is fetched.
#[derive(Clone, Debug)]
pub(super) struct Head {
    /// Names the blob.
    pub etag: String,
    pub size: Option<u64>,
}

/// Where a try has to be given up.
enum Trouble {
    /// Nobody answered, or the connection broke.
    Broken(String),
    /// An answer that another try may better, after a pause that the hub may ask for.
    Busy(u16, Option<Duration>),
    /// For good.
    Final(HubError),
}

/// The hub, for one repository.
pub(super) struct Client<'a> {
    agent: Agent,
    settings: &'a HubSettings,
    cache: Cache,
    endpoint: Uri,
    repo: String,
    revision: String,
}

impl<'a> Client<'a> {
    pub fn new(settings: &'a HubSettings, id: &HubId, cache: &std::path::Path) -> Result<Self, HubError> {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // Ranges and sizes count the file's own bytes.
            .accept_encoding("identity")
            .user_agent(concat!("greenroom/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(settings.stall_limit))
            .timeout_resolve(Some(settings.stall_limit))
            .timeout_recv_response(Some(settings.stall_limit.saturating_mul(2)))
            .timeout_per_read(Some(settings.stall_limit))
            .build()
            .into();
        let mut client = Self {
            agent,
            settings,
            cache: Cache::new(cache.to_owned()),
            endpoint: Uri::default(),
            repo: id.repo.clone(),
            revision: id.revision.clone(),
        };
        client.endpoint = client.address(&client.repository(&client.revision)?.url(""))?;
        Ok(client)
    }

    /// The hub's crate knows the addresses, the hub's own among them.
    fn repository(&self, revision: &str) -> Result<hf_hub::api::sync::ApiRepo, HubError> {
        let mut builder = ApiBuilder::from_cache(self.cache.clone()).with_token(None);
        if let Some(endpoint) = &self.settings.endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
        }
        let repo = Repo::with_revision(self.repo.clone(), RepoType::Model, revision.to_owned());
        let api = builder.build().map_err(|error| HubError::Protocol {
            what: "the hub's client".into(),
            message: error.to_string(),
        })?;
        Ok(api.repo(repo))
    }

    fn address(&self, text: &str) -> Result<Uri, HubError> {
        let shown = || self.settings.endpoint.clone().unwrap_or_else(|| text.to_owned());
        let uri: Uri = text.parse().map_err(|_| HubError::Endpoint { endpoint: shown() })?;
        let is_web = matches!(uri.scheme_str(), Some("http" | "https"));
        if is_web && uri.host().is_some() { Ok(uri) } else { Err(HubError::Endpoint { endpoint: shown() }) }
    }

    fn host(&self) -> String {
        // Without what stands before an `@`: that may be a password.
        let named = |host: &str| match self.endpoint.port_u16() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        };
        self.endpoint.host().map_or_else(|| "the hub".into(), named)
    }

    fn had_token(&self) -> bool {
        self.settings.token.is_some()
    }

    /// What the revision is, and what it holds.
    pub fn listing(&self) -> Result<Listing, HubError> {
        let what = format!("the list of files of {}", self.repo);
        let protocol = |message: String| HubError::Protocol { what: what.clone(), message };
        // Only the address is taken: the request is ours, with our rules for redirects and tokens.
        let uri = self.repository(&self.revision)?.info_request().uri_ref().map(ToString::to_string);
        let uri = uri.ok_or_else(|| HubError::Endpoint { endpoint: self.host() })?;
        let uri = self.address(&format!("{uri}?blobs=true"))?;
        let bytes = self.persist(&what, || {
            let mut response = self.get(&uri, None, &what, Crossing::Follow)?;
            let body = response.body_mut().with_config().limit(MAX_LISTING).read_to_vec();
            body.map_err(|error| Trouble::Broken(error.to_string()))
        })?;
        let listing: Listing = serde_json::from_slice(&bytes).map_err(|error| protocol(error.to_string()))?;
        if !is_commit(&listing.sha) {
            return Err(protocol(format!("its commit `{}` is none", listing.sha)));
        }
        if let Some(bad) = listing.siblings.iter().find(|file| !is_safe(&file.name)) {
            return Err(protocol(format!("the file name {:?} leaves its folder", bad.name)));
        }
        Ok(listing)
    }

    fn file_address(&self, commit: &str, file: &str) -> Result<Uri, HubError> {
        let uri = self.repository(commit)?.url(&percent_encoded(file));
        self.address(&uri)
    }

    /// A file's name in the cache and its size. A redirect to another host is where the file is; what is
    /// asked for here the hub says itself.
    pub fn head(&self, commit: &str, file: &str) -> Result<Head, HubError> {
        let uri = self.file_address(commit, file)?;
        self.persist(file, || {
            let response = self.request("HEAD", &uri, None, file, Crossing::Stop)?;
            let headers = response.headers();
            let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
            let etag = text("x-linked-etag").or_else(|| text("etag")).map(plain_etag).unwrap_or_default();
            let size = text("x-linked-size").or_else(|| {
                // A redirect's own length says nothing of the file.
                text("content-length").filter(|_| response.status().is_success())
            });
            let size = size.and_then(|size| size.trim().parse().ok());
            Ok(Head { etag, size })
        })
    }

    /// One try at a file's bytes from an offset on; what comes, and where it begins.
    pub fn body(&self, commit: &str, file: &str, from: u64) -> Result<(u64, Box<dyn Read>), BodyError> {
        let uri = self.file_address(commit, file).map_err(BodyError::Final)?;
        let range = (from > 0).then_some(from);
        let response = self.get(&uri, range, file, Crossing::Follow).map_err(|trouble| match trouble {
            Trouble::Broken(message) => BodyError::Again(message, None),
            // The part is longer than the file.
            Trouble::Busy(416, _) => BodyError::FromStart,
            Trouble::Busy(status, pause) => BodyError::Again(format!("status {status}"), pause),
            Trouble::Final(error) => BodyError::Final(error),
        })?;
        let begins = match (response.status().as_u16(), from) {
            (206, from) if range_start(response.headers()) == Some(from) => from,
            (206, _) => return Err(BodyError::FromStart),
            // A server that knows no ranges sends all of it.
            _ => 0,
        };
        // The caller counts: no limit here.
        Ok((begins, Box::new(response.into_body().into_with_config().limit(u64::MAX).reader())))
    }

    /// Tries again what may get better.
    fn persist<T>(&self, what: &str, mut attempt: impl FnMut() -> Result<T, Trouble>) -> Result<T, HubError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let asked = match attempt() {
                Ok(value) => return Ok(value),
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Broken(message)) if tries >= TRIES_UNANSWERED => {
                    return Err(self.unreachable(message));
                }
                Err(Trouble::Busy(status, _)) if tries >= TRIES => {
                    return Err(self.status(status, what, tries));
                }
                Err(Trouble::Broken(_)) => None,
                Err(Trouble::Busy(_, asked)) => asked,
            };
            std::thread::sleep(self.pause(tries, asked));
        }
    }

    /// How long to wait after so many tries.
    pub fn pause(&self, tries: usize, asked: Option<Duration>) -> Duration {
        let doubled = self.settings.retry_delay.saturating_mul(1 << tries.saturating_sub(1).min(8));
        asked.unwrap_or(doubled).min(LONGEST_PAUSE)
    }

    pub fn unreachable(&self, message: String) -> HubError {
        HubError::Unreachable { host: self.host(), message }
    }

    fn status(&self, status: u16, what: &str, tries: usize) -> HubError {
        HubError::Status { host: self.host(), status, what: what.to_owned(), tries }
    }

    fn get(
        &self,
        uri: &Uri,
        range: Option<u64>,
        what: &str,
        crossing: Crossing,
    ) -> Result<Response<Body>, Trouble> {
        self.request("GET", uri, range, what, crossing)
    }

    /// Follows redirects; the token goes to the endpoint's own origin and nowhere else.
    fn request(
        &self,
        method: &str,
        uri: &Uri,
        range: Option<u64>,
        what: &str,
        crossing: Crossing,
    ) -> Result<Response<Body>, Trouble> {
        let protocol =
            |message: String| Trouble::Final(HubError::Protocol { what: what.to_owned(), message });
        let mut uri = uri.clone();
        for _ in 0..=MAX_REDIRECTS {
            let token = self.settings.token.as_ref().filter(|_| origin(&uri) == origin(&self.endpoint));
            let response = self.send(method, &uri, range, token)?;
            if !response.status().is_redirection() {
                return self.judged(response, what);
            }
            let target = response.headers().get("location").and_then(|value| value.to_str().ok());
            let target = target.and_then(|target| joined(&uri, target));
            let target = target.ok_or_else(|| protocol("a redirect to nowhere".into()))?;
            if uri.scheme_str() == Some("https") && target.scheme_str() != Some("https") {
                return Err(protocol("a redirect from https to http".into()));
            }
            if crossing == Crossing::Stop && origin(&target) != origin(&uri) {
                return Ok(response);
            }
            uri = target;
        }
        Err(protocol(format!("more than {MAX_REDIRECTS} redirects")))
    }

    fn send(
        &self,
        method: &str,
        uri: &Uri,
        range: Option<u64>,
        token: Option<&Token>,
    ) -> Result<Response<Body>, Trouble> {
        let mut request = if method == "HEAD" { self.agent.head(uri) } else { self.agent.get(uri) };
        if let Some(token) = token {
            request = request.header("authorization", token.header());
        }
        if let Some(from) = range {
            request = request.header("range", format!("bytes={from}-"));
        }
        request.call().map_err(|error| match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl => {
                Trouble::Final(HubError::Protocol { what: uri.to_string(), message: error.to_string() })
            }
            error => Trouble::Broken(error.to_string()),
        })
    }

    /// What an answer that is no redirect means.
    fn judged(&self, response: Response<Body>, what: &str) -> Result<Response<Body>, Trouble> {
        let status = response.status().as_u16();
        let (repo, had_token) = (self.repo.clone(), self.had_token());
        let code = response.headers().get("x-error-code").and_then(|value| value.to_str().ok());
        let error = match (status, code.unwrap_or_default()) {
            (200..=299, _) => return Ok(response),
            (_, "GatedRepo") => HubError::Gated { repo, had_token },
            (_, "RevisionNotFound") => HubError::NoRevision { repo, revision: self.revision.clone() },
            (_, "EntryNotFound") => HubError::NoFile { repo, file: what.to_owned() },
            // Without a token the hub does not tell private from absent.
            (_, "RepoNotFound") => HubError::NoRepo { repo, had_token },
            (401, _) if !had_token => HubError::NoRepo { repo, had_token },
            (401 | 403, _) => HubError::Denied { repo, status, had_token },
            (404, _) => HubError::NoRepo { repo, had_token },
            (408 | 416 | 425 | 429 | 500..=599, _) => {
                let asked = response.headers().get("retry-after").and_then(|value| value.to_str().ok());
                let asked = asked.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
                return Err(Trouble::Busy(status, asked));
            }
            _ => self.status(status, what, 1),
        };
        Err(Trouble::Final(error))
    }
}

/// Why there are no bytes.
pub(super) enum BodyError {
    /// Another try may help, after a pause that the hub may ask for.
    Again(String, Option<Duration>),
    /// What is there already does not fit: begin anew.
    FromStart,
    /// Another try does not help.
    Final(HubError),
}

/// What a redirect to another origin does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Crossing {
    Follow,
    Stop,
}

/// Scheme, host and port.
fn origin(uri: &Uri) -> (String, String, u16) {
    let scheme = uri.scheme_str().unwrap_or_default().to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    (scheme, uri.host().unwrap_or_default().to_ascii_lowercase(), port)
}

/// A redirect's target as an address of its own.
fn joined(base: &Uri, target: &str) -> Option<Uri> {
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    let whole = if target.contains("://") {
        target.to_owned()
    } else if target.starts_with("//") {
        format!("{scheme}:{target}")
    } else if target.starts_with('/') {
        format!("{scheme}://{authority}{target}")
    } else {
        let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{target}")
    };
    let uri: Uri = whole.parse().ok()?;
    (matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()).then_some(uri)
}

fn plain_etag(etag: &str) -> String {
    etag.trim().trim_start_matches("W/").trim_matches('"').to_owned()
}

/// The first byte of a `bytes 100-199/200`.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get("content-range")?.to_str().ok()?;
    range.trim().strip_prefix("bytes")?.trim().split('-').next()?.parse().ok()
}

fn percent_encoded(file: &str) -> String {
    let mut out = String::with_capacity(file.len());
    for byte in file.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~' | b'/') {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_is_resolved_and_its_origin_compared() {
        let base: Uri = "https://hub.example/a/b/resolve/main/x".parse().expect("an address");
        let target = |text: &str| joined(&base, text).map(|uri| uri.to_string());
        assert_eq!(target("/c/d").as_deref(), Some("https://hub.example/c/d"));
        assert_eq!(target("y").as_deref(), Some("https://hub.example/a/b/resolve/main/y"));
        assert_eq!(target("//cdn.example/z?k=1").as_deref(), Some("https://cdn.example/z?k=1"));
        assert_eq!(
            (target("file:///etc/passwd"), target("")),
            (None, Some("https://hub.example/a/b/resolve/main/".into()))
        );
        let same = |text: &str| joined(&base, text).is_some_and(|uri| origin(&uri) == origin(&base));
        assert!(same("https://HUB.example:443/q") && same("/q"));
        assert!(
            !same("http://hub.example/q")
                && !same("https://hub.example:444/")
                && !same("https://hub.example.evil/")
        );
    }

    #[test]
    fn etags_and_ranges_lose_their_wrapping() {
        assert_eq!([plain_etag("\"ab\""), plain_etag("W/\"ab\""), plain_etag("ab")], ["ab"; 3]);
        let mut headers = HeaderMap::new();
        assert_eq!(range_start(&headers), None);
        headers.insert("content-range", "bytes 100-199/200".parse().expect("a value"));
        assert_eq!(range_start(&headers), Some(100));
        assert_eq!(percent_encoded("a b/ü#?.x"), "a%20b/%C3%BC%23%3F.x");
    }
}
