//! Words with times, by the cross-attention heads that follow the audio.

use super::compute::{AskedRow, Compute, Sequence, SpeechError, Window};
use super::rules::log_sum_exp;
use super::tokens::SpeechTokens;
use super::{LogitsOf, SpeechOut};
use crate::types::speech::{Segment, Word};

/// Encoder positions a second.
const POSITIONS_PER_SECOND: f64 = 50.0;
/// Width of the median along time.
const MEDIAN: usize = 7;
/// Tokens of the forced pass that are computed in one step.
const CHUNK: usize = 32;
/// Joins the word after it.
const PREPENDED: &str = "\"'“¿([{-";
/// Joins the word before it.
const APPENDED: &str = "\"'.。,，!！?？:：”)]}、";
/// Ends a sentence.
const SENTENCE_ENDS: &str = ".。!！?？";
/// Languages without spaces: each whole character is a word.
const SPACELESS: [&str; 6] = ["zh", "ja", "th", "lo", "my", "yue"];

/// The forced pass over a window's text: `scores` `[heads][tokens][positions]` with the heads' rows of all
/// tokens but `eot`, and each text token's probability.
struct Forced {
    heads: usize,
    rows: usize,
    positions: usize,
    scores: Vec<f32>,
    probabilities: Vec<f64>,
}

/// What words are found in.
pub struct Aligner<'a, C: Compute> {
    /// Who computes.
    pub compute: &'a C,
    /// Of the model.
    pub tokens: &'a SpeechTokens,
    /// What is heard.
    pub window: &'a Window,
    /// What the window begins with, without times.
    pub beginning: Vec<u32>,
    /// Code of the language.
    pub language: &'a str,
}

impl<C: Compute> Aligner<'_, C> {
    /// Gives the segments of a window their words: `frames` of real audio from `offset` seconds on, speech before
    /// which ended at `last_end`. A window that is too short, or without text, has none.
    ///
    /// # Errors
    /// See [`SpeechError`].
    pub async fn align(
        &self,
        segments: &mut [Segment],
        frames: usize,
        offset: f64,
        last_end: &mut f64,
    ) -> Result<(), SpeechError> {
        let text: Vec<u32> = segments
            .iter()
            .flat_map(|s| s.tokens.iter().copied().filter(|id| *id < self.tokens.eot))
            .collect();
        if text.is_empty() || frames < 4 {
            return Ok(());
        }
        let forced = self.force(&text).await?;
        let columns = (frames / 2).min(forced.positions);
        let matrix = follow(&forced, columns);
        // The first rows follow the window's beginning, but for the one that says what comes first.
        let skip = self.beginning.len() - 1;
        let path = warp(&matrix[skip * columns..], text.len() + 1, columns);
        let mut words = self.words(&text, &forced.probabilities, &path);
        shorten(&mut words);
        join(&mut words);
        distribute(segments, words, offset, last_end, self.tokens);
        Ok(())
    }

    async fn force(&self, text: &[u32]) -> Result<Forced, SpeechError> {
        let (heads, positions, context) = self.compute.cell().with(|engine| {
            Ok((engine.alignment_heads(), engine.dims().audio_context, engine.dims().text_context))
        })?;
        let mut ids = self.beginning.clone();
        ids.extend_from_slice(text);
        ids.truncate(context);
        let sequence = self.compute.cell().open(None)?;
        let rows = ids.len();
        let mut scores = vec![0.0; heads * rows * positions];
        let mut probabilities = Vec::with_capacity(text.len());
        let first_text = self.beginning.len() - 1;
        for (number, chunk) in ids.chunks(CHUNK).enumerate() {
            let start = number * CHUNK;
            let row = AskedRow {
                window: Window::clone(self.window),
                sequence: Sequence::clone(&sequence),
                start: start as u32,
                tokens: chunk.to_vec(),
                logits: LogitsOf::All,
                scores: true,
            };
            let out: SpeechOut = self.compute.decode(vec![row]).await?.into_iter().next().unwrap_or_default();
            for (head, from) in out.scores.chunks_exact(chunk.len() * positions).enumerate() {
                let at = (head * rows + start) * positions;
                scores[at..at + from.len()].copy_from_slice(from);
            }
            for (at, logits) in (start..).zip(&out.logits) {
                let Some(id) = at.checked_sub(first_text).and_then(|index| text.get(index)) else { continue };
                let texts = logits.get(..self.tokens.eot as usize).unwrap_or(&[]);
                let logit = texts.get(*id as usize).copied().unwrap_or(f32::NEG_INFINITY);
                probabilities.push(f64::from((logit - log_sum_exp(texts)).exp()));
            }
        }
        Ok(Forced { heads, rows, positions, scores, probabilities })
    }

    /// Words of a text by the path's first cell of each row.
    fn words(&self, text: &[u32], probabilities: &[f64], starts: &[usize]) -> Vec<Word> {
        let seconds = |row: usize| starts.get(row).copied().unwrap_or(0) as f64 / POSITIONS_PER_SECOND;
        let mut words = Vec::new();
        for range in self.split(text) {
            let probability = probabilities.get(range.clone()).filter(|p| !p.is_empty()).unwrap_or(&[0.0]);
            words.push(Word {
                word: self.tokens.decode(&text[range.clone()]),
                start: seconds(range.start),
                end: seconds(range.end),
                probability: probability.iter().sum::<f64>() / probability.len() as f64,
                tokens: range.len(),
            });
        }
        words
    }

    /// Tokens of each word.
    fn split(&self, text: &[u32]) -> Vec<std::ops::Range<usize>> {
        // First where bytes are whole characters.
        let mut units: Vec<std::ops::Range<usize>> = Vec::new();
        let (mut from, mut bytes) = (0, Vec::new());
        for (index, id) in text.iter().enumerate() {
            bytes.extend(self.tokens.bytes(*id));
            let cut = std::str::from_utf8(&bytes).err().is_some_and(|error| error.error_len().is_none());
            if !cut || index + 1 == text.len() {
                units.push(from..index + 1);
                from = index + 1;
                bytes.clear();
            }
        }
        if SPACELESS.contains(&self.language) {
            return units;
        }
        let mut words: Vec<std::ops::Range<usize>> = Vec::new();
        for unit in units {
            let part = self.tokens.decode(&text[unit.clone()]);
            let trimmed = part.trim();
            let mark = trimmed.len() == 1 && trimmed.bytes().all(|byte| byte.is_ascii_punctuation());
            match words.last_mut() {
                Some(word) if !(part.starts_with(' ') || mark) => word.end = unit.end,
                _ => words.push(unit),
            }
        }
        words
    }
}

/// Mean over heads of the scores after softmax along time, normalised along tokens, smoothed along time:
/// `[rows][columns]`.
fn follow(forced: &Forced, columns: usize) -> Vec<f32> {
    let Forced { heads, rows, positions, ref scores, .. } = *forced;
    let mut mean = vec![0.0; rows * columns];
    let mut head_rows = vec![0.0_f32; rows * columns];
    let mut window = Vec::new();
    for head in 0..heads {
        for row in 0..rows {
            let from = &scores[(head * rows + row) * positions..][..columns];
            let total = log_sum_exp(from);
            let to = &mut head_rows[row * columns..(row + 1) * columns];
            to.iter_mut().zip(from).for_each(|(to, x)| *to = (x - total).exp());
        }
        for column in 0..columns {
            let values = || (0..rows).map(|row| row * columns + column);
            let average = values().map(|at| head_rows[at]).sum::<f32>() / rows as f32;
            let variance = values().map(|at| (head_rows[at] - average).powi(2)).sum::<f32>() / rows as f32;
            let deviation = if variance > 0.0 { variance.sqrt() } else { 1.0 };
            values().for_each(|at| head_rows[at] = (head_rows[at] - average) / deviation);
        }
        for row in 0..rows {
            let values = &head_rows[row * columns..(row + 1) * columns];
            let to = &mut mean[row * columns..(row + 1) * columns];
            for (column, to) in to.iter_mut().enumerate() {
                *to += median(values, column, &mut window) / heads as f32;
            }
        }
    }
    mean
}

/// Median of the values around one, mirrored at the ends.
fn median(values: &[f32], at: usize, window: &mut Vec<f32>) -> f32 {
    let half = MEDIAN / 2;
    if values.len() <= half {
        return values[at];
    }
    window.clear();
    for place in at as isize - half as isize..=at as isize + half as isize {
        let last = values.len() as isize - 1;
        let place = if place < 0 {
            -place
        } else if place > last {
            2 * last - place
        } else {
            place
        };
        window.push(values[place.clamp(0, last) as usize]);
    }
    window.sort_by(f32::total_cmp);
    window[half]
}

/// Dynamic time warping of the negated matrix: for each row the first column of the path. Ties go to the left:
/// time advances.
fn warp(matrix: &[f32], rows: usize, columns: usize) -> Vec<usize> {
    let rows = rows.min(matrix.len() / columns.max(1));
    let width = columns + 1;
    let mut cost = vec![f32::INFINITY; (rows + 1) * width];
    let mut trace = vec![0_u8; (rows + 1) * width];
    cost[0] = 0.0;
    for row in 1..=rows {
        for column in 1..=columns {
            let diagonal = cost[(row - 1) * width + column - 1];
            let up = cost[(row - 1) * width + column];
            let left = cost[row * width + column - 1];
            let (best, way) = if diagonal < up && diagonal < left {
                (diagonal, 0)
            } else if up < diagonal && up < left {
                (up, 1)
            } else {
                (left, 2)
            };
            cost[row * width + column] = best - matrix[(row - 1) * columns + column - 1];
            trace[row * width + column] = way;
        }
    }
    let (mut row, mut column) = (rows, columns);
    let mut starts = vec![0; rows];
    while row > 0 || column > 0 {
        if row > 0 {
            starts[row - 1] = column.saturating_sub(1);
        }
        let way = if row == 0 {
            2
        } else if column == 0 {
            1
        } else {
            trace[row * width + column]
        };
        match way {
            0 => (row, column) = (row - 1, column - 1),
            1 => row -= 1,
            _ => column -= 1,
        }
    }
    starts
}

/// Cuts words at sentences' ends that are too long to be true.
fn shorten(words: &mut [Word]) {
    let (_, most) = typical(words);
    for index in 0..words.len() {
        if words[index].end - words[index].start <= most {
            continue;
        }
        let is_end = |word: &Word| {
            let trimmed = word.word.trim();
            !trimmed.is_empty() && trimmed.chars().count() == 1 && SENTENCE_ENDS.contains(trimmed)
        };
        if is_end(&words[index]) {
            words[index].end = words[index].start + most;
        } else if index > 0 && is_end(&words[index - 1]) {
            words[index].start = words[index].end - most;
        }
    }
}

/// A word's median duration, at most 0.7 s, and the longest that is believed.
fn typical(words: &[Word]) -> (f64, f64) {
    let mut durations: Vec<f64> =
        words.iter().map(|word| word.end - word.start).filter(|d| *d > 0.0).collect();
    durations.sort_by(f64::total_cmp);
    let median = match durations.len() {
        0 => 0.0,
        len if len % 2 == 1 => durations[len / 2],
        len => f64::midpoint(durations[len / 2 - 1], durations[len / 2]),
    };
    let median = median.min(0.7);
    (median, 2.0 * median)
}

/// Joins punctuation to the words beside it; what was joined is left empty.
fn join(words: &mut [Word]) {
    let mut next = words.len().saturating_sub(1);
    for index in (0..next).rev() {
        let word = &words[index].word;
        let is_mark = word.starts_with(' ') && !word.trim().is_empty() && PREPENDED.contains(word.trim());
        if is_mark {
            let joined = format!("{}{}", words[index].word, words[next].word);
            words[next].word = joined;
            words[next].tokens += std::mem::take(&mut words[index].tokens);
            words[index].word.clear();
        } else {
            next = index;
        }
    }
    let mut before = 0;
    for index in 1..words.len() {
        if words[index].tokens == 0 {
            continue;
        }
        let mark = &words[index].word;
        if !mark.is_empty()
            && APPENDED.contains(mark.as_str())
            && !words[before].word.ends_with(' ')
            && words[before].tokens > 0
        {
            let joined = format!("{}{}", words[before].word, words[index].word);
            words[before].word = joined;
            words[before].tokens += std::mem::take(&mut words[index].tokens);
            words[index].word.clear();
        } else {
            before = index;
        }
    }
}

/// Hands words to segments by their tokens, and lets the first and last ones agree with the segment's times.
fn distribute(
    segments: &mut [Segment],
    words: Vec<Word>,
    offset: f64,
    last_end: &mut f64,
    tokens: &SpeechTokens,
) {
    let (median, most) = typical(&words);
    let round = |seconds: f64| (seconds * 100.0).round() / 100.0;
    let mut words = words.into_iter().filter(|word| word.tokens > 0).peekable();
    for segment in segments {
        let wanted = segment.tokens.iter().filter(|id| **id < tokens.eot).count();
        let (mut taken, mut own) = (0, Vec::new());
        while taken < wanted
            && let Some(mut word) = words.next()
        {
            taken += word.tokens;
            (word.start, word.end) = (round(offset + word.start), round(offset + word.end));
            own.push(word);
        }
        if own.is_empty() {
            continue;
        }
        let first_is_long = own[0].end - own[0].start > most;
        let two_are_long = own.get(1).is_some_and(|second| second.end - own[0].start > 2.0 * most);
        if own[0].end - *last_end > 4.0 * median && (first_is_long || two_are_long) {
            if let Some(second) = own.get(1)
                && second.end - second.start > most
            {
                let boundary = (second.end / 2.0).max(second.end - most);
                own[0].end = boundary;
                own[1].start = boundary;
            }
            own[0].start = (own[0].end - most).max(0.0);
        }
        if segment.start < own[0].end && segment.start - 0.5 > own[0].start {
            own[0].start = (own[0].end - median).min(segment.start).max(0.0);
        } else {
            segment.start = own[0].start;
        }
        if let Some(last) = own.last_mut() {
            if segment.end > last.start && segment.end + 0.5 < last.end {
                last.end = (last.start + median).max(segment.end);
            } else {
                segment.end = last.end;
            }
        }
        let mut before = 0.0_f64;
        for word in &mut own {
            word.start = round(word.start.max(before));
            word.end = round(word.end.max(word.start));
            before = word.start;
        }
        segment.start = round(segment.start);
        segment.end = round(segment.end.max(segment.start));
        *last_end = segment.end;
        segment.words = own;
    }
}
