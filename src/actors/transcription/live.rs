//! A live session's task: what was heard becomes text, utterance after utterance.
//!
//! Two futures share a desk: one takes what the audio thread hears, the other writes down. While
//! somebody speaks, the utterance so far is recognised again and again, no faster than it can be
//! computed; what two results agree on is committed. When it is over it is recognised once more as a
//! whole, and only that text depends on nothing but the audio.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};

use super::session::SpeechSession;
use super::{Shared, User, failure};
use crate::model::speech::audio::AudioLimits;
use crate::model::speech::compute::SpeechError;
use crate::model::speech::features::{self, Recording};
use crate::model::speech::live::{Agreement, Heard, listen};
use crate::model::speech::recognise::recognise;
use crate::model::speech::tokens::SpeechTokens;
use crate::model::speech::{HOP, SAMPLE_RATE, samples, seconds};
use crate::observe::fields;
use crate::types::Ticket;
use crate::types::speech::{
    AudioFaultKind, Segment, SessionEnd, SessionEvent, SpeechFailure, SpeechOptions, Transcription, Word,
};

/// Audio that comes between two looks at an utterance, at least.
const STEP: Duration = Duration::from_millis(500);
/// The pause between looks is so many times what one takes.
const PAUSE: f64 = 1.2;
/// Audio of utterances that wait to be written down, at most, in samples; more is not taken.
const BEHIND: usize = 30 * SAMPLE_RATE as usize;
/// So much of what was said before is told to an utterance, in characters.
const TOLD: usize = 200;
/// A shorter rest behind an utterance's last words is a breath.
const LEAST_REST_S: f64 = 1.0;
/// A recogniser wants so many samples at least.
const LEAST: usize = SAMPLE_RATE as usize / 5;

/// Runs a session to its end, and keeps that for a while.
pub(super) async fn run(
    shared: Rc<Shared>,
    session: SpeechSession,
    ticket: Ticket,
    mut stop: watch::Receiver<bool>,
) {
    let counted = shared.gauges.speech.sessions.hold();
    // Whatever becomes of this task, its clients hear of it.
    let last_word = LastWord { shared: &shared, session: &session };
    let end = tokio::select! {
        biased;
        end = session.ended() => end,
        _ = stop.wait_for(|stop| *stop) => SessionEnd::Failed(SpeechFailure::ShuttingDown),
        () = finish_when_idle(&session) => SessionEnd::Cancelled,
        done = hear(&shared, &session) => match done {
            Ok(heard) => SessionEnd::Done(Arc::new(heard)),
            Err(failure) => SessionEnd::Failed(failure),
        },
    };
    let is_kept = end != SessionEnd::Cancelled;
    session.end(end);
    drop((ticket, counted));
    if is_kept {
        let keep = Duration::from_secs(shared.config.session_keep_s);
        let _deleted = tokio::time::timeout(keep, session.deleted()).await;
    }
    drop(last_word);
}

/// Ends a session that was not ended otherwise, and forgets it.
struct LastWord<'a> {
    shared: &'a Shared,
    session: &'a SpeechSession,
}

impl Drop for LastWord<'_> {
    fn drop(&mut self) {
        let message = "the session broke off inside the server".into();
        self.session.end(SessionEnd::Failed(SpeechFailure::Internal { message }));
        self.shared.sessions.remove(self.session.id());
    }
}

/// Finishes a session that nobody feeds, or that has lasted for as long as one may; never ends.
async fn finish_when_idle(session: &SpeechSession) {
    loop {
        let left = session.time_left();
        if left.is_zero() {
            session.finish();
            return std::future::pending().await;
        }
        tokio::time::sleep(left).await;
    }
}

/// An utterance: first under way, then over.
struct Utterance {
    number: usize,
    turn: usize,
    /// Its first sample's place.
    start: usize,
    samples: RefCell<Vec<f32>>,
    is_over: Cell<bool>,
    /// Its client does not want it.
    is_dropped: Cell<bool>,
    /// It is over or dropped.
    changed: Notify,
}

#[derive(Clone)]
enum Job {
    Utterance(Rc<Utterance>),
    TurnEnd(usize),
    /// What was written down of this turn goes.
    Clear(usize),
}

/// What the two futures share.
#[derive(Default)]
struct Floor {
    jobs: RefCell<VecDeque<Job>>,
    /// Something came.
    come: Notify,
    /// Something was done.
    done: Notify,
    heard: Cell<usize>,
    over: RefCell<Option<Result<Option<String>, SpeechFailure>>>,
}

impl Floor {
    /// Up to here all is done.
    fn processed(&self) -> usize {
        let first = self.jobs.borrow().iter().find_map(|job| match job {
            Job::Utterance(utterance) => Some(utterance.start),
            Job::TurnEnd(_) | Job::Clear(_) => None,
        });
        first.unwrap_or(self.heard.get())
    }

    /// Samples that wait in utterances that are over.
    fn behind(&self) -> usize {
        let waiting = |job: &Job| match job {
            Job::Utterance(utterance) if utterance.is_over.get() => utterance.samples.borrow().len(),
            _ => 0,
        };
        self.jobs.borrow().iter().map(waiting).sum()
    }
}

async fn hear(shared: &Rc<Shared>, session: &SpeechSession) -> Result<Transcription, SpeechFailure> {
    // The model stays as long as the session does.
    let _user = User::new(shared);
    let most = samples(session.max_duration().as_secs_f64());
    let heard = listen(session.spec(), Arc::clone(session.inlet()), most)
        .map_err(|error| SpeechFailure::Internal { message: error.to_string() })?;
    let floor = Floor::default();
    let writer = async {
        let tokens = shared.load().await?;
        tokens.check(&session.options())?;
        let (told, out) = (String::new(), Transcription::default());
        Writer { shared, session, floor: &floor, tokens, told, of_turn: (0, 0), warning: None, out }
            .run()
            .await
    };
    tokio::select! {
        done = writer => done,
        never = collect(heard, session, &floor) => match never {},
    }
}

enum Never {}

/// Takes what is heard, as far as writing down keeps up.
async fn collect(mut heard: mpsc::Receiver<Heard>, session: &SpeechSession, floor: &Floor) -> Never {
    let (mut number, mut turn) = (0, 0);
    let mut current: Option<Rc<Utterance>> = None;
    while let Some(heard) = heard.recv().await {
        match heard {
            Heard::Until(at) => floor.heard.set(at),
            Heard::Started(at) => {
                let utterance = Rc::new(Utterance {
                    number,
                    turn,
                    start: at,
                    samples: RefCell::default(),
                    is_over: Cell::new(false),
                    is_dropped: Cell::new(false),
                    changed: Notify::new(),
                });
                session.event(SessionEvent::SpeechStarted { utterance: number, turn, start: seconds(at) });
                number += 1;
                floor.jobs.borrow_mut().push_back(Job::Utterance(Rc::clone(&utterance)));
                current = Some(utterance);
            }
            Heard::Samples(samples) => {
                if let Some(utterance) = &current {
                    let mut all = utterance.samples.borrow_mut();
                    all.extend(samples);
                    floor.heard.set(floor.heard.get().max(utterance.start + all.len()));
                }
            }
            Heard::Stopped(at) => {
                if let Some(utterance) = current.take() {
                    utterance.samples.borrow_mut().truncate(at.saturating_sub(utterance.start));
                    utterance.is_over.set(true);
                    utterance.changed.notify_one();
                    session
                        .event(SessionEvent::SpeechStopped { utterance: utterance.number, end: seconds(at) });
                }
            }
            Heard::TurnEnded => {
                session.event(SessionEvent::TurnEnded { turn, end: seconds(floor.heard.get()) });
                floor.jobs.borrow_mut().push_back(Job::TurnEnd(turn));
                turn += 1;
            }
            Heard::Cleared => {
                current = None;
                floor.jobs.borrow_mut().retain(|job| match job {
                    Job::Utterance(utterance) if utterance.turn == turn => {
                        utterance.is_dropped.set(true);
                        utterance.changed.notify_one();
                        false
                    }
                    _ => true,
                });
                floor.jobs.borrow_mut().push_back(Job::Clear(turn));
                session.event(SessionEvent::Cleared { turn });
                turn += 1;
            }
            Heard::Ended { is_too_long, warning } => {
                if is_too_long {
                    session.is_too_long();
                }
                session.finish();
                *floor.over.borrow_mut() = Some(Ok(warning));
            }
            Heard::Failed(fault) => {
                *floor.over.borrow_mut() = Some(Err(SpeechFailure::Audio(fault)));
            }
        }
        session.progress(floor.heard.get(), floor.processed());
        floor.come.notify_one();
        while floor.behind() > BEHIND {
            floor.done.notified().await;
        }
    }
    if floor.over.borrow().is_none() {
        let message = "the audio thread broke off".into();
        *floor.over.borrow_mut() = Some(Err(SpeechFailure::Internal { message }));
        floor.come.notify_one();
    }
    std::future::pending().await
}

struct Writer<'a> {
    shared: &'a Rc<Shared>,
    session: &'a SpeechSession,
    floor: &'a Floor,
    tokens: Arc<SpeechTokens>,
    /// The end of what was said before.
    told: String,
    /// The latest turn with something written down, and its first segment.
    of_turn: (usize, usize),
    /// Why an utterance is missing.
    warning: Option<String>,
    out: Transcription,
}

impl Writer<'_> {
    async fn run(mut self) -> Result<Transcription, SpeechFailure> {
        loop {
            let next = self.floor.jobs.borrow().front().cloned();
            match next {
                Some(Job::Utterance(utterance)) => self.utterance(&utterance).await?,
                Some(Job::TurnEnd(turn)) => {
                    self.floor.jobs.borrow_mut().pop_front();
                    self.session.event(SessionEvent::TurnFinal { turn });
                }
                Some(Job::Clear(turn)) => {
                    self.floor.jobs.borrow_mut().pop_front();
                    if self.of_turn.0 == turn {
                        self.out.segments.truncate(self.of_turn.1);
                        self.told.clear();
                    }
                }
                None => {
                    let over = self.floor.over.borrow().clone();
                    match over {
                        Some(over) => {
                            self.out.warning = over?.or(self.warning);
                            self.out.duration = seconds(self.floor.heard.get());
                            return Ok(self.out);
                        }
                        None => self.floor.come.notified().await,
                    }
                }
            }
        }
    }

    /// Follows an utterance to its end, and writes it down.
    async fn utterance(&mut self, utterance: &Rc<Utterance>) -> Result<(), SpeechFailure> {
        let partials = self.session.spec().partials;
        let mut said = Agreement::default();
        if partials {
            self.follow(utterance, &mut said).await;
        }
        while !utterance.is_over.get() && !utterance.is_dropped.get() {
            let broke_off = self.floor.over.borrow().clone();
            if let Some(Err(failure)) = broke_off {
                return Err(failure);
            }
            self.floor.come.notified().await;
        }
        let samples = utterance.samples.borrow().clone();
        let begun = self.shared.clock.now();
        let heard = tokio::select! {
            biased;
            () = dropped(utterance) => return Ok(()),
            heard = self.whole(&samples) => match heard {
                // What was said before and will be said is not given up for one that cannot be recognised.
                Err(SpeechFailure::Internal { message }) => {
                    self.warning = Some(message);
                    Transcription::default()
                }
                heard => heard?,
            },
        };
        // From here on nothing waits: an utterance is written down as a whole or not at all.
        if partials {
            said.close(heard.segments.iter().flat_map(|segment| segment.words.clone()).collect());
        }
        self.write_down(utterance, &said, heard);
        let speech = &self.shared.gauges.speech;
        speech.utterances.up();
        speech.audio_ms.add((samples.len() / 16) as u64);
        speech.utterance_seconds.record(self.shared.clock.now().saturating_sub(begun));
        self.floor.jobs.borrow_mut().pop_front();
        self.session.progress(self.floor.heard.get(), self.floor.processed());
        self.floor.done.notify_one();
        Ok(())
    }

    /// Recognises an utterance while it grows, until it is over.
    async fn follow(&self, utterance: &Rc<Utterance>, said: &mut Agreement) {
        let clock = &self.shared.clock;
        let mut looked_at = 0;
        let mut step = STEP;
        while !utterance.is_over.get() && !utterance.is_dropped.get() && self.floor.over.borrow().is_none() {
            let due = looked_at + samples(step.as_secs_f64());
            if utterance.samples.borrow().len() < due {
                self.floor.come.notified().await;
                continue;
            }
            // Copied, as more comes meanwhile.
            let samples = utterance.samples.borrow().clone();
            looked_at = samples.len();
            let mut options = self.options();
            (options.words, options.beam_size, options.best_of) = (true, 1, 1);
            (options.temperature, options.ladder) = (None, [0.0].into());
            let begun = clock.now();
            let heard = tokio::select! {
                biased;
                // The whole utterance is to be heard instead.
                () = utterance.changed.notified() => return,
                heard = self.recognise(&samples, &options) => heard,
            };
            step = STEP.max(clock.now().saturating_sub(begun).mul_f64(PAUSE));
            let Ok(heard) = heard else { continue };
            let words = heard.segments.into_iter().flat_map(|segment| segment.words).collect();
            said.step(words, seconds(looked_at));
            let audio_s = seconds(utterance.start + looked_at);
            self.session.text(utterance.number, &text(said.committed()), &text(said.tentative()), audio_s);
        }
    }

    /// The session's options, for one utterance.
    fn options(&self) -> SpeechOptions {
        let mut options = self.session.options();
        options.vad = None;
        options.least_rest_s = LEAST_REST_S;
        if options.condition_on_previous_text && !self.told.is_empty() {
            options.prompt = format!("{} {}", options.prompt, self.told).trim().to_owned();
        }
        options
    }

    /// Recognises a whole utterance; once more where the engine broke.
    async fn whole(&self, samples: &[f32]) -> Result<Transcription, SpeechFailure> {
        let mut options = self.options();
        // Words move window borders, so they are always asked for: what is heard must not depend on them.
        options.words = true;
        match self.recognise(samples, &options).await {
            Err(SpeechError::Unloaded | SpeechError::Engine(_)) => {
                self.shared.load().await?;
                self.recognise(samples, &options).await.map_err(failure)
            }
            heard => heard.map_err(failure),
        }
    }

    async fn recognise(
        &self,
        samples: &[f32],
        options: &SpeechOptions,
    ) -> Result<Transcription, SpeechError> {
        let mut samples = samples.to_vec();
        samples.resize(samples.len().max(LEAST), 0.0);
        let _step = self.shared.steps.acquire().await.map_err(|_| SpeechError::Unloaded)?;
        let mels = self.shared.desk.engine().with(|engine| Ok(engine.dims().mels))?;
        let recording = Recording::Samples(samples.into());
        let feed = features::start(recording, AudioLimits::default(), mels, None).map_err(|error| {
            let message = error.to_string();
            SpeechError::Audio(crate::types::speech::AudioFault {
                kind: AudioFaultKind::Undecodable,
                message,
            })
        })?;
        recognise(&self.shared.desk, &self.tokens, options, feed, &mut |_| {}).await
    }

    fn write_down(&mut self, utterance: &Utterance, said: &Agreement, heard: Transcription) {
        let offset = seconds(utterance.start);
        let shifted =
            |word: &Word| Word { start: word.start + offset, end: word.end + offset, ..word.clone() };
        let final_text = heard.segments.iter().map(|segment| segment.text.as_str()).collect::<String>();
        let committed = match said.committed() {
            [] => final_text.clone(),
            words => text(words),
        };
        let event = SessionEvent::Committed {
            utterance: utterance.number,
            text: committed.trim().to_owned(),
            words: said.committed().iter().map(shifted).collect(),
        };
        self.session.conclude(utterance.number, &committed, event);
        // A text that was hard to find, or that repeats itself, is not told to the next utterance.
        let is_sound = |segment: &Segment| {
            segment.temperature <= 0.5
                && segment.compression_ratio <= self.session.spec().options.compression_ratio_threshold
        };
        if heard.segments.iter().all(is_sound) {
            self.told.push_str(&final_text);
            self.told = last_characters(&self.told, TOLD);
        } else {
            self.told.clear();
        }
        if self.out.language.is_none() {
            self.out.language = heard.language;
            self.out.language_probability = heard.language_probability;
        }
        let first = self.out.segments.len();
        if self.of_turn.0 != utterance.turn || first == 0 {
            self.of_turn = (utterance.turn, first);
        }
        let keeps_words = self.session.options().words;
        let placed = heard.segments.into_iter().enumerate().map(|(index, mut segment)| {
            segment.id = first + index;
            segment.seek += utterance.start / HOP;
            (segment.start, segment.end) = (segment.start + offset, segment.end + offset);
            segment.words = match keeps_words {
                true => segment.words.iter().map(shifted).collect(),
                false => Vec::new(),
            };
            segment
        });
        self.out.segments.extend(placed);
        let segments = self.out.segments[first..].to_vec();
        let text = final_text.trim().to_owned();
        self.session.event(SessionEvent::Final { utterance: utterance.number, text, segments });
        tracing::debug!(target: fields::REQUEST, session = self.session.id(), utterance = utterance.number, "heard");
    }
}

/// Waits until a client drops an utterance.
async fn dropped(utterance: &Utterance) {
    while !utterance.is_dropped.get() {
        utterance.changed.notified().await;
    }
}

fn text(words: &[Word]) -> String {
    words.iter().map(|word| word.word.as_str()).collect()
}

/// The end of a text, from a word's beginning on where there is one.
fn last_characters(text: &str, count: usize) -> String {
    let Some((from, _)) = text.char_indices().rev().nth(count.saturating_sub(1)).filter(|(at, _)| *at > 0)
    else {
        return text.to_owned();
    };
    let end = &text[from..];
    end.split_once(' ').map_or(end, |(_, whole)| whole).to_owned()
}
