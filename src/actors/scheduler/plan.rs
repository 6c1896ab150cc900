//! How many prompt tokens go beside the decode tokens of a step. Pure: numbers in,
//! numbers out, no engine, no row.
//!
//! Every decoding row gets its token. Rows that owe more share what the time budget
//! leaves: the step may take `max_itl` and `growth` times what it would take without
//! prompt tokens, whichever is less; without streams four times `max_itl`. The most
//! urgent class goes first, where rows rise with age, and in it the shortest remainder,
//! so that a short prompt never waits for a long one; but a row that was passed over as
//! often as its class's patience allows goes before it. Some prompt tokens go in every
//! step but those that measure what streams cost alone, so neither side starves.

use std::time::Duration;

use crate::actors::scheduler::pace::{Pace, Work};
use crate::types::Priority;

/// Prompt tokens that a step with any takes, whatever the budget says. Fewer would hardly make it
/// shorter: keys and values of all that the prompt has so far are read for one token or for many.
pub(crate) const LEAST_PREFILL: u32 = 4;
/// A step without streams may take so many times `max_itl`.
const UNWATCHED: f64 = 4.0;
/// Prompt tokens beside decode tokens before anything was measured.
pub(crate) const UNMEASURED_PREFILL: u32 = 32;

/// Limits of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Prompt tokens of a step, at most.
    pub(crate) max_chunk: u32,
    /// Longest time between two tokens of a stream.
    pub(crate) max_itl: Duration,
    /// The same as a multiple of what it would be without prompt tokens, at least 1.
    pub(crate) growth: f64,
}

/// A row that owes a piece of its prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefilling {
    /// Tokens it owes.
    pub(crate) owed: u32,
    /// Tokens it holds.
    pub(crate) start: u32,
    /// Its class, with all of its age.
    pub(crate) level: Priority,
    /// Steps in a row in which it got nothing.
    pub(crate) passed_over: u32,
}

/// The decode side of a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Decoding {
    /// What it computes.
    pub(crate) work: Work,
    /// Whether somebody waits for these tokens: rows in the background do not count.
    pub(crate) watched: bool,
}

/// Steps that a prefilling row can be passed over before it goes first in its class.
pub(crate) fn patience(level: Priority) -> u32 {
    match level {
        Priority::Interactive => 4,
        Priority::Normal => 8,
        Priority::Background => 32,
    }
}

/// Time that the step may take, seconds.
fn time_limit(decoding: &Decoding, limits: &Limits, pace: &Pace) -> f64 {
    let longest = limits.max_itl.as_secs_f64();
    if decoding.watched {
        let alone = pace.seconds(decoding.work);
        longest.min(alone * limits.growth.max(1.0))
    } else {
        // Nobody waits for a token, but somebody may come.
        longest * UNWATCHED
    }
}

/// Tokens for each prefilling row, in their order; 0 = passed over in this step.
/// `turn`: how long others on the thread can spare it.
pub(crate) fn share(
    rows: &[Prefilling],
    decoding: &Decoding,
    limits: &Limits,
    pace: &Pace,
    turn: Option<Duration>,
) -> Vec<u32> {
    let most = turn.map_or(f64::INFINITY, |turn| turn.as_secs_f64());
    let mut limit = time_limit(decoding, limits, pace).min(most);
    let max_chunk = limits.max_chunk.max(1);
    let mut order: Vec<usize> = (0..rows.len()).collect();
    // A stable sort: rows come in order of arrival, which decides between equals.
    order.sort_by_key(|&index| {
        let row = rows[index];
        let overdue = row.passed_over >= patience(row.level);
        let rank = if overdue { u32::MAX - row.passed_over } else { row.owed };
        (row.level.rank(), !overdue, rank)
    });
    let mut given = vec![0; rows.len()];
    let (mut work, mut taken) = (decoding.work, 0);
    for index in order {
        let row = rows[index];
        let room = if pace.knows_prompts() {
            let within = pace.prompt_tokens_within(work, row.start, limit).saturating_add(taken);
            within.clamp(LEAST_PREFILL.min(max_chunk), max_chunk)
        } else if decoding.watched {
            UNMEASURED_PREFILL.min(max_chunk)
        } else {
            max_chunk
        };
        let tokens = row.owed.min(room.saturating_sub(taken));
        given[index] = tokens;
        taken += tokens;
        work = work.with_prompt(row.start, tokens);
        if tokens == row.owed {
            // Its first token comes with this step: what follows must not delay it for long.
            limit = limit.min(limits.max_itl.as_secs_f64());
        }
    }
    given
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { max_chunk: 512, max_itl: Duration::from_millis(100), growth: 10.0 };

    fn row(owed: u32) -> Prefilling {
        Prefilling { owed, start: 0, level: Priority::Normal, passed_over: 0 }
    }

    fn decoding(rows: u32) -> Decoding {
        let work = (0..rows).fold(Work::default(), |work, _| work.with_decode(0, 1));
        Decoding { work, watched: rows > 0 }
    }

    /// 20 ms for a step, 1 ms a prompt token.
    fn measured(scale: u32) -> Pace {
        let mut pace = Pace::default();
        for tokens in [16, 40, 80, 160] {
            let beside = decoding(1).work;
            pace.record(beside, Duration::from_millis(20) * scale);
            pace.record(beside.with_prompt(0, tokens), Duration::from_millis(20 + u64::from(tokens)) * scale);
        }
        pace
    }

    fn shared(rows: &[Prefilling], decode_rows: u32, pace: &Pace) -> Vec<u32> {
        share(rows, &decoding(decode_rows), &LIMITS, pace, None)
    }

    #[test]
    fn alone_a_prompt_gets_whole_chunks() {
        assert_eq!(shared(&[row(2000)], 0, &Pace::default()), [512]);
        assert_eq!(shared(&[row(100)], 0, &Pace::default()), [100]);
    }

    #[test]
    fn beside_streams_the_measured_time_decides() {
        assert_eq!(shared(&[row(2000)], 1, &Pace::default()), [UNMEASURED_PREFILL]);
        let given = shared(&[row(2000)], 1, &measured(1))[0];
        assert!((75..=85).contains(&given), "(100 - 20) ms at 1 ms a token: {given}");
        assert_eq!(shared(&[row(2000)], 1, &measured(50)), [LEAST_PREFILL], "slow, but never nothing");
    }

    #[test]
    fn a_stream_slows_down_by_a_factor_at_most() {
        let limits = Limits { growth: 2.0, ..LIMITS };
        let given = share(&[row(2000)], &decoding(1), &limits, &measured(1), None)[0];
        assert!((17..=23).contains(&given), "20 ms more at 1 ms a token: {given}");
        let unwatched = Decoding { watched: false, ..decoding(1) };
        let given = share(&[row(2000)], &unwatched, &limits, &measured(1), None)[0];
        assert!((370..=390).contains(&given), "four times 100 ms: {given}");
    }

    #[test]
    fn others_on_the_thread_shorten_a_prompts_piece() {
        let turn = Some(Duration::from_millis(50));
        let given = share(&[row(2000)], &decoding(0), &LIMITS, &measured(1), turn)[0];
        assert!((25..=55).contains(&given), "{given}");
    }

    #[test]
    fn a_short_prompt_does_not_wait_for_a_long_one_nor_an_urgent_one_for_others() {
        assert_eq!(shared(&[row(5000), row(30)], 1, &Pace::default()), [2, 30]);
        let starving = Prefilling { passed_over: patience(Priority::Normal), ..row(5000) };
        assert_eq!(shared(&[row(30), starving], 1, &Pace::default()), [0, 32]);
        let urgent = Prefilling { level: Priority::Interactive, ..row(5000) };
        assert_eq!(shared(&[row(30), urgent], 1, &Pace::default()), [0, 32]);
        assert_eq!(shared(&[starving, Prefilling { owed: 40, ..urgent }], 1, &Pace::default()), [0, 32]);
    }

    proptest! {
        #[test]
        fn nobody_starves_and_nothing_exceeds_its_limit(
            mut owed in prop::collection::vec((1u32..3000, 0usize..3), 1..8),
            arrivals in prop::collection::vec((1u32..50, 0usize..3), 0..120),
            decode_rows in 0u32..4,
            scale in 1u32..20,
        ) {
            let pace = measured(scale);
            let mut passed = vec![0u32; owed.len()];
            for (step, new) in arrivals.into_iter().enumerate() {
                owed.push(new);
                passed.push(0);
                // Rows rise with age.
                if step % 30 == 29 {
                    owed.iter_mut().for_each(|(_, class)| *class = class.saturating_sub(1));
                }
                let rows: Vec<Prefilling> = owed.iter().zip(&passed)
                    .map(|(&(owed, class), &passed_over)| {
                        Prefilling { owed, start: 0, level: Priority::ALL[class], passed_over }
                    }).collect();
                let given = shared(&rows, decode_rows, &pace);
                let all: u32 = given.iter().sum();
                prop_assert!(all <= LIMITS.max_chunk);
                prop_assert!(all >= LEAST_PREFILL.min(owed.iter().map(|(owed, _)| owed).sum()));
                if decode_rows > 0 && all > LEAST_PREFILL {
                    let step = decoding(decode_rows).work.with_prompt(0, all);
                    prop_assert!(pace.seconds(step) <= LIMITS.max_itl.as_secs_f64() * 1.01);
                }
                for (index, &got) in given.iter().enumerate() {
                    prop_assert!(got <= owed[index].0);
                    owed[index].0 -= got;
                    passed[index] = if got == 0 { passed[index] + 1 } else { 0 };
                }
                let waiting = owed.len() as u32;
                let most = 2 * 30 + patience(Priority::Background) + waiting;
                prop_assert!(passed.iter().all(|&steps| steps <= most));
                let mut keep = owed.iter().map(|rest| rest.0 > 0);
                passed.retain(|_| keep.next().unwrap_or(false));
                owed.retain(|rest| rest.0 > 0);
                if owed.is_empty() { break; }
            }
        }
    }
}
