//! Settings: where they come from, which wins, and what is said about wrong ones.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use greenroom::Config;
use greenroom::config::{
    Activations, CacheConfig, CpuConfig, DeviceChoice, EngineConfig, HttpConfig, HubConfig, LogConfig,
    LogFormat, SamplingConfig, SchedulerConfig, Sources, SpeechConfig, TraceConfig,
};
use greenroom::types::SamplingOptions;
use proptest::prelude::*;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

const DOCUMENTED: &str = include_str!("../config/greenroom.toml");

/// A deserializer that only writes down which fields a struct asks for.
struct FieldNames<'a>(&'a mut Vec<&'static str>);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = de::value::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.extend(fields);
        visitor.visit_map(de::value::MapDeserializer::new(std::iter::empty::<(&str, &str)>()))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(de::Error::custom("not a struct"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

fn fields<'de, T: Deserialize<'de>>() -> Vec<&'static str> {
    let mut names = Vec::new();
    T::deserialize(FieldNames(&mut names)).map(drop).unwrap();
    names
}

/// Every dotted key there is.
fn all_keys() -> Vec<String> {
    let mut sections: BTreeMap<&str, Vec<&str>> = BTreeMap::from([
        ("http", fields::<HttpConfig>()),
        ("engine", fields::<EngineConfig>()),
        ("cpu", fields::<CpuConfig>()),
        ("scheduler", fields::<SchedulerConfig>()),
        ("cache", fields::<CacheConfig>()),
        ("speech", fields::<SpeechConfig>()),
        ("hub", fields::<HubConfig>()),
        ("sampling", fields::<SamplingConfig>()),
        ("log", fields::<LogConfig>()),
        ("trace", fields::<TraceConfig>()),
    ]);
    let mut keys = Vec::new();
    for section in fields::<Config>() {
        let names =
            sections.remove(section).unwrap_or_else(|| panic!("section {section} is not in this test"));
        keys.extend(names.into_iter().map(|name| format!("{section}.{name}")));
    }
    keys
}

/// The documented file with its commented-out settings put in.
fn uncommented() -> String {
    let setting = |line: &str| {
        line.strip_prefix("# ").is_some_and(|rest| {
            let name = rest.split(" = ").next().unwrap_or_default();
            rest.contains(" = ")
                && !name.is_empty()
                && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
        })
    };
    let lines = DOCUMENTED.lines().map(|line| if setting(line) { &line[2..] } else { line });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_documented_file_is_the_defaults() {
    let config = Sources::new().file("greenroom.toml", DOCUMENTED).resolve().unwrap();
    assert_eq!(config, Config::default());
}

#[test]
fn the_documented_file_names_every_setting_and_its_examples_are_valid() {
    let text = uncommented();
    let table: toml::Table = toml::from_str(&text).unwrap();
    for key in all_keys() {
        let (section, name) = key.split_once('.').unwrap();
        let there = table.get(section).and_then(|section| section.get(name)).is_some();
        assert!(there, "config/greenroom.toml does not document {key}");
    }
    Sources::new().file("greenroom.toml", &text).resolve().unwrap();
}

#[test]
fn later_sources_win_key_by_key() {
    let config = Sources::new()
        .file("a.toml", "[http]\nport = 1\nhost = \"10.0.0.1\"\nheartbeat_s = 3\n")
        .environment([
            ("GREENROOM__HTTP__PORT".into(), "2".into()),
            ("GREENROOM__HTTP__HOST".into(), "10.0.0.2".into()),
            ("GREENROOM_HOME".into(), "/nowhere".into()),
            ("PATH".into(), "/bin".into()),
        ])
        .flag("--port", "http.port", 3_i64)
        .resolve()
        .unwrap();
    assert_eq!((config.http.port, config.http.host.as_str(), config.http.heartbeat_s), (3, "10.0.0.2", 3));
}

#[test]
fn variables_are_read_as_the_setting_needs_them() {
    let variables = [
        ("GREENROOM__HTTP__ALLOWED_HOSTS", "a.example, b.example"),
        ("GREENROOM__HTTP__ALLOWED_ORIGINS", "[\"https://a.example\"]"),
        ("GREENROOM__HTTP__UNIX_SOCKET", "/tmp/x.sock"),
        ("GREENROOM__HTTP__TCP", "false"),
        ("GREENROOM__ENGINE__DEVICE", "cpu"),
        ("GREENROOM__CPU__ACTIVATIONS", "f32"),
        ("GREENROOM__SAMPLING__TEMPERATURE", "0"),
        ("GREENROOM__LOG__FORMAT", "json"),
        ("GREENROOM__LOG__LEVEL", "warn,greenroom=debug"),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let config = Sources::new().environment(variables).resolve().unwrap();
    assert_eq!(config.http.allowed_hosts, ["a.example", "b.example"]);
    assert_eq!(config.http.allowed_origins, ["https://a.example"]);
    assert_eq!(config.http.unix_socket.as_deref(), Some("/tmp/x.sock".as_ref()));
    assert!(!config.http.tcp);
    assert_eq!(config.engine.device, DeviceChoice::Cpu);
    assert_eq!(config.cpu.activations, Activations::F32);
    assert_eq!(config.sampling.temperature, Some(0.0));
    assert_eq!((config.log.format, config.log.level.as_str()), (LogFormat::Json, "warn,greenroom=debug"));
}

#[test]
fn every_problem_is_named_with_its_place() {
    let file = "# a comment\n[http]\nport = 99999\nprot = 1\nhost = \"\"\n[scheduler]\nmax_rows = 0\n[nonsense]\nx = 1\n";
    let error = Sources::new()
        .file("conf.toml", file)
        .environment([("GREENROOM__HTTP__WORKERS".into(), "many".into())])
        .flag("--threads", "cpu.threads", 0_i64)
        .resolve()
        .unwrap_err();
    let text = error.to_string();
    for part in [
        "conf.toml:3: http.port:",
        "conf.toml:4: http.prot: unknown field `prot`",
        "conf.toml:5: http.host: must not be empty",
        "conf.toml:7: scheduler.max_rows: 0 is not within 1 to 1024",
        "conf.toml:9: nonsense.x: unknown field `nonsense`",
        "environment variable GREENROOM__HTTP__WORKERS: http.workers:",
        "flag --threads: cpu.threads: 0 is not within 1 to 1024",
    ] {
        assert!(text.contains(part), "`{part}` is missing in:\n{text}");
    }
    assert_eq!(error.problems.len(), 7, "{text}");
}

#[test]
fn a_file_that_is_not_toml_is_named_with_its_line() {
    let text =
        Sources::new().file("c.toml", "[http]\nport = 1\nhost = = 2\n").resolve().unwrap_err().to_string();
    assert!(text.contains("c.toml:3:"), "{text}");
}

#[test]
fn a_setting_of_sampling_may_be_what_a_request_may_say() {
    let values = [
        f32::NAN,
        f32::NEG_INFINITY,
        -1.0,
        -1e-40,
        0.0,
        1e-40,
        0.0099,
        0.01,
        0.5,
        1.0,
        1.1,
        100.0,
        100.1,
        f32::INFINITY,
    ];
    type Set = fn(&mut SamplingConfig, &mut SamplingOptions, f32);
    let settings: [(&str, Set); 4] = [
        ("temperature", |c, r, v| (c.temperature, r.temperature) = (Some(v), Some(v))),
        ("top_p", |c, r, v| (c.top_p, r.top_p) = (Some(v), Some(v))),
        ("min_p", |c, r, v| (c.min_p, r.min_p) = (Some(v), Some(v))),
        ("repetition_penalty", |c, r, v| (c.repetition_penalty, r.repetition_penalty) = (Some(v), Some(v))),
    ];
    for (name, set) in settings {
        for value in values {
            let (mut config, mut request) = (Config::default(), SamplingOptions::default());
            set(&mut config.sampling, &mut request, value);
            let found = config.validate().err().unwrap_or_default();
            let keys: Vec<&str> = found.iter().map(|problem| problem.key.as_str()).collect();
            let key = format!("sampling.{name}");
            let expected = if request.check().is_ok() { vec![] } else { vec![key.as_str()] };
            assert_eq!(keys, expected, "{name} = {value}");
        }
    }
}

#[test]
fn a_log_level_is_a_known_word_or_a_list_of_directives() {
    let problems = |level: &str| {
        let mut config = Config::default();
        config.log.level = level.into();
        config.validate().err().unwrap_or_default()
    };
    for level in [
        "off",
        "error",
        "warn",
        "info",
        "debug",
        "trace",
        "INFO",
        " info ",
        "greenroom=debug",
        "warn,greenroom=debug",
        "greenroom::http=trace, info",
        "warn,[span{a,b}]=debug",
    ] {
        assert!(problems(level).is_empty(), "{level}: {:?}", problems(level));
    }
    for (level, word) in [
        ("inof", "inof"),
        ("warning", "warning"),
        ("7", "7"),
        ("inof,greenroom=debug", "inof"),
        ("warn,degub", "degub"),
        ("greenroom", "greenroom"),
    ] {
        let found = problems(level);
        assert_eq!(found.len(), 1, "{level}: {found:?}");
        assert!(found[0].key == "log.level" && found[0].message.contains(&format!("`{word}`")), "{found:?}");
        assert!(found[0].message.contains("off, error, warn, info, debug, trace"), "{found:?}");
    }
    assert_eq!(problems("").len(), 1);
}

#[test]
fn nothing_to_listen_on_is_a_problem() {
    let text = Sources::new().flag("--x", "http.tcp", false).resolve().unwrap_err().to_string();
    assert!(text.contains("http.unix_socket is not set"), "{text}");
}

proptest! {
    #[test]
    fn no_file_and_no_variable_can_make_it_panic(text in "\\PC*|[a-z\\[\\]=.\"'#\n0-9_]*", value in ".*") {
        let _ = Sources::new()
            .file("f", &text)
            .environment([("GREENROOM__HTTP__HOST".into(), value.clone()), (format!("GREENROOM__{value}"), text.clone())])
            .resolve();
    }
}
