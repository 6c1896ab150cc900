//! Live sessions inside a host's own System, with the real model and no chat model: what is written down,
//! whatever the chunks; what only grows; how sessions end.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use greenroom::actors::{SessionReader, SpeechSession};
use greenroom::config::DeviceChoice;
use greenroom::model::speech::source::{LoadedSpeech, SpeechFolder, SpeechSource};
use greenroom::types::speech::{
    AppendError, LiveInput, SessionEnd, SessionEvent, SessionNews, SessionSpec, SessionStatus, SpeechFailure,
    Transcription,
};
use greenroom::types::{LoadError, Refusal};
use greenroom::{Config, Greenroom};

fn clip(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/audio").join(name)).unwrap()
}

/// The samples of a 16 kHz WAV file.
fn pcm(name: &str) -> Vec<u8> {
    clip(name)[44..].to_vec()
}

async fn start(change: impl FnOnce(&mut Config)) -> Greenroom {
    let mut config = Config::default();
    config.engine.device = DeviceChoice::Cpu;
    change(&mut config);
    let speech = SpeechFolder::new(common::speech_model("whisper-tiny.en"), &config).unwrap();
    Greenroom::builder(config).speech(Arc::new(speech)).start().await.unwrap()
}

/// What is said in `jfk.*`, whatever the punctuation.
const JFK: &str = "and so my fellow americans ask not what your country can do for you ask what you can do for your country";

fn plain(text: &str) -> String {
    let letters = |c: char| c.is_alphanumeric() || c == ' ';
    text.to_lowercase().chars().filter(|c| letters(*c)).collect()
}

fn run(test: impl AsyncFnOnce()) {
    actix_rt::System::new().block_on(test());
}

fn spec(partials: bool) -> SessionSpec {
    let mut spec = SessionSpec::default();
    spec.partials = partials;
    spec
}

async fn open(greenroom: &Greenroom, spec: SessionSpec) -> SpeechSession {
    greenroom.handles().open_session(spec).await.unwrap()
}

/// Sends audio in chunks of these sizes, around and around.
async fn feed(session: &SpeechSession, audio: &[u8], sizes: &[usize]) {
    let (mut at, mut sizes) = (0, sizes.iter().cycle());
    while at < audio.len() {
        let end = audio.len().min(at + sizes.next().unwrap());
        session.room(end - at).await;
        session.append(None, audio[at..end].to_vec().into()).unwrap();
        at = end;
    }
    session.finish();
}

async fn done(session: &SpeechSession) -> Arc<Transcription> {
    match session.ended().await {
        SessionEnd::Done(heard) => heard,
        other => panic!("{other:?}"),
    }
}

#[test]
fn any_chunking_gives_the_same_final_text() {
    run(async || {
        let greenroom = start(|_| {}).await;
        let audio = [pcm("ps-goforward.wav"), vec![0; 40_000], pcm("jfk.wav")].concat();
        let whole = open(&greenroom, spec(false)).await;
        feed(&whole, &audio, &[audio.len()]).await;
        let whole = done(&whole).await;
        assert!(plain(&whole.text()).ends_with(JFK), "{}", whole.text());
        assert_eq!(whole.duration, audio.len() as f64 / 32_000.0, "all audio counts");
        for (partials, sizes) in [(false, &[3, 1, 32_000][..]), (true, &[640, 63_999])] {
            let session = open(&greenroom, spec(partials)).await;
            feed(&session, &audio, sizes).await;
            let heard = done(&session).await;
            assert_eq!(heard.text(), whole.text(), "{sizes:?}");
            let times = |heard: &Transcription| -> Vec<_> {
                heard.segments.iter().map(|segment| (segment.start, segment.end)).collect()
            };
            assert_eq!(times(&heard), times(&whole), "{sizes:?}");
        }
        greenroom.stop().await;
    });
}

#[test]
fn committed_text_only_grows_and_comes_before_the_end() {
    run(async || {
        let greenroom = start(|config| config.speech.preload = true).await;
        let session = open(&greenroom, spec(true)).await;
        let mut reader = session.reader();
        let audio = [pcm("jfk.wav"), vec![0; 40_000]].concat();
        let feeding = {
            let session = session.clone();
            actix_rt::spawn(async move {
                // Not faster than it is heard, so that there is something to be told meanwhile.
                for chunk in audio.chunks(32_000) {
                    let before = session.state(0);
                    session.append(None, chunk.to_vec().into()).unwrap();
                    let heard = async {
                        let mut now = before.clone();
                        while (&now.committed, &now.tentative) == (&before.committed, &before.tentative) {
                            session.changed_since(now.revision).await;
                            now = session.state(0);
                        }
                    };
                    let _nothing_to_tell = tokio::time::timeout(Duration::from_secs(3), heard).await;
                }
                session.finish();
            })
        };
        let (mut committed, mut revision, mut partials, mut kinds) = (String::new(), 0, 0, Vec::new());
        let (mut words, mut finals) = (Vec::new(), String::new());
        while let Some(news) = reader.next().await {
            match news {
                SessionNews::Partial(partial) => {
                    assert!(partial.revision > revision);
                    assert!(partial.committed.starts_with(&committed), "{committed:?} {partial:?}");
                    (revision, committed) = (partial.revision, partial.committed);
                    partials += 1;
                }
                SessionNews::Event(event) => kinds.push(match &*event {
                    SessionEvent::SpeechStarted { .. } => "started",
                    SessionEvent::SpeechStopped { .. } => "stopped",
                    SessionEvent::Committed { text, words: all, .. } => {
                        assert!(text.starts_with(&committed), "{committed:?} {text:?}");
                        committed.clone_from(text);
                        words.clone_from(all);
                        "committed"
                    }
                    SessionEvent::Final { text, .. } => {
                        finals.push_str(text);
                        committed.clear();
                        "final"
                    }
                    SessionEvent::TurnEnded { .. } => "turn ended",
                    SessionEvent::TurnFinal { .. } => "turn final",
                    other => panic!("{other:?}"),
                }),
                SessionNews::End(SessionEnd::Done(_)) => kinds.push("done"),
                SessionNews::End(other) => panic!("{other:?}"),
            }
        }
        feeding.await.unwrap();
        assert!(finals.contains("country"), "{finals}");
        assert!(partials > 1, "{partials} partials");
        assert!(words.windows(2).all(|pair| pair[0].start <= pair[1].start), "{words:?}");
        assert_eq!((kinds[0], kinds[kinds.len() - 1]), ("started", "done"));
        let count = |kind: &str| kinds.iter().filter(|found| **found == kind).count();
        for kind in ["stopped", "committed", "final"] {
            assert_eq!(count(kind), count("started"), "{kinds:?}");
        }
        // What a late reader of the state sees is the same.
        let state = session.state(0);
        assert_eq!(state.status, SessionStatus::Done);
        assert!(state.committed.contains("country"), "{state:?}");
        assert_eq!(session.state(state.revision).committed, "");
        greenroom.stop().await;
    });
}

#[test]
fn a_browsers_recording_comes_in_pieces_and_a_broken_one_is_named() {
    run(async || {
        let greenroom = start(|_| {}).await;
        for (name, sizes) in [("jfk.webm", &[400, 3_000][..]), ("jfk.ogg", &[1_000]), ("jfk.mp3", &[997])] {
            let mut container = spec(false);
            container.input = LiveInput::Container;
            let session = open(&greenroom, container).await;
            feed(&session, &clip(name), sizes).await;
            let text = done(&session).await.text();
            assert!(plain(&text).ends_with(&JFK[20..]), "{name}: {text}");
        }
        let mut container = spec(false);
        container.input = LiveInput::Container;
        let session = open(&greenroom, container).await;
        session
            .append(
                None,
                b"%PDF-1.7 and so on, for long enough to be looked at by whoever wants to look at it"
                    .to_vec()
                    .into(),
            )
            .unwrap();
        session.finish();
        let SessionEnd::Failed(SpeechFailure::Audio(fault)) = session.ended().await else {
            panic!("no fault")
        };
        assert!(fault.message.contains("a PDF document"), "{fault}");
        greenroom.stop().await;
    });
}

#[test]
fn silence_and_noise_give_no_text_and_nobody_loads_for_a_wrong_name() {
    run(async || {
        let greenroom = start(|_| {}).await;
        for name in ["silence-5s.wav", "noise-5s.wav"] {
            let session = open(&greenroom, spec(true)).await;
            feed(&session, &pcm(name), &[3_200]).await;
            let heard = done(&session).await;
            assert_eq!((heard.text().as_str(), heard.duration), ("", 5.0), "{name}");
        }
        let mut other = spec(true);
        other.model = Some("whisper-huge".into());
        let refused = greenroom.handles().open_session(other).await.unwrap_err();
        assert!(matches!(refused, Refusal::UnknownModel { .. }), "{refused}");
        greenroom.stop().await;
    });
}

#[test]
fn turns_are_ended_by_the_client_or_forgotten() {
    run(async || {
        let greenroom = start(|_| {}).await;
        let mut manual = spec(true);
        manual.manual_turns = true;
        let session = open(&greenroom, manual).await;
        let append = |name: &str| session.append(None, pcm(name).into()).unwrap();
        append("ps-something.wav");
        session.clear().unwrap();
        append("ps-goforward.wav");
        assert_eq!(session.commit(), Ok(true));
        assert_eq!(session.commit(), Ok(false), "nothing came since");
        session.finish();
        let heard = done(&session).await;
        let text = heard.text().to_lowercase();
        assert!(text.contains("forward"), "{text}");
        let mut reader = session.reader();
        let (mut cleared, mut ended, mut finished) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(news) = reader.next().await {
            match news {
                SessionNews::Event(event) => match *event {
                    SessionEvent::Cleared { turn } => cleared.push(turn),
                    SessionEvent::TurnEnded { turn, .. } => ended.push(turn),
                    SessionEvent::TurnFinal { turn } => finished.push(turn),
                    _ => {}
                },
                SessionNews::End(_) | SessionNews::Partial(_) => {}
            }
        }
        assert_eq!((cleared, &ended[..]), (vec![0], &[1][..]));
        assert_eq!(finished, ended);
        greenroom.stop().await;
    });
}

/// Reads on until an utterance is final; its text.
async fn next_final(reader: &mut SessionReader) -> String {
    loop {
        match reader.next().await {
            Some(SessionNews::Event(event)) => {
                if let SessionEvent::Final { text, .. } = &*event {
                    return text.clone();
                }
            }
            Some(SessionNews::Partial(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_was_written_down_is_forgotten_with_its_turn() {
    run(async || {
        let greenroom = start(|_| {}).await;
        let mut manual = spec(false);
        manual.manual_turns = true;
        let session = open(&greenroom, manual).await;
        let mut reader = session.reader();
        session.append(None, [pcm("ps-goforward.wav"), vec![0; 40_000]].concat().into()).unwrap();
        let first = next_final(&mut reader).await;
        assert_eq!(session.clear(), Ok(true));
        session.append(None, pcm("jfk.wav").into()).unwrap();
        session.finish();
        let heard = done(&session).await;
        let text = plain(&heard.text());
        assert!(text.starts_with("and so") && text.ends_with(&JFK[20..]), "{text} after {first}");
        assert!(heard.segments.iter().enumerate().all(|(index, segment)| segment.id == index));
        // What was told as committed is not taken back.
        assert!(session.state(0).committed.starts_with(&first));
        greenroom.stop().await;
    });
}

#[test]
fn a_turn_of_a_browsers_recording_ends_while_the_recording_goes_on() {
    run(async || {
        let greenroom = start(|_| {}).await;
        let mut container = spec(false);
        container.input = LiveInput::Container;
        let session = open(&greenroom, container).await;
        let mut reader = session.reader();
        session.append(None, clip("jfk.webm").into()).unwrap();
        session.commit().unwrap();
        while !plain(&next_final(&mut reader).await).ends_with("for your country") {}
        assert_eq!(session.status(), SessionStatus::Open);
        session.cancel();
        greenroom.stop().await;
    });
}

#[test]
fn a_server_that_goes_down_in_order_writes_down_what_was_said() {
    run(async || {
        let greenroom = start(|_| {}).await;
        let session = open(&greenroom, spec(false)).await;
        session.append(None, pcm("jfk.wav").into()).unwrap();
        greenroom.drain(Duration::from_secs(60)).await;
        let text = plain(&done(&session).await.text());
        assert!(text.ends_with(&JFK[20..]), "{text}");
        greenroom.stop().await;
    });
}

#[test]
fn chunks_are_taken_once_and_in_order() {
    run(async || {
        let greenroom = start(|_| {}).await;
        let session = open(&greenroom, spec(false)).await;
        let chunk = bytes::Bytes::from(vec![0; 3_200]);
        assert_eq!(session.append(Some(0), chunk.clone()), Ok(true));
        assert_eq!(session.append(Some(0), chunk.clone()), Ok(false));
        assert_eq!(session.append(Some(2), chunk.clone()), Err(AppendError::OutOfOrder { expected: 1 }));
        assert_eq!(session.append(Some(1), chunk.clone()), Ok(true));
        assert_eq!(session.state(0).received_s, 0.2);
        session.finish();
        done(&session).await;
        assert_eq!(session.append(Some(1), chunk.clone()), Ok(false), "taken, also now");
        let closed = AppendError::Closed { status: SessionStatus::Done };
        assert_eq!(session.append(Some(2), chunk), Err(closed));
        greenroom.stop().await;
    });
}

#[test]
fn sessions_end_by_themselves_and_are_limited_and_forgotten() {
    run(async || {
        let greenroom = start(|config| {
            config.speech.max_sessions = 2;
            config.speech.session_keep_s = 1;
        })
        .await;
        let handles = greenroom.handles();
        let mut short = spec(false);
        (short.idle, short.max_duration) = (Some(Duration::from_millis(50)), Some(Duration::from_secs(4)));
        let idle = open(&greenroom, short.clone()).await;
        let kept = open(&greenroom, spec(false)).await;
        let refused = handles.open_session(spec(false)).await.unwrap_err();
        assert!(matches!(refused, Refusal::SessionLimit { limit: 2, .. }), "{refused}");
        assert_eq!(done(&idle).await.text(), "", "finished for being idle");
        // One that ended counts no more.
        short.idle = None;
        let long = open(&greenroom, short).await;
        long.append(None, pcm("jfk.wav").into()).unwrap();
        assert_eq!(done(&long).await.duration, 4.0);
        assert_eq!(long.append(None, vec![0; 2].into()), Err(AppendError::DurationLimit));
        assert_eq!(handles.speech().await.unwrap().sessions, 1);
        kept.cancel();
        assert!(handles.find_session(kept.id()).is_none(), "cancelled");
        while handles.find_session(long.id()).is_some() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        greenroom.stop().await;
    });
}

#[test]
fn a_cancelled_session_stops_computing_and_a_stopped_server_says_so() {
    run(async || {
        let greenroom = start(|config| config.speech.preload = true).await;
        let handles = greenroom.handles();
        let (session, left) = (open(&greenroom, spec(true)).await, open(&greenroom, spec(true)).await);
        session.append(None, pcm("long-60s.wav")[..900_000].to_vec().into()).unwrap();
        let mut reader = session.reader();
        // Until it is certain that something is computed.
        while !matches!(reader.next().await.unwrap(), SessionNews::Partial(_) | SessionNews::End(_)) {}
        session.cancel();
        assert_eq!(session.ended().await, SessionEnd::Cancelled);
        left.cancel();
        while handles.speech().await.unwrap().state_bytes > 0 {
            tokio::task::yield_now().await;
        }
        let late = open(&greenroom, spec(true)).await;
        late.append(None, pcm("long-60s.wav")[..900_000].to_vec().into()).unwrap();
        greenroom.stop().await;
        assert_eq!(late.ended().await, SessionEnd::Failed(SpeechFailure::ShuttingDown));
    });
}

/// Counts how often it is loaded.
struct Counted {
    folder: SpeechFolder,
    loads: AtomicUsize,
}

impl SpeechSource for Counted {
    fn id(&self) -> &str {
        self.folder.id()
    }

    fn load(&self) -> Result<LoadedSpeech, LoadError> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        self.folder.load()
    }
}

#[test]
fn who_asks_and_goes_leaves_no_load_behind() {
    run(async || {
        let mut config = Config::default();
        config.engine.device = DeviceChoice::Cpu;
        let folder = SpeechFolder::new(common::speech_model("whisper-tiny.en"), &config).unwrap();
        let source = Arc::new(Counted { folder, loads: AtomicUsize::new(0) });
        let speech = Arc::clone(&source) as Arc<dyn SpeechSource>;
        let greenroom = Greenroom::builder(config).speech(speech).start().await.unwrap();
        for _ in 0..8 {
            let session = open(&greenroom, spec(false)).await;
            session.append(None, pcm("ps-goforward.wav").into()).unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
            session.cancel();
        }
        let last = open(&greenroom, spec(false)).await;
        feed(&last, &pcm("ps-goforward.wav"), &[32_000]).await;
        assert_eq!(done(&last).await.text(), "Go forward 10 meters.");
        assert_eq!(source.loads.load(Ordering::Relaxed), 1);
        greenroom.stop().await;
    });
}
