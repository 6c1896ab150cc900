//! The library's side: what is asked for, what lies in the cache afterwards, what is refused.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use greenroom::model::hub::{Hub, HubError, HubId, HubSettings, Progress, Pulled, Token};

use super::server::{COMMIT, Fault, HubServer, git_hash, sha256};

/// Keeps what it is told.
#[derive(Default)]
struct Told(Mutex<Vec<String>>);

impl Progress for Told {
    fn note(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
    fn begin(&self, file: &str, _bytes: u64) {
        self.0.lock().unwrap().push(format!("begin {file}"));
    }
    fn at(&self, _bytes: u64) {}
    fn end(&self) {}
}

/// A hub's server and an empty cache.
struct World {
    server: HubServer,
    cache: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self { server: HubServer::start(), cache: tempfile::tempdir().unwrap() }
    }

    /// A model folder with weights of so many bytes.
    fn folder(bytes: usize) -> Self {
        let world = Self::new();
        world.server.small("config.json", r#"{"model_type": "llama"}"#);
        world.server.small("tokenizer.json", "{}");
        world.server.small("README.md", "read me");
        world.server.large("model.safetensors", weights(bytes));
        world.server.large("pytorch_model.bin", weights(10));
        world
    }

    fn settings(&self) -> HubSettings {
        let mut settings = HubSettings::from_variables(|_| None);
        settings.cache = Some(self.cache.path().to_owned());
        settings.endpoint = Some(self.server.endpoint());
        settings.token = Token::new("secret");
        settings.retry_delay = Duration::from_millis(1);
        settings.stall_limit = Duration::from_secs(5);
        settings
    }

    fn pull_with(&self, settings: HubSettings, text: &str) -> (Result<Pulled, HubError>, Vec<String>) {
        let told = Told::default();
        let result = Hub::new(settings).pull(&HubId::parse(text).unwrap(), &[], &told);
        (result, told.0.into_inner().unwrap())
    }

    fn pull(&self, text: &str) -> Result<Pulled, HubError> {
        self.pull_with(self.settings(), text).0
    }

    fn find(&self, text: &str) -> Result<PathBuf, HubError> {
        Hub::new(self.settings()).find(&HubId::parse(text).unwrap()).map(|found| found.path)
    }

    fn repo(&self) -> PathBuf {
        self.cache.path().join("models--org--name")
    }

    fn part(&self, bytes: &[u8]) -> PathBuf {
        self.repo().join("blobs").join(format!("{}.incomplete", sha256(bytes)))
    }

    fn put_part(&self, of: &[u8], have: &[u8]) {
        std::fs::create_dir_all(self.repo().join("blobs")).unwrap();
        std::fs::write(self.part(of), have).unwrap();
    }
}

fn weights(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 % 251) as u8).collect()
}

fn text(result: Result<Pulled, HubError>) -> String {
    result.expect_err("refused").to_string()
}

#[test]
fn a_folder_lies_as_every_program_of_the_hubs_expects() {
    let world = World::folder(300_000);
    let pulled = world.pull("org/name").unwrap();
    assert_eq!(pulled.path, world.repo().join("snapshots").join(COMMIT));
    assert_eq!((pulled.files, pulled.fetched), (3, 300_000 + 23 + 2));
    assert_eq!(std::fs::read_to_string(world.repo().join("refs/main")).unwrap(), COMMIT);
    let weights = weights(300_000);
    let blob = world.repo().join("blobs").join(sha256(&weights));
    assert_eq!(std::fs::read(&blob).unwrap(), weights);
    assert!(world.repo().join("blobs").join(git_hash(b"{}")).is_file());
    #[cfg(unix)]
    {
        let link = std::fs::read_link(pulled.path.join("model.safetensors")).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(sha256(&weights)));
    }
    assert!(!pulled.path.join("pytorch_model.bin").exists(), "the same weights in another form");
    assert_eq!(world.find("org/name").unwrap(), pulled.path);
    assert_eq!(world.find(&format!("org/name@{COMMIT}")).unwrap(), pulled.path);
    let before = world.server.fetches("model.safetensors").len();
    assert_eq!(world.pull("org/name").unwrap().fetched, 0);
    assert_eq!(world.server.fetches("model.safetensors").len(), before, "nothing is fetched twice");
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let world = World::folder(1000);
    world.pull("org/name").unwrap();
    let requests = world.server.requests();
    assert!(requests.iter().any(|request| request.on_content_host));
    for request in requests {
        let expected = (!request.on_content_host).then_some("Bearer secret");
        assert_eq!(request.authorization.as_deref(), expected, "{request:?}");
    }
}

#[test]
fn a_cut_connection_is_taken_up_where_it_ended() {
    let world = World::folder(900_000);
    world.server.fail(Fault::Cut("model.safetensors", 400_000));
    world.server.fail(Fault::Cut("model.safetensors", 200_000));
    world.pull("org/name").unwrap();
    let ranges: Vec<_> = world.server.fetches("model.safetensors").iter().map(|get| get.range).collect();
    assert_eq!(ranges, [None, Some(400_000), Some(600_000)]);
}

#[test]
fn a_part_of_an_earlier_run_is_taken_up_and_verified() {
    let world = World::folder(500_000);
    let whole = weights(500_000);
    world.put_part(&whole, &whole[..123_456]);
    assert_eq!(world.pull("org/name").unwrap().fetched, 500_000 - 123_456 + 25);
    assert_eq!(world.server.fetches("model.safetensors")[0].range, Some(123_456));
    assert!(!world.part(&whole).exists());

    let world = World::folder(500_000);
    world.put_part(&whole, &[7; 1000]);
    let (pulled, told) = world.pull_with(world.settings(), "org/name");
    pulled.unwrap();
    assert!(told.iter().any(|line| line.contains("damaged")), "{told:?}");
    assert_eq!(std::fs::read(world.find("org/name").unwrap().join("model.safetensors")).unwrap(), whole);

    let world = World::folder(1000);
    world.put_part(&weights(1000), &[7; 2000]);
    world.pull("org/name").unwrap();
}

#[test]
fn a_server_that_knows_no_ranges_sends_all_of_it_again() {
    let world = World::folder(500_000);
    world.server.fail(Fault::Cut("model.safetensors", 300_000));
    world.server.fail(Fault::NoRange("model.safetensors"));
    world.pull("org/name").unwrap();
    assert_eq!(world.server.fetches("model.safetensors").len(), 2);
}

#[test]
fn silence_is_a_broken_connection() {
    let world = World::folder(500_000);
    world.server.fail(Fault::Stall("model.safetensors", 300_000));
    let mut settings = world.settings();
    settings.stall_limit = Duration::from_millis(300);
    world.pull_with(settings, "org/name").0.unwrap();
    assert_eq!(world.server.fetches("model.safetensors")[1].range, Some(300_000));
}

#[test]
fn wrong_bytes_are_thrown_away_and_refused() {
    let world = World::folder(100_000);
    world.server.fail(Fault::Wrong("model.safetensors"));
    let error = text(world.pull("org/name"));
    assert!(error.contains("model.safetensors") && error.contains("sha256"), "{error}");
    let whole = weights(100_000);
    assert!(!world.part(&whole).exists() && !world.repo().join("blobs").join(sha256(&whole)).exists());
    assert!(matches!(world.find("org/name"), Err(HubError::Absent { .. })), "no revision was noted");
    world.server.fail(Fault::Longer("model.safetensors"));
    let error = text(world.pull("org/name"));
    assert!(error.contains("longer than the 100000 bytes"), "{error}");
    world.pull("org/name").expect("the next pull begins anew");
}

#[test]
fn a_wrong_small_file_is_refused_by_gits_hash() {
    let world = World::folder(1000);
    world.server.fail(Fault::Wrong("config.json"));
    let error = text(world.pull("org/name"));
    assert!(error.contains("config.json") && error.contains("git hash"), "{error}");
}

#[test]
fn every_refusal_of_the_hubs_has_its_own_words() {
    for (at, status, code, words) in [
        ("/api/", 403, "GatedRepo", &["gated", "HF_TOKEN"][..]),
        ("config.json", 401, "GatedRepo", &["gated"]),
        ("/api/", 404, "RepoNotFound", &["org/name", "no such model", "private"]),
        ("/api/", 401, "", &["refused access", "401"]),
        ("/api/", 404, "RevisionNotFound", &["no revision `v9`"]),
        ("tokenizer.json", 404, "EntryNotFound", &["no file `tokenizer.json`"]),
    ] {
        let world = World::folder(1000);
        world.server.fail(Fault::Status(at, status, code));
        let error = text(world.pull("org/name@v9"));
        assert!(words.iter().all(|word| error.contains(word)), "{status} {code}: {error}");
    }
    let world = World::folder(1000);
    world.server.fail(Fault::Status("/api/", 401, ""));
    let mut settings = world.settings();
    settings.token = None;
    let error = text(world.pull_with(settings, "org/name").0);
    assert!(error.contains("set HF_TOKEN") && !error.contains("secret"), "{error}");
}

#[test]
fn a_busy_hub_is_asked_again_but_not_for_ever() {
    let world = World::folder(1000);
    for fault in [("/api/", 503), ("/api/", 429), ("model.safetensors", 500), ("model.safetensors", 502)] {
        world.server.fail(Fault::Status(fault.0, fault.1, ""));
    }
    world.pull("org/name").unwrap();
    let world = World::folder(1000);
    (0..20).for_each(|_| world.server.fail(Fault::Status("/api/", 503, "")));
    let error = text(world.pull("org/name"));
    assert!(error.contains("503") && error.contains("5 tries"), "{error}");
    assert_eq!(world.server.requests().len(), 5);
}

#[test]
fn where_nobody_answers_or_may_be_asked_that_is_said() {
    let world = World::folder(1000);
    let mut settings = world.settings();
    let closed = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
    settings.endpoint = Some(format!("http://{closed}"));
    let error = text(world.pull_with(settings, "org/name").0);
    assert!(error.contains("cannot be reached") && error.contains("HF_HUB_OFFLINE"), "{error}");
    let mut settings = world.settings();
    settings.offline = true;
    let error = text(world.pull_with(settings, "org/name").0);
    assert!(error.contains("offline") && world.server.requests().is_empty(), "{error}");
    for endpoint in ["nonsense", "ftp://x", ""] {
        let mut settings = world.settings();
        settings.endpoint = Some(endpoint.into());
        let error = text(world.pull_with(settings, "org/name").0);
        assert!(error.contains("HF_ENDPOINT"), "{endpoint}: {error}");
    }
}

#[test]
fn pulls_at_once_fetch_once_and_do_not_disturb_each_other() {
    for bytes in [2_000_000, 10, 11, 12, 13, 14, 15, 16] {
        let world = World::folder(bytes);
        std::thread::scope(|scope| {
            let pulls: Vec<_> = (0..4).map(|_| scope.spawn(|| world.pull("org/name"))).collect();
            for pull in pulls {
                pull.join().unwrap().unwrap();
            }
        });
        assert_eq!(world.server.fetches("model.safetensors").len(), 1);
    }
}

#[test]
fn parts_that_the_repository_itself_lacks_are_named() {
    let world = World::new();
    world.server.large("m-00001-of-00003.gguf", weights(10));
    world.server.large("m-00003-of-00003.gguf", weights(11));
    let error = text(world.pull("org/name"));
    assert!(error.contains("m-00002-of-00003.gguf") && !error.contains("00001-of"), "{error}");
}

#[test]
fn two_models_of_one_quantisation_go_by_their_files_names() {
    let world = World::new();
    world.server.large("a-Q4_K_M.gguf", weights(10));
    world.server.large("b-Q4_K_M.gguf", weights(11));
    let error = text(world.pull("org/name"));
    assert!(error.contains("a-Q4_K_M") && error.contains("b-Q4_K_M"), "{error}");
    assert!(world.pull("org/name:b-Q4_K_M").unwrap().path.ends_with("b-Q4_K_M.gguf"));
}

#[test]
fn some_files_of_another_commit_leave_a_whole_model_in_its_place() {
    let world = World::folder(1000);
    let older = "f".repeat(40);
    world.pull("org/name").unwrap();
    let snapshots = world.repo().join("snapshots");
    std::fs::rename(snapshots.join(COMMIT), snapshots.join(&older)).unwrap();
    let listings = world.repo().join(".greenroom");
    std::fs::rename(listings.join(format!("{COMMIT}.json")), listings.join(format!("{older}.json"))).unwrap();
    std::fs::write(world.repo().join("refs/main"), &older).unwrap();
    let id = HubId::parse("org/name").unwrap();
    Hub::new(world.settings()).pull(&id, &["*.json".into()], &Told::default()).unwrap();
    assert_eq!(world.find("org/name").unwrap(), snapshots.join(&older));
}

#[test]
fn a_password_in_the_endpoint_is_in_no_message() {
    let world = World::folder(10);
    let mut settings = world.settings();
    let closed = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
    settings.endpoint = Some(format!("http://user:hunter2@{closed}"));
    let error = text(world.pull_with(settings, "org/name").0);
    assert!(error.contains(&closed.to_string()) && !error.contains("hunter2"), "{error}");
}

#[test]
fn what_does_not_fit_the_disk_is_not_begun() {
    let world = World::new();
    world.server.small("config.json", "{}");
    world.server.claiming("model.safetensors", 1 << 60);
    let error = text(world.pull("org/name"));
    assert!(
        error.contains("no space") && error.contains("1.0 EiB are needed") && error.contains("free"),
        "{error}"
    );
    assert!(world.server.fetches("config.json").is_empty());
}

#[test]
fn names_that_leave_the_cache_are_refused() {
    for name in ["../../evil.safetensors", "/etc/evil.safetensors", "a/../../evil.safetensors"] {
        let world = World::folder(1000);
        world.server.small(name, "x");
        let error = text(world.pull("org/name"));
        assert!(error.contains("leaves its folder"), "{error}");
        assert!(!world.repo().exists(), "nothing was written");
    }
}

#[test]
fn a_quantisation_is_named_or_the_only_one() {
    let world = World::new();
    world.server.small("README.md", "x");
    world.server.large("model-Q4_K_M.gguf", weights(5000));
    world.server.large("sub/model-BF16-00001-of-00002.gguf", weights(7000));
    world.server.large("sub/model-BF16-00002-of-00002.gguf", weights(7001));
    let error = text(world.pull("org/name"));
    assert!(
        error.contains("org/name:Q4_K_M  4.9 KiB") && error.contains("org/name:BF16  13.7 KiB"),
        "{error}"
    );
    let error = text(world.pull("org/name:Q2_K"));
    assert!(error.contains("no quantisation `Q2_K`") && error.contains("org/name:BF16"), "{error}");
    let pulled = world.pull("org/name:q4_k_m").unwrap();
    assert!(pulled.path.ends_with("model-Q4_K_M.gguf"));
    assert_eq!(world.find("org/name").unwrap(), pulled.path, "the only one that is here");
    let pulled = world.pull("org/name:BF16").unwrap();
    assert_eq!((pulled.files, pulled.path.ends_with("sub/model-BF16-00001-of-00002.gguf")), (2, true));
    assert!(matches!(world.find("org/name"), Err(HubError::Choose { .. })));
    std::fs::remove_file(pulled.path.with_file_name("model-BF16-00002-of-00002.gguf")).unwrap();
    match world.find("org/name:BF16") {
        Err(HubError::Incomplete { missing, .. }) => {
            assert_eq!(missing, ["sub/model-BF16-00002-of-00002.gguf"]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_snapshot_with_something_missing_is_never_handed_out() {
    let world = World::new();
    world.server.small("config.json", "{}");
    world.server.small("tokenizer.json", "{}");
    world.server.small("chat_template.jinja", "{{ messages }}");
    let map = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    world.server.small("model.safetensors.index.json", map);
    world.server.large("model-00001-of-00002.safetensors", weights(1000));
    world.server.large("model-00002-of-00002.safetensors", weights(1001));
    let path = world.pull("org/name").unwrap().path;
    let whole = std::fs::canonicalize(path.join("model-00002-of-00002.safetensors")).unwrap();
    let lacks = |file: &str| match world.find("org/name") {
        Err(HubError::Incomplete { missing, .. }) => assert_eq!(missing, [file]),
        other => panic!("{other:?}"),
    };
    std::fs::write(&whole, [0; 500]).unwrap();
    lacks("model-00002-of-00002.safetensors");
    std::fs::remove_file(&whole).unwrap();
    lacks("model-00002-of-00002.safetensors");
    world.pull("org/name").unwrap();
    std::fs::remove_file(path.join("chat_template.jinja")).unwrap();
    lacks("chat_template.jinja");
    // Another program's pull leaves no listing: index and names have to do.
    std::fs::remove_dir_all(world.repo().join(".greenroom")).unwrap();
    assert_eq!(world.find("org/name").unwrap(), path);
    std::fs::remove_file(path.join("tokenizer.json")).unwrap();
    lacks("tokenizer.json");
}

#[test]
fn a_ref_that_points_elsewhere_is_not_followed() {
    let world = World::folder(1000);
    world.pull("org/name").unwrap();
    std::fs::write(world.repo().join("refs/main"), "../../../..").unwrap();
    assert!(matches!(world.find("org/name"), Err(HubError::Absent { .. })));
}

#[test]
fn patterns_take_exactly_what_they_match() {
    let world = World::folder(1000);
    let id = HubId::parse("org/name").unwrap();
    let pull = |pattern: &str| Hub::new(world.settings()).pull(&id, &[pattern.to_owned()], &Told::default());
    let pulled = pull("*.md").unwrap();
    assert_eq!((pulled.files, std::fs::read_to_string(&pulled.path).unwrap()), (1, "read me".to_owned()));
    assert!(text(pull("*.gguf")).contains("--file *.gguf"));
    assert!(matches!(world.find("org/name"), Err(HubError::Absent { .. } | HubError::Incomplete { .. })));
}
