//! Keeps pages from elsewhere out, and lets the listed ones in (CORS).
//!
//! A browser lets any page send requests to a loopback port. Two headers that a
//! page cannot forge tell it apart: `Host` (a name that was rebound to the
//! loopback address is not one of ours) and `Origin`. Programs send no
//! `Origin` and are not concerned. Pure: decides from strings.

use std::net::IpAddr;

use crate::config::HttpConfig;

/// What to make of a request's `Origin`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OriginVerdict {
    /// No page, or a page of our own.
    Own,
    /// A page that the settings list: gets CORS headers.
    Listed,
    /// Any other page.
    Foreign,
}

/// The rules, made once from the settings.
#[derive(Clone, Debug)]
pub struct Guard {
    host: String,
    any_address: bool,
    allowed_hosts: Vec<String>,
    allowed_origins: Vec<String>,
}

impl Guard {
    /// Rules for these settings.
    pub fn new(config: &HttpConfig) -> Self {
        let lower = |list: &[String]| list.iter().map(|entry| entry.to_ascii_lowercase()).collect();
        let host = bare_host(&config.host).to_ascii_lowercase();
        let any_address = host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified());
        Self {
            host,
            any_address,
            allowed_hosts: lower(&config.allowed_hosts),
            allowed_origins: lower(&config.allowed_origins),
        }
    }

    /// Whether a `Host` header names this server.
    ///
    /// An address cannot be rebound, so where the server listens on all
    /// addresses, any address will do; names are what rebinding needs.
    pub fn host_is_ours(&self, header: &str) -> bool {
        let name = host_of(header).to_ascii_lowercase();
        let bare = bare_host(&name);
        let listed = |entry: &String| entry == "*" || bare_host(entry) == bare;
        if bare == self.host || bare == "localhost" || self.allowed_hosts.iter().any(listed) {
            return true;
        }
        bare.parse::<IpAddr>().is_ok_and(|address| self.any_address || is_loopback(address))
    }

    /// What to make of an `Origin`, given the request's `Host`.
    pub fn origin(&self, origin: Option<&str>, host: Option<&str>) -> OriginVerdict {
        let Some(origin) = origin.map(str::to_ascii_lowercase) else { return OriginVerdict::Own };
        if self.allowed_origins.iter().any(|entry| entry == "*" || *entry == origin) {
            return OriginVerdict::Listed;
        }
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        match (authority, host) {
            (Some(authority), Some(host)) if authority.eq_ignore_ascii_case(host) => OriginVerdict::Own,
            _ => OriginVerdict::Foreign,
        }
    }
}

fn is_loopback(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback(),
        IpAddr::V6(address) => {
            address.is_loopback() || address.to_ipv4_mapped().is_some_and(|v4| v4.is_loopback())
        }
    }
}

/// The host of `host[:port]`, brackets kept.
fn host_of(header: &str) -> &str {
    let header = header.trim();
    if header.starts_with('[') {
        return header.find(']').map_or(header, |end| &header[..=end]);
    }
    header.split_once(':').map_or(header, |(host, _)| host).trim_end_matches('.')
}

/// Without the brackets of an IPv6 address.
fn bare_host(host: &str) -> &str {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(host: &str, hosts: &[&str], origins: &[&str]) -> Guard {
        let mut config = HttpConfig { host: host.into(), ..HttpConfig::default() };
        config.allowed_hosts = hosts.iter().map(ToString::to_string).collect();
        config.allowed_origins = origins.iter().map(ToString::to_string).collect();
        Guard::new(&config)
    }

    #[test]
    fn loopback_names_and_the_bound_address_are_ours() {
        let rules = guard("192.168.1.5", &["box.example"], &[]);
        for host in
            ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "127.9.9.9", "[::1]:8080", "192.168.1.5:80"]
        {
            assert!(rules.host_is_ours(host), "{host}");
        }
        assert!(rules.host_is_ours("Box.Example:99"));
        for host in
            ["evil.example", "localhost.evil.example", "192.168.1.6", "", "[::2]", "127.0.0.1.evil.example"]
        {
            assert!(!rules.host_is_ours(host), "{host}");
        }
    }

    #[test]
    fn on_all_addresses_any_address_will_do_but_no_name() {
        let rules = guard("0.0.0.0", &[], &[]);
        assert!(rules.host_is_ours("10.0.0.7:8080"));
        assert!(!rules.host_is_ours("rebound.example:8080"));
    }

    #[test]
    fn origins_are_own_listed_or_foreign() {
        let rules = guard("127.0.0.1", &[], &["https://chat.example"]);
        let host = Some("127.0.0.1:8080");
        assert_eq!(rules.origin(None, host), OriginVerdict::Own);
        assert_eq!(rules.origin(Some("http://127.0.0.1:8080"), host), OriginVerdict::Own);
        assert_eq!(rules.origin(Some("https://chat.example"), host), OriginVerdict::Listed);
        for foreign in ["http://127.0.0.1:3000", "https://evil.example", "null", ""] {
            assert_eq!(rules.origin(Some(foreign), host), OriginVerdict::Foreign, "{foreign}");
        }
        assert_eq!(guard("127.0.0.1", &[], &["*"]).origin(Some("null"), host), OriginVerdict::Listed);
    }
}
