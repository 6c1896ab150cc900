//! How a request will be run, decided once when it is accepted. Pure: from the request's shape
//! and the engine's abilities to a placement, or a refusal with the figures.
//!
//! Whatever can share steps does. A model that cannot runs its rows one at a time, under the same
//! admission, and the placement says why; whatever else is left off is named as well.

use crate::types::{ByteSize, PrepareError};

/// Room that a row must find besides its prompt before it is admitted, tokens.
pub(crate) const HEADROOM_TOKENS: u32 = 256;

/// What a request asks for, as far as its placement depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Shape {
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u32,
    /// Wants the log-probability of each token.
    pub(crate) logprobs: bool,
    /// Brings known tokens.
    pub(crate) fill: bool,
}

/// What the engine can do and has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Abilities {
    /// Rows can share a step.
    pub(crate) batches: bool,
    /// Most tokens of a sequence, by the model.
    pub(crate) context: u32,
    /// Key-value bytes there are.
    pub(crate) kv_capacity_bytes: u64,
    /// Key-value bytes of a token.
    pub(crate) kv_bytes_per_token: u64,
    /// Tokens of a block.
    pub(crate) kv_block_tokens: u32,
}

/// What the operator switched on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Switches {
    /// Finished rows are kept for those that begin alike.
    pub(crate) prompt_cache: bool,
    /// Proposals from the prompt are verified.
    pub(crate) prompt_lookup: bool,
}

/// How a row shares steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Lane {
    /// With all others.
    #[default]
    Batched,
    /// Alone; one such row at a time.
    Serial,
}

/// Why something is not as it usually is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// The engine computes one row a step: the lane is serial.
    BatchingUnavailable,
    /// Finished rows are not kept.
    CacheDisabled,
    /// A token that was not drawn has no log-probability: it brings no known tokens.
    FillWithoutLogprobs,
    /// For the same reason nothing is proposed.
    LookupWithoutLogprobs,
    /// Known tokens are the better source: nothing is looked up.
    LookupGivesWayToFill,
}

impl Reason {
    /// Its code in logs and traces.
    pub(crate) fn code(self) -> &'static str {
        match self {
            Self::BatchingUnavailable => "batching-unavailable",
            Self::CacheDisabled => "cache-disabled",
            Self::FillWithoutLogprobs => "fill-without-logprobs",
            Self::LookupWithoutLogprobs => "lookup-without-logprobs",
            Self::LookupGivesWayToFill => "lookup-gives-way-to-fill",
        }
    }
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Placement {
    /// With whom it shares steps.
    pub(crate) lane: Lane,
    /// Prefixes are reused and kept.
    pub(crate) prompt_cache: bool,
    /// Known tokens are taken.
    pub(crate) fill: bool,
    /// Proposals are looked up and verified.
    pub(crate) lookup: bool,
    /// Why something is off or alone.
    pub(crate) reasons: Vec<Reason>,
}

impl Abilities {
    /// Bytes of the blocks that hold so many tokens.
    pub(crate) fn bytes_of(&self, tokens: u32) -> u64 {
        let block = u64::from(self.kv_block_tokens.max(1));
        u64::from(tokens).div_ceil(block).saturating_mul(block).saturating_mul(self.kv_bytes_per_token)
    }

    /// Tokens that all key-value memory has room for.
    pub(crate) fn room_tokens(&self) -> u32 {
        let block = u64::from(self.kv_block_tokens.max(1));
        let block_bytes = block.saturating_mul(self.kv_bytes_per_token).max(1);
        let tokens = (self.kv_capacity_bytes / block_bytes).saturating_mul(block);
        u32::try_from(tokens).unwrap_or(u32::MAX)
    }
}

/// Decides.
///
/// # Errors
/// `ContextExceeded` for a prompt that leaves the context no room for one token of an answer,
/// `MemoryExceeded` for one that all key-value memory has no room for.
pub(crate) fn place(
    shape: &Shape,
    abilities: &Abilities,
    switches: &Switches,
) -> Result<Placement, PrepareError> {
    let prompt = shape.prompt_tokens;
    if prompt >= abilities.context {
        return Err(PrepareError::ContextExceeded { prompt, limit: abilities.context });
    }
    if prompt >= abilities.room_tokens() {
        return Err(PrepareError::MemoryExceeded {
            prompt,
            need: ByteSize(abilities.bytes_of(prompt.saturating_add(1))),
            have: ByteSize(abilities.kv_capacity_bytes),
            most: abilities.room_tokens().saturating_sub(1),
        });
    }
    let mut reasons = Vec::new();
    let mut unless = |condition: bool, reason: Reason| {
        if condition {
            reasons.push(reason);
        }
        !condition
    };
    let batched = unless(!abilities.batches, Reason::BatchingUnavailable);
    let prompt_cache = unless(!switches.prompt_cache, Reason::CacheDisabled);
    let fill = shape.fill && unless(shape.logprobs, Reason::FillWithoutLogprobs);
    let lookup = switches.prompt_lookup
        && unless(shape.logprobs, Reason::LookupWithoutLogprobs)
        && unless(fill, Reason::LookupGivesWayToFill);
    let lane = if batched { Lane::Batched } else { Lane::Serial };
    Ok(Placement { lane, prompt_cache, fill, lookup, reasons })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABILITIES: Abilities = Abilities {
        batches: true,
        context: 4096,
        kv_capacity_bytes: 1 << 20,
        kv_bytes_per_token: 64,
        kv_block_tokens: 16,
    };

    /// Every combination of what is asked, what can be done and what is switched on.
    #[test]
    fn every_combination_is_placed_as_the_table_says() {
        for bits in 0u32..1 << 5 {
            let bit = |index: u32| bits >> index & 1 == 1;
            let (batches, cache, lookup, logprobs, fill) = (bit(0), bit(1), bit(2), bit(3), bit(4));
            let shape = Shape { prompt_tokens: 10, logprobs, fill };
            let abilities = Abilities { batches, ..ABILITIES };
            let switches = Switches { prompt_cache: cache, prompt_lookup: lookup };
            let placed = place(&shape, &abilities, &switches).unwrap();
            // The table, row by row.
            let lane = if batches { Lane::Batched } else { Lane::Serial };
            assert_eq!(placed.lane, lane, "{bits:05b}");
            assert_eq!(placed.prompt_cache, cache, "{bits:05b}");
            assert_eq!(placed.fill, matches!((fill, logprobs), (true, false)), "{bits:05b}");
            let looks_up = matches!((lookup, logprobs, fill), (true, false, false));
            assert_eq!(placed.lookup, looks_up, "{bits:05b}");
            let expected: Vec<Reason> = [
                (!batches, Reason::BatchingUnavailable),
                (!cache, Reason::CacheDisabled),
                (fill && logprobs, Reason::FillWithoutLogprobs),
                (lookup && logprobs, Reason::LookupWithoutLogprobs),
                (lookup && !logprobs && fill, Reason::LookupGivesWayToFill),
            ]
            .into_iter()
            .filter_map(|(holds, reason)| holds.then_some(reason))
            .collect();
            assert_eq!(placed.reasons, expected, "{bits:05b}");
            assert!(placed.reasons.iter().all(|reason| !reason.code().is_empty()));
        }
    }

    #[test]
    fn what_can_never_fit_is_refused_with_the_figures() {
        let switches = Switches { prompt_cache: true, prompt_lookup: false };
        let refused = |prompt_tokens, abilities: &Abilities| {
            place(&Shape { prompt_tokens, ..Shape::default() }, abilities, &switches).err()
        };
        assert_eq!(refused(4095, &ABILITIES), None);
        assert_eq!(
            refused(4096, &ABILITIES),
            Some(PrepareError::ContextExceeded { prompt: 4096, limit: 4096 })
        );
        // 160 tokens of 64 bytes, in blocks of 16.
        let small = Abilities { kv_capacity_bytes: 10 * 16 * 64, ..ABILITIES };
        assert_eq!(refused(159, &small), None);
        let error = refused(160, &small).unwrap();
        assert_eq!(
            error,
            PrepareError::MemoryExceeded {
                prompt: 160,
                need: ByteSize(11 * 16 * 64),
                have: ByteSize(10 * 16 * 64),
                most: 159,
            }
        );
        assert!(error.to_string().contains("at most 159 tokens"), "{error}");
    }
}
