//! A whole recording, window after window.

use std::ops::Range;

use futures_util::future::try_join_all;
use tokio::sync::mpsc;

use super::compute::{AskedRow, Compute, SpeechError, Window};
use super::decode::{Decoded, WindowTask};
use super::features::{Feed, Survey};
use super::mel;
use super::rules::log_sum_exp;
use super::segments;
use super::silence::{self, Span};
use super::tokens::SpeechTokens;
use super::words::Aligner;
use super::{HOP, LogitsOf, WINDOW_FRAMES};
use crate::types::speech::{AudioFault, AudioFaultKind, Segment, SpeechOptions, Transcription};

/// Above this temperature a window's text is not told to the next one.
const RESET_ABOVE: f64 = 0.5;
/// Samples that a recording needs: a tenth of a second.
const LEAST_SAMPLES: usize = 1600;
/// Tokens of what was said before, at most, one for the announcement not counted.
const PREVIOUS: usize = 223;

/// Frames that a piece's text may leave unheard: a second.
const LEAST_REST: usize = 100;

/// What a recogniser tells while it works.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress<'a> {
    /// The first look is over.
    Surveyed(&'a Survey),
    /// One more segment, which will not change.
    Segment(&'a Segment),
    /// Seconds of the recording that are done.
    Done(f64),
}

/// Frames as they come, of which the latest are kept.
struct Frames {
    feed: mpsc::Receiver<Feed>,
    mels: usize,
    loudest: f32,
    kept: Vec<f32>,
    /// The first one kept.
    first: usize,
}

impl Frames {
    /// A window's `[3000][mels]`: `size` frames from `seek` on, the rest filled with 0. Earlier frames are forgotten.
    async fn window(&mut self, seek: usize, size: usize) -> Result<Vec<f32>, SpeechError> {
        while self.first + self.kept.len() / self.mels < seek + size {
            match self.feed.recv().await {
                Some(Feed::Frames(frames)) => self.kept.extend(frames),
                Some(Feed::Failed(fault)) => return Err(SpeechError::Audio(fault)),
                Some(Feed::Survey(_)) => {}
                None => break,
            }
        }
        let past = seek.saturating_sub(self.first).min(self.kept.len() / self.mels);
        self.kept.drain(..past * self.mels);
        self.first += past;
        let mut mel = self.kept[..self.kept.len().min(size * self.mels)].to_vec();
        mel::normalise(&mut mel, self.loudest);
        mel.resize(WINDOW_FRAMES * self.mels, 0.0);
        Ok(mel)
    }
}

/// Recognises a recording whose features come from [`super::features::start`].
///
/// # Errors
/// See [`SpeechError`].
///
/// # Cancellation
/// Dropping the future gives everything back.
pub async fn recognise<C: Compute>(
    compute: &C,
    tokens: &SpeechTokens,
    options: &SpeechOptions,
    mut feed: mpsc::Receiver<Feed>,
    tell: &mut dyn FnMut(Progress<'_>),
) -> Result<Transcription, SpeechError> {
    let survey = match feed.recv().await {
        Some(Feed::Survey(survey)) => survey,
        Some(Feed::Failed(fault)) => return Err(SpeechError::Audio(fault)),
        _ => {
            let message = "the audio was not read".into();
            return Err(SpeechError::Audio(AudioFault { kind: AudioFaultKind::Undecodable, message }));
        }
    };
    if survey.samples < LEAST_SAMPLES {
        let message = format!("{:.3} s of audio: at least 0.1 s are needed", survey.seconds());
        return Err(SpeechError::Audio(AudioFault { kind: AudioFaultKind::TooShort, message }));
    }
    tell(Progress::Surveyed(&survey));
    let mels = compute.cell().with(|engine| Ok(engine.dims().mels))?;
    let frames = Frames { feed, mels, loudest: survey.loudest, kept: Vec::new(), first: 0 };
    let given = options.language.filter(|code| tokens.language(code).is_some());
    let given = if tokens.is_multilingual() { given } else { Some("en") };
    let words = options.hotwords.trim();
    let mut hotwords = if words.is_empty() { Vec::new() } else { tokens.encode(words) };
    hotwords.truncate(PREVIOUS);
    let run = Run {
        compute,
        tokens,
        options,
        out: Transcription {
            language: given,
            language_probability: if given.is_some() { 1.0 } else { 0.0 },
            duration: survey.seconds(),
            segments: Vec::new(),
            warning: survey.warning.clone(),
        },
        survey,
        frames,
        hotwords,
        history: if options.prompt.trim().is_empty() { Vec::new() } else { tokens.encode(&options.prompt) },
        last_end: 0.0,
    };
    match options.batch_size {
        0 | 1 => run.windows(tell).await,
        count => run.pieces(count, tell).await,
    }
}

/// Pieces of speech that fill a window each as well as they do, as frames; no stretch is longer than one.
fn pieces(speech: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut pieces: Vec<Range<usize>> = Vec::new();
    let mut samples = 0;
    for stretch in speech {
        let start = samples / HOP;
        samples += stretch.len();
        let end = samples / HOP;
        match pieces.last_mut() {
            Some(last) if end - last.start <= WINDOW_FRAMES => last.end = end,
            // One that is longer after all is cut without mercy.
            _ => pieces.extend((start..end).step_by(WINDOW_FRAMES).map(|at| at..end.min(at + WINDOW_FRAMES))),
        }
    }
    pieces
}

struct Run<'a, C: Compute> {
    compute: &'a C,
    tokens: &'a SpeechTokens,
    options: &'a SpeechOptions,
    survey: Survey,
    frames: Frames,
    /// What every window is told.
    hotwords: Vec<u32>,
    /// What the next window is told.
    history: Vec<u32>,
    /// End of the latest speech among the frames, in seconds.
    last_end: f64,
    out: Transcription,
}

impl<C: Compute> Run<'_, C> {
    async fn windows(mut self, tell: &mut dyn FnMut(Progress<'_>)) -> Result<Transcription, SpeechError> {
        let total = self.survey.frames().max(usize::from(!self.survey.speech.is_empty()));
        let mut seek = 0;
        let is_a_rest = |left: usize| (left as f64) < self.options.least_rest_s * 100.0;
        while seek < total && (seek == 0 || !is_a_rest(total - seek)) {
            let size = WINDOW_FRAMES.min(total - seek);
            let mel = self.frames.window(seek, size).await?;
            let window = self.compute.encode(mel).await?;
            if self.out.language.is_none() {
                self.detect(&window).await?;
            }
            let task = self.task(&window, seek);
            let decoded = task.decode().await?;
            let is_silent = task.is_silent(&decoded);
            let advance = match is_silent {
                true => size,
                false => self.take(&window, decoded, seek..total, tell).await?,
            };
            seek += advance.clamp(1, WINDOW_FRAMES);
            tell(Progress::Done(self.survey.original(seek.min(total) as f64 / 100.0, true)));
        }
        Ok(self.out)
    }

    fn beginning(&self, timestamps: bool) -> Vec<u32> {
        let language = self.out.language.and_then(|code| self.tokens.language(code)).map(|(_, id)| id);
        self.tokens.beginning(language, self.options.task, timestamps)
    }

    /// What a window is told of before: hotwords' beginning, then the end of what was said.
    fn previous(&self) -> Vec<u32> {
        let mut told = self.hotwords.clone();
        let room = PREVIOUS - told.len();
        told.extend_from_slice(&self.history[self.history.len().saturating_sub(room)..]);
        if !told.is_empty() {
            told.insert(0, self.tokens.previous());
        }
        told
    }

    /// Finds the language of a window out.
    async fn detect(&mut self, window: &Window) -> Result<(), SpeechError> {
        let row = AskedRow {
            window: Window::clone(window),
            sequence: self.compute.cell().open(None)?,
            start: 0,
            tokens: vec![self.tokens.sot],
            logits: LogitsOf::Last,
            scores: false,
        };
        let out = self.compute.decode(vec![row]).await?.into_iter().next().unwrap_or_default();
        let logits = out.logits.into_iter().next().unwrap_or_default();
        let ids = self.tokens.language_ids();
        let logits = logits.get(ids.start as usize..ids.end as usize).unwrap_or(&[]);
        let total = log_sum_exp(logits);
        let known = ids.zip(logits).filter_map(|(id, logit)| Some((self.tokens.language_of(id)?, *logit)));
        let allowed = known
            .filter(|(code, _)| self.options.languages.is_empty() || self.options.languages.contains(code));
        if let Some((code, logit)) = allowed.max_by(|a, b| a.1.total_cmp(&b.1)) {
            self.out.language = Some(code);
            self.out.language_probability = f64::from((logit - total).exp());
        }
        Ok(())
    }

    /// Pieces of speech, so many at a time: each is decoded without knowing the others, but for the language.
    async fn pieces(
        mut self,
        count: usize,
        tell: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Transcription, SpeechError> {
        let mut waiting = pieces(&self.survey.speech).into_iter();
        // The first one tells the language of all.
        if let Some(piece) = waiting.next() {
            let mel = self.frames.window(piece.start, piece.len()).await?;
            let window = self.compute.encode(mel.clone()).await?;
            if self.out.language.is_none() {
                self.detect(&window).await?;
            }
            let segments = self.piece(piece.clone(), mel, window).await?;
            self.give(segments, piece.end, tell);
        }
        loop {
            let mut batch = Vec::new();
            for piece in waiting.by_ref().take(count) {
                batch.push((piece.clone(), self.frames.window(piece.start, piece.len()).await?));
            }
            if batch.is_empty() {
                return Ok(self.out);
            }
            let decoding = batch.into_iter().map(|(piece, mel)| async {
                let end = piece.end;
                let window = self.compute.encode(mel.clone()).await?;
                Ok::<_, SpeechError>((end, self.piece(piece, mel, window).await?))
            });
            for (end, segments) in try_join_all(decoding).await? {
                self.give(segments, end, tell);
            }
        }
    }

    /// The segments of a piece, whatever came before it; a rest that its text leaves is heard again.
    async fn piece(
        &self,
        piece: Range<usize>,
        mel: Vec<f32>,
        mut window: Window,
    ) -> Result<Vec<Segment>, SpeechError> {
        let mels = self.frames.mels;
        let (mut seek, mut out, mut last_end) = (piece.start, Vec::new(), 0.0);
        while seek < piece.end && (seek == piece.start || piece.end - seek >= LEAST_REST) {
            let size = piece.end - seek;
            if seek > piece.start {
                let from = (seek - piece.start) * mels;
                let mut rest = mel[from..from + size * mels].to_vec();
                rest.resize(WINDOW_FRAMES * mels, 0.0);
                window = self.compute.encode(rest).await?;
            }
            let task = self.task(&window, seek);
            let decoded = task.decode().await?;
            if task.is_silent(&decoded) {
                break;
            }
            let (segments, advance) =
                self.segments(&window, &decoded, seek..piece.end, &mut last_end).await?;
            out.extend(segments);
            seek += if advance == 0 { size } else { advance };
        }
        Ok(out)
    }

    /// Says and keeps segments; all up to frame `end` is done then.
    fn give(&mut self, segments: Vec<Segment>, end: usize, tell: &mut dyn FnMut(Progress<'_>)) {
        for segment in segments {
            self.keep(segment, tell);
        }
        tell(Progress::Done(self.survey.original(end as f64 / 100.0, true)));
    }

    /// Says and keeps a segment, at its place in the recording.
    fn keep(&mut self, mut segment: Segment, tell: &mut dyn FnMut(Progress<'_>)) {
        self.place(&mut segment);
        segment.id = self.out.segments.len();
        tell(Progress::Segment(&segment));
        self.out.segments.push(segment);
    }

    fn task<'b>(&'b self, window: &'b Window, seek: usize) -> WindowTask<'b, C> {
        WindowTask {
            compute: self.compute,
            tokens: self.tokens,
            options: self.options,
            window,
            prompt: (self.previous(), self.beginning(self.options.timestamps)),
            timestamps: self.options.timestamps,
            number: seek as u64,
        }
    }

    /// A window's segments with their words, and the frames to the next window. `rest` is what there is from the
    /// window's first frame on.
    async fn segments(
        &self,
        window: &Window,
        decoded: &Decoded,
        rest: Range<usize>,
        last_end: &mut f64,
    ) -> Result<(Vec<Segment>, usize), SpeechError> {
        let (seek, size) = (rest.start, rest.len().min(WINDOW_FRAMES));
        let cut = segments::cut(self.tokens, decoded, seek, size);
        let (mut segments, mut advance) = (cut.segments, cut.advance);
        let offset = seek as f64 / 100.0;
        if self.options.words || self.options.hallucination_silence_s.is_some() {
            let said_before = *last_end;
            let aligner = Aligner {
                compute: self.compute,
                tokens: self.tokens,
                window,
                beginning: self.beginning(false),
                language: self.out.language.unwrap_or("en"),
            };
            aligner.align(&mut segments, size, offset, last_end).await?;
            let last = segments.iter().rev().find_map(|segment| segment.words.last());
            if let Some(end) = last.map(|word| word.end).filter(|end| !cut.single_ending && *end > offset) {
                advance = ((end * 100.0).round() as usize).saturating_sub(seek);
            }
            if let Some(threshold) = self.options.hallucination_silence_s {
                let end = (seek + size) as f64 / 100.0;
                let content_end = rest.end as f64 / 100.0;
                let span = Span { start: offset, end, content_end, last_end: said_before };
                let kept = silence::sift(&segments, span, threshold, cut.single_ending);
                segments.truncate(kept.segments);
                if let Some(next) = kept.next {
                    advance = ((next * 100.0).round() as usize).saturating_sub(seek);
                }
                let last = segments.iter().rev().find_map(|segment| segment.words.last());
                *last_end = last.map_or(said_before, |word| word.end);
            }
            if !self.options.words {
                segments.iter_mut().for_each(|segment| segment.words.clear());
            }
        }
        Ok((segments, advance))
    }

    /// Takes a window's text in; frames to the next window.
    async fn take(
        &mut self,
        window: &Window,
        decoded: Decoded,
        rest: Range<usize>,
        tell: &mut dyn FnMut(Progress<'_>),
    ) -> Result<usize, SpeechError> {
        let size = rest.len().min(WINDOW_FRAMES);
        let mut last_end = self.last_end;
        let (segments, advance) = self.segments(window, &decoded, rest, &mut last_end).await?;
        self.last_end = last_end;
        for segment in segments {
            self.history.extend_from_slice(&segment.tokens);
            self.keep(segment, tell);
        }
        let repeats = decoded.compression_ratio > self.options.compression_ratio_threshold;
        if !self.options.condition_on_previous_text || decoded.temperature > RESET_ABOVE || repeats {
            self.history.clear();
        }
        let excess = self.history.len().saturating_sub(2 * PREVIOUS);
        self.history.drain(..excess);
        Ok(if advance == 0 { size } else { advance })
    }

    /// Turns times among the frames into those of the recording.
    fn place(&self, segment: &mut Segment) {
        let duration = self.survey.seconds();
        let round = |seconds: f64| ((seconds * 100.0).round() / 100.0).clamp(0.0, duration);
        segment.seek = (self.survey.original(segment.seek as f64 / 100.0, false) * 100.0).round() as usize;
        segment.start = round(self.survey.original(segment.start, false));
        segment.end = round(self.survey.original(segment.end, true)).max(segment.start);
        for word in &mut segment.words {
            // By its middle, so that no word is torn by silence that was cut out.
            let shift = self.survey.shift(f64::midpoint(word.start, word.end), false);
            (word.start, word.end) = (round(word.start + shift), round(word.end + shift));
        }
        if let (Some(first), Some(last)) = (segment.words.first(), segment.words.last()) {
            (segment.start, segment.end) = (first.start, last.end.max(first.start));
        }
    }
}
