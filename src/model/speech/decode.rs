//! One window's text: greedy, best of some, beams; and the ladder of temperatures.

use super::LogitsOf;
use super::compute::{AskedRow, Compute, Sequence, SpeechError, Window};
use super::rules::{self, Rules, compression_ratio};
use super::tokens::SpeechTokens;
use crate::types::speech::SpeechOptions;

/// Tokens of a prompt that are computed in one step.
const PROMPT_CHUNK: usize = 48;
/// A text that ends with so many repeats of at most so many tokens goes on like that.
const REPEATS: usize = 12;
const LONGEST_REPEAT: usize = 12;

/// What a window came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// Sampled ids without the end.
    pub tokens: Vec<u32>,
    /// Of each of them, natural logarithm, without the temperature.
    pub logprobs: Vec<f32>,
    /// Mean over the tokens and the end.
    pub avg_logprob: f64,
    /// How likely it is that nobody speaks.
    pub no_speech_prob: f64,
    /// See [`compression_ratio`].
    pub compression_ratio: f64,
    /// The one that was accepted.
    pub temperature: f64,
}

/// Tokens written so far.
#[derive(Clone, Default)]
struct Text {
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    /// Of the log-probabilities, the end's as well.
    sum: f64,
}

impl Text {
    /// What texts are ranked by; nothing is the worst.
    fn score(&self) -> f64 {
        match self.tokens.len() {
            0 => f64::NEG_INFINITY,
            len => self.sum / len as f64,
        }
    }

    fn best(texts: impl Iterator<Item = Self>) -> Result<Self, SpeechError> {
        texts.max_by(|a, b| a.score().total_cmp(&b.score())).ok_or(SpeechError::Unloaded)
    }
}

/// A text that is being written, and the logits of what may follow.
struct Candidate {
    sequence: Sequence,
    text: Text,
    logits: Vec<f32>,
    done: bool,
}

/// The prompt, computed: its sequence, length, the logits after it, and what its first token says of silence.
struct Prompted {
    sequence: Sequence,
    len: u32,
    logits: Vec<f32>,
    no_speech_prob: f64,
}

/// What a window is decoded with.
pub struct WindowTask<'a, C: Compute> {
    /// Who computes.
    pub compute: &'a C,
    /// Of the model.
    pub tokens: &'a SpeechTokens,
    /// What was asked.
    pub options: &'a SpeechOptions,
    /// What is heard.
    pub window: &'a Window,
    /// Text before, with its announcement, and what the window begins with.
    pub prompt: (Vec<u32>, Vec<u32>),
    /// Times are wanted.
    pub timestamps: bool,
    /// Keys random numbers.
    pub number: u64,
}

impl<C: Compute> WindowTask<'_, C> {
    /// The ladder: the first result that is good enough, or the best of the bad ones.
    ///
    /// # Errors
    /// See [`SpeechError`].
    pub async fn decode(&self) -> Result<Decoded, SpeechError> {
        let prompted = self.prompt().await?;
        let rules = Rules::new(self.tokens, self.timestamps);
        let mut bad: Vec<Decoded> = Vec::new();
        let temperatures = self.options.temperatures();
        for (rung, temperature) in temperatures.iter().copied().enumerate() {
            let beams = self.options.beam_size.max(1);
            let result = match temperature == 0.0 && beams > 1 {
                true => self.beams(&prompted, &rules, beams).await?,
                false => self.sample(&prompted, &rules, temperature, rung as u64).await?,
            };
            let repeats = result.compression_ratio > self.options.compression_ratio_threshold;
            let doubtful = result.avg_logprob < self.options.logprob_threshold;
            let silent = self.is_silent(&result);
            if silent || !(repeats || doubtful) {
                return Ok(result);
            }
            bad.push(result);
        }
        let limit = self.options.compression_ratio_threshold;
        let last = temperatures.last().copied().unwrap_or(0.0);
        let some_compress = bad.iter().any(|result| result.compression_ratio <= limit);
        let usable = bad.into_iter().filter(|result| !some_compress || result.compression_ratio <= limit);
        let best = usable.max_by(|a, b| a.avg_logprob.total_cmp(&b.avg_logprob));
        best.map(|best| Decoded { temperature: last, ..best }).ok_or(SpeechError::Unloaded)
    }

    /// Whether nobody speaks in it.
    pub fn is_silent(&self, result: &Decoded) -> bool {
        result.no_speech_prob > self.options.no_speech_threshold
            && (result.avg_logprob < self.options.logprob_threshold || result.tokens.is_empty())
    }

    async fn prompt(&self) -> Result<Prompted, SpeechError> {
        let sequence = self.compute.cell().open(None)?;
        let mut start = 0;
        let row = |start: u32, tokens: &[u32], logits: LogitsOf| AskedRow {
            window: Window::clone(self.window),
            sequence: Sequence::clone(&sequence),
            start,
            tokens: tokens.to_vec(),
            logits,
            scores: false,
        };
        for chunk in self.prompt.0.chunks(PROMPT_CHUNK) {
            self.compute.decode(vec![row(start, chunk, LogitsOf::Nothing)]).await?;
            start += chunk.len() as u32;
        }
        let beginning = &self.prompt.1;
        let outs = self.compute.decode(vec![row(start, beginning, LogitsOf::Ends)]).await?;
        let mut logits = outs.into_iter().next().unwrap_or_default().logits;
        let last = logits.pop().unwrap_or_default();
        let first = logits.first().unwrap_or(&last);
        let silence = first.get(self.tokens.no_speech() as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let no_speech_prob = f64::from((silence - rules::log_sum_exp(first)).exp());
        Ok(Prompted { len: start + beginning.len() as u32, sequence, logits: last, no_speech_prob })
    }

    /// Most tokens that a window may have.
    fn most_tokens(&self, prompted: &Prompted) -> Result<usize, SpeechError> {
        let context = self.compute.cell().with(|engine| Ok(engine.dims().text_context))?;
        Ok((context / 2).min(context.saturating_sub(prompted.len as usize)))
    }

    /// Goes on from the prompt with nothing written yet.
    fn begin(&self, prompted: &Prompted) -> Result<Candidate, SpeechError> {
        let sequence = self.compute.cell().open(Some((&prompted.sequence, prompted.len)))?;
        Ok(Candidate { sequence, text: Text::default(), logits: prompted.logits.clone(), done: false })
    }

    /// One candidate, or at a temperature the best of some.
    async fn sample(
        &self,
        prompted: &Prompted,
        rules: &Rules,
        temperature: f64,
        rung: u64,
    ) -> Result<Decoded, SpeechError> {
        let count = if temperature > 0.0 { self.options.best_of.max(1) } else { 1 };
        let most = self.most_tokens(prompted)?;
        let mut candidates = (0..count).map(|_| self.begin(prompted)).collect::<Result<Vec<_>, _>>()?;
        loop {
            for (index, candidate) in
                candidates.iter_mut().enumerate().filter(|(_, candidate)| !candidate.done)
            {
                rules.apply(&mut candidate.logits, &candidate.text.tokens);
                let total = rules::log_sum_exp(&candidate.logits);
                let at = [self.number, rung, index as u64, candidate.text.tokens.len() as u64];
                let token = match temperature > 0.0 {
                    true => {
                        let uniform = rules::uniform(self.options.seed, at);
                        rules::draw(&candidate.logits, temperature as f32, uniform)
                    }
                    false => rules::best(&candidate.logits).map(|(token, _)| token),
                };
                // Where nothing is allowed, the text ends.
                let token = token.unwrap_or(rules.eot());
                let logit = candidate.logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
                let logprob = if total.is_finite() { logit - total } else { 0.0 };
                let text = &mut candidate.text;
                text.sum += f64::from(logprob);
                if token == rules.eot() {
                    candidate.done = true;
                    continue;
                }
                text.tokens.push(token);
                text.logprobs.push(logprob);
                candidate.done = text.tokens.len() >= most || goes_round(&text.tokens);
            }
            let live: Vec<usize> = (0..count).filter(|index| !candidates[*index].done).collect();
            if live.is_empty() {
                break;
            }
            let rows = live.iter().map(|index| self.row(prompted, &candidates[*index])).collect();
            let outs = self.compute.decode(rows).await?;
            for (index, out) in live.into_iter().zip(outs) {
                candidates[index].logits = out.logits.into_iter().next().unwrap_or_default();
            }
        }
        let best = Text::best(candidates.into_iter().map(|candidate| candidate.text))?;
        Ok(self.decoded(best, prompted, temperature))
    }

    fn row(&self, prompted: &Prompted, candidate: &Candidate) -> AskedRow {
        AskedRow {
            window: Window::clone(self.window),
            sequence: Sequence::clone(&candidate.sequence),
            start: prompted.len + candidate.text.tokens.len() as u32 - 1,
            tokens: candidate.text.tokens.last().copied().into_iter().collect(),
            logits: LogitsOf::Last,
            scores: false,
        }
    }

    /// Beam search at temperature 0.
    async fn beams(&self, prompted: &Prompted, rules: &Rules, beams: usize) -> Result<Decoded, SpeechError> {
        let most = self.most_tokens(prompted)?;
        let mut live = vec![self.begin(prompted)?];
        let mut finished: Vec<Text> = Vec::new();
        loop {
            // (beam, token, log-probability, sum), best first.
            let mut next: Vec<(usize, u32, f32, f64)> = Vec::new();
            for (beam, candidate) in live.iter_mut().enumerate() {
                rules.apply(&mut candidate.logits, &candidate.text.tokens);
                let total = rules::log_sum_exp(&candidate.logits);
                for (token, logit) in rules::top(&candidate.logits, beams + 1) {
                    let logprob = logit - total;
                    next.push((beam, token, logprob, candidate.text.sum + f64::from(logprob)));
                }
            }
            next.sort_by(|a, b| b.3.total_cmp(&a.3));
            let mut chosen: Vec<Candidate> = Vec::with_capacity(beams);
            for (beam, token, logprob, sum) in next {
                let parent = &live[beam];
                let mut text = Text { sum, ..parent.text.clone() };
                if token == rules.eot() {
                    if finished.len() < beams {
                        finished.push(text);
                    }
                    continue;
                }
                text.tokens.push(token);
                text.logprobs.push(logprob);
                let at = prompted.len + parent.text.tokens.len() as u32;
                let sequence = self.compute.cell().open(Some((&parent.sequence, at)))?;
                chosen.push(Candidate { sequence, text, logits: Vec::new(), done: false });
                if chosen.len() == beams {
                    break;
                }
            }
            live = chosen;
            let is_over = |text: &Text| text.tokens.len() >= most || goes_round(&text.tokens);
            let over = live.iter().any(|beam| is_over(&beam.text));
            if live.is_empty() || finished.len() >= beams || over {
                break;
            }
            let rows = live.iter().map(|beam| self.row(prompted, beam)).collect();
            for (beam, out) in live.iter_mut().zip(self.compute.decode(rows).await?) {
                beam.logits = out.logits.into_iter().next().unwrap_or_default();
            }
        }
        let missing = beams.saturating_sub(finished.len());
        finished.extend(live.into_iter().take(missing).map(|beam| beam.text));
        Ok(self.decoded(Text::best(finished.into_iter())?, prompted, 0.0))
    }

    fn decoded(&self, text: Text, prompted: &Prompted, temperature: f64) -> Decoded {
        let Text { tokens, logprobs, sum } = text;
        let compression_ratio = compression_ratio(&self.tokens.decode(&tokens));
        let avg_logprob = sum / (tokens.len() + 1) as f64;
        let avg_logprob = if avg_logprob.is_finite() { avg_logprob } else { 0.0 };
        let no_speech_prob = prompted.no_speech_prob;
        Decoded { tokens, logprobs, avg_logprob, no_speech_prob, compression_ratio, temperature }
    }
}

/// Whether a text has begun to repeat its end again and again.
pub fn goes_round(tokens: &[u32]) -> bool {
    (1..=LONGEST_REPEAT).any(|len| {
        let Some(start) = tokens.len().checked_sub(len * REPEATS) else { return false };
        let (pattern, tail) = (&tokens[tokens.len() - len..], &tokens[start..]);
        tail.chunks_exact(len).all(|chunk| chunk == pattern)
    })
}
