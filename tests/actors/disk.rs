//! The prompt cache's tier on disk, as an application sees it: what was computed once is not
//! computed again after a restart, and whatever is wrong with the folder, answers are right.

use std::fs;
use std::path::Path;

use greenroom::actors::messages::CacheStatistics;
use greenroom::model::fake::Script;
use greenroom::types::{ChatEvent, ChatRequest, Usage};
use greenroom::{Config, Greenroom};

use crate::harness::{ask, read, run, start, stop};

fn long() -> ChatRequest {
    let mut request = ask(&"what an agent says each time it asks. ".repeat(60));
    request.max_tokens = Some(30);
    request
}

fn with(dir: &Path) -> impl Fn(&mut Config) + Clone + use<> {
    let dir = dir.to_path_buf();
    move |config| config.cache.dir = Some(dir.clone())
}

async fn answer(greenroom: &Greenroom, request: ChatRequest) -> (String, Usage) {
    let (text, end) = read(greenroom.chat(request).await.unwrap()).await;
    let ChatEvent::Done { usage, .. } = end else { panic!("{end:?}") };
    (text, usage)
}

/// One life of a server: an answer, and whether anything was kept.
async fn life(dir: &Path, request: ChatRequest) -> (String, Usage, u64) {
    let (greenroom, _) = start(Script::new(), with(dir)).await;
    let (text, usage) = answer(&greenroom, request).await;
    let gauges = greenroom.handles().gauges().clone();
    stop(greenroom).await;
    (text, usage, gauges.ssd_written_bytes.get())
}

fn segments(dir: &Path) -> Vec<std::path::PathBuf> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|suffix| suffix == "gkv")).collect()
}

#[test]
fn what_was_computed_outlives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    run(async move {
        let (cold, usage, written) = life(dir.path(), long()).await;
        assert_eq!(usage.cached_tokens, 0);
        assert!(written > 0);
        assert!(segments(dir.path()).len() > 3, "a long prompt is several segments");
        let (greenroom, model) = start(Script::new(), with(dir.path())).await;
        let (warm, usage) = answer(&greenroom, long()).await;
        assert_eq!(warm, cold);
        assert_eq!(usage.cached_tokens, usage.prompt_tokens - 1);
        assert_eq!(model.records()[0].start, usage.prompt_tokens - 1, "one token was computed");
        let handles = greenroom.handles();
        let gauges = handles.gauges();
        assert_eq!(gauges.cache_ssd_hit_tokens.get(), u64::from(usage.prompt_tokens - 1));
        let report = handles.cache().send(CacheStatistics).await.unwrap();
        assert_eq!(report.ssd_bytes, gauges.ssd_bytes.get());
        assert!(report.ssd_segments > 3 && report.kind.contains("on disk"), "{report:?}");
        // What was read is in memory now.
        let (again, usage) = answer(&greenroom, long()).await;
        assert_eq!((again, usage.cached_tokens), (cold, usage.prompt_tokens - 1));
        stop(greenroom).await;
        assert_eq!(gauges.ssd_bytes.get(), 0, "gauges return to zero");
    });
}

#[test]
fn another_question_after_the_same_beginning_reads_just_that() {
    let dir = tempfile::tempdir().unwrap();
    run(async move {
        life(dir.path(), long()).await;
        let mut other = long();
        let beginning = other.messages[0].content.clone().unwrap();
        other.messages[0].content = Some(format!("{}and something else", &beginning[..1700]));
        let (greenroom, _) = start(Script::new(), |config| config.cache.enabled = false).await;
        let (cold, _) = answer(&greenroom, other.clone()).await;
        stop(greenroom).await;
        let (warm, usage, written) = life(dir.path(), other.clone()).await;
        assert_eq!(warm, cold);
        assert!((1700..1720).contains(&usage.cached_tokens), "{usage:?}");
        assert!(written > 0, "its own end was added");
        let (_, usage, written) = life(dir.path(), other).await;
        assert_eq!((usage.cached_tokens, written), (usage.prompt_tokens - 1, 0));
    });
}

#[test]
fn damaged_files_cost_time_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    run(async move {
        let (cold, _, _) = life(dir.path(), long()).await;
        let mut files = segments(dir.path());
        files.sort();
        for (number, file) in files.iter().enumerate() {
            let mut bytes = fs::read(file).unwrap();
            let last = bytes.len() - 1;
            match number % 3 {
                0 => bytes[last] ^= 1,
                1 => bytes.truncate(last),
                _ => bytes[20] ^= 1,
            }
            fs::write(file, bytes).unwrap();
        }
        let (greenroom, _) = start(Script::new(), with(dir.path())).await;
        let (again, usage) = answer(&greenroom, long()).await;
        assert_eq!((again, usage.cached_tokens), (cold.clone(), 0));
        stop(greenroom).await;
        let (warm, usage, _) = life(dir.path(), long()).await;
        assert_eq!(warm, cold);
        assert_eq!(usage.cached_tokens, usage.prompt_tokens - 1, "what was damaged is made good");
    });
}

#[test]
fn two_servers_do_not_share_a_folder_and_both_serve() {
    let dir = tempfile::tempdir().unwrap();
    run(async move {
        let (first, _) = start(Script::new(), with(dir.path())).await;
        answer(&first, long()).await;
        let (second, _) = start(Script::new(), with(dir.path())).await;
        let (_, usage) = answer(&second, long()).await;
        assert_eq!(usage.cached_tokens, 0);
        let report = second.handles().cache().send(CacheStatistics).await.unwrap();
        assert!(report.kind.contains("not open"), "{report:?}");
        stop(second).await;
        stop(first).await;
    });
}

#[test]
fn a_folder_that_cannot_be_written_any_more_turns_the_tier_off_and_the_server_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    run(async move {
        let (greenroom, _) = start(Script::new(), with(dir.path())).await;
        let (first, _) = answer(&greenroom, long()).await;
        // As if the disk were gone: no file can be made any more.
        let elsewhere = dir.path().with_extension("moved");
        fs::rename(dir.path(), &elsewhere).unwrap();
        let mut other = long();
        other.messages[0].content = Some("z".repeat(3000));
        answer(&greenroom, other).await;
        let (again, usage) = answer(&greenroom, long()).await;
        assert_eq!((again, usage.cached_tokens), (first, usage.prompt_tokens - 1), "from memory");
        let handles = greenroom.handles();
        stop(greenroom).await;
        assert!(handles.gauges().ssd_dropped.get() > 0);
        fs::remove_dir_all(elsewhere).unwrap();
    });
}

#[test]
fn what_is_forgotten_does_not_come_back_with_a_write_under_way() {
    let dir = tempfile::tempdir().unwrap();
    run(async move {
        // So slow that a segment is being written for as long as the test needs.
        let slow = |config: &mut Config| {
            with(dir.path())(config);
            config.cache.ssd_write_mib_s = 1;
        };
        let (greenroom, _) = start(Script::new(), slow).await;
        answer(&greenroom, long()).await;
        let order = greenroom::actors::ClearCache { disk: true };
        let report = greenroom.handles().clear_cache().send(order).await.unwrap();
        assert_eq!((report.entries, report.ssd_segments), (0, 0));
        stop(greenroom).await;
        assert!(segments(dir.path()).is_empty(), "{:?}", segments(dir.path()));
    });
}

#[test]
fn a_small_budget_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    run(async move {
        let tiny = |config: &mut Config| {
            with(dir.path())(config);
            config.cache.ssd_gb = 0.001;
        };
        let (greenroom, _) = start(Script::new(), tiny).await;
        for number in 0..60u32 {
            let mut request = long();
            request.messages[0].content = Some(format!("{number:04}{}", "y".repeat(3500)));
            request.max_tokens = Some(2);
            answer(&greenroom, request).await;
        }
        stop(greenroom).await;
        let bytes: u64 = segments(dir.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert!(bytes <= 1_000_000 && bytes > 500_000, "{bytes}");
    });
}

#[test]
fn a_prompt_that_is_larger_than_the_budget_is_not_written_again_and_again() {
    let dir = tempfile::tempdir().unwrap();
    run(async move {
        let tiny = |config: &mut Config| {
            with(dir.path())(config);
            config.cache.ssd_gb = 0.00001;
        };
        let (greenroom, _) = start(Script::new(), tiny).await;
        let gauges = greenroom.handles().gauges().clone();
        answer(&greenroom, long()).await;
        stop(greenroom).await;
        let written = gauges.ssd_written_bytes.get();
        // Each segment once, and each deposit's attempt at what found no room.
        assert!(written < 100_000, "{written} bytes for a prompt of 2,300 tokens");
    });
}

/// What nobody waits for must not make others' steps shorter.
#[test]
fn writing_behind_does_not_cut_prompts_into_small_pieces() {
    use std::sync::Arc;
    use std::time::Duration;

    use greenroom::model::fake::FakeModel;
    use greenroom::types::ManualClock;

    let dir = tempfile::tempdir().unwrap();
    let mut steps = Vec::new();
    for folder in [None, Some(dir.path().to_path_buf())] {
        let count = Arc::new(std::sync::Mutex::new(0));
        let counted = Arc::clone(&count);
        run(async move {
            let clock = Arc::new(ManualClock::new());
            let script =
                Script::new().takes(Duration::from_millis(20), Duration::from_micros(1500), clock.clone());
            let mut config = Config::default();
            config.cache.dir = folder;
            let model = FakeModel::new("fake", script);
            let control = model.control();
            let builder = Greenroom::builder(config).model(Arc::new(model)).clock(clock);
            let greenroom = builder.start().await.unwrap();
            greenroom.ready().await.unwrap();
            for text in ["first of all. ", "another prompt, as long. "] {
                let mut request = ask(&text.repeat(140));
                request.max_tokens = Some(2);
                answer(&greenroom, request).await;
            }
            *counted.lock().unwrap() = control.records().len();
            stop(greenroom).await;
        });
        steps.push(*count.lock().unwrap());
    }
    assert_eq!(steps[0], steps[1]);
}
